"""Acts of moderators: each is whole, reported correctly, and in the log with who and why."""

from __future__ import annotations

import msgspec
import pytest

from auth.errors import AuthError
from auth.keyring import Keyring
from auth.revocations import Revocations, read_list
from auth.server.accounts import AmbiguousName, NotAName, UnknownName
from auth.server.join_refused import JoinReason
from auth.server.moderation import NotDone
from auth.tokens import CLOCK_TOLERANCE_MS, Token, read_token
from tests.auth.store.stores import HOUR_MS, ROOT, RUN, Node, Person, Server
from tests.auth.store.test_issuing import refused


class Peers:
    """The list that every peer accepts: the newest one, under the keys of the pinned one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.revocations = Revocations(RUN)

    def refuse(self, token: bytes | Token) -> bool:
        store = self.server.store
        keyring = Keyring.from_pinned(RUN, self.server.fingerprint, store.keys.records)
        self.revocations.accept(store.revocation_list().signed, keyring)
        return self.revocations.refuses(read_token(token) if isinstance(token, bytes) else token)


@pytest.fixture
def peers(server: Server) -> Peers:
    return Peers(server)


def test_allowing_tells_what_changed(server: Server) -> None:
    moderation = server.moderation
    first = moderation.allow("Alice", actor="local:bo", reason="a friend", note="from the club")
    assert (first.value, first.change) == ("github:alice", "new")
    assert first.account is not None
    assert (first.account.added_by, first.account.note) == ("local:bo", "from the club")
    assert moderation.allow("alice", actor=ROOT).change == "unchanged"
    assert moderation.allow("alice", roles=("volunteer",), actor=ROOT).change == "unchanged"
    assert moderation.allow("alice", roles=("monitor",), actor=ROOT).change == "roles"
    moderation.deny("alice", actor=ROOT)
    again = moderation.allow("github:ALICE", actor=ROOT)
    assert (again.change, again.account and again.account.roles) == ("was denied", ("monitor",))
    moderation.revoke("alice", actor=ROOT)
    assert moderation.allow("alice", actor=ROOT).change == "was revoked"
    assert server.acts() == ["allowed", "allowed", "denied", "allowed", "revoked", "allowed"]
    row = moderation.audit(limit=10).rows[-3]
    assert (row.actor, row.reason, row.name) == ("local:bo", "a friend", "github:alice")


def test_a_bare_name_is_enough_where_only_one_can_be_meant(server: Server) -> None:
    moderation = server.moderation
    providers = ("github", "keycloak")
    with pytest.raises(AmbiguousName, match="github:alice, keycloak:alice"):
        moderation.allow("alice", actor=ROOT, providers=providers)
    moderation.allow("keycloak:alice", actor=ROOT, providers=providers)
    assert moderation.allow("alice", actor=ROOT, providers=providers).value == "keycloak:alice"
    moderation.allow("github:alice", actor=ROOT)
    with pytest.raises(AmbiguousName):
        moderation.revoke("alice", actor=ROOT)
    with pytest.raises(UnknownName):
        moderation.revoke("bob", actor=ROOT)


@pytest.mark.parametrize(
    "text",
    ["", ":", "github:", ":alice", "git hub:alice", "a:b:c", "алиса", "-x", "a" * 120, "a\n"],
)
def test_an_invalid_name_changes_nothing(server: Server, text: str) -> None:
    if text == "a\n":  # white space around a name is not part of it
        assert server.moderation.allow(text, actor=ROOT).value == "github:a"
        return
    for act in (server.moderation.allow, server.moderation.deny, server.moderation.revoke):
        with pytest.raises(NotAName) as caught:
            act(text, actor=ROOT)
        assert caught.value.exit_code == 2
        assert caught.value.advice
    assert server.acts() == []


async def test_denying_ends_what_the_name_has_and_nothing_else(
    server: Server, peers: Peers
) -> None:
    server.allow("alice")
    server.allow("bob")
    nodes = [Node(1, server), Node(2, server), Node(3, server)]
    for node, login in zip(nodes, ("alice", "alice", "bob"), strict=True):
        await node.join(Person(login))
    done = server.moderation.deny("alice", actor=ROOT, reason="spam")
    assert (done.change, done.live_tokens) == ("denied", 2)
    assert [peers.refuse(node.token) for node in nodes] == [True, True, False]
    assert server.moderation.deny("alice", actor=ROOT).change == "unchanged"
    with refused(JoinReason.DENIED):
        await nodes[0].renew()
    await nodes[2].renew()


async def test_a_name_is_revoked_until_it_is_allowed_again(server: Server, peers: Peers) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(Person("alice"))
    before = node.token
    done = server.moderation.revoke("alice", actor=ROOT, reason="misuse")
    assert (done.kind, done.value, done.live_tokens) == ("name", "github:alice", 1)
    assert done.list_number == server.store.revocation_list().number
    assert peers.refuse(before)
    with refused(JoinReason.REVOKED):
        await node.renew()
    with pytest.raises(NotDone, match="was revoked already"):
        server.moderation.revoke("alice", actor=ROOT)
    server.moderation.allow("alice", actor=ROOT)
    await node.join(Person("alice"))  # in the same millisecond: dated so that it counts
    assert peers.refuse(before)
    assert not peers.refuse(node.token)


async def test_one_token_is_revoked_and_its_node_goes_on_with_the_next(
    server: Server, peers: Peers
) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(Person("alice"))
    first = node.token
    done = server.moderation.revoke("#1", actor=ROOT)
    assert (done.kind, done.value, done.live_tokens) == ("serial", "1", 1)
    assert server.moderation.tokens("alice").tokens[0].revoked
    with pytest.raises(NotDone, match="was revoked already"):
        server.moderation.revoke("1", actor=ROOT)
    await node.renew()
    assert (peers.refuse(first), peers.refuse(node.token)) == (True, False)
    assert server.moderation.allow("1", actor=ROOT).change == "lifted"
    assert not peers.refuse(first)
    for nothing in ("7", "999999999999"):
        with pytest.raises(NotDone, match="no live token"):
            server.moderation.revoke(nothing, actor=ROOT)


async def test_a_key_can_be_revoked_before_it_was_ever_seen(server: Server) -> None:
    node = Node(1, server)
    done = server.moderation.revoke(node.peer_id, actor=ROOT)
    assert (done.kind, done.live_tokens, done.forget_ms) == ("peer", 0, 0)
    with pytest.raises(NotDone):
        server.moderation.revoke(node.peer_id, actor=ROOT)
    assert [entry.on_list for entry in server.moderation.revocations().entries] == [False]
    server.moderation.allow(node.peer_id, actor=ROOT)
    with pytest.raises(NotDone, match="is not revoked"):
        server.moderation.allow(node.peer_id, actor=ROOT)
    assert server.acts() == ["revoked", "lifted"]


async def test_an_entry_is_on_the_list_for_as_long_as_a_token_could_count(
    server: Server,
) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(Person("alice"))
    token = read_token(node.token)
    done = server.moderation.revoke(node.peer_id, actor=ROOT)
    assert done.forget_ms == token.expires_ms + HOUR_MS + 2 * CLOCK_TOLERANCE_MS
    server.clock.now_ms = done.forget_ms - 1
    server.store.writer.run(server.store.refresh_list)
    assert len(read_list(server.store.revocation_list().signed).entries) == 1
    server.clock.now_ms = done.forget_ms
    number = server.store.revocation_list().number
    server.store.writer.run(server.store.refresh_list)
    newest = read_list(server.store.revocation_list().signed)
    assert (newest.entries, newest.number > number) == ((), True)


async def test_letting_go_of_a_name_shuts_its_former_owner_out(
    server: Server, peers: Peers
) -> None:
    server.allow("alice")
    old, new = Node(1, server), Node(2, server)
    await old.join(Person("alice"))
    assert server.moderation.allow("alice", rebind=True, actor=ROOT).change == "rebound"
    assert peers.refuse(old.token)
    with refused(JoinReason.LOGIN_OVER):
        await old.renew()
    await new.join(Person("alice", number="another"))
    with refused(JoinReason.NAME_OF_ANOTHER):
        await old.join(Person("alice"))


async def test_names_are_found_by_state_and_role(server: Server) -> None:
    for login in ("alice", "albert", "bob"):
        server.allow(login)
    server.allow("bob", "volunteer", "backbone")
    server.moderation.deny("albert", actor=ROOT)
    await Node(1, server).join(Person("alice"))

    def names(**wanted: object) -> list[str]:
        found = server.moderation.accounts(**wanted)  # type: ignore[arg-type]
        assert found.total >= len(found.accounts)
        return [account.login for account in found.accounts]

    assert names() == ["albert", "alice", "bob"]
    assert names(state="denied") == ["albert"]
    assert names(role="backbone") == ["bob"]
    assert names(role="back") == []
    assert names(limit=1) == ["albert"]
    alice = server.moderation.account("alice")
    assert (alice.bound, alice.keys, alice.live_tokens) == (True, 1, 1)
    assert alice.last_seen_ms == server.clock()
    server.clock.forward(HOUR_MS)
    assert server.moderation.account("alice").live_tokens == 0


async def test_the_log_is_read_newest_first_in_parts(server: Server) -> None:
    for login in ("alice", "bob", "carol"):
        server.allow(login)
        server.clock.forward(1000)
    node = Node(1, server)
    await node.join(Person("bob"))
    read = server.moderation.audit
    part = read(limit=2)
    assert ([row.number for row in part.rows], part.more) == ([6, 5], True)
    whole = read(limit=10)
    assert ([row.number for row in whole.rows], whole.more) == ([6, 5, 4, 3, 2, 1], False)
    assert [row.number for row in read(name="bob").rows] == [6, 4]
    assert [row.number for row in read(name="github:bob", act="joined").rows] == [6]
    since = server.clock() - 2000
    assert [row.number for row in read(since_ms=since).rows] == [6, 5, 4]


def test_every_answer_can_be_sent_as_json(server: Server) -> None:
    moderation = server.moderation
    moderation.allow("alice", actor=ROOT)
    moderation.code_new(actor=ROOT)
    answers: list[msgspec.Struct] = [
        moderation.allow("alice", actor=ROOT), moderation.revoke("alice", actor=ROOT),
        moderation.accounts(), moderation.tokens(), moderation.revocations(), moderation.codes(),
        moderation.key_rotate(actor=ROOT), moderation.keys(), moderation.audit(),
        moderation.verify(),
    ]  # fmt: skip
    for answer in answers:
        assert msgspec.json.decode(msgspec.json.encode(answer))


def test_an_act_that_fails_halfway_leaves_nothing(server: Server) -> None:
    """The list has no room for one more: neither the account nor the log has changed."""
    server.allow("alice")
    entries = "INSERT INTO revocations VALUES (NULL, 'serial', ?, 1, ?, 'x', '', NULL)"
    server.store.writer.run(
        lambda transaction: transaction.connection.executemany(
            entries, ((serial, server.clock() + HOUR_MS) for serial in range(1, 5000))
        )
    )
    acts, number = server.acts(), server.store.revocation_list().number
    with pytest.raises(AuthError, match="can be spread"):
        server.moderation.revoke(Node(1, server).peer_id, actor=ROOT)
    assert (server.acts(), server.store.revocation_list().number) == (acts, number)
    assert server.moderation.revocations(limit=1).entries[0].kind == "serial"
    assert server.is_sound()


async def test_a_courier_of_the_server_has_a_token_that_counts(
    server: Server, peers: Peers
) -> None:
    node = Node(1, server)
    token = read_token(server.moderation.courier_token(node.peer, actor=ROOT))
    keyring = Keyring.from_pinned(RUN, server.fingerprint, server.store.keys.records)
    assert keyring.allows(token) is not None
    assert not peers.refuse(token)
    assert (token.username, token.peer, token.serial) == ("auth-server", node.peer, 1)
    assert token.expires_ms - token.issued_ms == 5 * 60 * 1000
    assert server.acts() == ["courier"]
