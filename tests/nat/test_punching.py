"""Hole punching by DCUtR: in time, not in vain, and never against somebody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as some

from nat import messages
from nat.addresses import ip_of, is_global, port_of, site_of, without_peer
from nat.circuits import CircuitTaker
from nat.kinds import Nat, can_punch
from nat.messages import HolePunch, PunchType
from nat.punching import (
    DCUTR,
    DIALLED_SECONDS,
    DIALLED_WITHIN_SECONDS,
    LEAST_GAP_SECONDS,
    LEAST_PORT,
    MOST_AT_ONCE,
    MOST_DIALLED,
    MOST_OF_A_PEER,
    PEERS_REMEMBERED,
    PUNCH_SECONDS,
    RETRY_SECONDS,
    TALK_SECONDS,
    VERDICT_SECONDS,
    Outside,
    Puncher,
    PunchOutcome,
    worth_dialling,
    worth_punching,
)
from nat.relay_limits import RelayLimits
from nat.relaying import STOP
from nat.reservations import reserve
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach
from protocols.testing.link_model import LinkSettings
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.nat.relays import Hub, hub_in
from tests.simulated.worlds import LATENCY_SECONDS, simulated, time_until_broken

# ---- which addresses are worth dialling, without a network

PUBLIC = ("/ip4/8.8.8.8/tcp/4001", "/ip6/2001:4860::1/tcp/4001")
HOME = ("/ip4/192.168.1.7/tcp/4001",)
LOOPBACK = ("/ip4/127.0.0.1/tcp/4001",)

octets = some.integers(0, 255)
ports = some.sampled_from([0, 22, 1023, 1024, 4001, 65535])
claims = some.lists(
    some.one_of(
        some.sampled_from(
            [*PUBLIC, *HOME, *LOOPBACK, "/ip4/224.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1",
             "/ip4/169.254.169.254/tcp/80", "/ip6/::1/tcp/22", "/ip6/ff02::1/tcp/1",
             "/ip4/8.8.8.8/tcp/0", "/ip4/8.8.8.8/udp/53", "/dns/example.org/tcp/80",
             "/ip4/8.8.8.8/tcp/1/p2p-circuit", f"{PUBLIC[0]}/p2p/12D3Koo", "", "nonsense"]
        ),
        some.builds("/ip4/{}.{}.{}.{}/tcp/{}".format, octets, octets, octets, octets, ports),
        some.builds("/ip4/8.8.8.8/tcp/{}".format, ports),
        some.builds("/ip6/2001:4860:{}::{}/tcp/4001".format, some.integers(0, 2), octets),
    ),
    max_size=40,
).map(tuple)  # fmt: skip


@given(claims, some.sampled_from([(), PUBLIC, HOME, LOOPBACK, (*HOME, *PUBLIC)]))
def test_what_is_dialled_is_little_and_of_the_kind_of_our_own(
    claimed: tuple[str, ...], own: tuple[str, ...]
) -> None:
    worth = worth_dialling(claimed, own)
    assert len(worth) == len(set(worth)) <= MOST_DIALLED
    for address in worth:
        ip = ip_of(address)
        assert ip is not None
        assert port_of(address) >= LEAST_PORT
        assert not ip.is_multicast
        assert not ip.is_unspecified
        assert is_global(address) or own in (HOME, LOOPBACK)
        assert not ip.is_loopback or own == LOOPBACK
    for version in ("/ip4/", "/ip6/"):
        assert len({site_of(one) for one in worth if one.startswith(version)}) <= 1


@given(claims)
def test_public_addresses_at_one_home_are_dialled_from_anywhere_in_their_order(
    claimed: tuple[str, ...],
) -> None:
    plain = dict.fromkeys(without_peer(one) for one in claimed)
    public = [one for one in plain if is_global(one) and port_of(one) >= LEAST_PORT]
    first: dict[str, str] = {}
    for one in public:
        first.setdefault(one[:5], site_of(one))
    at_home = tuple(one for one in public if first[one[:5]] == site_of(one))
    assert worth_dialling(claimed, PUBLIC) == at_home[:MOST_DIALLED]


@pytest.mark.parametrize("ours", Nat)
@pytest.mark.parametrize("theirs", Nat)
def test_the_kinds_of_routers_only_count_for_ipv4(ours: Nat, theirs: Nat) -> None:
    expected = PUBLIC if can_punch(ours, theirs) else PUBLIC[1:]
    assert worth_punching(PUBLIC, Outside(ours, PUBLIC), theirs) == expected


# ---- two peers with a link through a relay


class Home:
    """A node with a link to a relay, that punches."""

    def __init__(
        self, hub: Hub, network: SimulatedNetwork, nat: Nat, addresses: tuple[str, ...] | None
    ) -> None:
        self.hub = hub
        self.network = network
        self.outside = Outside(nat, (network.place,) if addresses is None else addresses)
        self.asked_outside_at: list[float] = []
        self.puncher = Puncher(network, self._outside)
        network.serve(STOP, CircuitTaker(network, lambda _: True).answer)

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    async def _outside(self) -> Outside:
        await trio.lowlevel.checkpoint()
        self.asked_outside_at.append(trio.current_time())
        return self.outside

    def reach_of(self, other: Home) -> Reach:
        link = self.network.link(other.peer)
        return Reach.NONE if link is None else link.reach

    async def calls(self, other: Home) -> None:
        """Reach this one through the relay, so that it drives."""
        circuit = f"{self.hub.network.address}/p2p-circuit/p2p/{other.peer}"
        self.network.learn_addresses(other.peer, [circuit])
        assert (await self.network.connect(other.peer)).reach is Reach.RELAYED


class Street:
    """The homes at one relay."""

    def __init__(self, hub: Hub, nursery: trio.Nursery) -> None:
        self.hub = hub
        self._nursery = nursery

    async def home(
        self,
        name: str,
        nat: Nat = Nat.PORT_RESTRICTED,
        *,
        says: Nat | None = None,
        addresses: tuple[str, ...] | None = None,
        punches: bool = True,
    ) -> Home:
        network = self.hub.world.add_node(name, NodeSettings(nat=nat))
        network.learn_addresses(self.hub.peer, self.hub.network.addresses())
        home = Home(self.hub, network, nat if says is None else says, addresses)
        await reserve(network, self.hub.peer)
        if punches:
            await self._nursery.start(home.puncher.run)
        return home


@asynccontextmanager
async def street(world: SimulatedWorld) -> AsyncIterator[Street]:
    async with (
        hub_in(world, RelayLimits(circuits_per_peer=100)) as hub,
        trio.open_nursery() as nursery,
    ):
        yield Street(hub, nursery)
        nursery.cancel_scope.cancel()


@simulated
async def test_a_relayed_link_becomes_direct_within_two_seconds(world: SimulatedWorld) -> None:
    async with street(world) as here:
        left, right = await here.home("left"), await here.home("right")
        await left.calls(right)
        await trio.sleep(2)
        for one, other in ((left, right), (right, left)):
            link = one.network.link(other.peer)
            assert link is not None
            assert link.reach is Reach.DIRECT
            assert link.punched
        assert right.puncher.attempts == {PunchOutcome.PUNCHED: 1}
        assert left.puncher.attempts == {}, "it answers"


@pytest.mark.parametrize("left_nat", list(Nat)[1:])
@pytest.mark.parametrize("right_nat", list(Nat)[1:])
@simulated
async def test_where_two_routers_cannot_meet_nothing_is_tried(
    world: SimulatedWorld, left_nat: Nat, right_nat: Nat
) -> None:
    async with street(world) as here:
        left, right = await here.home("left", left_nat), await here.home("right", right_nat)
        circuit = f"{here.hub.network.address}/p2p-circuit/p2p/{right.peer}"
        left.network.learn_addresses(right.peer, [circuit])
        await left.network.connect(right.peer)
        await trio.sleep(2)
        if can_punch(left_nat, right_nat):
            assert left.reach_of(right) is Reach.DIRECT
        else:
            assert right.puncher.attempts == {PunchOutcome.HOPELESS: 1}
            assert not left.network.sent_to
            assert not right.network.sent_to
            await trio.sleep(2 * sum(RETRY_SECONDS))
            assert right.puncher.attempts == {PunchOutcome.HOPELESS: 1}
            assert left.reach_of(right) is Reach.RELAYED


@simulated
async def test_a_failed_attempt_is_repeated_after_longer_and_longer_times(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        left = await here.home("left", Nat.SYMMETRIC, says=Nat.UNKNOWN)
        right = await here.home("right", Nat.SYMMETRIC, says=Nat.UNKNOWN)
        await left.calls(right)
        await trio.sleep(sum(RETRY_SECONDS) + 6 * TALK_SECONDS)
        assert right.puncher.attempts == {PunchOutcome.FAILED: 1 + len(RETRY_SECONDS)}
        began = right.asked_outside_at
        pauses = [later - earlier for earlier, later in pairwise(began)]
        for pause, delay in zip(pauses, RETRY_SECONDS, strict=True):
            assert pause == pytest.approx(delay + PUNCH_SECONDS, abs=20 * LATENCY_SECONDS)
        await trio.sleep(3600)
        assert len(right.asked_outside_at) == 1 + len(RETRY_SECONDS)


@simulated
async def test_a_router_that_changes_its_mind_is_met_at_the_next_attempt(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        left = await here.home("left", addresses=())
        right = await here.home("right")
        left.outside = Outside(Nat.PORT_RESTRICTED, ("/ip4/10.200.0.0/tcp/4001",))
        await left.calls(right)
        await trio.sleep(PUNCH_SECONDS + 1.2)
        assert right.puncher.attempts == {PunchOutcome.FAILED: 1}
        left.outside = Outside(Nat.PORT_RESTRICTED, (left.network.place,))
        await trio.sleep(10)
        assert right.puncher.attempts == {PunchOutcome.FAILED: 1, PunchOutcome.PUNCHED: 1}


@pytest.mark.parametrize("who", ["left", "right"])
@simulated
async def test_a_side_that_does_not_know_its_address_now_is_no_verdict(
    world: SimulatedWorld, who: str
) -> None:
    async with street(world) as here:
        left, right = await here.home("left"), await here.home("right")
        unsure = left if who == "left" else right
        unsure.outside = Outside(Nat.PORT_RESTRICTED, ())
        await left.calls(right)
        await trio.sleep(3)
        assert right.puncher.attempts == {PunchOutcome.FAILED: 2}, right.asked_outside_at
        unsure.outside = Outside(Nat.PORT_RESTRICTED, (unsure.network.place,))
        await trio.sleep(10)
        assert right.puncher.attempts == {PunchOutcome.FAILED: 2, PunchOutcome.PUNCHED: 1}


@simulated
async def test_a_peer_that_does_not_speak_it_is_not_asked_again(world: SimulatedWorld) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        await left.calls(right)
        await trio.sleep(3600)
        assert right.puncher.attempts == {PunchOutcome.NOT_SPOKEN: 1}


@pytest.mark.parametrize("verdict", [PunchOutcome.NOT_SPOKEN, PunchOutcome.HOPELESS])
@simulated
async def test_a_verdict_ages(world: SimulatedWorld, verdict: PunchOutcome) -> None:
    async with street(world) as here:
        serves = verdict is PunchOutcome.HOPELESS
        left, right = await here.home("left", punches=serves), await here.home("right")
        usual = left.outside
        left.outside = replace(usual, nat=Nat.SYMMETRIC)
        await left.calls(right)
        await trio.sleep(VERDICT_SECONDS - 1.0)
        assert right.puncher.attempts == {verdict: 1}
        left.outside = usual
        async with trio.open_nursery() as nursery:
            if not serves:
                await nursery.start(left.puncher.run)
            await trio.sleep(3.0)
            assert right.puncher.attempts == {verdict: 1, PunchOutcome.PUNCHED: 1}
            assert left.reach_of(right) is Reach.DIRECT
            nursery.cancel_scope.cancel()


@simulated
async def test_a_link_that_became_direct_otherwise_is_not_driven_any_more(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        await left.calls(right)
        await trio.sleep(1)
        assert right.puncher._driving
        world.punch(left.network, right.network, LinkSettings(latency_seconds=LATENCY_SECONDS))
        await trio.sleep(1)
        assert right.reach_of(left) is Reach.DIRECT
        assert not right.puncher._driving


@simulated
async def test_both_sides_may_drive_at_once(world: SimulatedWorld) -> None:
    """Each has asked a relay for a circuit to the other; one attempt goes on and meets."""
    async with street(world) as here:
        left, right = await here.home("left"), await here.home("right")
        await left.calls(right)
        async with trio.open_nursery() as nursery:  # right drives already, now left does too
            nursery.start_soon(left.puncher._attempt, right.peer)
        await trio.sleep(2)
        assert left.reach_of(right) is right.reach_of(left) is Reach.DIRECT
        assert left.network.punching == right.network.punching == {}
        silent = min((left, right), key=lambda home: home.peer)
        assert silent.puncher.attempts[PunchOutcome.FLOOD] >= 1


@pytest.mark.slow
@simulated
async def test_many_attempts_that_fail_do_not_keep_another_peer_from_meeting(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        right = await here.home("right")
        for number in range(MOST_AT_ONCE + 4):
            far = await here.home(f"far-{number}", Nat.SYMMETRIC, says=Nat.UNKNOWN)
            await far.calls(right)
        left = await here.home("left")
        await left.calls(right)
        await trio.sleep(2 * (PUNCH_SECONDS + 1))
        assert left.reach_of(right) is Reach.DIRECT
        assert right.puncher.attempts[PunchOutcome.PUNCHED] == 1


@simulated
async def test_one_peer_that_says_nothing_takes_few_places(world: SimulatedWorld) -> None:
    async with street(world) as here:
        right = await here.home("right")
        silent = await here.home("silent", Nat.SYMMETRIC, punches=False)
        await silent.calls(right)
        await trio.sleep(60)
        refused = right.puncher.attempts[PunchOutcome.FLOOD]
        for _ in range(MOST_OF_A_PEER + 3):
            await silent.network.open(right.peer, DCUTR)
            await trio.sleep(2 * LEAST_GAP_SECONDS)
        assert right.puncher.attempts[PunchOutcome.FLOOD] == refused + 3
        await trio.sleep(TALK_SECONDS)
        assert not right.puncher._answering, "and gives them back"


@simulated
async def test_a_relayed_link_that_was_there_before_becomes_direct_as_well(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        left, right = await here.home("left"), await here.home("right", punches=False)
        await left.calls(right)
        await trio.sleep(60)
        assert left.reach_of(right) is Reach.RELAYED
        async with trio.open_nursery() as nursery:
            await nursery.start(right.puncher.run)
            await trio.sleep(2)
            assert left.reach_of(right) is right.reach_of(left) is Reach.DIRECT
            nursery.cancel_scope.cancel()


# ---- links that are lost


@pytest.mark.parametrize("after_seconds", [0.05, 0.3, 0.6, 1.0, 3.0])
@simulated
async def test_a_link_that_is_lost_in_an_attempt_leaves_nothing_and_a_new_one_is_punched(
    world: SimulatedWorld, after_seconds: float
) -> None:
    async with street(world) as here:
        left = await here.home("left", Nat.SYMMETRIC, says=Nat.UNKNOWN)
        right = await here.home("right")
        await left.calls(right)
        await trio.sleep(after_seconds)
        world.break_link(left.network, right.network)
        await trio.sleep(2 * PUNCH_SECONDS)
        assert left.network.punching == right.network.punching == {}
        assert not right.puncher._driving
        assert not right.puncher._attempting
        assert not left.puncher._answering.total()
        asked = len(right.asked_outside_at)
        await left.calls(right)
        await trio.sleep(LATENCY_SECONDS)
        assert len(right.asked_outside_at) == asked + 1, "without the delay of the old link"


# ---- peers that misbehave


async def _call_for(left: Home, right: Home, raw: bytes) -> float:
    """Send this to the other's DCUtR, and return after how long the stream breaks or ends."""
    stream = await left.network.open(right.peer, DCUTR)
    if raw:
        await stream.send_all(raw)
    return await time_until_broken(stream)


