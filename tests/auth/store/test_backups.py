"""A backup is a whole folder, made beside a running server, and one can go back to it."""

from __future__ import annotations

import shutil
import stat
from functools import partial
from pathlib import Path

import pytest
import trio

from auth.keyring import Keyring, endorse
from auth.keys import SigningKey
from auth.revocations import Revocations, read_list
from auth.server.join_refused import JoinReason, JoinRefused
from auth.server.moderation import KeyComesTooLate, NoSuchKey
from auth.server.signing_keys import read_key_file, write_key_file
from auth.server.store import SERIALS_A_SECOND
from auth.server.store_errors import StoreFailed
from auth.tokens import read_token
from tests.auth.store.stores import HOUR_MS, ROOT, RUN, Clock, Node, Person, Server, running

ALICE = Person("alice")


def all_of(folder: str) -> list[Path]:
    return list(Path(folder).rglob("*"))


async def test_a_backup_holds_everything_and_is_private(server: Server, tmp_path: Path) -> None:
    server.allow("alice")
    await Node(1, server).join(ALICE)
    made = server.moderation.backup(tmp_path / "backup", actor="local:bo", reason="weekly")
    found = all_of(made.path)
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}
    key = server.moderation.keys().keys[0].key_id
    assert names == {
        "auth.sqlite": 0o600, "audit.head": 0o600, "keys": 0o700, f"{key}.key": 0o600,
    }  # fmt: skip
    assert made.files == 3
    assert made.bytes == sum(path.stat().st_size for path in found if path.is_file())
    row = server.moderation.audit(limit=1).rows[0]
    assert (row.act, row.actor, row.reason) == ("backed up", "local:bo", "weekly")
    assert server.moderation.verify(head=made.audit_head).sound


