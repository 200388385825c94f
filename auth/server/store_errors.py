"""The errors of the auth server's state on disk, each with what, why and what to do.

None of these is a refusal: a volunteer who meets one has not been turned away, and tries again
later. `told` turns any error of SQLite or the operating system into one of them, so that no error
of sqlite3 leaves this package.

A full disk has several errors. SQLite reports FULL for its own files and IOERR for a write that a
quota or a file size limit cut short. Both mean "make room", and neither means that anything already
written was lost.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from auth.errors import AuthError

UNREACHABLE = 4  # exit code: try again later


class StoreFailed(AuthError):
    """The state could not be read or written; the operation has not happened."""


class DiskFull(StoreFailed):
    """There is no room for the next transaction. Everything answered before is safe."""


class StoreDamaged(StoreFailed):
    """The file is not a valid database of ours. Nothing was changed in it."""


class StoreIsNewer(StoreFailed):
    """The file was written by a newer potluck, and an older one must not touch it."""


class StoreMissing(StoreFailed):
    """There is no auth server's state in this folder yet."""


class StoreInUse(StoreFailed):
    """Another process writes into this folder."""

    exit_code = 3


class StoreBusy(StoreFailed):
    """The queue of writes is full: try again in a second."""

    exit_code = UNREACHABLE


class StoreClosed(StoreFailed):
    """The server is stopping; the request has not been performed."""

    exit_code = UNREACHABLE


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
# SQLITE_IOERR with the detail that a write, a truncation or a sync did not work
_WRITING_FAILED = frozenset(
    sqlite3.SQLITE_IOERR | (detail << 8)
    for detail in (3, 4, 6, 12, 19)  # WRITE, FSYNC, TRUNCATE, NOMEM is not one of them, SHMSIZE
    if detail != 12
)


# The errors of a call to SQLite. It quotes a damaged schema in its messages, and Python then
# fails to decode those.
WHAT_SQLITE_RAISES = (sqlite3.Error, UnicodeDecodeError)


def told(error: sqlite3.Error | OSError | UnicodeDecodeError, path: Path) -> StoreFailed:
    """The same failure as one of these errors; `path` is the file concerned."""
    if isinstance(error, UnicodeDecodeError):
        return damaged(path, "it has text that is not UTF-8")
    if isinstance(error, OSError):
        if error.errno in _NO_ROOM:
            return _disk_full(path)
        return StoreFailed(
            f"{error.filename or path} cannot be used: {error.strerror or error}.",
            why="The auth server keeps its state there.",
            advice="See that this user owns the folder and that the disk is there (ls -ld, df).",
        )
    code = getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR
    if code & 0xFF == sqlite3.SQLITE_FULL or code in _WRITING_FAILED:
        return _disk_full(path)
    if code & 0xFF in _DAMAGED:
        return damaged(path, str(error))
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(
            f"{path} is locked by another program.",
            why="A backup tool or a database browser may have it open.",
            advice="Close it there, and try again.",
        )
    return StoreFailed(
        f"{path} cannot be used: {error}.",
        why="The disk may be gone, read-only, or not this user's.",
        advice="Look at the disk (df, dmesg) and at the file's owner and mode (ls -l).",
    )


def damaged(path: Path, how: str) -> StoreDamaged:
    return StoreDamaged(
        f"{path} is damaged: {how}.",
        why="The disk failed, or something else wrote into the file.",
        advice="Stop the server, keep that folder aside, and put the last backup in its place "
        "(`potluck auth backup` made it).",
    )


def _disk_full(path: Path) -> DiskFull:
    return DiskFull(
        f"There is no room to write to {path}.",
        why="Its disk, or the quota on it, is full; nothing that was answered before is lost.",
        advice="Free some space there; the server goes on by itself.",
    )