@pytest.mark.parametrize(
    ("raw", "seconds"),
    [
        pytest.param(b"\x05hello", 0, id="no protobuf"),
        pytest.param(b"\xff\xff\xff", 0, id="too long"),
        pytest.param(messages.encode(HolePunch(type=PunchType.SYNC)), 0, id="out of turn"),
        pytest.param(b"", TALK_SECONDS, id="nothing"),
        pytest.param(b"\x20half", TALK_SECONDS, id="half a message"),
    ],
)
@simulated
async def test_garbage_ends_its_stream_and_the_next_attempt_succeeds(
    world: SimulatedWorld, raw: bytes, seconds: float
) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        await left.calls(right)
        await trio.sleep(1)
        took = await _call_for(left, right, raw)
        assert took == pytest.approx(seconds, abs=5 * LATENCY_SECONDS)
        assert right.puncher._answering.total() == 0
        other = await here.home("other")
        await other.calls(right)
        await trio.sleep(2)
        assert other.reach_of(right) is Reach.DIRECT


@simulated
async def test_addresses_of_others_are_not_dialled_if_they_are_of_no_use(
    world: SimulatedWorld,
) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        await left.calls(right)
        message = HolePunch(type=PunchType.CONNECT)
        message.addrs.extend(messages.packed(["/ip4/127.0.0.1/tcp/22", "/ip4/224.0.0.1/tcp/1"]))
        async with await left.network.open(right.peer, DCUTR) as stream:
            await stream.send_all(messages.encode(message))
            await messages.read(stream, HolePunch)
            assert await stream.receive_some() == b"", "it says good-bye"
        assert not right.network.punching


