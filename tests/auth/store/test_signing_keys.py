"""Auth keys: they rotate without anybody noticing, and a stolen one is out at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from auth.keyring import MOST_KEYS, Keyring
from auth.keys import SigningKey, fingerprint
from auth.refusals import AccessRefused
from auth.revocations import Revocations, RevocationsFull, SerialEntry, read_list
from auth.server.join_refused import JoinReason
from auth.server.moderation import SHORTEST_OVERLAP_MS, NoSuchKey
from auth.server.revoked import MARGIN_MS
from auth.server.signing_keys import TooManyKeys
from auth.tokens import LONGEST_LIFE_MS, read_token
from auth.verified_tokens import VerifiedTokens
from tests.auth.store.stores import (
    HOUR_MS,
    ROOT,
    RUN,
    START_MS,
    Clock,
    Node,
    Person,
    Server,
    running,
)
from tests.auth.store.test_issuing import refused

ALICE = Person("alice")


class Peer:
    """Another person's node, which pinned a key and accepts the keys that follow from it."""

    def __init__(self, server: Server, pinned: str) -> None:
        self.server = server
        self.keyring = Keyring.from_pinned(RUN, pinned, server.store.keys.records)
        self.revocations = Revocations(RUN)
        self.tokens = VerifiedTokens(RUN, self.keyring, self.revocations)

    def hear(self) -> None:
        self.keyring.add(self.server.store.keys.records)
        self.revocations.accept(self.server.store.revocation_list().signed, self.keyring)

    def takes(self, token: bytes) -> bool:
        try:
            self.tokens.verify(token, self.server.clock(), shown_by=None)
        except AccessRefused:
            return False
        return True


def states(server: Server) -> list[str]:
    return [key.state for key in server.moderation.keys().keys]


async def test_a_new_key_is_known_everywhere_before_it_signs(server: Server) -> None:
    server.allow("alice")
    node, first = Node(1, server), server.fingerprint
    await node.join(ALICE)
    before = node.token
    peer = Peer(server, first)
    done = server.moderation.key_rotate(actor=ROOT, reason="each year")
    assert done.signs_from_ms == server.clock() + HOUR_MS
    assert states(server) == ["signs now", "next"]
    with pytest.raises(NoSuchKey, match="on its way already"):
        server.moderation.key_rotate(actor=ROOT)
    await node.renew()
    assert read_token(node.token).key_id == read_token(before).key_id
    peer.hear()
    server.clock.forward(HOUR_MS - 1)
    node.next_challenge = None
    await node.renew()
    old = node.token
    server.clock.forward(1)
    assert states(server) == ["older", "signs now"]
    await node.renew()  # pinned to the first key still
    assert read_token(node.token).key_id.hex() == done.new.key_id
    assert peer.takes(old)
    assert peer.takes(node.token)
    assert server.store.fingerprint == done.new.fingerprint != first
    await Node(2, server, pinned=done.new.fingerprint).join(ALICE)  # by a new invite
    await Node(3, server, pinned=first).join(ALICE)  # by an old one
    assert server.is_sound()


def test_an_overlap_is_never_so_short_that_nodes_could_miss_it(server: Server) -> None:
    done = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
    assert done.signs_from_ms == server.clock() + SHORTEST_OVERLAP_MS


def test_the_list_is_signed_anew_by_the_key_that_takes_over(server: Server) -> None:
    done = server.moderation.key_rotate(actor=ROOT)
    server.clock.now_ms = done.signs_from_ms
    number = server.store.revocation_list().number
    server.store.writer.run(server.store.refresh_list)
    newest = read_list(server.store.revocation_list().signed)
    assert newest.key_id.hex() == done.new.key_id
    assert newest.number > number


@pytest.mark.parametrize("named_by", ["key_id", "fingerprint"])
async def test_a_stolen_key_is_out_and_all_who_are_allowed_go_on(
    server: Server, folder: Path, named_by: str
) -> None:
    server.allow("alice")
    node, other = Node(1, server), Node(2, server)
    await node.join(ALICE)
    await other.join(ALICE)
    before = node.token
    peer = Peer(server, server.fingerprint)
    stolen = server.moderation.keys().keys[0]
    done = server.moderation.key_withdraw(
        getattr(stolen, named_by).upper(), actor=ROOT, reason="laptop lost"
    )
    assert done.new is not None
    assert (done.withdrawn.state, done.new.state) == ("withdrawn", "signs now")
    assert not (folder / "keys" / f"{stolen.key_id}.key").exists()
    await node.renew()  # by its key alone, though its token is worth nothing now
    peer.hear()
    assert not peer.takes(before)
    assert peer.takes(node.token)
    assert server.is_sound()
    with pytest.raises(NoSuchKey, match="was withdrawn already"):
        server.moderation.key_withdraw(stolen.key_id, actor=ROOT)
    assert server.acts()[-3:] == ["key made", "key withdrawn", "renewed"]


