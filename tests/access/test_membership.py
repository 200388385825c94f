"""A node with a pass: guarded, renewed without a person, and out when the auth server says so."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from auth.documents import encode
from auth.keyring import MOST_KEYS, endorse
from auth.keys import SigningKey
from auth.refusals import Reason
from auth.revocations import LIMIT_BYTES, NameEntry, PeerEntry, SerialEntry
from auth.roles import Role
from nat import messages
from nat.messages import Status
from nat.relaying import HOP
from nat.reservations import RelayRefused, reserve
from node.core.access.membership import Membership, open_membership
from node.core.access.notice import notice_of
from node.core.access.pass_file import load_pass
from node.core.access.renewal import MembershipEnded
from node.core.configuration import Configuration
from node.core.control_client import ask_once
from node.core.directory import FAMILIES, join_or_be_refused
from node.core.failure import failure_of
from node.core.key_file import load_identity
from node.core.node import Node
from node.core.private_file import UnusableFile, replace_private_file
from protocols.dht import DhtSettings, SlotRefused, open_dht
from protocols.errors import Unreachable
from protocols.network import Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import open_rpc
from protocols.rpc.ping import ping, serve_ping
from protocols.testing.world import SimulatedWorld
from tests.access.https_servers import ScriptedServer, response
from tests.access.impostor import (
    ROOT,
    RUN,
    STRANGER,
    Impostor,
    encoded,
    running_impostor,
    said,
)
from tests.access.members import (
    clocks_off,
    introduce,
    log_in,
    network_in,
    running_node,
    until_renewed,
    write_key,
)
from tests.homes import home_in
from tests.waiting import PATIENCE_SECONDS, until

FAR_FUTURE_MS = 1 << 52


@dataclass
class Run:
    """A run with its auth server, its world, and a folder for homes."""

    world: SimulatedWorld
    impostor: Impostor
    server: ScriptedServer
    folder: Path

    async def member(self, name: str, clock_off: float = 0.0) -> Configuration:
        identity = self.world.identity_of(name)
        return await log_in(
            self.folder / name, identity, self.impostor, self.server, clocks_off(clock_off)
        )

    async def outlaw(self, name: str) -> tuple[Network, Membership]:
        """A member that has a pass, and a program of its own."""
        home = await self.member(name)
        network = self.world.add_node(name)
        member = open_membership(home, network.identity)
        assert member is not None
        return network, member

    @asynccontextmanager
    async def nodes(self, *names: str) -> AsyncIterator[list[Node]]:
        """Members that run and know one another."""
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(
                    running_node(self.world, name, await self.member(name))
                )
                for name in names
            ]
            introduce(*nodes)
            yield nodes


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    impostor = Impostor()
    async with (
        SimulatedWorld(seed=1) as world,
        running_impostor(tmp_path, impostor) as server,
    ):
        yield Run(world, impostor, server, tmp_path)


async def talks(one: Node, other: Node) -> None:
    await ping(one.rpc, other.network.peer_id, timeout=10)


async def talks_again(one: Node, other: Node) -> None:
    """As `talks`, where links and streams have just been closed, and the other may be shut out."""

    async def answered() -> bool:
        try:
            await talks(one, other)
        except (NotAllowed, Unreachable):
            return False
        return True

    await until(answered, PATIENCE_SECONDS)


async def refusal_of(what: Awaitable[object]) -> Reason | None:
    """Why it is refused; fails if it is not."""
    with pytest.raises(NotAllowed) as refused:
        await what
    return refused.value.reason


async def eventually(condition: Callable[[], bool]) -> None:
    await until(condition, PATIENCE_SECONDS)


# -- taking part


async def test_members_talk_with_one_another(run: Run) -> None:
    async with run.nodes("alice", "bob") as (alice, bob):
        await talks(alice, bob)
        membership = alice.status().membership
    assert not membership.open
    assert (membership.run, membership.username) == (RUN, "code:alice")
    assert (membership.standing, membership.roles) == ("valid", ("volunteer",))
    assert 2_000 < membership.renewed_in_seconds < 3_000
    assert 3_590 < membership.expires_in_seconds <= 3_600


async def test_a_stranger_is_answered_nothing(run: Run) -> None:
    stranger_home = home_in(run.folder / "mallory")
    write_key(stranger_home.key_file, run.world.identity_of("mallory"))
    async with (
        run.nodes("alice") as (alice,),
        running_node(run.world, "mallory", stranger_home) as mallory,
    ):
        introduce(alice, mallory)
        assert mallory.status().membership.open
        assert await refusal_of(talks(mallory, alice)) is Reason.TOKEN_MISSING
        assert await refusal_of(talks(alice, mallory)) is Reason.TOKEN_MISSING


@pytest.mark.parametrize(
    ("whom", "answer"), [("members", Status.PERMISSION_DENIED), ("everybody", Status.OK)]
)
async def test_a_relay_in_a_closed_run_is_for_members_unless_its_owner_says_everybody(
    run: Run, whom: str, answer: Status
) -> None:
    home = await run.member("alice")
    home = dataclasses.replace(home, values={**home.values, "relay.serve": True, "relay.for": whom})
    stranger = run.world.add_node("mallory")
    async with running_node(run.world, "alice", home) as alice:
        stranger.learn_addresses(alice.network.peer_id, alice.network.addresses())
        async with await stranger.open(alice.network.peer_id, HOP) as stream:
            await messages.send(stream, messages.Hop(type=messages.HopType.RESERVE))
            said = await messages.read(stream, messages.Hop)
        relay = alice.status().relay
    assert said.status == answer
    assert relay is not None
    assert relay.refusals == ({"not_admitted": 1} if whom == "members" else {})


async def test_the_endpoints_of_the_pass_are_joined_at(run: Run) -> None:
    async with run.nodes("alice") as (alice,):
        run.impostor.endpoints = (*alice.network.addresses(), "/not/an/address")
        bob_home = await run.member("bob")
        async with running_node(run.world, "bob", bob_home) as bob:
            with trio.fail_after(PATIENCE_SECONDS):
                await bob.dht.joined()
            assert [link.peer for link in bob.network.links()] == [alice.network.peer_id]


async def test_a_relay_calls_a_peer_that_asks_for_a_place_before_anything_else(run: Run) -> None:
    """After its restart a relay knows nobody, and volunteers ask for their places at once."""
    home = await run.member("relay")
    serving = dataclasses.replace(home, values={**home.values, "relay.serve": True})
    async with running_node(run.world, "relay", serving) as relay:
        member, membership = await run.outlaw("member")
        stranger = run.world.add_node("stranger")
        for one in (member, stranger):
            one.learn_addresses(relay.network.peer_id, relay.network.addresses())
        async with open_rpc(member, membership.guard(member)) as rpc:
            serve_ping(rpc)
            await reserve(member, relay.network.peer_id)
        with pytest.raises(RelayRefused, match="only members"):
            await reserve(stranger, relay.network.peer_id)
        assert relay.status().relay is not None
        assert relay.status().relay.reservations == 1


@pytest.mark.slow
async def test_a_monitor_keeps_nothing_for_others(run: Run) -> None:
    async with run.nodes("alice") as (alice,):
        run.impostor.endpoints = alice.network.addresses()
        run.impostor.role = Role.MONITOR
        async with run.nodes("monitor") as (monitor,):
            await monitor.dht.joined()
            await talks(monitor, alice)
            assert monitor.dht.statistics().peers_in_table == 1
            assert alice.dht.statistics().peers_in_table == 0


async def test_a_pass_that_does_not_count_keeps_a_node_from_starting(run: Run) -> None:
    configuration = await run.member("alice")
    other = run.folder / "other"
    write_key(other / "identity.key", run.world.identity_of("other"))
    (other / "access.pass").write_bytes(configuration.places.pass_file.read_bytes())
    (other / "access.pass").chmod(0o600)
    stolen = home_in(other)
    with pytest.raises(UnusableFile, match="not for this node"):
        async with Node(stolen, open_network=network_in(run.world, "other")):
            pass


async def test_the_pass_is_for_its_owner_alone(run: Run) -> None:
    path = (await run.member("alice")).places.pass_file
    assert path.stat().st_mode & 0o777 == 0o600
    kept = load_pass(path)
    assert kept is not None
    assert set(json.loads(path.read_text())) == {
        "run", "access_pass", "fingerprint", "auth_url", "pin", "clock_offset_ms", "refused",
        "kind",
    }  # fmt: skip


# -- renewal


@pytest.mark.slow
async def test_a_token_is_renewed_without_a_person(run: Run) -> None:
    run.impostor.life_ms = 1_000
    async with run.nodes("alice", "bob") as (alice, bob):
        for _ in range(3):
            await until_renewed(alice)
            await talks(alice, bob)
            await talks(bob, alice)
        kept = load_pass(alice.configuration.places.pass_file)
        assert alice.membership is not None
        assert kept is not None
        assert kept.access_pass == alice.membership.kept.access_pass


async def test_a_renewal_takes_one_request_until_the_server_forgets_the_challenge(
    run: Run,
) -> None:
    """The pass has the next challenge. A server that was restarted does not know it."""
    known: set[str] = set()

    def grant(impostor: Impostor, question: dict[str, Any]) -> bytes:
        following = bytes(40) + impostor._random()
        known.add(encoded(following))
        return said({"pass": encoded(impostor.make_pass(question, next_challenge=following))})

    def renew(impostor: Impostor, question: dict[str, Any]) -> bytes:
        if question["challenge"] in known:
            known.remove(question["challenge"])
            return grant(impostor, question)
        if asked()[-2:] == ["/v1/challenge", "/v1/renew"]:
            return grant(impostor, question)
        return impostor.refuse(question, code="challenge")

    def asked() -> list[str]:
        return [path for path in run.impostor.asked if path in ("/v1/renew", "/v1/challenge")]

    run.impostor.answers |= {"/v1/login": grant, "/v1/renew": renew}
    async with run.nodes("alice") as (alice,):
        assert alice.membership is not None
        run.impostor.asked.clear()
        for _ in range(2):
            alice.membership.renew_within(0.0)
            await until_renewed(alice)
        assert asked() == ["/v1/renew", "/v1/renew"]
        known.clear()
        alice.membership.renew_within(0.0)
        await until_renewed(alice)
        assert asked()[2:] == ["/v1/renew", "/v1/challenge", "/v1/renew"]
        assert not alice.membership.trouble


@pytest.mark.slow
async def test_an_outage_is_lived_through_until_the_grace_ends(run: Run) -> None:
    run.impostor.life_ms = 900
    async with run.nodes("alice", "bob") as (alice, bob):
        granting = run.impostor.answers["/v1/renew"]

        def down(*_: object) -> bytes:
            return response("500 Oh dear")

        run.impostor.answers["/v1/renew"] = down
        await eventually(lambda: alice.status().membership.standing == "grace")
        await talks(alice, bob)
        assert "500" in alice.status().membership.trouble

        run.impostor.grace_ms = 100
        run.impostor.answers["/v1/renew"] = granting
        for node in (alice, bob):
            await until_renewed(node)
        run.impostor.answers["/v1/renew"] = down
        await eventually(lambda: alice.status().membership.standing == "over")
        assert await refusal_of(talks(alice, bob)) is Reason.TOKEN_EXPIRED

        run.impostor.life_ms = 3_600_000
        run.impostor.answers["/v1/renew"] = granting
        for node in (alice, bob):
            await eventually(lambda node=node: node.status().membership.standing == "valid")
        await talks(alice, bob)
        assert alice.status().membership.trouble == ""


@pytest.mark.slow
async def test_a_captive_portal_ends_nothing(run: Run) -> None:
    run.impostor.life_ms = 1_000
    async with run.nodes("alice") as (alice,):
        granting = run.impostor.answers["/v1/renew"]
        asked = len(run.impostor.asked)
        run.impostor.answers["/v1/renew"] = lambda *_: response(
            "403 Forbidden", b"<html>Pay first", "Content-Type: text/html"
        )
        await eventually(lambda: "a page came" in alice.status().membership.trouble)
        assert "/v1/renew" in run.impostor.asked[asked:]
        run.impostor.answers["/v1/renew"] = granting
        await until_renewed(alice)


@pytest.mark.slow
async def test_a_refusal_ends_the_node_at_once_and_says_why(run: Run) -> None:
    run.impostor.life_ms = 1_000
    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012 - it ends in the middle of the block
        async with run.nodes("alice") as (alice,):
            configuration = alice.configuration
            run.impostor.answers["/v1/renew"] = Impostor.refuse
            with trio.fail_after(PATIENCE_SECONDS):
                await trio.sleep_forever()
    failure = failure_of(ended.value)
    assert failure.what == (
        "This node may no longer take part in albert: You may not take part in this run."
    )
    assert (failure.why, failure.advice) == ("A moderator said so.", "Ask them.")
    assert failure.exit_code == 3
    kept = load_pass(configuration.places.pass_file)
    assert kept is not None
    assert "no longer take part in albert" in kept.refused


async def test_after_a_refusal_it_asks_before_it_goes_on(run: Run) -> None:
    configuration = await run.member("alice")
    identity = load_identity(configuration.key_file)
    assert identity is not None
    membership = open_membership(configuration, identity)
    assert membership is not None
    await membership.remember_refusal("You were refused.")
    again = open_membership(configuration, identity)
    assert again is not None
    assert again.schedule.seconds_until_next(again.server_time.now_ms()) == 0.0
    assert again.status().trouble == "You were refused."


async def test_a_pass_that_login_brings_is_taken_up_by_the_running_node(run: Run) -> None:
    async with run.nodes("alice") as (alice,):
        assert alice.membership is not None
        before = alice.membership.token.serial
        await run.member("alice")
        socket = alice.configuration.places.control_socket
        assert await trio.to_thread.run_sync(ask_once, socket, "access reload") == {
            "changed": True,
            "run": RUN,
        }
        assert alice.membership.token.serial > before


async def test_a_server_that_has_moved_is_found_again_with_a_new_invite(
    run: Run, tmp_path: Path
) -> None:
    run.impostor.life_ms = 2_000
    async with run.nodes("alice") as (alice,):
        run.impostor.answers["/v1/renew"] = lambda *_: response("500 Gone")
        elsewhere = Impostor()
        (tmp_path / "elsewhere").mkdir()
        async with running_impostor(tmp_path / "elsewhere", elsewhere) as server:
            identity = run.world.identity_of("alice")
            await log_in(run.folder / "alice", identity, elsewhere, server)
            socket = alice.configuration.places.control_socket
            await trio.to_thread.run_sync(ask_once, socket, "access reload")
            assert alice.membership is not None
            alice.membership.renew_within(0.0)
            await until_renewed(alice)
            assert alice.status().membership.auth_url == server.url


# -- clocks


@pytest.mark.slow
@pytest.mark.parametrize("off", [-600.0, 600.0])
async def test_a_clock_ten_minutes_off_locks_nobody_out(
    run: Run, off: float, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = await run.member("wrong", clock_off=off)
    async with (
        run.nodes("alice") as (alice,),
        running_node(run.world, "wrong", wrong, clocks_off(off)) as node,
    ):
        introduce(alice, node)
        await talks(alice, node)
        await talks(node, alice)
        await eventually(lambda: "The clock of this machine is 10.0 minutes" in caplog.text)
        assert abs(node.status().membership.clock_offset_ms + off * 1000) < 1_000
        assert abs(alice.status().membership.clock_offset_ms) < 1_000


@pytest.mark.slow
@pytest.mark.parametrize("off", [-600.0, 600.0])
async def test_a_clock_that_is_set_wrong_after_the_login_is_noticed(run: Run, off: float) -> None:
    configuration = await run.member("wrong")
    async with (
        run.nodes("alice") as (alice,),
        running_node(run.world, "wrong", configuration, clocks_off(off)) as node,
    ):
        introduce(alice, node)
        await eventually(lambda: node.status().membership.clock_measured)
        await talks(node, alice)
        await talks(alice, node)


# -- keys


@pytest.mark.slow
async def test_a_new_auth_key_is_taken_up_by_all(run: Run) -> None:
    run.impostor.life_ms = 1_500
    async with run.nodes("alice", "bob") as (alice, bob):
        newer = SigningKey(b"\5" * 32)
        run.impostor.records += (endorse(RUN, newer.public_key, 1, FAR_FUTURE_MS, ROOT),)
        run.impostor.key = newer
        for node in (alice, bob):
            await eventually(lambda node=node: node.membership.token.key_id == newer.key_id)
        await talks(alice, bob)
        await talks(bob, alice)


@pytest.mark.slow
async def test_when_an_auth_key_is_withdrawn_everybody_gets_a_new_token(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.core.access.membership.EVERYBODY_RENEWS_WITHIN_SECONDS", 0.2)
    async with run.nodes("alice", "bob") as nodes:
        await talks(*nodes)
        await talks(*reversed(nodes))
        newer = SigningKey(b"\5" * 32)
        run.impostor.records += (endorse(RUN, newer.public_key, 1, FAR_FUTURE_MS, ROOT),)
        run.impostor.key = newer
        signed = run.impostor.revoke(1, withdrawn=(ROOT.key_id,))
        for node in nodes:
            assert node.membership is not None
            node.membership.following.take(signed, run.impostor.records)
        for node in nodes:
            await eventually(lambda node=node: node.membership.token.key_id == newer.key_id)
        await talks_again(*nodes)
        await talks_again(*reversed(nodes))


@pytest.mark.slow
async def test_a_member_that_was_away_when_its_key_was_withdrawn_gets_in_with_another_token(
    run: Run,
) -> None:
    """Its token is valid by all that it knows, and the only peer refuses it. It once ended."""
    async with run.nodes("alice") as (alice,):
        run.impostor.endpoints = tuple(alice.network.addresses())
        home = await run.member("bob")
        newer = SigningKey(b"\5" * 32)
        run.impostor.records += (endorse(RUN, newer.public_key, 1, FAR_FUTURE_MS, ROOT),)
        run.impostor.key = newer
        signed = run.impostor.revoke(1, withdrawn=(ROOT.key_id,))
        alice.membership.following.take(signed, run.impostor.records)
        alice.membership.renew_within(0.0)
        await eventually(lambda: alice.membership.token.key_id == newer.key_id)
        await bob_is_let_in_after(run, home, Reason.UNKNOWN_AUTH_KEY)


@pytest.mark.slow
async def test_a_member_whose_token_was_over_when_it_came_back_waits_for_the_next(run: Run) -> None:
    """As a laptop that slept for hours: it asks others before the auth server has answered."""
    async with run.nodes("alice") as (alice,):
        run.impostor.endpoints = tuple(alice.network.addresses())
        run.impostor.life_ms, run.impostor.grace_ms = 1, 0
        home = await run.member("bob")
        run.impostor.life_ms = 3_600_000
        await bob_is_let_in_after(run, home, Reason.TOKEN_EXPIRED)


async def bob_is_let_in_after(run: Run, home: Configuration, reason: Reason) -> None:
    """All refuse bob until the auth server answers."""
    granting = run.impostor.answers["/v1/renew"]
    run.impostor.answers["/v1/renew"] = lambda *_: response("500 Oh dear")
    async with running_node(run.world, "bob", home) as bob:
        with trio.fail_after(PATIENCE_SECONDS):
            refusal = await bob.dht.turned_away()
            assert refusal.reason is reason
            run.impostor.answers["/v1/renew"] = granting
            await join_or_be_refused(bob.dht, bob.membership)
        assert not any(one.refused for one in bob.dht.bootstrap_state().addresses)


# -- revocation


def revoked_now(peer: bytes) -> PeerEntry:
    return PeerEntry(peer, int(time.time() * 1000) + 60_000, FAR_FUTURE_MS)


@pytest.mark.slow
async def test_a_list_from_the_server_ends_everything_with_the_revoked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.core.access.revocation_follower.DEFAULT_POLL_SECONDS", 0.2)
    monkeypatch.setattr("node.core.access.revocation_follower.LONGEST_POLL_SECONDS", 1.0)
    async with run.nodes("alice", "bob") as (alice, bob):
        mallory, member = await run.outlaw("mallory")
        async with open_rpc(mallory, member.guard(mallory)) as rpc:
            for node in (alice, bob):
                mallory.learn_addresses(node.network.peer_id, node.network.addresses())
                await ping(rpc, node.network.peer_id, timeout=10)
            run.impostor.revoke(1, revoked_now(mallory.identity.public_key))
            for node in (alice, bob):
                await eventually(lambda node=node: node.status().membership.revocations == 1)
                await eventually(lambda node=node: node.network.link(mallory.peer_id) is None)
                assert (
                    await refusal_of(ping(node.rpc, mallory.peer_id, timeout=10)) is Reason.REVOKED
                )
        await talks(alice, bob)


@pytest.mark.slow
async def test_a_list_spreads_through_the_directory_while_the_server_is_down(run: Run) -> None:
    run.impostor.answers["/v1/revocations"] = lambda *_: response("503 Down")
    async with run.nodes("alice") as (alice,):
        run.impostor.endpoints = alice.network.addresses()
        async with run.nodes("bob", "carol") as others:
            nodes = [alice, *others]
            for node in nodes:
                await node.dht.joined()
            await a_list_reaches_all(run, nodes)


async def a_list_reaches_all(run: Run, nodes: list[Node]) -> None:
    signed = run.impostor.revoke(7, NameEntry("code:mallory", 1, FAR_FUTURE_MS))
    content = encode(notice_of(signed, run.impostor.records))
    answer = await trio.to_thread.run_sync(
        ask_once,
        nodes[0].configuration.places.control_socket,
        "access revocations",
        {"list": base64.b64encode(signed).decode()},
    )
    assert answer == {"news": True, "number": 7}
    for node in nodes:
        await eventually(lambda node=node: node.status().membership.revocations == 7)
        kept = node.configuration.places.revocations_file
        await eventually(lambda kept=kept: kept.exists() and kept.read_bytes() == content)


async def test_the_longest_list_is_taken_from_the_owner_with_the_keys_of_all_rotations(
    run: Run,
) -> None:
    by = ROOT
    for number in range(1, MOST_KEYS):
        newer = SigningKey(number.to_bytes(32, "big"))
        run.impostor.records += (endorse(RUN, newer.public_key, 1, FAR_FUTURE_MS, by),)
        by = newer
    entries = [PeerEntry(number.to_bytes(32, "big"), 1, FAR_FUTURE_MS) for number in range(1303)]
    signed = run.impostor.revoke(7, *entries, by=by)
    assert LIMIT_BYTES - 200 < len(signed) <= LIMIT_BYTES
    async with run.nodes("alice") as (alice,):
        told = {"list": signed, "keys": encode(run.impostor.records)}
        answer = await trio.to_thread.run_sync(
            ask_once,
            alice.configuration.places.control_socket,
            "access revocations",
            {name: base64.b64encode(data).decode() for name, data in told.items()},
        )
    assert answer == {"news": True, "number": 7}


async def test_a_false_list_changes_nothing(run: Run) -> None:
    async with run.nodes("alice") as (alice,):
        assert alice.membership is not None
        forged = run.impostor.revoke(9, by=STRANGER)
        with pytest.raises(Exception, match="not signed by a key of this run"):
            alice.membership.following.take(forged)
        assert alice.status().membership.revocations == 0


async def test_nobody_keeps_a_false_list_for_others(run: Run) -> None:
    async with run.nodes("alice") as (alice,):
        mallory, member = await run.outlaw("mallory")
        settings = DhtSettings(bootstrap=alice.network.addresses(), client=True)
        async with (
            open_rpc(mallory, member.guard(mallory)) as rpc,
            open_dht(mallory, rpc, families=FAMILIES, settings=settings) as dht,
        ):
            await dht.joined()
            forged = notice_of(run.impostor.revoke(9, by=STRANGER), run.impostor.records)
            with pytest.raises(SlotRefused, match="not signed by a key of this run"):
                await dht.put(f"revocations/{RUN}", forged, 60.0, keep_up=False)
        assert alice.status().membership.revocations == 0
        assert alice.dht.statistics().slots_stored == 0


async def test_a_restart_remembers_who_was_revoked(run: Run) -> None:
    configuration = await run.member("alice")
    identity = load_identity(configuration.key_file)
    assert identity is not None
    membership = open_membership(configuration, identity)
    assert membership is not None
    membership.following.take(run.impostor.revoke(3))
    await membership.following.save()
    again = open_membership(configuration, identity)
    assert again is not None
    assert again.following.revocations.number == 3


async def test_a_restart_remembers_a_list_of_a_key_that_is_newer_than_the_pass(run: Run) -> None:
    configuration = await run.member("alice")
    identity = load_identity(configuration.key_file)
    assert identity is not None
    membership = open_membership(configuration, identity)
    assert membership is not None
    newer = SigningKey(b"\5" * 32)
    run.impostor.records += (endorse(RUN, newer.public_key, 1, FAR_FUTURE_MS, ROOT),)
    signed = run.impostor.revoke(3, by=newer, withdrawn=(ROOT.key_id,))
    membership.following.take(signed, run.impostor.records)
    await membership.following.save()
    again = open_membership(configuration, identity)
    assert again is not None
    assert again.following.revocations.number == 3
    assert again.keyring.withdrawn == {ROOT.key_id}


async def test_a_list_that_an_earlier_version_kept_is_read(run: Run) -> None:
    configuration = await run.member("alice")
    identity = load_identity(configuration.key_file)
    assert identity is not None
    replace_private_file(configuration.places.revocations_file, run.impostor.revoke(3))
    membership = open_membership(configuration, identity)
    assert membership is not None
    assert membership.following.revocations.number == 3


async def test_a_node_that_finds_itself_revoked_is_out(run: Run) -> None:
    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012 - it ends in the middle of the block
        async with run.nodes("alice") as (alice,):
            run.impostor.answers["/v1/renew"] = lambda *_: response("503 Down")
            key = alice.network.identity.public_key
            assert alice.membership is not None
            alice.membership.following.take(run.impostor.revoke(1, revoked_now(key)))
            with trio.fail_after(PATIENCE_SECONDS):
                await trio.sleep_forever()
    assert ended.value.subgroup(MembershipEnded) is not None
    assert failure_of(ended.value).what.endswith("Access was revoked.")


async def test_a_node_whose_one_token_was_revoked_outlives_an_outage_and_gets_the_next(
    run: Run,
) -> None:
    async with run.nodes("alice") as (alice,):
        membership = alice.membership
        assert membership is not None
        granting = run.impostor.answers["/v1/renew"]
        run.impostor.answers["/v1/renew"] = lambda *_: response("503 Down")
        serial = membership.token.serial
        entry = SerialEntry(serial, int(time.time() * 1000), FAR_FUTURE_MS)
        membership.following.take(run.impostor.revoke(1, entry))
        await eventually(lambda: "503" in alice.status().membership.trouble)
        run.impostor.answers["/v1/renew"] = granting
        membership.renew_within(0.0)
        await eventually(lambda: membership.token.serial > serial)


@pytest.mark.soak
async def test_a_node_that_is_allowed_again_at_once_goes_on(run: Run) -> None:
    async with run.nodes("alice", "bob") as (alice, bob):
        await talks(alice, bob)
        assert alice.membership is not None
        just_now = PeerEntry(
            alice.network.identity.public_key, int(time.time() * 1000), FAR_FUTURE_MS
        )
        await trio.sleep(0.01)
        signed = run.impostor.revoke(1, just_now)
        serial = alice.membership.token.serial
        for node in (alice, bob):
            assert node.membership is not None
            node.membership.following.take(signed)
        await eventually(lambda: alice.membership.token.serial > serial)
        await talks_again(alice, bob)
