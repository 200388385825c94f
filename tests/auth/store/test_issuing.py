"""Which persons get a pass, which do not and why; each answer is in the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from auth.challenges import LOGIN, RENEW
from auth.errors import AuthError
from auth.keyring import Keyring
from auth.revocations import Revocations
from auth.roles import Role
from auth.server.issuing import Issuer, IssuerSettings, UnusableSettings
from auth.server.join_refused import JoinReason, JoinRefused
from auth.statements import open_refusal, open_time
from auth.tokens import read_token
from tests.auth.store.stores import ADDRESS, HOUR_MS, ROOT, RUN, Node, Person, Server

ALICE = Person("Alice")


@contextmanager
def refused(reason: JoinReason) -> Iterator[None]:
    with pytest.raises(JoinRefused) as caught:
        yield
    assert caught.value.reason is reason
    assert caught.value.what
    assert caught.value.why
    assert caught.value.advice


async def test_somebody_on_the_list_gets_a_pass_with_all_that_is_in_it(server: Server) -> None:
    server.allow("alice", "volunteer", "backbone")
    access_pass = await Node(1, server).join(ALICE)
    token = read_token(access_pass.token)
    assert token.username == "github:alice"
    assert token.roles == (Role.BACKBONE, Role.VOLUNTEER)
    assert token.serial == 1
    assert (token.issued_ms, token.expires_ms) == (server.clock(), server.clock() + HOUR_MS)
    assert access_pass.endpoints == ("/ip4/192.0.2.1/tcp/1",)
    assert access_pass.server_time_ms == server.clock()
    assert server.acts() == ["allowed", "joined"]
    row = server.moderation.audit(limit=1).rows[0]
    assert (row.name, row.peer, row.serial) == ("github:alice", token.peer_id, 1)
    assert row.reason == "github confirmed Alice."


@pytest.mark.parametrize(
    "settings",
    [
        IssuerSettings(auth_url="https://a", token_life_ms=8 * 24 * HOUR_MS),
        IssuerSettings(auth_url="https://a", token_life_ms=0),
        IssuerSettings(auth_url="https://a", grace_ms=-1),
        IssuerSettings(auth_url="https://" + "a" * 1000),
        IssuerSettings(auth_url="https://a", endpoints=("/ip4/192.0.2.1/tcp/1",) * 17),
    ],
)
def test_settings_that_make_no_good_pass_are_told_at_once(
    server: Server, settings: IssuerSettings
) -> None:
    with pytest.raises(UnusableSettings, match="no pass can be made"):
        Issuer(server.store, settings)


async def test_each_pass_has_a_higher_serial_and_renewal_needs_no_person(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    serials = [read_token((await node.join(ALICE)).token).serial]
    for _ in range(3):
        server.clock.forward(40 * 60 * 1000)
        serials.append(read_token((await node.renew()).token).serial)
    assert serials == [1, 2, 3, 4]
    assert server.acts() == ["allowed", "joined", "renewed", "renewed", "renewed"]


async def test_a_name_that_is_not_on_the_list_is_refused_and_told_its_name(server: Server) -> None:
    with pytest.raises(JoinRefused, match="github:alice is not on the list"):
        await Node(1, server).join(ALICE)
    assert server.newest("refused").startswith("not-on-the-list: github:alice")


async def test_a_name_that_was_denied_or_revoked_is_told_which(server: Server) -> None:
    server.moderation.deny("alice", actor=ROOT)
    with refused(JoinReason.DENIED):
        await Node(1, server).join(ALICE)
    server.moderation.revoke("alice", actor=ROOT)
    with refused(JoinReason.REVOKED):
        await Node(1, server).join(ALICE)
    assert server.acts() == ["denied", "refused", "revoked", "refused"]


async def test_a_login_that_changed_hands_does_not_open_the_account(server: Server) -> None:
    server.allow("alice")
    await Node(1, server).join(ALICE)
    with refused(JoinReason.NAME_OF_ANOTHER):
        await Node(2, server).join(Person("alice", number="somebody else"))


async def test_somebody_who_changed_their_login_is_still_who_they_were(server: Server) -> None:
    server.allow("alice")
    server.allow("bob")
    await Node(1, server).join(ALICE)
    renamed = Person("bob", number=ALICE.subject)
    token = read_token((await Node(2, server).join(renamed)).token)
    assert token.username == "github:alice"
    assert not server.moderation.account("bob").bound


async def test_the_same_login_at_another_provider_is_somebody_else(server: Server) -> None:
    server.allow("alice")
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("alice", provider="keycloak"))


async def test_a_provider_cannot_give_out_the_names_of_those_who_came_by_a_code(
    server: Server,
) -> None:
    """`code:bob` is for the person with bob's code, also if the settings give it another id."""
    server.moderation.code_new(name="bob", actor=ROOT)
    server.allow("code:bob")
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("bob", provider="code"))


