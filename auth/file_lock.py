"""A lock on an open file, so that two processes do not write into one place."""

from __future__ import annotations

import importlib


def try_lock(descriptor: int) -> bool:
    """Try to get the lock. It is released with the descriptor, or the process."""
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:  # a platform without flock: nothing prevents a second process there
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
