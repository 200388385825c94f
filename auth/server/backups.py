"""A backup: a folder that is a whole auth server's state, made while the server runs.

It holds the database as of one moment, the signing keys and the head of the audit log, all private
to this user, and appears under its name only when it is complete. To go back to it, stop the
server and put the folder in the place of the old one.

The keys are read while the database's state is held, so that a key that is made or withdrawn
meanwhile is not in one and missing in the other.

After a backup is restored, the server must not give out serial numbers a second time, or a
revocation list with an older number than peers have. So the copy is marked, and a store that finds
the mark continues from a higher number, and records in the log that it was restored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec

from auth.server import audit, database
from auth.server.signing_keys import keep_names
from auth.server.store import StorePaths
from auth.server.store_errors import StoreFailed, told


class BackupMade(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    bytes: int
    files: int
    audit_head: str
    """`NUMBER:HASH`: written down, it shows later whether the log was rewritten."""


def check_is_free(destination: Path) -> None:
    """StoreFailed if the destination exists, or its folder does not."""
    try:
        taken = destination.exists() or destination.is_symlink()
        is_in_folder = destination.parent.is_dir()
    except OSError as error:
        raise told(error, destination) from error
    if taken:
        raise StoreFailed(
            f"There is something at {destination} already.",
            why="A backup is never written over anything.",
            advice="Name a folder that does not exist yet.",
        )
    if not is_in_folder:
        raise StoreFailed(
            f"There is no folder {destination.parent}.",
            why="The backup would be made in it.",
            advice="Make that folder first, or name another place.",
        )


def keys_in(folder: Path) -> dict[str, bytes]:
    """The key files by name. Call this in the writer's thread: keys do not change meanwhile."""
    found = {}
    try:
        for path in sorted(folder.glob("*.key")):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                found[path.name] = file.read()
    except OSError as error:
        raise told(error, folder) from error
    return found


def make_backup(
    paths: StorePaths,
    state: sqlite3.Connection,
    keys: Mapping[str, bytes],
    destination: Path,
    now_ms: int,
) -> BackupMade:
    """Write a held state, and the keys of that same moment, to a folder that does not exist yet.

    AuthError if it fails; then nothing is left.
    """
    destination = destination.absolute()
    check_is_free(destination)
    draft = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
    try:
        try:
            draft.mkdir(mode=database.FOLDER_MODE)
            copy = draft / paths.database.name
            database.copy_database(state, copy)
            head = _mark(copy, now_ms)
            _write_keys(keys, draft / paths.keys.name)
            audit.write_head_file(draft / paths.head.name, head)
            keep_names(draft)
            sizes = [path.stat().st_size for path in draft.rglob("*") if path.is_file()]
            draft.rename(destination)
            keep_names(destination.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, sqlite3.Error) as error:
        raise told(error, destination) from error
    return BackupMade(
        path=str(destination), bytes=sum(sizes), files=len(sizes), audit_head=str(head)
    )


def _mark(copy: Path, now_ms: int) -> audit.Head:
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        database.check_pages(copy, connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("UPDATE store SET backup_ms = ?", (now_ms,))
        head = audit.read_head(connection)
    if head is None:
        raise StoreFailed(
            f"{copy} has no head of its audit log.",
            why="The database that was copied is damaged.",
            advice="Run `potluck auth audit --verify` on the original.",
        )
    return head


def _write_keys(keys: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(mode=database.FOLDER_MODE)
    for name, content in keys.items():
        database.write_new_file(folder / name, content)
    keep_names(folder)
