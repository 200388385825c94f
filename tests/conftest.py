"""What holds for every test, whoever starts it.

A shell without job control starts its background commands with SIGINT ignored, and a process that
ignores a signal hands that on to all its children. The tests of Ctrl-C would then wait for
programs that rightly take no notice of it.

scripts/test --fast takes the profile `fast` of hypothesis: fewer examples of each property, where a
test does not say how many. All others take hypothesis's own, a hundred.

What was imported until the tests begin is no garbage, and is exempt from looking for it.
"""

from __future__ import annotations

import gc
import signal

from hypothesis import settings

FAST_EXAMPLES = 25

settings.register_profile("fast", max_examples=FAST_EXAMPLES)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # each full collection would take half a second for them: a tenth of the time


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
