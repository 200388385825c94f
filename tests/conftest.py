"""What holds for every test, whoever starts it.

A shell without job control starts its background commands with SIGINT ignored, and a process that
ignores a signal hands that on to all its children. The tests of Ctrl-C would then wait for
programs that rightly take no notice of it.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