async def test_a_full_list_has_room_again_once_the_key_of_its_tokens_is_withdrawn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auth.revocations.LIMIT_BYTES", 720)
    nodes = [Node(number, server) for number in range(1, 20)]
    for node in nodes:
        server.allow(f"person-{node.peer_id}")
        await node.join(Person(f"person-{node.peer_id}"))
    peer = Peer(server, server.fingerprint)
    done = 0
    with pytest.raises(RevocationsFull) as full:  # noqa: PT012 - one of them is too many
        while True:
            server.moderation.revoke(f"person-{nodes[done].peer_id}", actor=ROOT)
            done += 1
    assert 0 < done < len(nodes) - 1
    assert "keys withdraw" in full.value.advice
    server.moderation.key_withdraw(server.fingerprint, actor=ROOT)
    assert read_list(server.store.revocation_list().signed).entries == ()
    server.moderation.revoke(f"person-{nodes[done].peer_id}", actor=ROOT)
    server.store.writer.run(server.store.refresh_list)
    peer.hear()
    old = [node.token for node in nodes]
    assert not any(map(peer.takes, old))
    for node in nodes[: done + 1]:
        with refused(JoinReason.REVOKED):
            await node.renew()
    await nodes[-1].renew()
    assert peer.takes(nodes[-1].token)


async def test_a_key_that_is_withdrawn_leaves_the_entries_for_tokens_of_others_on_the_list(
    server: Server,
) -> None:
    for number, name in enumerate(("alice", "bob"), 1):
        server.allow(name)
        await Node(number, server).join(Person(name))
    first = server.moderation.keys().keys[0]
    made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
    server.clock.now_ms = made.signs_from_ms
    late = Node(3, server, pinned=first.fingerprint)
    await late.join(Person("bob"))
    for target in ("alice", "bob", late.peer_id, str(read_token(late.token).serial)):
        server.moderation.revoke(target, actor=ROOT)
    server.moderation.key_withdraw(first.key_id, actor=ROOT)
    kept = read_list(server.store.revocation_list().signed).entries
    assert [type(entry).__name__ for entry in kept] == ["NameEntry", "PeerEntry", "SerialEntry"]
    server.clock.forward(2 * HOUR_MS + MARGIN_MS)
    server.moderation.key_withdraw(made.new.key_id, actor=ROOT)
    assert read_list(server.store.revocation_list().signed).entries == ()


@asynccontextmanager
async def put_back(folder: Path, backup: Path) -> AsyncIterator[tuple[Server, str, str]]:
    """A server that was put back from a backup and has revoked alice since, with the ids of its
    first key, which has signed her token, and of the one that signs now."""
    clock = Clock()
    with running(folder, clock) as server:
        server.allow("alice")
        await Node(1, server).join(ALICE)
        first = server.fingerprint
        made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
        clock.now_ms = made.signs_from_ms
        server.moderation.backup(backup, actor=ROOT)
    with running(backup, clock) as server:
        server.moderation.revoke("alice", actor=ROOT)
        yield server, first, made.new.key_id


async def test_a_server_that_does_not_know_all_tokens_sheds_no_entry_that_they_may_need(
    folder: Path, tmp_path: Path
) -> None:
    async with put_back(folder, tmp_path / "backup") as (server, first, second):
        server.moderation.key_withdraw(first, actor=ROOT)
        assert len(read_list(server.store.revocation_list().signed).entries) == 1
        server.moderation.key_withdraw(second, actor=ROOT)
        assert read_list(server.store.revocation_list().signed).entries == ()


