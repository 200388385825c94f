"""A few lines that no Ctrl-C or SIGTERM cuts in two.

    with undisturbed():
        ...                 # takes milliseconds: a key is made, a lock is tried

Before a command's loop runs, a signal raises where the program stands (node/main.py), and between a
file that was just made and the `try` that would remove it is a place to stand, too. In such lines
signals wait until the end of the block.

Easy to get wrong: only the thread that enters this is left alone. That is enough where there is no
other thread yet; inside a running loop no signal raises anyway.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from node.stopping_signals import stopping_signals


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end a command come after the block."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
