"""The one SQLite file of the auth server: opened, checked, migrated, copied while in use.

WAL with synchronous = FULL: when a COMMIT returns, the transaction is on the disk, and survives
`kill -9` and a power loss. A file that is damaged, foreign, or of a newer potluck is refused and
left as it is: unlike a cache, this one cannot be begun anew without losing who may take part.
Before a migration changes anything, a copy of the old file is put beside it.

Easy to get wrong: SQLite runs what it finds in a file (triggers, views). So the schema of an
opened file is compared, word for word, with what our own migrations make; a trigger that somebody
dropped or added is found here, before the first statement of ours runs.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from auth.server.schema import APPLICATION_ID, MIGRATIONS
from auth.server.store_errors import (
    WHAT_SQLITE_RAISES,
    StoreDamaged,
    StoreFailed,
    StoreIsNewer,
    StoreMissing,
    damaged,
    told,
)

FILE_MODE = 0o600
FOLDER_MODE = 0o700
WRITABLE_BY_OTHERS = 0o022
# Another process that has the file open (a backup tool, a person with sqlite3) is waited for.
BUSY_SECONDS = 5.0
BACKUP_PAGES_AT_ONCE = 1024  # 4 MiB: between two such steps the writer gets its turn
# With the WAL at this length a commit moves it into the file: 16 MiB keeps both reads and the
# pause for moving it short.
CHECKPOINT_PAGES = 4000
_SIDE_FILES = ("", "-wal", "-shm")


def create_database(path: Path, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """Make the file, which must not be there yet, and open it for writing."""
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        raise StoreFailed(
            f"There is an auth server's state at {path} already.",
            why="Making a new one would throw away who may take part, and the signing keys.",
            advice="Use it as it is, or choose another folder (POTLUCK_HOME or --home).",
        ) from None
    except OSError as error:
        raise told(error, path) from error
    try:
        return _open_for_writing(path, migrations, is_new=True)
    except BaseException:
        remove_database(path)
        raise


def remove_database(path: Path) -> None:
    """Take away a file that was only half made, with what SQLite put beside it."""
    for side in _SIDE_FILES:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}{side}")


def open_for_writing(path: Path, migrations: Sequence[str] = MIGRATIONS) -> sqlite3.Connection:
    """Open, check and migrate. The connection may be handed to one other thread."""
    return _open_for_writing(path, migrations, is_new=False)


def _open_for_writing(path: Path, migrations: Sequence[str], *, is_new: bool) -> sqlite3.Connection:
    with _telling(path):
        _check_place(path)
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _make_careful(connection)
            version = _check_content(path, connection, migrations)
            if version == 0 and not is_new:
                raise damaged(path, "it is empty")
            check_pages(path, connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA fullfsync = ON")  # where fsync alone stops in the drive
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
            connection.execute("PRAGMA foreign_keys = ON")
            _migrate(path, connection, version, migrations)
        except BaseException:
            connection.close()
            raise
    return connection


@contextlib.contextmanager
def reading(path: Path, migrations: Sequence[str] = MIGRATIONS) -> Iterator[sqlite3.Connection]:
    """A connection that sees one state of the file and cannot change it, also beside a writer."""
    with _telling(path):
        _check_place(path)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS,
            isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        with contextlib.closing(connection):
            _make_careful(connection)
            connection.execute("PRAGMA query_only = ON")
            version = _check_content(path, connection, migrations)
            if version == 0:
                raise damaged(path, "it is empty")
            if version != len(migrations):
                raise StoreFailed(
                    f"{path} was written by an older potluck.",
                    why="It has to be brought up to date first, and reading may not do that.",
                    advice="Start the auth server once, or run a moderator's command.",
                )
            connection.execute("BEGIN")
            yield connection


@contextlib.contextmanager
def held_state(source: Path) -> Iterator[sqlite3.Connection]:
    """The state of this moment, to be copied from any thread while others go on writing."""
    with (
        _telling(source),
        contextlib.closing(
            sqlite3.connect(source, timeout=BUSY_SECONDS, check_same_thread=False)
        ) as original,
    ):
        # One transaction of the reader: a busy writer cannot make the copy begin again.
        original.execute("BEGIN")
        original.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield original


def copy_database(original: sqlite3.Connection, destination: Path) -> None:
    """A sound copy of a held state. `destination` must not exist."""
    with _telling(destination):
        os.close(
            os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        )
        try:
            with contextlib.closing(sqlite3.connect(destination, isolation_level=None)) as copy:
                copy.execute("PRAGMA synchronous = FULL")
                original.backup(copy, pages=BACKUP_PAGES_AT_ONCE)
                # a copy in WAL mode would leave two files beside it
                copy.execute("PRAGMA journal_mode = DELETE")
        except BaseException:
            remove_database(destination)
            raise


def check_is_ours(path: Path, status: os.stat_result) -> None:
    """StoreFailed unless this is an ordinary file that only this user can write."""
    if not stat.S_ISREG(status.st_mode):
        raise StoreFailed(
            f"{path} is not an ordinary file.",
            why="Something else was put in the place of the auth server's state.",
            advice="See what it is, and move it away.",
        )
    if status.st_uid != os.geteuid():
        raise StoreFailed(
            f"{path} belongs to another user.",
            why="Its owner could change who may take part.",
            advice="Run this as that user.",
        )
    if stat.S_IMODE(status.st_mode) & WRITABLE_BY_OTHERS:
        raise StoreFailed(
            f"Others may write to {path}: its mode is {stat.S_IMODE(status.st_mode):04o}.",
            why="They could change who may take part.",
            advice=f"If nobody has, run `chmod 600 {path}`.",
        )


def check_folder(folder: Path) -> None:
    """StoreFailed unless only this user can put files there."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & WRITABLE_BY_OTHERS:
        raise StoreFailed(
            f"Others may write to {folder}.",
            why="They could put another database or another key there.",
            advice=f"If nobody has, run `chmod 700 {folder}` as its owner.",
        )


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except (*WHAT_SQLITE_RAISES, OSError) as error:
        raise told(error, path) from error


