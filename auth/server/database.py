"""The one SQLite file of the auth server: opened, checked, migrated, copied while in use.

WAL with synchronous = FULL: when a COMMIT returns, the transaction is on the disk, and survives
`kill -9` and a power loss. A file that is damaged, foreign, or of a newer potluck is refused and
left as it is: unlike a cache, it cannot be begun anew without losing who may take part. Before a
migration changes anything, a copy of the old file is put beside it.

SQLite runs triggers and views that it finds in a file. So the schema of an opened file is compared,
word for word, with the one that our own migrations make; a dropped or added trigger is found before
our first statement runs.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from auth.roles import Role, in_order
from auth.server.store_errors import (
    WHAT_SQLITE_RAISES,
    StoreDamaged,
    StoreFailed,
    StoreIsNewer,
    StoreMissing,
    damaged,
    told,
)

# The tables of the auth server, as numbered migrations.
#
# A file is at version n when the first n texts have run on it. Append, never change: files of every
# version are out there, and `tests/auth/store` opens one of each.
#
# The triggers that forbid changing the audit log are only a second protection. Anybody who can open
# the file can drop them. The hash chain reveals an edit (`audit.py`).


# "pot3" in ASCII, in SQLite's field for the application of a file.
APPLICATION_ID = 0x706F7433

_FIRST = """
    CREATE TABLE store (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        run TEXT NOT NULL,
        made_ms INTEGER NOT NULL,
        last_serial INTEGER NOT NULL,
        grace_ms INTEGER NOT NULL,
        unsure_until_ms INTEGER NOT NULL,
        backup_ms INTEGER
    );

    CREATE TABLE audit (
        number INTEGER PRIMARY KEY,
        at_ms INTEGER NOT NULL,
        act TEXT NOT NULL,
        actor TEXT NOT NULL,
        name TEXT,
        peer BLOB,
        serial INTEGER,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        hash BLOB NOT NULL
    );
    CREATE TRIGGER audit_is_append_only BEFORE INSERT ON audit
        WHEN NEW.number IS NOT (SELECT coalesce(max(number), 0) + 1 FROM audit)
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TABLE audit_head (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        number INTEGER NOT NULL,
        hash BLOB NOT NULL,
        key_id BLOB NOT NULL,
        signature BLOB NOT NULL
    );

    CREATE TABLE accounts (
        account INTEGER PRIMARY KEY,
        provider TEXT NOT NULL,
        login TEXT NOT NULL,
        subject TEXT,
        roles TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('allowed', 'denied', 'revoked')),
        added_ms INTEGER NOT NULL,
        added_by TEXT NOT NULL,
        changed_ms INTEGER NOT NULL,
        changed_by TEXT NOT NULL,
        note TEXT NOT NULL,
        UNIQUE (provider, login)
    );
    CREATE UNIQUE INDEX accounts_by_subject ON accounts (provider, subject)
        WHERE subject IS NOT NULL;
    CREATE INDEX accounts_by_login ON accounts (login);

    CREATE TABLE peers (
        peer BLOB PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts,
        first_ms INTEGER NOT NULL,
        login_ms INTEGER NOT NULL,
        seen_ms INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX peers_by_account ON peers (account);

    CREATE TABLE tokens (
        serial INTEGER PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts,
        peer BLOB NOT NULL,
        roles TEXT NOT NULL,
        key_id BLOB NOT NULL,
        issued_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL
    );
    CREATE INDEX tokens_by_account ON tokens (account, expires_ms);

    CREATE TABLE codes (
        code INTEGER PRIMARY KEY,
        code_hash BLOB NOT NULL UNIQUE,
        login TEXT,
        roles TEXT NOT NULL,
        uses_allowed INTEGER,
        uses INTEGER NOT NULL,
        expires_ms INTEGER,
        made_ms INTEGER NOT NULL,
        made_by TEXT NOT NULL,
        cancelled_ms INTEGER,
        note TEXT NOT NULL
    );
    CREATE TABLE code_uses (
        code INTEGER NOT NULL REFERENCES codes,
        peer BLOB NOT NULL,
        account INTEGER NOT NULL REFERENCES accounts,
        at_ms INTEGER NOT NULL,
        PRIMARY KEY (code, peer)
    ) WITHOUT ROWID;

    CREATE TABLE signing_keys (
        key_id BLOB PRIMARY KEY,
        public_key BLOB NOT NULL,
        from_ms INTEGER NOT NULL,
        until_ms INTEGER NOT NULL,
        endorsed_by BLOB NOT NULL,
        signature BLOB NOT NULL,
        made_ms INTEGER NOT NULL,
        withdrawn_ms INTEGER,
        place INTEGER NOT NULL UNIQUE
    ) WITHOUT ROWID;

    CREATE TABLE revocations (
        entry INTEGER PRIMARY KEY,
        kind TEXT NOT NULL CHECK (kind IN ('name', 'peer', 'serial')),
        value BLOB NOT NULL,
        revoked_ms INTEGER NOT NULL,
        forget_ms INTEGER NOT NULL,
        revoked_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        lifted_ms INTEGER
    );
    CREATE INDEX revocations_by_value ON revocations (kind, value);
    CREATE TABLE revocation_list (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        number INTEGER NOT NULL,
        issued_ms INTEGER NOT NULL,
        document BLOB NOT NULL
    );
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)


# Rows of the database as typed structs, and the error for a row that cannot be one.
#
# SQLite checks neither types nor values; a disk that fails, or a person with an editor, leaves rows
# that no code of ours wrote. A reader of one gets StoreDamaged, and never a ValueError.
#
# Roles are in one column as words with commas, in the order of `in_order`.


T = TypeVar("T", bound=msgspec.Struct)


def struct_of(type_: type[T], row: Sequence[object]) -> T:
    """The columns in the order of the struct's fields. StoreDamaged if they do not fit."""
    fields = dict(zip(type_.__struct_fields__, row, strict=True))
    roles = fields.get("roles")
    if isinstance(roles, str):
        fields["roles"] = roles.split(",")
    try:
        return msgspec.convert(fields, type_)
    except msgspec.ValidationError as error:
        raise StoreDamaged(
            f"The auth server's database has a row that makes no sense: {error}.",
            why="The disk failed, or something else wrote into the file.",
            advice="Run `potluck auth audit --verify`, and consider going back to a backup.",
        ) from None


def rows_of(
    connection: sqlite3.Connection, type_: type[T], rest: str, values: Sequence[object] = ()
) -> list[T]:
    """The rows that `SELECT … rest` finds. A struct's fields have the names of their columns."""
    columns = ", ".join(type_.__struct_fields__)
    found = connection.execute(f"SELECT {columns} {rest}", values)
    return [struct_of(type_, row) for row in found]


def row_of(
    connection: sqlite3.Connection, type_: type[T], rest: str, values: Sequence[object] = ()
) -> T | None:
    """The first of these rows; None if there is none."""
    return next(iter(rows_of(connection, type_, rest, values)), None)


def spell_roles(roles: Iterable[Role]) -> str:
    return ",".join(role.value for role in in_order(roles))


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
    """Remove a file that was only half made, with SQLite's files beside it."""
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
    """A consistent copy of a held state. `destination` must not exist."""
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


def write_new_file(path: Path, content: bytes) -> None:
    """A file of this user alone, on the disk when this returns (its name, once `keep_names` of its
    folder is). OSError from the system."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, FILE_MODE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
    # text that is not UTF-8 was not written by us; reading it must not raise
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
    """Read every page; StoreDamaged if one is damaged. A second or two for each gigabyte."""
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
