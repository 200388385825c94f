"""The file: made whole or not at all, brought up to date, and never used when it is not sound."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from auth.errors import AuthError
from auth.server import database
from auth.server.database import MIGRATIONS
from auth.server.store import StoreReader, create_store, open_store
from auth.server.store_errors import (
    StoreDamaged,
    StoreFailed,
    StoreInUse,
    StoreIsNewer,
    StoreMissing,
)
from tests.auth.store.stores import ROOT, RUN, Clock, running

VERSION_1 = Path(__file__).with_name("version-1.sql")
NEXT = """
    CREATE TABLE invented (thing TEXT NOT NULL);
    INSERT INTO invented SELECT run FROM store;
"""


@pytest.fixture
def made(folder: Path) -> Path:
    with running(folder) as server:
        server.allow("alice")
    return folder


def change(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def refuses(folder: Path, kind: type[AuthError], words: str) -> None:
    """It is not opened in either way, and is afterwards as it was."""
    before = (folder / "auth.sqlite").read_bytes()
    for _ in range(2):
        with pytest.raises(kind, match=words) as caught, open_store(folder):
            pass
        assert caught.value.what
        assert caught.value.why
        assert caught.value.advice
        with pytest.raises(kind, match=words), StoreReader(folder).reading():
            pass
    assert (folder / "auth.sqlite").read_bytes() == before


def test_a_new_database_is_private_and_complete(folder: Path) -> None:
    made = create_store(folder, RUN, actor=ROOT)
    assert len(made.fingerprint) == 26
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert names == {
        "auth.sqlite": 0o600, "auth.sqlite.lock": 0o600, "audit.head": 0o600,
        "keys": 0o700, f"{made.key_id}.key": 0o600,
    }  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with open_store(folder) as store:
        assert store.run == RUN
        assert store.fingerprint == made.fingerprint
        assert store.can_sign()


def test_nothing_is_made_over_what_is_there(made: Path) -> None:
    before = (made / "auth.sqlite").read_bytes()
    with pytest.raises(StoreFailed, match="already"):
        create_store(made, RUN, actor=ROOT)
    assert (made / "auth.sqlite").read_bytes() == before
    assert len(list((made / "keys").iterdir())) == 1


def test_nothing_is_left_of_what_could_not_be_made(folder: Path) -> None:
    with pytest.raises(StoreFailed, match="cannot be the name of a run"):
        create_store(folder, "../etc", actor=ROOT)
    folder.mkdir()
    (folder / "audit.head").mkdir()  # in the way of a rename
    with pytest.raises(StoreFailed):
        create_store(folder, RUN, actor=ROOT)
    assert not (folder / "auth.sqlite").exists()
    assert not list(folder.glob(".making*"))
    (folder / "audit.head").rmdir()
    create_store(folder, RUN, actor=ROOT)


def test_a_folder_without_a_database_is_told_so_and_stays_empty(folder: Path) -> None:
    with pytest.raises(StoreMissing, match="potluck auth init"), open_store(folder):
        pass
    with pytest.raises(StoreMissing), StoreReader(folder).reading():
        pass
    assert not folder.exists()


def test_only_one_process_writes(made: Path) -> None:
    with (
        open_store(made),
        pytest.raises(StoreInUse, match=str(os.getpid())) as caught,
        open_store(made),
    ):
        pass
    assert caught.value.exit_code == 3
    with open_store(made):
        pass


def test_reading_goes_on_beside_the_writer_and_sees_one_state(made: Path) -> None:
    with running(made) as server, StoreReader(made).reading() as connection:
        count = "SELECT count(*) FROM accounts"
        assert connection.execute(count).fetchone() == (1,)
        server.allow("bob")
        assert connection.execute(count).fetchone() == (1,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM accounts")


def test_a_file_of_a_newer_potluck_is_left_alone(made: Path) -> None:
    change(made / "auth.sqlite", f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    refuses(made, StoreIsNewer, "newer potluck")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER spy AFTER INSERT ON accounts BEGIN DELETE FROM codes; END",
        "DROP TRIGGER audit_is_not_changed",
        "DROP TABLE codes",
        "CREATE VIEW everything AS SELECT * FROM accounts",
        "DELETE FROM store",
        "DELETE FROM revocation_list",
        "PRAGMA application_id = 1",
    ],
)
def test_a_file_with_other_tables_than_ours_is_not_used(made: Path, statement: str) -> None:
    change(made / "auth.sqlite", statement)
    with pytest.raises(StoreDamaged), open_store(made):
        pass


def test_a_damaged_file_is_told_of_and_not_touched(made: Path) -> None:
    path = made / "auth.sqlite"
    content = bytearray(path.read_bytes())
    content[0:16] = b"not a database!!"
    path.write_bytes(content)
    refuses(made, StoreDamaged, "is damaged")
    path.write_bytes(b"")
    refuses(made, StoreDamaged, "it is empty")


def test_a_page_that_was_overwritten_is_found_when_the_server_starts(made: Path) -> None:
    path = made / "auth.sqlite"
    content = bytearray(path.read_bytes())
    place = content.index(b"github")
    page = place // 4096
    content[page * 4096 : page * 4096 + 200] = bytes(range(200))
    path.write_bytes(content)
    with pytest.raises(StoreDamaged, match="put the last backup"), open_store(made):
        pass


def test_a_file_that_others_could_have_changed_is_not_used(made: Path) -> None:
    (made / "auth.sqlite").chmod(0o660)
    refuses(made, StoreFailed, "Others may write")
    (made / "auth.sqlite").chmod(0o600)
    made.chmod(0o770)
    refuses(made, StoreFailed, "Others may write to ")
    made.chmod(0o700)
    key = next((made / "keys").iterdir())
    key.chmod(0o640)
    with pytest.raises(StoreFailed, match="Others may read the signing key"), open_store(made):
        pass
    key.chmod(0o600)
    os.rename(made / "auth.sqlite", made / "elsewhere")
    os.symlink(made / "elsewhere", made / "auth.sqlite")
    refuses(made, StoreFailed, "is not an ordinary file")


def test_nothing_is_made_where_others_could_change_it(tmp_path: Path) -> None:
    folder = tmp_path / "auth"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StoreFailed, match="Others may write to"):
        create_store(folder, RUN, actor=ROOT)
    assert not list(folder.iterdir())


def test_without_its_key_a_server_does_not_start(made: Path) -> None:
    key = next((made / "keys").iterdir())
    content = key.read_bytes()
    key.unlink()
    with pytest.raises(StoreFailed, match="no key to sign with"), open_store(made):
        pass
    for rubbish in (b"", b"rubbish", content[:-2], content.replace(b"potluck", b"kotluck")):
        key.write_bytes(rubbish)
        key.chmod(0o600)
        with pytest.raises(StoreFailed, match="is not a signing key"), open_store(made):
            pass
    key.write_bytes(content)
    with open_store(made, clock_ms=Clock()) as store:
        assert store.can_sign()


def test_a_migration_brings_a_file_up_to_date_and_keeps_the_old_one(made: Path) -> None:
    path = made / "auth.sqlite"
    database.open_for_writing(path, (*MIGRATIONS, NEXT)).close()
    with database.reading(path, (*MIGRATIONS, NEXT)) as connection:
        assert connection.execute("SELECT thing FROM invented").fetchone() == (RUN,)
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    aside = made / f"auth.sqlite.version-{len(MIGRATIONS)}"
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    refuses(made, StoreIsNewer, "newer")
    os.replace(aside, path)
    with running(made) as server:
        assert server.moderation.accounts().total == 1
        assert server.is_sound()


def test_a_migration_that_fails_leaves_the_file_as_it_was(made: Path) -> None:
    path = made / "auth.sqlite"
    broken = "CREATE TABLE half (a); INSERT INTO nothing VALUES (1);"
    with pytest.raises(StoreFailed):
        database.open_for_writing(path, (*MIGRATIONS, NEXT, broken))
    with database.reading(path, (*MIGRATIONS, NEXT)) as connection:
        assert connection.execute("SELECT count(*) FROM invented").fetchone() == (1,)


def test_reading_does_not_bring_a_file_up_to_date(made: Path) -> None:
    with (
        pytest.raises(StoreFailed, match="older potluck"),
        database.reading(made / "auth.sqlite", (*MIGRATIONS, NEXT)),
    ):
        pass


def test_a_file_of_version_1_is_still_understood(folder: Path) -> None:
    """A database of version 1, as SQL. Never change that file; each version adds one."""
    with running(folder):
        pass  # for the key, which is made from the same seed
    path = folder / "auth.sqlite"
    path.unlink()
    shutil.copy(VERSION_1.with_suffix(".head"), folder / "audit.head")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1.read_text(encoding="utf-8"))
    path.chmod(0o600)
    with running(folder) as server:
        assert [account.name for account in server.moderation.accounts().accounts] == [
            "code:erin", "github:alice", "github:bob",
        ]  # fmt: skip
        assert server.moderation.account("bob").state == "denied"
        assert server.moderation.revocations().entries[0].kind == "peer"
        assert server.moderation.codes().codes[0].uses == 1
        assert server.is_sound()