async def test_a_login_that_could_not_stand_in_a_token_is_refused(server: Server) -> None:
    with refused(JoinReason.NOT_ON_THE_LIST):
        await Node(1, server).join(Person("аlice"))  # the first letter is Cyrillic


async def test_a_refused_login_binds_nobody_to_the_name(server: Server) -> None:
    server.allow("alice")
    peer = Node(1, server)
    server.moderation.revoke(peer.peer_id, actor=ROOT)
    with refused(JoinReason.PEER_REVOKED):
        await peer.join(ALICE)
    assert not server.moderation.account("alice").bound


async def test_a_revoked_key_gets_nothing_under_any_name_until_it_is_allowed(
    server: Server,
) -> None:
    server.allow("alice")
    server.allow("bob")
    node = Node(1, server)
    await node.join(ALICE)
    server.moderation.revoke(node.peer_id, actor=ROOT, reason="stolen")
    with refused(JoinReason.PEER_REVOKED):
        await node.renew()
    with refused(JoinReason.PEER_REVOKED):
        await node.join(Person("bob"))
    server.clock.forward(100 * HOUR_MS)  # long after the signed list has forgotten it
    with refused(JoinReason.PEER_REVOKED):
        await node.join(ALICE)
    server.moderation.allow(node.peer_id, actor=ROOT)
    await node.join(ALICE)


async def test_a_key_of_somebody_who_was_denied_does_not_come_back_as_another(
    server: Server,
) -> None:
    server.allow("alice")
    server.allow("bob")
    node = Node(1, server)
    await node.join(ALICE)
    server.moderation.deny("alice", actor=ROOT)
    with refused(JoinReason.PEER_OF_ANOTHER):
        await node.join(Person("bob"))


async def test_a_node_may_change_to_another_name_that_is_allowed(server: Server) -> None:
    server.allow("alice")
    server.allow("bob")
    node = Node(1, server)
    await node.join(ALICE)
    assert read_token((await node.join(Person("bob"))).token).username == "github:bob"
    assert read_token((await node.renew()).token).username == "github:bob"


async def test_an_account_has_only_so_many_nodes_at_a_time(server: Server) -> None:
    server.allow("alice")
    nodes = [Node(number, server) for number in range(1, 5)]
    for node in nodes[:3]:
        await node.join(ALICE)
    with refused(JoinReason.TOO_MANY_KEYS):
        await nodes[3].join(ALICE)
    await nodes[0].join(ALICE)  # one that counts already
    server.clock.forward(2 * HOUR_MS + 1)  # no token of the others can count any more
    await nodes[3].join(ALICE)


async def test_a_challenge_is_answered_once(server: Server) -> None:
    node = Node(1, server)
    challenge, _ = server.issuer.challenge(node.peer)
    await node.proven(LOGIN, challenge)
    with refused(JoinReason.CHALLENGE):
        await node.proven(LOGIN, challenge)
    assert server.newest("refused").startswith("challenge")


async def test_a_challenge_of_another_peer_or_too_old_is_refused(server: Server) -> None:
    node, other = Node(1, server), Node(2, server)
    challenge, seconds = server.issuer.challenge(other.peer)
    with refused(JoinReason.CHALLENGE):
        await node.proven(LOGIN, challenge)
    server.steady.forward(seconds * 1000)
    with refused(JoinReason.CHALLENGE):
        await other.proven(LOGIN, challenge)


