"""Which signals end a command: Ctrl-C, SIGTERM, and the end of its terminal.

Easy to get wrong: `nohup potluck join` is meant to outlive its terminal. It begins with SIGHUP
ignored, and has to leave it so.
"""

from __future__ import annotations

import signal
import sys


def stopping_signals() -> tuple[signal.Signals, ...]:
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
