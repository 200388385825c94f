"""The relay: places and rates by the rules, and nothing that a peer does costs the others."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter

import pytest
import trio
import trio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nat import messages
from nat.addresses import site_of
from nat.circuits import MOST_CIRCUITS, CircuitTaker
from nat.messages import Hop, HopType, Status, Stop, StopType
from nat.relay_limits import RelayLimits
from nat.relaying import (
    ANSWER_SECONDS,
    COPY_BYTES,
    HOP,
    IDLE_SECONDS,
    MOST_ASKING,
    MOST_ASKING_PER_PEER,
    MOST_ASKING_PER_SITE,
    STOP,
    TALK_SECONDS,
    TELL_AGAIN_SECONDS,
    Pace,
    Refusal,
    RelayCounts,
    RelayPlaces,
)
from nat.reservations import RelayRefused, reserve
from protocols.identity import PeerId
from protocols.network import Reach, Stream, StreamHandler
from protocols.testing.traversal import CIRCUIT_SECONDS
from protocols.testing.world import LinkSettings, SimulatedWorld
from tests.nat.relays import Hub, hub_in
from tests.simulated.worlds import (
    LATENCY_SECONDS,
    SETTINGS,
    echo,
    read_exactly,
    simulated,
    time_until_broken,
)

WINDOW_BYTES = SETTINGS.window_bytes
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")

# ---- the rules, without a network

TIGHT = RelayLimits(
    reservations=4, reservations_per_site=2, reservation_seconds=10, circuits=8, circuits_per_peer=3
)
OF_A_SITE, OF_A_SITE_TO_A_PEER, OF_A_PAIR = 2, 1, 1
peers = some.sampled_from([PeerId(name) for name in "abcdef"])
sites = some.sampled_from(["home", "lab", "train"])
places_to_ask = some.sampled_from([f"place {number}" for number in range(6)])


class PlacesAgainstLists(RuleBasedStateMachine):
    """Places against two plain lists of what was given and not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.places = RelayPlaces(TIGHT)
        self.reserved: dict[PeerId, tuple[str, float]] = {}
        self.circuits: list[tuple[PeerId, str, PeerId]] = []

    def ends(self) -> list[PeerId]:
        return [end for source, _, target in self.circuits for end in (source, target)]

    def live(self) -> dict[PeerId, str]:
        return {peer: site for peer, (site, until) in self.reserved.items() if self.now < until}

    @rule(seconds=some.sampled_from([0.1, 1.0, 5.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(peer=peers, site=sites)
    def reserve(self, peer: PeerId, site: str) -> None:
        others = {other: where for other, where in self.live().items() if other != peer}
        at_site = sum(where == site for where in others.values())
        refusal = self.places.reserve(peer, site, self.now)
        if refusal is None:
            assert len(others) < TIGHT.reservations
            assert at_site < TIGHT.reservations_per_site
            self.reserved[peer] = (site, self.now + TIGHT.reservation_seconds)
        elif refusal is Refusal.RESERVATIONS:
            assert peer not in self.live()
            assert len(others) == TIGHT.reservations
        else:
            assert refusal is Refusal.SITE
            assert at_site == TIGHT.reservations_per_site

    @rule(peer=peers)
    def link_ends(self, peer: PeerId) -> None:
        self.places.give_back(peer)
        self.reserved.pop(peer, None)

    @rule(asked=some.tuples(peers, places_to_ask, peers))
    def join(self, asked: tuple[PeerId, str, PeerId]) -> None:
        source, site, target = asked
        refusal = self.places.join(source, site, target, self.now)
        ends = self.ends()
        most = max(ends.count(source), ends.count(target))
        from_site = [circuit[2] for circuit in self.circuits if circuit[1] == site]
        few_left = (
            2 * len(self.circuits) >= TIGHT.circuits
            or 2 * ends.count(target) >= TIGHT.circuits_per_peer
        )
        of_pair = [circuit for circuit in self.circuits if circuit[::2] == (source, target)]
        expected = (
            Refusal.ITSELF if source == target
            else Refusal.NO_RESERVATION if target not in self.live()
            else Refusal.CIRCUITS if len(self.circuits) == TIGHT.circuits
            else Refusal.PEER if most == TIGHT.circuits_per_peer
            else None if not few_left
            else Refusal.SHARE if len(from_site) >= OF_A_SITE
            else Refusal.SHARE if from_site.count(target) >= OF_A_SITE_TO_A_PEER
            else Refusal.SHARE if len(of_pair) >= OF_A_PAIR
            else None
        )  # fmt: skip
        assert refusal is expected
        if refusal is None:
            self.circuits.append(asked)

    @precondition(lambda self: self.circuits)
    @rule(which=some.integers(0, 3))
    def part(self, which: int) -> None:
        self.places.part(*self.circuits.pop(which % len(self.circuits)))

    @invariant()
    def keeps_the_limits(self) -> None:
        assert self.places.reservations <= TIGHT.reservations
        assert self.places.circuits == len(self.circuits) <= TIGHT.circuits
        for peer in self.live():
            assert self.places.has_place(peer, self.now)

    @invariant()
    def counts_what_is_held_and_nothing_else(self) -> None:
        sites = [site for _, site in self.places._until.values()]
        assert dict(self.places._sites) == {site: sites.count(site) for site in sites}
        ends = self.ends()
        assert dict(self.places._ends) == {end: ends.count(end) for end in ends}
        assert sum(self.places._shares.values()) == 3 * len(self.circuits)
        assert all(count > 0 for count in self.places._shares.values())


TestPlaces = pytest.mark.slow(PlacesAgainstLists.TestCase)
TestPlaces.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_peer_that_moves_to_a_full_site_gets_no_place_there() -> None:
    places = RelayPlaces(TIGHT)
    assert places.reserve(A, "lab", 0) is None
    assert places.reserve(B, "lab", 0) is None
    assert places.reserve(C, "home", 0) is None
    assert places.reserve(C, "lab", 1) is Refusal.SITE
    assert places.has_place(C, 1), "and keeps the one that it has"


def test_one_asker_and_one_site_have_a_share_of_the_circuits_once_half_are_taken() -> None:
    limits = RelayLimits(circuits_per_peer=16)
    places = RelayPlaces(limits)
    for number in range(limits.reservations):
        assert places.reserve(PeerId(str(number)), f"site {number}", 0) is None

    def taken(source: str, site: str, target: PeerId) -> int:
        count = 0
        while places.join(PeerId(source), site, target, 0) is None:
            count += 1
        return count

    target = PeerId("0")
    assert taken("greedy", "home", target) == 8, "half of those with this peer"
    assert sum(taken(f"invented {number}", "home", target) for number in range(10)) == 0
    assert taken("honest", "lab", target) == 2
    others = (PeerId(str(number)) for number in range(1, 60))
    assert sum(taken(f"to {other}", "home", other) for other in others) == 128 - 10
    assert taken("late", "home", PeerId("99")) == 0, "it has half of the relay"
    assert taken("late", "lab", PeerId("99")) == 2


@given(
    some.lists(some.tuples(some.integers(1, COPY_BYTES), some.floats(0, 5)), min_size=1),
    some.integers(1, 1 << 20),
)
def test_a_pace_lets_no_more_through_than_its_rate_and_one_piece(
    pieces: list[tuple[int, float]], rate: int
) -> None:
    pace, now, passed = Pace(rate), 0.0, 0
    first = last = None
    for size, pause in pieces:
        now += pause
        turn = pace.take(size, now)
        assert turn >= max(now, last or 0.0)
        first = turn if first is None else first
        assert passed <= rate * (turn - first) * (1 + 1e-9) + COPY_BYTES
        passed, last = passed + size, turn


def test_a_pace_without_a_rate_never_waits() -> None:
    pace = Pace(0)
    assert [pace.take(1 << 30, 5.0) for _ in range(3)] == [5.0, 5.0, 5.0]


def test_a_site_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert site_of("/ip4/192.0.2.7/tcp/4001/p2p/x") == site_of("/ip4/192.0.2.7/tcp/9")
    assert site_of("/ip4/192.0.2.7/tcp/1") != site_of("/ip4/192.0.2.8/tcp/1")
    assert site_of("/ip6/2001:db8::1/tcp/1") == site_of("/ip6/2001:db8::ffff:1/tcp/1")
    assert site_of("/ip6/2001:db8::1/tcp/1") != site_of("/ip6/2001:db8:0:1::1/tcp/1")


def test_a_limit_below_zero_is_refused() -> None:
    for field in dataclasses.fields(RelayLimits):
        with pytest.raises(ValueError, match=field.name):
            RelayLimits(**{field.name: -1})


# ---- what the owner reads


@simulated
async def test_refusals_are_all_counted_and_logged_once_a_minute_for_each_reason(
    world: SimulatedWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "potluck.relay")
    async with hub_in(world, RelayLimits(reservations=1)) as hub:
        lucky, late = await hub.guests(2)
        await lucky.reserve()
        for _ in range(50):
            assert await late.status_of_reserving() == Status.RESERVATION_REFUSED
            assert await late.status_of_connecting(late.peer) == Status.PERMISSION_DENIED
        assert hub.relay.refusals == {Refusal.RESERVATIONS: 50, Refusal.ITSELF: 50}
        assert len(caplog.messages) == 2
        await trio.sleep(TELL_AGAIN_SECONDS)
        await late.status_of_reserving()
        assert caplog.messages[2].endswith("reservations (51 so far)")


# ---- reservations


@simulated
async def test_a_reservation_is_given_for_its_time(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(reservation_seconds=600)) as hub:
        (guest,) = await hub.guests(1)
        asked_at = trio.current_time()
        answer = await guest.ask(Hop(type=HopType.RESERVE))
        assert (answer.type, answer.status) == (HopType.STATUS, Status.OK)
        assert answer.reservation.expire == pytest.approx(
            world.settings.started_at + asked_at + 600, abs=2
        )
        assert messages.unpacked(answer.reservation.addrs) == hub.network.addresses()
        assert not answer.HasField("limit"), "there is none"
        assert hub.relay.counts() == RelayCounts(reservations=1, reserved=1)


@simulated
async def test_the_limits_of_circuits_are_told(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(circuit_seconds=60, circuit_bytes=1000)) as hub:
        (guest,) = await hub.guests(1)
        answer = await guest.ask(Hop(type=HopType.RESERVE))
        assert (answer.limit.duration, answer.limit.data) == (60, 1000)


@simulated
async def test_a_reservation_expires(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(reservation_seconds=600)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        await trio.sleep(600)
        assert hub.relay.counts().reservations == 0
        assert await source.status_of_connecting(target.peer) == Status.NO_RESERVATION


@simulated
async def test_a_reservation_that_is_renewed_goes_on(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(reservation_seconds=600)) as hub:
        source, target = await hub.guests(2)
        for _ in range(5):
            await target.reserve()
            await trio.sleep(300)
        assert hub.relay.counts().reservations == 1
        await hub.circuit(source, target)


@pytest.mark.parametrize("how", ["politely", "by a crash", "by silence"])
@simulated
async def test_a_reservation_is_given_back_when_its_link_ends(
    world: SimulatedWorld, how: str
) -> None:
    async with hub_in(world, RelayLimits(reservations=1)) as hub:
        first, second = await hub.guests(2)
        await first.reserve()
        assert await second.status_of_reserving() == Status.RESERVATION_REFUSED
        if how == "politely":
            await first.network.disconnect(hub.peer)
        else:
            world.crash(first.network, silently=how == "by silence")
        await trio.sleep(LATENCY_SECONDS if how != "by silence" else SETTINGS.silence_seconds)
        await second.reserve()
        assert hub.relay.counts().reservations == 1


@simulated
async def test_no_more_reservations_are_given_than_there_are_places(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world, RelayLimits(reservations=2)) as hub:
        *lucky, late = await hub.guests(3)
        for guest in lucky:
            await guest.reserve()
        with pytest.raises(RelayRefused, match="no place left"):
            await late.reserve()
        assert await late.status_of_reserving() == Status.RESERVATION_REFUSED
        assert hub.relay.refusals == {Refusal.RESERVATIONS: 2}
        for guest in lucky:  # a place that is held is renewed however full it is
            await guest.reserve()


@pytest.mark.slow
@simulated
async def test_a_thousand_peers_in_one_place_leave_the_others_theirs(
    world: SimulatedWorld,
) -> None:
    limits = RelayLimits(reservations=40, reservations_per_site=8)
    async with hub_in(world, limits) as hub:
        machine = world.add_node("machine")
        crowd = [await hub.guest("", machine=machine) for _ in range(1000)]
        said = [await one.status_of_reserving() for one in crowd]
        assert said.count(Status.OK) == 8
        assert said.count(Status.RESERVATION_REFUSED) == 992
        assert hub.relay.refusals == {Refusal.SITE: 992}
        for guest in await hub.guests(32):
            await guest.reserve()
        assert hub.relay.counts().reservations == 40


@simulated
async def test_a_peer_that_is_not_admitted_gets_neither_place_nor_circuit(
    world: SimulatedWorld,
) -> None:
    admitted: set[PeerId] = set()

    async def admits(peer: PeerId) -> bool:
        await trio.sleep(1)  # it has to be asked
        return peer in admitted

    async with hub_in(world, admits=admits) as hub:
        member, stranger = await hub.guests(2)
        admitted.add(member.peer)
        await member.reserve()
        assert await stranger.status_of_reserving() == Status.PERMISSION_DENIED
        assert await stranger.status_of_connecting(member.peer) == Status.PERMISSION_DENIED
        assert hub.relay.refusals == {Refusal.NOT_ADMITTED: 2}


@simulated
async def test_over_a_relayed_link_nothing_is_given(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        target = await hub.guest("target")
        await target.reserve()
        far = world.add_node("far")
        world.set_path(far, hub.network, LinkSettings(latency_seconds=0.1, relayed=True))
        far.learn_addresses(hub.peer, hub.network.addresses())
        assert (await far.connect(hub.peer)).reach is Reach.RELAYED
        with pytest.raises(RelayRefused):
            await reserve(far, hub.peer)
        assert hub.relay.refusals == {Refusal.RELAYED_LINK: 1}


# ---- circuits


@simulated
async def test_a_circuit_carries_bytes_both_ways(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await near.send_all(b"there")
        assert await read_exactly(far, 5) == b"there"
        await far.send_all(b"and back")
        assert await read_exactly(near, 8) == b"and back"
        counts = hub.relay.counts()
        assert (counts.circuits, counts.connected, counts.carried_bytes) == (1, 1, 13)


@simulated
async def test_without_a_reservation_there_is_no_circuit(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        assert await source.status_of_connecting(target.peer) == Status.NO_RESERVATION
        assert hub.relay.refusals == {Refusal.NO_RESERVATION: 1}


@simulated
async def test_a_peer_gets_no_circuit_to_itself(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        (guest,) = await hub.guests(1)
        await guest.reserve()
        assert await guest.status_of_connecting(guest.peer) == Status.PERMISSION_DENIED
        assert hub.relay.refusals == {Refusal.ITSELF: 1}


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        pytest.param(RelayLimits(circuits=2), Refusal.CIRCUITS, id="in all"),
        pytest.param(RelayLimits(circuits_per_peer=2), Refusal.PEER, id="for one peer"),
    ],
)
@simulated
async def test_no_more_circuits_are_made_than_the_limits_say(
    world: SimulatedWorld, limits: RelayLimits, refusal: Refusal
) -> None:
    async with hub_in(world, limits) as hub:
        *sources, target = await hub.guests(4)
        await target.reserve()
        ends = [(await hub.circuit(one, target))[0] for one in sources[:2]]
        asked = await sources[2].status_of_connecting(target.peer)
        assert asked == Status.RESOURCE_LIMIT_EXCEEDED
        assert hub.relay.refusals == {refusal: 1}
        ends[0].reset()
        await trio.sleep(LATENCY_SECONDS)
        await hub.circuit(sources[2], target)


@simulated
async def test_of_two_circuits_to_one_peer_one_ends_alone(world: SimulatedWorld) -> None:
    """In the library the end of one ends the peer's reservation and all its circuits."""
    async with hub_in(world) as hub:
        first, second, target = await hub.guests(3)
        await target.reserve()
        one = await hub.circuit(first, target)
        other = await hub.circuit(second, target)
        same = await hub.circuit(second, target)
        one[0].reset()
        assert await time_until_broken(one[1]) == pytest.approx(2 * LATENCY_SECONDS)
        same[1].reset()
        assert await time_until_broken(same[0]) == pytest.approx(2 * LATENCY_SECONDS)
        await other[0].send_all(b"still here")
        assert await read_exactly(other[1], 10) == b"still here"
        counts = hub.relay.counts()
        assert (counts.circuits, counts.reservations) == (1, 1)
        await hub.circuit(first, target)


@simulated
async def test_a_circuit_outlives_the_reservation_that_it_was_made_by(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world, RelayLimits(reservation_seconds=60)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await trio.sleep(120)
        assert hub.relay.counts().reservations == 0
        await near.send_all(b"on and on")
        assert await read_exactly(far, 9) == b"on and on"


@simulated
async def test_the_end_of_one_direction_is_passed_on_and_the_other_goes_on(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await near.send_all(b"question")
        await near.send_eof()
        assert await read_exactly(far, 99) == b"question"
        await far.send_all(b"answer")
        await far.send_eof()
        assert await read_exactly(near, 99) == b"answer"
        await trio.sleep(1)
        assert hub.relay.counts().circuits == 0


@simulated
async def test_what_was_sent_before_the_ends_arrives_however_slowly_it_is_read(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world, RelayLimits(circuit_bytes_per_second=0)) as hub:
        source, target = await hub.guests(2)
        world.throttle(hub.network, upload_bytes_per_second=100_000)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await far.send_eof()
        await near.send_all(bytes(WINDOW_BYTES))
        await near.aclose()
        assert len(await read_exactly(far, WINDOW_BYTES + 1)) == WINDOW_BYTES


@pytest.mark.parametrize("end", ["near", "far"])
@simulated
async def test_the_loss_of_one_link_ends_its_circuits_for_the_other_side(
    world: SimulatedWorld, end: str
) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        world.crash((source if end == "near" else target).network)
        left = far if end == "near" else near
        assert await time_until_broken(left) == pytest.approx(2 * LATENCY_SECONDS)
        assert hub.relay.counts().circuits == 0


# ---- limits of circuits


@simulated
async def test_a_circuit_ends_for_both_after_its_bytes(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(circuit_bytes=1000)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await near.send_all(bytes(1000))
        await far.send_all(bytes(1000))
        assert len(await read_exactly(far, 1000)) == len(await read_exactly(near, 1000)) == 1000
        await near.send_all(b"x")
        for one in (near, far):
            with pytest.raises(trio.BrokenResourceError):
                await one.receive_some()
        assert hub.relay.counts().circuits == 0


@simulated
async def test_a_circuit_ends_for_both_after_its_time(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(circuit_seconds=60)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        async with trio.open_nursery() as nursery:
            for one in (near, far):
                nursery.start_soon(_breaks_after, one, 60 + LATENCY_SECONDS)


async def _breaks_after(stream: Stream, seconds: float) -> None:
    assert await time_until_broken(stream) == pytest.approx(seconds, abs=3 * LATENCY_SECONDS)


@simulated
async def test_a_circuit_that_carries_nothing_ends(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        async with trio.open_nursery() as nursery:
            for one in (near, far):
                nursery.start_soon(_breaks_after, one, IDLE_SECONDS)


async def _pour(stream: Stream, size: int) -> None:
    await stream.send_all(bytes(size))


@pytest.mark.parametrize(
    ("limits", "circuits", "rate"),
    [
        pytest.param(RelayLimits(circuit_bytes_per_second=100_000), 1, 100_000, id="one"),
        pytest.param(RelayLimits(circuit_bytes_per_second=100_000), 3, 300_000, id="each"),
        pytest.param(RelayLimits(bytes_per_second=100_000), 3, 100_000, id="all together"),
        pytest.param(
            RelayLimits(circuit_bytes_per_second=50_000, bytes_per_second=100_000),
            3, 100_000, id="both",
        ),
    ],
)  # fmt: skip
@simulated
async def test_the_rates_are_kept_and_used(
    world: SimulatedWorld, limits: RelayLimits, circuits: int, rate: int
) -> None:
    size = 500_000
    async with hub_in(world, limits) as hub:
        *sources, target = await hub.guests(circuits + 1)
        await target.reserve()
        ends = [await hub.circuit(one, target) for one in sources]
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for near, far in ends:
                nursery.start_soon(_pour, near, size)
                nursery.start_soon(read_exactly, far, size)
        took = trio.current_time() - started
        # the first piece of each goes at once, and the last is not waited for
        exact = circuits * size / rate
        assert exact - circuits * COPY_BYTES / rate <= took <= exact + 4 * LATENCY_SECONDS


@simulated
async def test_rates_hold_for_each_direction(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(circuit_bytes_per_second=100_000)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for one in (near, far):
                nursery.start_soon(_pour, one, 500_000)
                nursery.start_soon(read_exactly, one, 500_000)
        assert trio.current_time() - started == pytest.approx(5, abs=1)


@simulated
async def test_a_sender_waits_while_the_other_end_does_not_read(world: SimulatedWorld) -> None:
    """The relay holds two windows, which are the streams' own, and two buffers, however long."""
    async with hub_in(world, RelayLimits(circuit_bytes_per_second=0)) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, _far = await hub.circuit(source, target)
        sent = 0
        with trio.move_on_after(IDLE_SECONDS / 2) as waiting:
            while True:
                await near.send_all(bytes(10_000))
                sent += 10_000
        assert waiting.cancelled_caught
        assert WINDOW_BYTES < sent <= 2 * WINDOW_BYTES + 2 * COPY_BYTES


# ---- the budget of a month


@simulated
async def test_a_spent_budget_ends_circuits_and_gives_no_new_ones(world: SimulatedWorld) -> None:
    left = 1000

    def spend(size: int) -> None:
        nonlocal left
        left -= size

    async with hub_in(world, month_left=lambda: left, spend=spend) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        near, far = await hub.circuit(source, target)
        await near.send_all(bytes(1000))
        assert len(await read_exactly(far, 1000)) == 1000
        assert left == 0
        await far.send_all(b"x")
        assert await time_until_broken(near) == pytest.approx(2 * LATENCY_SECONDS)
        assert left == 0, "nothing beyond it was carried"
        asked = await source.status_of_connecting(target.peer)
        assert asked == Status.RESOURCE_LIMIT_EXCEEDED
        assert await source.status_of_reserving() == Status.RESOURCE_LIMIT_EXCEEDED
        assert hub.relay.refusals == {Refusal.MONTH: 2}
        left = 1000
        await hub.circuit(source, target)


# ---- peers that misbehave


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x05hello", id="no protobuf"),
        pytest.param(b"\xff\xff\xff", id="too long"),
        pytest.param(messages.encode(Hop(type=HopType.STATUS)), id="an answer"),
        pytest.param(messages.encode(Hop(type=77)), id="a type that is none"),
    ],
)
@simulated
async def test_nonsense_is_answered_with_its_status(world: SimulatedWorld, garbage: bytes) -> None:
    async with hub_in(world) as hub:
        (stranger,) = await hub.guests(1)
        answer = await stranger.ask(garbage)
        assert answer.type == HopType.STATUS
        assert answer.status in (Status.MALFORMED_MESSAGE, Status.UNEXPECTED_MESSAGE)
        assert hub.relay.counts() == RelayCounts()


@pytest.mark.parametrize("said", [b"", b"\x20half of it"], ids=["nothing", "half a message"])
@simulated
async def test_a_peer_that_says_no_whole_message_is_dropped_in_time(
    world: SimulatedWorld, said: bytes
) -> None:
    async with hub_in(world) as hub:
        (stranger,) = await hub.guests(1)
        stream = await stranger.network.open(hub.peer, HOP)
        if said:
            await stream.send_all(said)
        took = await time_until_broken(stream)
        assert took == pytest.approx(TALK_SECONDS, abs=2 * LATENCY_SECONDS)


@simulated
async def test_silent_questions_of_one_peer_leave_room_for_others(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        stranger, honest = await hub.guests(2)
        for _ in range(2 * MOST_ASKING):
            await stranger.network.open(hub.peer, HOP)
            await trio.lowlevel.checkpoint()
            if hub.relay.refusals:
                break
        assert hub.relay.refusals == {Refusal.BUSY: 1}
        assert sum(hub.relay._asking.values()) == MOST_ASKING_PER_PEER
        await honest.reserve()


@simulated
async def test_silent_questions_from_one_site_leave_room_for_others(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        (honest,) = await hub.guests(1)
        machine = world.add_node("machine")
        crowd = MOST_ASKING // MOST_ASKING_PER_PEER
        strangers = [await hub.guest("", machine=machine) for _ in range(crowd)]
        async with trio.open_nursery() as nursery:
            for stranger in strangers * MOST_ASKING_PER_PEER:
                nursery.start_soon(stranger.network.open, hub.peer, HOP)
        assert sum(hub.relay._asking.values()) == MOST_ASKING_PER_SITE
        await honest.reserve()
        await trio.sleep(TALK_SECONDS)
        assert not hub.relay._asking
        assert not hub.relay._asking_sites


def _taking_it_badly(how: str) -> StreamHandler:
    async def take(stream: Stream) -> None:
        await messages.read(stream, Stop)
        if how == "refuses":
            refusal = Stop(type=StopType.STATUS, status=Status.PERMISSION_DENIED)
            await messages.send(stream, refusal)
        elif how == "sends garbage":
            await stream.send_all(b"\x05hello")
        elif how == "resets":
            stream.reset()
        else:
            await trio.sleep_forever()

    return take


@pytest.mark.parametrize("how", ["refuses", "sends garbage", "resets", "is silent", "serves none"])
@simulated
async def test_a_target_that_does_not_take_a_circuit_costs_the_asker_only_that(
    world: SimulatedWorld, how: str
) -> None:
    async with hub_in(world) as hub:
        source, target, honest = await hub.guests(3)
        await target.reserve()
        await honest.reserve()
        target.network.stop_serving(STOP)
        if how != "serves none":
            target.network.serve(STOP, _taking_it_badly(how))
        with trio.fail_after(ANSWER_SECONDS + 1):
            status = await source.status_of_connecting(target.peer)
        assert status == Status.CONNECTION_FAILED
        assert hub.relay.refusals == {Refusal.UNREACHED: 1}
        assert hub.relay.counts().circuits == 0
        await hub.circuit(source, honest)


@simulated
async def test_a_node_takes_so_many_circuits_also_if_they_come_at_once(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world) as hub:
        (guest,) = await hub.guests(1)
        taker = CircuitTaker(guest.network, lambda _: True)
        guest.network.stop_serving(STOP)
        guest.network.serve(STOP, taker.answer)
        said: Counter[int] = Counter()

        async def bring() -> None:
            stream = await hub.network.open(guest.peer, STOP)
            await messages.send(stream, Stop(type=StopType.CONNECT))
            said[(await messages.read(stream, Stop)).status] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(MOST_CIRCUITS // 2 + 3):
                nursery.start_soon(bring)
        assert said == {Status.OK: MOST_CIRCUITS // 2, Status.RESOURCE_LIMIT_EXCEEDED: 3}
        assert taker.open.total() == MOST_CIRCUITS // 2
        await trio.sleep(CIRCUIT_SECONDS)
        assert not taker.open, "nobody came over them"


@simulated
async def test_one_relay_leaves_circuits_for_others(world: SimulatedWorld) -> None:
    async with hub_in(world) as greedy, hub_in(world, name="other") as other:
        (guest,) = await greedy.guests(1)
        world.introduce(guest.network, other.network)
        await guest.network.connect(other.peer)
        taker = CircuitTaker(guest.network, lambda _: True)
        guest.network.stop_serving(STOP)
        guest.network.serve(STOP, taker.answer)

        async def taken(hub: Hub, wanted: int) -> int:
            said: Counter[int] = Counter()

            async def bring() -> None:
                stream = await hub.network.open(guest.peer, STOP)
                await messages.send(stream, Stop(type=StopType.CONNECT))
                said[(await messages.read(stream, Stop)).status] += 1

            async with trio.open_nursery() as nursery:
                for _ in range(wanted):
                    nursery.start_soon(bring)
            return said[Status.OK]

        assert await taken(greedy, MOST_CIRCUITS) == MOST_CIRCUITS // 2
        assert await taken(other, 32) == 32, "as many as a relay of ours has for one peer"
        assert await taken(other, MOST_CIRCUITS) == MOST_CIRCUITS // 4 - 32
        assert await taken(greedy, 1) == 0
        await trio.sleep(CIRCUIT_SECONDS)
        assert await taken(greedy, MOST_CIRCUITS) == MOST_CIRCUITS // 2


@simulated
async def test_an_asker_that_leaves_while_its_target_is_asked_leaves_nothing(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world) as hub:
        source, target = await hub.guests(2)
        await target.reserve()
        with trio.move_on_after(3 * LATENCY_SECONDS):
            await hub.circuit(source, target)
        await trio.sleep(1)
        end = target.network.link_end(hub.peer)
        assert end is not None
        assert not end.streams
        assert hub.relay.counts().circuits == 0


@simulated
async def test_a_relay_that_ends_serves_no_more_and_its_peers_links_go_on(
    world: SimulatedWorld,
) -> None:
    async with hub_in(world) as hub:
        (guest,) = await hub.guests(1)
    hub.network.serve("/echo", echo)
    stream = await guest.network.open(hub.peer, "/echo")
    await stream.send_all(b"only the relay")
    assert await read_exactly(stream, 14) == b"only the relay"