async def test_a_proof_for_another_server_purpose_or_key_is_refused(server: Server) -> None:
    with refused(JoinReason.SIGNATURE):
        await Node(1, server, pinned="a" * 26).proven(LOGIN)
    node = Node(1, server)
    challenge, _ = server.issuer.challenge(node.peer)
    with refused(JoinReason.SIGNATURE):
        await server.issuer.prove(node.peer, challenge, bytes(64), LOGIN, ADDRESS)
    with refused(JoinReason.CHALLENGE):
        await server.issuer.prove(b"short", challenge, bytes(64), LOGIN, ADDRESS)
    with refused(JoinReason.SIGNATURE):
        peer = bytes(32)  # a point for which anybody can sign
        challenge, _ = server.issuer.challenge(peer)
        await server.issuer.prove(peer, challenge, bytes(64), LOGIN, ADDRESS)


async def test_the_clock_of_the_wall_has_no_say_over_challenges(server: Server) -> None:
    node = Node(1, server)
    challenge, _ = server.issuer.challenge(node.peer)
    server.clock.forward(-100 * HOUR_MS)
    await node.proven(LOGIN, challenge)


async def test_a_node_that_never_logged_in_cannot_renew(server: Server) -> None:
    server.allow("alice")
    node, other = Node(1, server), Node(2, server)
    await node.join(ALICE)
    other.token = node.token
    with refused(JoinReason.TOKEN):
        await other.renew()


async def test_a_token_of_nobody_is_refused_at_renewal(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    for token in (b"", b"rubbish", node.token[:-1] + bytes([node.token[-1] ^ 1])):
        with refused(JoinReason.TOKEN):
            await server.issuer.renew(await node.proven(RENEW), token, ADDRESS)


async def test_a_node_that_was_away_for_a_month_logs_in_again(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    server.clock.forward(29 * 24 * HOUR_MS)
    node.next_challenge = None
    await node.renew()
    server.clock.forward(31 * 24 * HOUR_MS)
    node.next_challenge = None
    with refused(JoinReason.LOGIN_OVER):
        await node.renew()
    await node.join(ALICE)


@pytest.mark.parametrize("limit", ["check_peer", "check_account"])
async def test_a_limit_stops_a_renewal_before_it_is_written(server: Server, limit: str) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)

    class TooMany(AuthError):
        pass

    def stop(whom: bytes | str) -> None:
        assert whom in (node.peer, "github:alice")
        raise TooMany("Too many.")

    with pytest.raises(TooMany):
        await server.issuer.renew(await node.proven(RENEW), node.token, ADDRESS, **{limit: stop})
    assert server.acts() == ["allowed", "joined"]


async def test_roles_that_were_changed_come_with_the_next_token(server: Server) -> None:
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    server.allow("alice", "monitor")
    assert read_token((await node.renew()).token).roles == (Role.MONITOR,)


async def test_nobody_who_was_denied_gets_a_pass_at_the_same_time(server: Server) -> None:
    """Many renew while one act denies them: only refusals come after the act in the log."""
    server.allow("alice")
    node = Node(1, server)
    await node.join(ALICE)
    granted: list[int] = []

    async def renew() -> None:
        proven = await node.proven(RENEW)
        try:
            answer = await server.issuer.renew(proven, node.token, ADDRESS)
        except JoinRefused:
            return
        granted.append(answer.serial)

    async with trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(renew)
            if number == 20:
                nursery.start_soon(
                    trio.to_thread.run_sync,
                    lambda: server.moderation.deny("alice", actor=ROOT),
                )
    acts = server.acts()
    assert "renewed" not in acts[acts.index("denied") :]
    assert acts.count("renewed") == len(granted)
    revocations = Revocations(RUN)
    keys = server.store.keys
    keyring = Keyring.from_pinned(RUN, server.fingerprint, keys.records)
    revocations.accept(server.store.revocation_list().signed, keyring)
    assert revocations.refuses(read_token(node.token))


async def test_a_refusal_is_signed_for_what_was_asked(server: Server) -> None:
    node = Node(1, server)
    challenge, _ = server.issuer.challenge(node.peer)
    error = JoinRefused(JoinReason.DENIED)
    signed = server.issuer.signed_refusal(error.code, error, challenge)
    keyring = Keyring.from_pinned(RUN, server.fingerprint, server.store.keys.records)
    refusal = open_refusal(signed, keyring, challenge)
    assert (refusal.code, refusal.what) == ("denied", error.what)
    time = open_time(server.issuer.signed_time(b"n" * 16), keyring, b"n" * 16)
    assert time.time_ms == server.clock()