def _check_place(path: Path) -> None:
    if not path.exists():
        raise StoreMissing(
            f"There is no auth server's state at {path}.",
            why="It is made once, before the server is started.",
            advice="Run `potluck auth init`, or point POTLUCK_HOME at where it is.",
        )
    check_folder(path.parent)
    for side in _SIDE_FILES:
        with contextlib.suppress(FileNotFoundError):
            check_is_ours(Path(f"{path}{side}"), os.lstat(f"{path}{side}"))


def _make_careful(connection: sqlite3.Connection) -> None:
    # text that is not UTF-8 was not written by us; what is read of it must not be an exception
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    for statement in (
        "PRAGMA trusted_schema = OFF",
        "PRAGMA cell_size_check = ON",
        "PRAGMA mmap_size = 0",  # a damaged disk is then an error, and not a signal
    ):
        connection.execute(statement)


def _check_content(path: Path, connection: sqlite3.Connection, migrations: Sequence[str]) -> int:
    """The version of the file, 0 if it is new."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application == APPLICATION_ID and version > len(migrations):
        raise StoreIsNewer(
            f"{path} was written by a newer potluck.",
            why=f"It is of version {version}, and this one knows {len(migrations)}.",
            advice="Update potluck. If the update was a mistake, put back the last backup.",
        )
    if application not in (0, APPLICATION_ID) or (application == 0 and version):
        raise StoreDamaged(
            f"{path} is the file of another program.",
            why="Its first page says so.",
            advice="Choose another folder for the auth server (POTLUCK_HOME or --home).",
        )
    if _schema_of(connection) != _schema_of_version(max(0, version), migrations):
        raise damaged(path, "its tables are not those that potluck made")
    return int(version)


def check_pages(path: Path, connection: sqlite3.Connection) -> None:
    """Read every page; StoreDamaged if one is not sound. A second or two for each gigabyte."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, str(verdict).splitlines()[0])


def _migrate(
    path: Path, connection: sqlite3.Connection, version: int, migrations: Sequence[str]
) -> None:
    if 0 < version < len(migrations):
        aside = path.with_name(f"{path.name}.version-{version}")
        remove_database(aside)
        with held_state(path) as original:
            copy_database(original, aside)
    for number, script in enumerate(migrations[version:], start=version + 1):
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {number}; COMMIT;"
            )
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _schema_of_version(version: int, migrations: Sequence[str]) -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        for script in migrations[:version]:
            model.executescript(script)
        return _schema_of(model)


def _schema_of(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%' ORDER BY name"
    ).fetchall()
