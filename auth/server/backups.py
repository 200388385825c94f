"""A backup: a folder that is a whole auth server's state, made while the server runs.

It holds the database as of one moment, the signing keys and the head of the audit log, all private
to this user, and appears under its name only when it is complete. To go back to it, stop the
server and put the folder in the place of the old one.

Easy to get wrong: after going back, the server must not give out serial numbers a second time, or
a revocation list with an older number than peers have. So the copy is marked, and a store that
finds the mark counts on from further up, and says in the log that it was put back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
from pathlib import Path

import msgspec

from auth.server import audit_head, database
from auth.server.signing_keys import keep_names
from auth.server.store_errors import StoreFailed, told


class BackupMade(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    bytes: int
    files: int
    audit_head: str
    """`NUMBER:HASH`: written down, it shows whether the log was ever written anew."""


def check_is_free(destination: Path) -> None:
    """StoreFailed if there is something where the backup is to be, or nowhere to put it."""
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


def make_backup(
    database_file: Path, keys_folder: Path, head_name: str, destination: Path, now_ms: int
) -> BackupMade:
    """Copy everything to a folder that is not there yet. AuthError, and nothing left, if not."""
    destination = destination.absolute()
    check_is_free(destination)
    draft = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}")
    try:
        try:
            draft.mkdir(mode=database.FOLDER_MODE)
            copy = draft / database_file.name
            database.copy_database(database_file, copy)
            head = _mark(copy, now_ms)
            _copy_keys(keys_folder, draft / keys_folder.name)
            audit_head.write_head_file(draft / head_name, head)
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


def _mark(copy: Path, now_ms: int) -> audit_head.Head:
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        database.check_pages(copy, connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("UPDATE store SET backup_ms = ?", (now_ms,))
        head = audit_head.read_head(connection)
    if head is None:
        raise StoreFailed(
            f"{copy} has no head of its audit log.",
            why="The database that was copied is damaged.",
            advice="Run `potluck auth audit --verify` on the original.",
        )
    return head


def _copy_keys(source: Path, target: Path) -> None:
    target.mkdir(mode=database.FOLDER_MODE)
    for path in sorted(source.glob("*.key")):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(descriptor, "rb") as original:
            content = original.read()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(target / path.name, flags, database.FILE_MODE), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    keep_names(target)
