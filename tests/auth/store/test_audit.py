"""The audit log: `verify` finds every change that is made to it behind the server's back."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auth.server import audit
from auth.server.audit import (
    Act,
    AuditEntry,
    AuditHash,
    AuditVerdict,
    Chain,
    read_head_file,
    verify_log,
)
from auth.server.moderation import NotDone
from auth.server.store import StoreReader
from auth.server.store_errors import StoreFailed
from tests.auth.store.stores import ROOT, RUN, Clock, Server, running

ROWS = 14
COLUMNS = (
    "number", "at_ms", "act", "actor", "name", "peer", "serial", "reason", "detail", "hash",
)  # fmt: skip

# A function's folder is copied for each example; hypothesis must not mind that it is shared.
examples = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed auth server's folder whose log has ROWS rows of all kinds."""
    folder = tmp_path_factory.mktemp("original") / "auth"
    with running(folder) as server:
        for login in ("alice", "bob", "carol", "dave"):
            server.moderation.allow(login, actor=ROOT, reason=f"a friend, she says: {login} ☕")
        for login in ("alice", "bob"):
            server.moderation.deny(login, actor="local:bo", reason="no longer")
        server.moderation.code_new(actor=ROOT, name="erin")
        server.moderation.courier_token(bytes(range(32)), actor=ROOT)
        for number in range(4):
            server.moderation.revoke(f"12D3KooW{peer(number)}", actor=ROOT, reason="lost")
    return folder


def peer(number: int) -> str:
    from auth.keys import SigningKey, peer_id_of

    return peer_id_of(SigningKey(bytes([number] * 32)).public_key).removeprefix("12D3KooW")


@contextlib.contextmanager
def copied(original: Path) -> Iterator[Path]:
    folder = original.parent / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    yield folder


def verdict_of(folder: Path, noted: tuple[int, bytes] | None = None) -> AuditVerdict:
    reader = StoreReader(folder)
    keys = reader.published().keys.verifying()
    with reader.reading() as connection:
        return verify_log(connection, RUN, keys, reader.paths.head, noted)


def tamper(folder: Path, edit: Callable[[sqlite3.Connection], object]) -> None:
    """The changes of a person who knows SQLite: first without the triggers, then with them."""
    with contextlib.closing(sqlite3.connect(folder / "auth.sqlite")) as connection, connection:
        triggers = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        edit(connection)
        for _, sql in triggers:
            connection.execute(sql)


def test_a_log_that_nobody_touched_is_sound(original: Path) -> None:
    verdict = verdict_of(original)
    assert verdict.sound
    assert verdict.rows == ROWS
    head = read_head_file(original / "audit.head")
    assert verdict.head == str(head)
    assert verdict.what == "All 14 rows are as they were written."


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET reason = 'x' WHERE number = 3",
        "DELETE FROM audit WHERE number = 14",
        "DELETE FROM audit",
        "INSERT OR REPLACE INTO audit SELECT * FROM audit WHERE number = 3",
        "INSERT INTO audit SELECT 99, 1, 'x', 'x', 'x', x'', 1, 'x', 'x', x''",
        "INSERT INTO audit SELECT 0, 1, 'x', 'x', 'x', x'', 1, 'x', 'x', x''",
    ],
)
def test_the_database_itself_only_lets_the_log_grow(original: Path, statement: str) -> None:
    with (
        copied(original) as folder,
        contextlib.closing(sqlite3.connect(folder / "auth.sqlite")) as connection,
        pytest.raises(sqlite3.IntegrityError, match="only ever appended to"),
    ):
        connection.execute(statement)


def changed(value: object, place: int, mask: int) -> object:
    """The same value with one byte of it different."""
    match value:
        case None:
            return mask
        case int():
            return value ^ (mask << (8 * (place % 6)))
        case bytes():
            content = bytearray(value or b"\x00")
            content[place % len(content)] ^= mask
            return bytes(content)
        case str():
            content = bytearray(value.encode() or b"\x00")
            content[place % len(content)] ^= mask
            return bytes(content)
    raise AssertionError(value)


@pytest.mark.slow
@examples
@given(
    number=st.integers(1, ROWS),
    column=st.sampled_from(COLUMNS[1:]),
    place=st.integers(0, 500),
    mask=st.integers(1, 255),
)
def test_one_byte_of_one_row_is_found_and_named(
    original: Path, number: int, column: str, place: int, mask: int
) -> None:
    with copied(original) as folder:

        def edit(connection: sqlite3.Connection) -> None:
            (value,) = connection.execute(
                f"SELECT {column} FROM audit WHERE number = ?", (number,)
            ).fetchone()
            new = changed(value, place, mask)
            kept = "CAST(? AS TEXT)" if isinstance(value, str) else "?"
            connection.execute(
                f"UPDATE audit SET {column} = {kept} WHERE number = ?", (new, number)
            )

        tamper(folder, edit)
        verdict = verdict_of(folder)
        assert not verdict.sound
        assert verdict.broken_row == number
        assert f"Row {number} " in verdict.what


