"""One writer per folder: a lock of the kernel on `auth.sqlite.lock`, held while a store is open.

The database is written by the running server, or by one moderator's command when no server runs;
never by both, because each keeps counters in memory (serials, the head of the audit log). The lock
goes with its process however that ends. Readers need none.

Easy to get wrong: the lock must not be on the database itself. SQLite has locks of its own there,
and closing any descriptor of that file would drop them all.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from auth.server.database import FILE_MODE
from auth.server.store_errors import StoreInUse, told

LONGEST_PID = 20  # characters


@contextlib.contextmanager
def hold_store_lock(path: Path) -> Iterator[None]:
    """Be the only writer. StoreInUse if another process is. The file is never removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except OSError as error:
        raise told(error, path) from error
    try:
        if not _try_lock(descriptor):
            pid = os.read(descriptor, LONGEST_PID).decode("ascii", "replace").strip()
            who = f" (pid {pid})" if pid.isdigit() else ""
            raise StoreInUse(
                f"Another process{who} writes into {path.parent}.",
                why="It is the auth server, or a moderator's command.",
                advice="Moderate through the running server, or stop it first.",
            )
        # A pid is a courtesy to whoever meets the lock; a full disk must not keep us from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:  # a platform without flock: nothing stops a second writer there
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