@pytest.mark.slow
@pytest.mark.parametrize("drives", [True, False], ids=["we drive", "it drives"])
@simulated
async def test_one_peer_has_us_connect_to_others_for_a_while_only(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch, drives: bool
) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        dialled: list[tuple[str, ...]] = []
        punch = right.network.punch

        async def noted(peer: PeerId, addresses: Iterable[str], *, initiates: bool) -> LinkFacts:
            dialled.append(tuple(addresses))
            return await punch(peer, dialled[-1], initiates=initiates)

        monkeypatch.setattr(right.network, "punch", noted)
        left.outside = Outside(Nat.UNKNOWN, tuple(f"/ip4/10.9.9.{n}/tcp/4001" for n in range(9)))
        if drives:
            left.network.serve(DCUTR, left.puncher._answer)
        seconds = 1500.0  # within its reservation
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            await left.calls(right)
            if drives:
                await trio.sleep(PUNCH_SECONDS + 1.0)
            else:
                await left.puncher._try(right.peer)
            world.break_link(left.network, right.network)
            await trio.sleep(1.0)
        assert set(dialled) == {left.outside.addresses[:1]}, "one of those that it names"
        most = (seconds / DIALLED_WITHIN_SECONDS + 1) * DIALLED_SECONDS / PUNCH_SECONDS
        assert most - 2 <= len(dialled) <= most
        honest = await here.home("honest")
        await honest.calls(right)
        await trio.sleep(2)
        assert honest.reach_of(right) is Reach.DIRECT