async def test_after_a_restore_a_full_list_has_room_once_every_key_is_withdrawn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of withdrawn keys are on the list as well, and there is room for them."""
    async with put_back(folder, tmp_path / "backup") as (server, first, second):
        before = len(server.store.revocation_list().signed)
        server.moderation.revoke(Node(99, server).peer_id, actor=ROOT)
        each = len(server.store.revocation_list().signed) - before
        monkeypatch.setattr("auth.revocations.LIMIT_BYTES", before + 10 * each + 5)
        done = 1
        with pytest.raises(RevocationsFull) as full:  # noqa: PT012 - one of them is too many
            while True:
                server.moderation.revoke(Node(100 + done, server).peer_id, actor=ROOT)
                done += 1
        server.moderation.key_withdraw(first, actor=ROOT)
        assert len(read_list(server.store.revocation_list().signed).entries) == 1 + done
        server.moderation.key_withdraw(second, actor=ROOT)
        assert read_list(server.store.revocation_list().signed).entries == ()
        server.moderation.revoke(Node(200, server).peer_id, actor=ROOT)
        peer = Peer(server, first)
        peer.hear()
        assert peer.keyring.find(server.store.keys.active(server.clock()).key_id) is not None
        assert server.is_sound()
    assert "first withdraw every older key" in full.value.advice


async def test_a_token_that_it_does_not_know_counts_until_its_grace_is_over(
    folder: Path, tmp_path: Path
) -> None:
    async with put_back(folder, tmp_path / "backup") as (server, first, _):
        server.clock.forward(LONGEST_LIFE_MS + 1)
        server.moderation.key_withdraw(first, actor=ROOT)
        assert len(read_list(server.store.revocation_list().signed).entries) == 1


def test_the_file_of_a_withdrawn_key_that_a_crash_left_goes_at_the_next_start(
    folder: Path,
) -> None:
    with running(folder) as server:
        stolen = server.moderation.keys().keys[0]
        path = folder / "keys" / f"{stolen.key_id}.key"
        content = path.read_bytes()
        server.moderation.key_withdraw(stolen.key_id, actor=ROOT)
    path.write_bytes(content)
    path.chmod(0o600)
    with running(folder) as server:
        assert not path.exists()
        assert server.moderation.keys().keys[0].state == "withdrawn"


def test_a_key_that_does_not_sign_is_withdrawn_without_a_new_one(server: Server) -> None:
    first = server.moderation.keys().keys[0]
    made = server.moderation.key_rotate(actor=ROOT)
    server.clock.now_ms = made.signs_from_ms
    assert server.moderation.key_withdraw(first.key_id, actor=ROOT).new is None
    assert states(server) == ["withdrawn", "signs now"]
    with pytest.raises(NoSuchKey, match="no auth key 'ffff'"):
        server.moderation.key_withdraw("ffff", actor=ROOT)


def test_a_key_on_its_way_is_withdrawn_and_the_old_one_goes_on(server: Server) -> None:
    made = server.moderation.key_rotate(actor=ROOT)
    done = server.moderation.key_withdraw(made.new.key_id, actor=ROOT)
    assert done.new is not None, "its successor must be deeper than it, to withdraw it"
    peer = Peer(server, server.fingerprint)
    peer.hear()
    assert done.new.key_id in {record.key_id.hex() for record in peer.keyring.records}
    assert states(server)[1] == "withdrawn"
    assert server.store.can_sign()


async def test_keys_and_what_was_withdrawn_survive_a_restart(folder: Path) -> None:
    clock = Clock()
    with running(folder, clock) as server:
        server.allow("alice")
        server.moderation.key_withdraw(server.fingerprint, actor=ROOT)
        before = server.moderation.keys()
    with running(folder, clock) as server:
        assert server.moderation.keys() == before
        assert server.is_sound()
        node = Node(1, server, pinned=fingerprint(SigningKey(b"\x07" * 32).public_key))
        await node.join(ALICE)


def test_an_act_on_keys_that_fails_leaves_no_file(server: Server, folder: Path) -> None:
    for _ in range(MOST_KEYS - 1):
        made = server.moderation.key_rotate(overlap_ms=0, actor=ROOT)
        server.clock.now_ms = made.signs_from_ms
    assert len(list((folder / "keys").iterdir())) == MOST_KEYS
    acts = server.acts()
    with pytest.raises(TooManyKeys):
        server.moderation.key_rotate(actor=ROOT)
    assert len(list((folder / "keys").iterdir())) == MOST_KEYS
    assert server.acts() == acts
    assert server.store.can_sign()


@pytest.mark.parametrize("wrong_by_ms", [400 * 24 * HOUR_MS, -START_MS])
async def test_a_clock_that_was_wrong_when_the_run_was_made_does_no_harm(
    folder: Path, wrong_by_ms: int
) -> None:
    """Far ahead, or in 1970 as on a small computer without a battery."""
    clock = Clock(START_MS + wrong_by_ms)
    with running(folder, clock) as server:
        server.allow("alice")
        clock.now_ms = START_MS
        await Node(1, server).join(ALICE)
        assert server.store.can_sign()


async def test_a_clock_before_the_newest_key_goes_back_to_the_one_before_it(
    server: Server,
) -> None:
    server.allow("alice")
    made = server.moderation.key_rotate(actor=ROOT)
    pinned = server.fingerprint
    server.clock.now_ms = made.signs_from_ms
    assert server.store.fingerprint == made.new.fingerprint
    server.clock.forward(-HOUR_MS)
    assert server.store.fingerprint == pinned
    await Node(1, server).join(ALICE)


async def test_after_the_clock_went_back_a_name_that_was_revoked_has_to_wait(
    server: Server,
) -> None:
    """Its new token would be older than its revocation: every peer would refuse it."""
    server.clock.forward(2 * HOUR_MS)
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    server.moderation.revoke("alice", actor=ROOT)
    server.moderation.allow("alice", actor=ROOT)
    server.clock.forward(-600_000)
    with refused(JoinReason.CLOCK):
        await node.join(ALICE)
    server.clock.forward(600_000)
    await node.join(ALICE)
    peer = Peer(server, server.fingerprint)
    peer.hear()
    assert peer.takes(node.token)


@pytest.mark.parametrize("again", ["allow", "revoke and allow", "rebind"])
async def test_a_name_that_was_revoked_by_a_clock_a_year_ahead_comes_back(
    server: Server, again: str
) -> None:
    year_ms = 365 * 24 * HOUR_MS
    server.allow("alice")
    node, other = Node(1, server), Node(2, server)
    await other.join(ALICE)
    server.clock.forward(year_ms)
    await node.join(ALICE)
    server.moderation.revoke("alice", actor=ROOT)
    server.moderation.allow("alice", actor=ROOT)
    server.clock.forward(HOUR_MS - year_ms)
    with refused(JoinReason.CLOCK):
        await node.join(ALICE)
    if again == "revoke and allow":
        server.moderation.revoke("alice", actor=ROOT)
    allowed = server.moderation.allow("alice", rebind=again == "rebind", actor=ROOT)
    assert allowed.change == ("rebound" if again == "rebind" else "was revoked")
    early, ahead = other.token, node.token
    await node.join(ALICE)
    peer = Peer(server, server.fingerprint)
    peer.hear()
    assert peer.takes(node.token)
    assert not peer.takes(early)
    server.clock.forward(year_ms - HOUR_MS)
    server.store.writer.run(server.store.refresh_list)
    peer.hear()
    assert not peer.takes(ahead), "its time has come, and it is still revoked"
    server.moderation.revoke("alice", actor=ROOT)
    peer.hear()
    assert not peer.takes(node.token)


@pytest.mark.parametrize("is_withdrawn", [False, True])
async def test_a_name_that_comes_back_has_tokens_on_the_list_only_of_keys_that_count(
    server: Server, is_withdrawn: bool
) -> None:
    """A token of a withdrawn key is refused anyway; its entry would take room for a year."""
    server.allow("alice")
    node, pinned = Node(1, server), server.fingerprint
    server.clock.forward(365 * 24 * HOUR_MS)
    await node.join(ALICE)
    server.moderation.revoke("alice", actor=ROOT)
    server.clock.forward(-365 * 24 * HOUR_MS)
    if is_withdrawn:
        server.moderation.key_withdraw(server.fingerprint, actor=ROOT)
    server.moderation.allow("alice", actor=ROOT)
    ahead = node.token
    listed = read_list(server.store.revocation_list().signed).entries
    serials = [entry.serial for entry in listed if isinstance(entry, SerialEntry)]
    assert serials == ([] if is_withdrawn else [read_token(ahead).serial])
    await node.join(ALICE)
    server.clock.forward(365 * 24 * HOUR_MS)
    peer = Peer(server, pinned)
    peer.hear()
    assert not peer.takes(ahead)


async def test_after_the_clock_was_a_year_ahead_a_revocation_still_reaches_everybody(
    server: Server,
) -> None:
    """For that minute all tokens seemed to be over for long, and were forgotten."""
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    server.clock.forward(365 * 24 * HOUR_MS)
    server.store.writer.run(server.store._forget)
    server.clock.forward(1 - 365 * 24 * HOUR_MS)
    server.moderation.revoke("alice", actor=ROOT)
    peer = Peer(server, server.fingerprint)
    peer.hear()
    assert not peer.takes(node.token)


async def test_serials_rise_whatever_the_clock_does(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    serials, numbers = [], []
    await node.join(ALICE)
    for step in (-600_000, 86_400_000, -3_600_000, 0):
        server.clock.forward(step)
        node.next_challenge = None
        await node.renew()
        serials.append(read_token(node.token).serial)
        server.moderation.revoke(Node(100 + len(serials), server).peer_id, actor=ROOT)
        numbers.append(server.store.revocation_list().number)
    assert serials == [2, 3, 4, 5]
    assert numbers == sorted(set(numbers))
    assert server.acts().count("clock went back") == 2
    assert server.is_sound()
