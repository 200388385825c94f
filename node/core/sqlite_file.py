"""Opening a SQLite file of this node, so that no damaged or foreign file can stop it or run code.

    KIND = FileKind("The directory's file", 0x706F7431, MIGRATIONS, "this node starts without it")
    connection = open_or_begin_anew(path, KIND)

The file is in WAL mode: after `kill -9` or a power loss it has the state after some transaction,
never half of one. A file that cannot be ours (damaged, of another program, or with other tables) is
moved aside with a warning, and a new one is begun. Only a file of a newer potluck is refused: it is
sound, and worth an update.

SQLite runs code that is in a file (views, triggers, generated columns). So the schema of an opened
file is compared, word for word, with the result of our own migrations.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from node.core.private_file import FILE_MODE, check_is_ours
from protocols.errors import PotluckError

# How long to wait for another process with the file open (a backup, a person with sqlite3).
BUSY_SECONDS = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileKind:
    """- `name`: what the file is, at the beginning of a message.
    - `application_id`: four letters in SQLite's field for the application of a file.
    - `migrations`: a file is at version n after the first n have run on it. Append; never change
      one.
    - `without`: what follows from a file that is lost, in words.
    """

    name: str
    application_id: int
    migrations: tuple[str, ...]
    without: str


class NotOurs(Exception):
    """The file is damaged or foreign; the text says how."""


# The errors of SQLite that blame the file, and not the disk or a lock.
_THE_FILE_ITSELF = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
)
_SIDE_FILES = ("", "-wal", "-shm")


def open_or_begin_anew(path: Path, kind: FileKind) -> sqlite3.Connection:
    """Open the file, or make it. One that cannot be ours is moved aside. OSError, sqlite3.Error or
    PotluckError if neither works."""
    try:
        return _open(path, kind)
    except NotOurs as error:
        reason = str(error)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _THE_FILE_ITSELF:
            raise
        reason = str(error)
    aside = path.with_name(path.name + ".damaged")
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{side}", f"{aside}{side}")
    log.warning(
        "%s %s cannot be used: %s. It is moved to %s, and %s.",
        kind.name,
        path,
        reason,
        aside,
        kind.without,
    )
    return _open(path, kind)


def _open(path: Path, kind: FileKind) -> sqlite3.Connection:
    _check_place(path)
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        for statement in (
            "PRAGMA trusted_schema = OFF",
            "PRAGMA cell_size_check = ON",
            "PRAGMA mmap_size = 0",  # so that a damaged disk gives an error, not a signal
        ):
            connection.execute(statement)
        version = _check_content(path, connection, kind)
        connection.execute("PRAGMA journal_mode = WAL")
        # With WAL the file is sound after a power loss; the last few batches may be missing.
        connection.execute("PRAGMA synchronous = NORMAL")
        _migrate(connection, version, kind)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_place(path: Path) -> None:
    """Make an empty file of our own, or check the existing one and its side files."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            check_is_ours(Path(f"{path}{side}"), os.lstat(f"{path}{side}"))


def _check_content(path: Path, connection: sqlite3.Connection, kind: FileKind) -> int:
    """The version of the file, 0 if it is new. NotOurs if it is foreign or damaged."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application == kind.application_id and version > len(kind.migrations):
        raise PotluckError(
            f"{path} was written by a newer potluck.",
            why=f"It is of version {version}, and this one knows {len(kind.migrations)}.",
            advice="Update potluck, or move that file away to start without it.",
        )
    if application not in (0, kind.application_id) or (application == 0 and version):
        raise NotOurs("it belongs to another program")
    if _schema_of(connection) != _schema_of_version(max(0, version), kind):
        raise NotOurs("its tables are not ours")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise NotOurs(str(verdict).splitlines()[0])
    return int(version)


def _migrate(connection: sqlite3.Connection, version: int, kind: FileKind) -> None:
    for number, script in enumerate(kind.migrations[version:], start=version + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {kind.application_id};"
            f" PRAGMA user_version = {number}; COMMIT;"
        )


def _schema_of_version(version: int, kind: FileKind) -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        for script in kind.migrations[:version]:
            model.executescript(script)
        return _schema_of(model)


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