def test_a_backup_is_never_written_over_anything(server: Server, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("there", "link", "auth"):
        with pytest.raises(StoreFailed, match="already"):
            server.moderation.backup(tmp_path / place, actor=ROOT)
    with pytest.raises(StoreFailed):
        server.moderation.backup(tmp_path / "no such folder" / "backup", actor=ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["auth", "link", "there"]


def test_there_is_no_backup_that_the_log_does_not_know_of(server: Server, tmp_path: Path) -> None:
    """With a backup, a person can sign tokens. So the row is written first, and is in the copy."""
    made = server.moderation.backup(tmp_path / "backup", actor="local:bo")
    with running(Path(made.path)) as restored:
        row = restored.moderation.audit(act="backed up").rows[0]
    assert (row.actor, row.detail) == ("local:bo", f"to {made.path}")
    with pytest.raises(StoreFailed):
        server.moderation.backup(Path("/proc/backup"), actor="local:bo")
    row = server.moderation.audit(limit=1).rows[0]
    assert (row.act, row.detail) == ("backup failed", "to /proc/backup")
    assert row.reason.startswith("/proc/")


async def test_a_backup_has_every_key_that_its_database_counts_on(
    server: Server, tmp_path: Path
) -> None:
    """The same with any change of the keys while it is made."""
    made: list[Path] = []

    def change_keys() -> None:
        for _ in range(8):
            server.moderation.key_withdraw(_newest(server), actor=ROOT)

    def back_up() -> None:
        for number in range(6):
            made.append(tmp_path / f"backup-{number}")
            server.moderation.backup(made[-1], actor=ROOT)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, change_keys)
        nursery.start_soon(trio.to_thread.run_sync, back_up)
    for folder in made:
        with running(folder) as restored:
            counting = [key for key in restored.moderation.keys().keys if not key.withdrawn_ms]
            assert all(key.has_file for key in counting)


def _newest(server: Server) -> str:
    return server.moderation.keys().keys[-1].key_id


async def test_going_back_to_a_backup_goes_on_from_there(tmp_path: Path) -> None:
    clock, folder, backup = Clock(), tmp_path / "auth", tmp_path / "backup"
    with running(folder, clock) as server:
        server.allow("alice")
        early = Node(1, server)
        await early.join(ALICE)
        server.moderation.backup(backup, actor=ROOT)
        late = Node(2, server)
        await late.join(ALICE)
        server.moderation.revoke(late.peer_id, actor=ROOT)
        lost = read_token(late.token).serial, server.store.revocation_list()
        keyring = Keyring.from_pinned(RUN, server.fingerprint, server.store.keys.records)
        peers = Revocations(RUN)
        peers.accept(lost[1].signed, keyring)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    clock.forward(3_000)
    with running(folder, clock) as server:
        assert server.is_sound()
        row = server.moderation.audit(limit=1).rows[0]
        assert (row.act, row.detail[:24]) == ("restored", "The backup was made 4 s ")
        early.server = server
        early.next_challenge = None
        await early.renew()
        assert read_token(early.token).serial == 1 + 4 * SERIALS_A_SECOND + 1 > lost[0]
        # The list that peers have is older than the one issued now, although that one knows less.
        assert peers.accept(server.store.revocation_list().signed, keyring)
        # Nobody knows until when tokens live that were issued after the backup.
        done = server.moderation.revoke(late.peer_id, actor=ROOT)
        assert done.forget_ms > clock() + 7 * 24 * 3600 * 1000
        assert server.moderation.revocations().entries[0].on_list
    with running(folder, clock) as server:
        assert len(server.moderation.audit(act="restored").rows) == 1


async def test_to_deny_somebody_whose_code_works_on_names_the_code(tmp_path: Path) -> None:
    """After a restore even the same key would come in by it, under the next name."""
    clock, backup = Clock(), tmp_path / "backup"
    with running(tmp_path / "auth", clock) as server:
        made = server.moderation.code_new(uses=30, actor=ROOT)
        server.moderation.backup(backup, actor=ROOT)
        node = Node(1, server)
        await node.join_by_code(made.code)
        name = read_token(node.token).username
    with running(backup, clock) as server:
        node.server = server
        done = server.moderation.deny(name, actor=ROOT)
        assert (done.change, done.open_code) == ("denied", made.view.code_id)
        await node.join_by_code(made.code)
        again = read_token(node.token).username
        assert server.moderation.revoke(again, actor=ROOT).open_code == made.view.code_id
        server.moderation.code_cancel(done.open_code, actor=ROOT)
        assert server.moderation.deny(name, actor=ROOT).open_code is None
        for other in ("code:dana", "code:c9-1", "github:c1-1"):
            assert server.moderation.deny(other, actor=ROOT).open_code is None


def test_a_code_for_one_name_lets_nobody_in_under_another(server: Server) -> None:
    """The number in the name is that of a code which the restored server does not know."""
    server.moderation.code_new(name="dana", actor=ROOT)
    assert server.moderation.deny("code:c1-1", actor=ROOT).open_code is None


async def restored_before_a_rotation(
    tmp_path: Path, clock: Clock
) -> tuple[Node, Path, Revocations]:
    """The server in `auth` is put back from before its present key. Returns a node with a token of
    that key, the key's file, and the revocations of a peer, which knows it as well."""
    folder, backup, broken = (tmp_path / name for name in ("auth", "backup", "broken"))
    with running(folder, clock) as server:
        server.allow("alice")
        server.allow("bob")
        node = Node(1, server)
        await node.join(ALICE)
        server.moderation.backup(backup, actor=ROOT)
        made = server.moderation.key_rotate(actor=ROOT)
        clock.now_ms = made.signs_from_ms
        node.next_challenge = None
        await node.renew()
        server.moderation.revoke("bob", actor=ROOT)
        server.store.writer.run(server.store.refresh_list)
        peer = Revocations(RUN)
        keyring = Keyring.from_pinned(RUN, node.pinned, server.store.keys.records)
        peer.accept(server.store.revocation_list().signed, keyring)
    folder.rename(broken)
    shutil.copytree(backup, folder)
    clock.forward(3_000)
    node.next_challenge = None
    return node, broken / "keys" / f"{made.new.key_id}.key", peer


def key_in(file: Path) -> SigningKey:
    key = read_key_file(file)
    assert key is not None
    return key


def known_to_all(node: Node, key: SigningKey, server: Server) -> Keyring:
    """What a peer trusts that knew the lost key before, and has heard the restored server."""
    first = server.store.keys.records[0]
    lost = endorse(RUN, key.public_key, 1, first.until_ms, SigningKey(b"\x07" * 32))
    keyring = Keyring.from_pinned(RUN, node.pinned, (first, lost))
    keyring.add(server.store.keys.records)
    return keyring


async def test_after_a_restore_the_key_of_a_later_rotation_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    node, file, peer = await restored_before_a_rotation(tmp_path, clock)
    key = key_in(file)
    with running(tmp_path / "auth", clock) as server:
        assert "`potluck auth keys rotate --key FILE`" in caplog.text
        node.server = server
        with pytest.raises(JoinRefused, match=f"does not know the auth key {key.key_id.hex()}"):
            await node.renew()
        assert server.newest("refused").startswith("unknown-key: ")
        server.moderation.revoke("alice", actor=ROOT)
        server.moderation.allow("alice", actor=ROOT)
        keyring = known_to_all(node, key, server)
        assert not peer.accept(server.store.revocation_list().signed, keyring)
        done = server.moderation.key_rotate(key_file=file, actor=ROOT)
        assert (done.new.state, done.old.state) == ("signs now", "older")
        keyring = known_to_all(node, key, server)
        assert peer.accept(server.store.revocation_list().signed, keyring)
        assert peer.refuses(read_token(node.token))
        with pytest.raises(JoinRefused) as refused:  # known again; alice has to log in again
            await node.renew()
        assert refused.value.reason is JoinReason.LOGIN_OVER
        await node.join(ALICE)
        assert read_token(node.token).key_id == key.key_id
        assert server.is_sound()
        # a peer that hears of the key now accepts tokens that it signed before the restore
        newcomer = Keyring.from_pinned(RUN, node.pinned, server.store.keys.records)
        found = newcomer.find(key.key_id)
        assert found is not None
        assert found.signs_at(clock() - HOUR_MS)
        assert found.depth == 1
    with running(tmp_path / "auth", clock) as server:
        assert server.store.fingerprint == done.new.fingerprint


async def test_a_key_that_is_put_back_is_refused_the_tokens_that_were_revoked_before(
    tmp_path: Path,
) -> None:
    """The list seemed not to need them any more: all keys that the server had were withdrawn."""
    clock = Clock()
    node, file, peer = await restored_before_a_rotation(tmp_path, clock)
    key = key_in(file)
    with running(tmp_path / "auth", clock) as server:
        server.moderation.revoke("alice", actor=ROOT)
        server.moderation.revoke("bob", actor=ROOT)
        server.moderation.revoke(Node(3, server).peer_id, actor=ROOT)
        server.moderation.allow(Node(3, server).peer_id, actor=ROOT)
        server.moderation.key_withdraw(server.fingerprint, actor=ROOT)
        clock.forward(60_000)
        server.moderation.key_rotate(key_file=file, actor=ROOT)
        assert peer.accept(server.store.revocation_list().signed, known_to_all(node, key, server))
        assert peer.refuses(read_token(node.token))
        assert len(peer) == 2
        assert server.is_sound()


async def test_a_clock_that_steps_back_after_a_key_is_put_back_takes_nobody_off_the_list(
    tmp_path: Path,
) -> None:
    clock = Clock()
    _, file, _ = await restored_before_a_rotation(tmp_path, clock)
    with running(tmp_path / "auth", clock) as server:
        older = server.fingerprint
        server.moderation.revoke("alice", actor=ROOT)
        server.moderation.key_rotate(key_file=file, actor=ROOT)
        clock.forward(-5_000)
        server.moderation.key_withdraw(older, actor=ROOT)
        assert len(read_list(server.store.revocation_list().signed).entries) == 1


async def test_a_key_for_whose_revocations_there_is_no_room_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    _, file, _ = await restored_before_a_rotation(tmp_path, clock)
    with running(tmp_path / "auth", clock) as server:
        server.moderation.revoke("alice", actor=ROOT)
        server.moderation.key_withdraw(server.fingerprint, actor=ROOT)
        clock.forward(60_000)
        before = server.store.revocation_list().signed
        monkeypatch.setattr("auth.revocations.LIMIT_BYTES", len(before) + 5)
        with pytest.raises(KeyComesTooLate, match="cannot be given back"):
            server.moderation.key_rotate(key_file=file, actor=ROOT)
        assert server.store.revocation_list().signed == before
        assert server.is_sound()
        monkeypatch.undo()
        server.moderation.key_rotate(key_file=file, actor=ROOT)


async def test_after_a_restore_without_the_later_key_a_new_invite_counts(tmp_path: Path) -> None:
    clock = Clock()
    node, file, peer = await restored_before_a_rotation(tmp_path, clock)
    key = key_in(file)
    with running(tmp_path / "auth", clock) as server:
        made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
        clock.now_ms = made.signs_from_ms
        server.moderation.revoke("bob", actor=ROOT)
        server.store.writer.run(server.store.refresh_list)
        newest = server.store.revocation_list().signed
        assert not peer.accept(newest, known_to_all(node, key, server))
        invited = Node(1, server, pinned=made.new.fingerprint)
        opened = await invited.join(ALICE)
        keyring = Keyring.from_pinned(RUN, invited.pinned, opened.keys)
        assert Revocations(RUN).accept(newest, keyring)


def test_keys_that_were_put_back_in_a_wrong_order_are_put_right_by_the_newest_once_more(
    tmp_path: Path,
) -> None:
    clock, folder, backup, broken = Clock(), *(tmp_path / name for name in ("auth", "old", "new"))
    with running(folder, clock) as server:
        server.allow("bob")
        first = server.fingerprint
        server.moderation.backup(backup, actor=ROOT)
        files = []
        for _ in range(3):
            made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
            clock.now_ms = made.signs_from_ms
            files.append(broken / "keys" / f"{made.new.key_id}.key")
        server.store.writer.run(server.store.refresh_list)
        keyring, peer = Keyring.from_pinned(RUN, first, server.store.keys.records), Revocations(RUN)
        peer.accept(server.store.revocation_list().signed, keyring)
    folder.rename(broken)
    shutil.copytree(backup, folder)
    clock.forward(3_000)
    with running(folder, clock) as server:
        for file in reversed(files):
            server.moderation.key_rotate(key_file=file, actor=ROOT)
        server.moderation.revoke("bob", actor=ROOT)
        assert not peer.accept(server.store.revocation_list().signed, keyring)
        with pytest.raises(NoSuchKey, match="is known here already"):
            server.moderation.key_rotate(key_file=files[0], actor=ROOT)
        for file in files[1:]:
            done = server.moderation.key_rotate(key_file=file, actor=ROOT)
            assert done.new.key_id == file.stem
            assert done.new.state == "signs now"
        assert peer.accept(server.store.revocation_list().signed, keyring)
    with running(folder, clock) as server:
        keys = server.moderation.keys().keys
        assert [key.key_id for key in keys[1:]] == [file.stem for file in files]
        assert server.store.fingerprint == keys[-1].fingerprint
        newcomer = Keyring.from_pinned(RUN, first, server.store.keys.records)
        depths = [newcomer.find(record.key_id) for record in server.store.keys.records]
        assert [known and known.depth for known in depths] == [0, 1, 2, 3]
        assert server.is_sound()


async def test_a_key_that_was_made_here_is_not_put_last(server: Server, folder: Path) -> None:
    """Nodes know that others came after it."""
    for _ in range(2):
        made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
        server.clock.now_ms = made.signs_from_ms
    for key in server.moderation.keys().keys:
        with pytest.raises(NoSuchKey, match="is known here already"):
            server.moderation.key_rotate(key_file=folder / "keys" / f"{key.key_id}.key", actor=ROOT)


@pytest.mark.parametrize("then", ["withdrawn", "made"])
async def test_a_wrong_order_that_cannot_be_put_right_says_what_to_do(
    tmp_path: Path, then: str
) -> None:
    clock = Clock()
    _, newest, _ = await restored_before_a_rotation(tmp_path, clock)
    older = write_key_file(tmp_path / "keys", SigningKey(b"\x08" * 32))
    with running(tmp_path / "auth", clock) as server:
        for file in (newest, older):
            server.moderation.key_rotate(key_file=file, actor=ROOT)
        if then == "withdrawn":
            server.moderation.key_withdraw(older.stem, actor=ROOT)
        else:
            server.moderation.key_rotate(actor=ROOT)
        with pytest.raises(NoSuchKey, match="is known here already") as refused:
            server.moderation.key_rotate(key_file=newest, actor=ROOT)
        assert "restore the backup again" in refused.value.advice


def test_a_key_that_was_withdrawn_after_the_backup_is_given_back_and_withdrawn_again(
    tmp_path: Path,
) -> None:
    clock, folder, backup, broken = Clock(), *(tmp_path / name for name in ("auth", "old", "new"))
    with running(folder, clock) as server:
        first = server.fingerprint
        server.moderation.backup(backup, actor=ROOT)
        stolen = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
        clock.now_ms = stolen.signs_from_ms
        server.moderation.backup(tmp_path / "later", actor=ROOT)
        server.store.writer.run(server.store.refresh_list)
        was_off = Keyring.from_pinned(RUN, first, server.store.keys.records)
        off = Revocations(RUN)
        assert off.accept(server.store.revocation_list().signed, was_off)
        newest = server.moderation.key_withdraw(stolen.new.key_id, actor=ROOT).new
        assert newest is not None
        was_on = Keyring.from_pinned(RUN, first, server.store.keys.records)
        on = Revocations(RUN)
        assert on.accept(server.store.revocation_list().signed, was_on)
    folder.rename(broken)
    shutil.copytree(backup, folder)
    clock.forward(3_000)
    with running(folder, clock) as server:
        file = tmp_path / "later" / "keys" / f"{stolen.new.key_id}.key"
        server.moderation.key_rotate(key_file=file, actor=ROOT)
        file = broken / "keys" / f"{newest.key_id}.key"
        server.moderation.key_rotate(key_file=file, actor=ROOT)
        assert server.moderation.key_withdraw(stolen.new.key_id, actor=ROOT).new is None
        for peer, keyring in ((off, was_off), (on, was_on)):
            keyring.add(server.store.keys.records)
            assert peer.accept(server.store.revocation_list().signed, keyring)
            assert keyring.find(bytes.fromhex(stolen.new.key_id)) is None
            assert keyring.find(bytes.fromhex(newest.key_id)) is not None
        assert server.is_sound()


def test_a_key_that_is_known_or_not_there_is_not_put_back(server: Server, folder: Path) -> None:
    known = server.moderation.keys().keys[0].key_id
    acts = server.acts()
    with pytest.raises(NoSuchKey, match="is known here already"):
        server.moderation.key_rotate(key_file=folder / "keys" / f"{known}.key", actor=ROOT)
    with pytest.raises(NoSuchKey, match="There is no file"):
        server.moderation.key_rotate(key_file=folder / "keys" / "none.key", actor=ROOT)
    assert server.acts() == acts
    assert len(server.moderation.keys().keys) == 1


async def test_a_backup_does_not_stop_the_server(server: Server, tmp_path: Path) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    renewed = 0

    async def renew(until: trio.Event) -> None:
        nonlocal renewed
        while not until.is_set():
            node.next_challenge = None
            await node.renew()
            renewed += 1

    done = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(renew, done)
        for number in range(5):
            backup = partial(server.moderation.backup, tmp_path / f"backup-{number}", actor=ROOT)
            await trio.to_thread.run_sync(backup)
        done.set()
    assert renewed > 0
    for number in range(5):
        with running(tmp_path / f"backup-{number}", server.clock) as copy:
            assert copy.is_sound()
            assert copy.moderation.audit(act="tampered").rows == ()