@pytest.mark.slow
@examples
@given(data=st.data())
def test_a_row_taken_out_moved_or_put_in_is_found_and_named(
    original: Path, data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, ROWS - 1), label="first")
    second = data.draw(st.integers(first + 1, ROWS), label="second")
    how = data.draw(st.sampled_from(["delete", "swap", "close the gap", "copy"]), label="how")

    def edit(connection: sqlite3.Connection) -> None:
        move = "UPDATE audit SET number = ? WHERE number = ?"
        if how in ("delete", "close the gap"):
            connection.execute("DELETE FROM audit WHERE number = ?", (first,))
        if how == "close the gap":
            for number in range(first + 1, ROWS + 1):
                connection.execute(move, (number - 1, number))
        if how == "swap":
            for new, old in ((-1, first), (first, second), (second, -1)):
                connection.execute(move, (new, old))
        if how == "copy":
            for number in range(ROWS, first, -1):
                connection.execute(move, (number + 1, number))
            connection.execute(
                f"INSERT INTO audit SELECT {first + 1}, {', '.join(COLUMNS[1:])} FROM audit"
                f" WHERE number = {first}"
            )

    with copied(original) as folder:
        tamper(folder, edit)
        verdict = verdict_of(folder)
        assert not verdict.sound
        assert verdict.broken_row == (first + 1 if how == "copy" else first)


def rewrite_from(connection: sqlite3.Connection, number: int, reason: str) -> None:
    """Change a row, and hash it and all after it anew: the chain is whole again."""
    connection.execute("UPDATE audit SET reason = ? WHERE number = ?", (reason, number))
    before = audit.first_hash(RUN)
    for row in connection.execute(f"SELECT {', '.join(COLUMNS)} FROM audit").fetchall():
        before = AuditHash(audit.hash_of(before, row[:-1]))
        connection.execute("UPDATE audit SET hash = ? WHERE number = ?", (before, row[0]))


def test_a_log_that_was_hashed_anew_is_found_by_the_signature(original: Path) -> None:
    with copied(original) as folder:
        tamper(folder, lambda connection: rewrite_from(connection, 5, "he deserved it"))
        verdict = verdict_of(folder)
        assert not verdict.sound
        assert verdict.what == "Row 14 is not the one whose hash was signed."


def cut(connection: sqlite3.Connection, after: int) -> None:
    connection.execute("DELETE FROM audit WHERE number > ?", (after,))


@pytest.mark.parametrize("kept", [0, 1, 13])
def test_a_truncated_log_is_found(original: Path, kept: int) -> None:
    with copied(original) as folder:
        tamper(folder, lambda connection: cut(connection, kept))
        verdict = verdict_of(folder)
        assert not verdict.sound
        assert verdict.broken_row == kept + 1
        assert "cut off" in verdict.what


def older_and_newer(tmp_path: Path) -> tuple[Path, Path, str]:
    """A folder, the same folder a while later, and the head that was shown at the end."""
    now, older = tmp_path / "auth", tmp_path / "older"
    with running(now) as server:
        server.allow("alice")
    shutil.copytree(now, older)
    with running(now) as server:
        server.moderation.deny("alice", actor=ROOT, reason="to be hidden")
        head = server.moderation.verify().head
    return now, older, head


def test_an_older_database_put_back_is_found_by_the_head_beside_it(tmp_path: Path) -> None:
    now, older, _ = older_and_newer(tmp_path)
    shutil.copy(older / "auth.sqlite", now / "auth.sqlite")
    verdict = verdict_of(now)
    assert not verdict.sound
    assert verdict.what.startswith("Rows 4 to 4 were cut off")


def test_everything_older_put_back_is_found_by_a_head_that_was_written_down(
    tmp_path: Path,
) -> None:
    now, older, head = older_and_newer(tmp_path)
    assert verdict_of(older).sound
    with running(older) as server:
        verdict = server.moderation.verify(head=head)
        assert (verdict.sound, verdict.broken_row) == (False, 4)
        server.moderation.allow("bob", actor=ROOT)  # as many rows again, but others
        verdict = server.moderation.verify(head=head)
        assert verdict.what == "The log was written anew: row 4 is not the one you wrote down."
    with running(now) as server:
        server.moderation.allow("bob", actor=ROOT)
        assert server.moderation.verify(head=head).sound


def test_a_head_beside_the_database_that_is_gone_or_forged_is_found(original: Path) -> None:
    with copied(original) as folder:
        path = folder / "audit.head"
        text = path.read_text()
        for content in ("", "rubbish\n" * 5, text.replace("number 14", "number 13"), text[:-9]):
            path.write_text(content)
            verdict = verdict_of(folder)
            assert not verdict.sound
            assert "audit.head is missing, or not signed" in verdict.what
        path.unlink()
        assert not verdict_of(folder).sound


def test_another_runs_head_does_not_do(original: Path, tmp_path: Path) -> None:
    with running(tmp_path / "other") as server:
        server.allow("mallory")
    with copied(original) as folder:
        shutil.copy(tmp_path / "other" / "audit.head", folder / "audit.head")
        assert not verdict_of(folder).sound


