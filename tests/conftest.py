"""What holds for every test, whoever starts it.

A shell without job control starts its background commands with SIGINT ignored, and a process that
ignores a signal hands that on to all its children. The tests of Ctrl-C would then wait for
programs that rightly take no notice of it. So it is with SIGHUP, where nohup began the tests.

How hypothesis looks for examples is a profile, and scripts/test names it. `default` is the same
examples each time, so that nobody's change fails by what another's left undetected; `fast` is fewer
of them, where a test does not say how many; `soak` is other ones each time. How long an example
takes is the machine's affair: no profile has a limit for it.

scripts/test gives a whole run to two workers (pytest-xdist). The tests of some rooms start
processes, wait for real seconds, or hold a clock against them: one worker gets all of those, one
after the other, so that they do not disturb each other. Most of their time is waiting, and the
other worker computes meanwhile.

What was imported until the tests begin is no garbage, and is exempt from looking for it.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.demonstrated import Played, play

HERE = Path(__file__).parent
FAST_EXAMPLES = 25

# Rooms whose tests must not run beside each other.
WITH_PROCESSES = frozenset({"access", "commands", "frame", "lab", "processes", "soak", "strangers"})

_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _PATIENT, derandomize=True)
settings.register_profile("fast", _PATIENT, derandomize=True, max_examples=FAST_EXAMPLES)
settings.register_profile("soak", _PATIENT, derandomize=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(HERE / room in item.path.parents for room in WITH_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("with processes"))


@pytest.fixture(scope="session")
def the_demo(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """`potluck demo`, played once by the worker that has the rooms with processes."""
    return play(tmp_path_factory.mktemp("demo"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # each full collection would take half a second for them: a tenth of the time


# For the children that are of the laboratory; pytest itself has the folder from pyproject.toml.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE.parent / "scripts")])

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