@simulated
async def test_a_flood_of_calls_is_answered_once_in_a_while(world: SimulatedWorld) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        await left.calls(right)
        await trio.sleep(1)
        for _ in range(8):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(left.network.open, right.peer, DCUTR)
            await trio.sleep(LEAST_GAP_SECONDS)
        assert right.puncher._answering.total() == MOST_OF_A_PEER
        assert right.puncher.attempts[PunchOutcome.FLOOD] == 8 * 10 - MOST_OF_A_PEER


@simulated
async def test_over_a_direct_link_nothing_is_answered(world: SimulatedWorld) -> None:
    async with street(world) as here:
        left = await here.home("left", punches=False)
        right = await here.home("right", Nat.NONE)
        left.network.learn_addresses(right.peer, right.network.addresses())
        assert (await left.network.connect(right.peer)).reach is Reach.DIRECT
        assert await _call_for(left, right, b"") <= 2 * LATENCY_SECONDS
        assert right.puncher.attempts == {PunchOutcome.FLOOD: 1}
        assert not right.asked_outside_at


@simulated
async def test_only_so_many_callers_are_remembered(world: SimulatedWorld) -> None:
    async with street(world) as here:
        left, right = await here.home("left", punches=False), await here.home("right")
        for number in range(PEERS_REMEMBERED):
            right.puncher._last[PeerId(str(number))] = 0.0
        await left.calls(right)
        await trio.sleep(1)
        await left.network.open(right.peer, DCUTR)
        await trio.sleep(1)
        assert len(right.puncher._last) == PEERS_REMEMBERED
