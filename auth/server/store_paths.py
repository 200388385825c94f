"""The files of an auth server's state, and its clock.

    FOLDER/auth.sqlite         the database (and -wal, -shm beside it)
    FOLDER/auth.sqlite.lock    held by the one process that writes
    FOLDER/audit.head          the signed head of the audit log, at most a second old
    FOLDER/keys/KEYID.key      the secret half of each auth key

Everything in the folder belongs together. Without its keys, a database is a run that nobody can
join any more; `backups.py` copies all of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

DATABASE_NAME = "auth.sqlite"
LOCK_NAME = "auth.sqlite.lock"
HEAD_NAME = "audit.head"
KEYS_NAME = "keys"


class StorePaths(msgspec.Struct, frozen=True):
    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / DATABASE_NAME

    @property
    def lock(self) -> Path:
        return self.folder / LOCK_NAME

    @property
    def head(self) -> Path:
        return self.folder / HEAD_NAME

    @property
    def keys(self) -> Path:
        return self.folder / KEYS_NAME


def wall_ms() -> int:
    return time.time_ns() // 1_000_000
