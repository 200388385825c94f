"""The signals that end a command, and code that they must not interrupt.

    with undisturbed():
        ...                 # takes milliseconds: a key is made, a lock is tried

Before a command's loop runs, a signal raises wherever the program is (node/app/main.py), perhaps
between making a file and the `try` that would remove it. In such a block signals wait until its
end.

`nohup potluck join` shall outlive its terminal. It starts with SIGHUP ignored, and must leave it
so. `undisturbed` only protects the thread that enters it. That is enough before there are other
threads; inside a running loop no signal raises anyway.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator


def stopping_signals() -> tuple[signal.Signals, ...]:
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that end a command until the block ends."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