@pytest.mark.parametrize("what", ["cut", "head", "file"])
def test_changes_made_while_the_server_was_stopped_are_reported_after_it_starts(
    original: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first transaction signs a new head; the evidence must not go with the old one."""
    with copied(original) as folder:
        if what == "cut":
            tamper(folder, lambda connection: cut(connection, 9))
        elif what == "head":
            tamper(folder, lambda connection: connection.execute("DELETE FROM audit_head"))
        else:
            (folder / "audit.head").unlink()
        with running(folder) as server:
            server.allow("zoe")
            verdict = server.moderation.verify()
            assert not verdict.sound
            assert "tells of an earlier break" in verdict.what
            assert "tampered" in caplog.text
            dealt_with = server.moderation.verify(head=verdict.head)
            assert dealt_with.sound
        with running(folder) as server:
            assert server.moderation.audit(act="tampered").rows[0].number == verdict.broken_row
            assert len(server.moderation.audit(act="tampered").rows) == 1


def test_a_head_that_is_behind_after_a_crash_is_no_edit(original: Path) -> None:
    with copied(original) as folder:
        before = (folder / "audit.head").read_bytes()
        with running(folder) as server:
            server.allow("zoe")
        (folder / "audit.head").write_bytes(before)
        assert verdict_of(folder).sound
        with running(folder) as server:
            assert server.moderation.audit(act="tampered").rows == ()
        assert (folder / "audit.head").read_bytes() != before


def rows_of(folder: Path) -> list[tuple[object, ...]]:
    with StoreReader(folder).reading() as connection:
        return connection.execute(f"SELECT {', '.join(COLUMNS)} FROM audit").fetchall()


@settings(examples, max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
@pytest.mark.slow
def test_no_byte_of_the_file_changes_the_log_unseen(
    original: Path, place: float, mask: int
) -> None:
    """A byte that nothing uses may change; a log that reads otherwise may not pass."""
    with copied(original) as folder:
        path = folder / "auth.sqlite"
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= mask
        path.write_bytes(content)
        try:
            verdict = verdict_of(folder)
            rows = rows_of(folder)
        except StoreFailed:
            return
        assert not verdict.sound or rows == rows_of(original)


def test_every_byte_of_a_reason_in_the_file_counts(original: Path) -> None:
    content = (original / "auth.sqlite").read_bytes()
    start = content.index("she says: carol ☕".encode())
    for place in range(start, start + len("she says: carol ☕".encode())):
        with copied(original) as folder:
            edited = bytearray(content)
            edited[place] ^= 0x01
            (folder / "auth.sqlite").write_bytes(edited)
            verdict = verdict_of(folder)
            assert (verdict.sound, verdict.broken_row) == (False, 5)


def test_reasons_are_kept_on_one_line_and_bounded(server: Server) -> None:
    server.moderation.allow("alice", actor="local:\n\x1b[2J", reason="x" * 10_000 + "\r\n")
    server.moderation.deny("alice", actor=ROOT, reason="\ud800 half a character")
    rows = server.moderation.audit(limit=2).rows
    assert rows[0].reason == "\ufffd half a character"
    assert rows[1].actor == "local:\ufffd\ufffd[2J"
    assert len(rows[1].reason) == audit.LONGEST_TEXT
    assert server.is_sound()


def test_a_head_that_was_not_copied_well_is_said(server: Server) -> None:
    for text in ("", "3", "3:abc", "-1:" + "0" * 64, "3:" + "0" * 62, "x" * 1000):
        with pytest.raises(NotDone, match="is not the head of an audit log"):
            server.moderation.verify(head=text)


def test_the_hash_covers_every_field_and_the_row_before() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE audit ({', '.join(COLUMNS)})")

    def hashed(before: str = RUN, at_ms: int = 1, **fields: object) -> bytes:
        entry = AuditEntry(**{"act": Act.JOINED, "actor": "a", **fields})  # type: ignore[arg-type]
        chain = Chain(0, audit.first_hash(before))
        chain.append(connection, at_ms, entry)
        return chain.hash

    seen = {
        hashed(), hashed("another-run"), hashed(at_ms=2), hashed(act=Act.RENEWED),
        hashed(actor="b"), hashed(name="n"), hashed(name=""), hashed(peer=b"p"), hashed(serial=1),
        hashed(reason="r"), hashed(detail="r"),
    }  # fmt: skip
    assert len(seen) == 11
    connection.close()


def test_a_long_log_is_walked_without_holding_it(tmp_path: Path) -> None:
    clock = Clock()
    with running(tmp_path / "auth", clock) as server:
        for _ in range(10):
            server.store.writer.run(
                lambda transaction: [
                    transaction.log(Act.REFUSED, "peer", str(number)) for number in range(300)
                ]
            )
        verdict = server.moderation.verify()
    assert (verdict.sound, verdict.rows) == (True, 3002)
