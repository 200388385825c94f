"""A node's places at relays: kept, renewed, replaced, and no relay's word believed."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nat import messages
from nat.messages import LONGEST_MESSAGE_BYTES, Hop, HopType, Status
from nat.relay_limits import RelayLimits
from nat.relaying import HOP, TALK_SECONDS, Relay
from nat.reservations import (
    ADDRESSES_PER_RELAY,
    AWAY_DELAY_SECONDS,
    AWAY_DELAY_WITH_A_PLACE_SECONDS,
    LONGEST_DELAY_SECONDS,
    LONGEST_SECONDS,
    MOST_CANDIDATES,
    NO_RELAY_SECONDS,
    SHORTEST_SECONDS,
    SLOW_SECONDS,
    STARTING_SECONDS,
    WANTED,
    RelayChoice,
    Reservation,
    Reservations,
    addresses_to_pass_on,
    reserve,
)
from protocols.errors import RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import Stream, StreamHandler
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.nat.relays import Hub, hub_in
from tests.simulated.worlds import LATENCY_SECONDS, SETTINGS, simulated

A, B, C, D = (PeerId(name) for name in "abcd")
LIFE_SECONDS = 100.0
REPLACED_SECONDS = 1.0  # after it is known to be dead
BACK_SECONDS = 15.0


def reservation(relay: PeerId, now: float, seconds: float = LIFE_SECONDS) -> Reservation:
    return Reservation(relay, (), now + seconds / 2, now + seconds)


# ---- which relay to ask when, without a network


class ChoiceInTime(RuleBasedStateMachine):
    """All that relays may do to a RelayChoice, in any order and after any time."""

    relays = some.sampled_from([PeerId(name) for name in "abcdef"])

    @initialize()
    def start(self) -> None:
        self.now = 1000.0
        self.choice = RelayChoice()
        self.candidates = [PeerId(name) for name in "abcdef"]
        self.failures: dict[PeerId, tuple[float, float]] = {}  # the last, and the pause after it
        self.asked: dict[PeerId, float] = {}
        self.had: dict[PeerId, Reservation] = {}

    @rule(seconds=some.sampled_from([0.5, 3.0, 20.0, 51.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(order=some.permutations("abcdef"))
    def look(self, order: list[str]) -> None:
        """What `Reservations` does whenever something has happened."""
        candidates = [PeerId(name) for name in order]
        live = [one for one in self.choice.held if one.ends_at > self.now]
        asked = self.choice.to_ask(candidates, self.now)
        assert set(self.choice.held) == set(live), "a live one is never dropped, a dead one always"
        assert len(asked) == len(set(asked))
        assert not set(asked) & set(self.asked), "one question at a time"
        renewed = [relay for relay in asked if self.choice.holds(relay)]
        fresh = [relay for relay in asked if not self.choice.holds(relay)]
        held = {one.relay for one in live}
        expected = [
            relay
            for relay, at in self.asked.items()
            if self.now < at + SLOW_SECONDS and relay not in held
        ]
        wanted = self.choice.wanted
        assert len(live) + len(expected) + len(fresh) <= max(wanted, len(live) + len(expected))
        assert len(renewed) <= wanted
        for one in live[:wanted]:
            if one.relay in renewed:
                assert one.renew_at <= self.now
            elif one.renew_at <= self.now:
                assert one.relay in {*self.failures, *self.asked}, "renewed unless it just failed"
        for relay in fresh:
            failed_at, pause = self.failures.get(relay, (float("-inf"), 0.0))
            assert self.now >= failed_at + min(pause, LONGEST_DELAY_SECONDS)
        self.asked |= dict.fromkeys(asked, self.now)

    @rule(relay=relays, good=some.booleans())
    def answers(self, relay: PeerId, good: bool) -> None:
        if self.asked.pop(relay, None) is None:
            return
        if good:
            self.choice.reserved(reservation(relay, self.now))
            self.failures.pop(relay, None)
        else:
            _, pause = self.failures.get(relay, (0.0, 1.0))
            self.choice.failed(relay, "no", self.now)
            self.failures[relay] = (self.now, min(2 * pause, LONGEST_DELAY_SECONDS))

    @rule(relay=relays)
    def link_ends(self, relay: PeerId) -> None:
        assert self.choice.lost(relay) is (relay in self.had)

    @rule()
    def forgive(self) -> None:
        self.choice.forgive()
        self.failures.clear()
        self.asked.clear()

    @rule(is_needed=some.booleans())
    def need(self, is_needed: bool) -> None:
        self.choice.wanted = WANTED if is_needed else 0

    @invariant()
    def remembers_what_is_held(self) -> None:
        self.had = {one.relay: one for one in self.choice.held}

    @invariant()
    def sleeps_until_there_is_something_to_do(self) -> None:
        """It is woken by every answer, by lost links, and by what else is called."""
        twin = copy.deepcopy(self.choice)
        next_at = twin.next_at(self.candidates, self.now)
        if next_at > self.now:
            assert twin.to_ask(self.candidates, self.now) == []
            just_before = min(next_at, self.now + 10_000.0) - 0.01
            if just_before > self.now:
                assert twin.to_ask(self.candidates, just_before) == []


ChoiceInTime.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestChoice = pytest.mark.slow(ChoiceInTime.TestCase)


def test_two_are_asked_at_first_and_none_when_both_are_held() -> None:
    choice = RelayChoice()
    assert choice.to_ask([A, B, C], 0) == [A, B]
    choice.reserved(reservation(A, 0))
    assert choice.to_ask([A, B, C], 0) == []
    choice.reserved(reservation(B, 0))
    assert choice.to_ask([A, B, C], 0) == []
    assert choice.next_at([A, B, C], 0) == LIFE_SECONDS / 2


def test_each_is_renewed_at_half_of_its_life() -> None:
    choice = RelayChoice()
    choice.reserved(reservation(A, 0))
    choice.reserved(reservation(B, 10))
    assert choice.to_ask([A, B], 49) == []
    assert choice.to_ask([A, B], 50) == [A]
    choice.reserved(reservation(A, 50))
    assert choice.to_ask([A, B], 60) == [B]


def test_a_renewal_that_fails_drops_nothing_before_the_end() -> None:
    choice = RelayChoice()
    choice.reserved(reservation(A, 0))
    choice.failed(A, "busy", 50)
    assert choice.holds(A)
    assert choice.to_ask([A], 51) == []
    assert choice.to_ask([A], 52) == [A]
    assert choice.holds(A)
    choice.to_ask([A], LIFE_SECONDS)
    assert not choice.holds(A)


def test_the_delay_doubles_up_to_ten_minutes_and_ends_with_a_success() -> None:
    choice, now = RelayChoice(), 0.0
    delays = []
    for _ in range(12):
        choice.failed(A, "full", now)
        delays.append(choice.next_at([A], now) - now)
        now += delays[-1]
        assert choice.to_ask([A], now) == [A]
    assert delays == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600]
    choice.reserved(reservation(A, now))
    choice.lost(A)
    choice.failed(A, "gone", now)
    assert choice.next_at([A], now) == now + 2


def test_those_that_never_failed_are_asked_before_others() -> None:
    choice = RelayChoice(wanted=1)
    choice.failed(A, "full", 0)
    choice.failed(B, "full", 0)
    choice.failed(B, "full", 5)
    assert choice.to_ask([B, A, C], 1000) == [C]
    choice.failed(C, "no relay", 0, NO_RELAY_SECONDS)
    assert choice.to_ask([C, B, A], 1000) == [A]


def test_a_relay_that_was_lost_is_asked_at_once_but_after_another() -> None:
    choice = RelayChoice(wanted=1)
    choice.reserved(reservation(A, 0))
    choice.lost(A)
    assert choice.to_ask([A, B], 1) == [B]
    choice.failed(B, "full", 1)
    assert choice.to_ask([A, B], 1) == [A]


def test_another_is_asked_beside_one_that_is_slow_and_both_may_answer() -> None:
    choice = RelayChoice(wanted=1)
    assert choice.to_ask([A, B, C], 0) == [A]
    assert choice.is_waiting(0)
    assert choice.next_at([A, B, C], 0) == SLOW_SECONDS
    assert choice.to_ask([A, B, C], SLOW_SECONDS / 2) == []
    assert choice.to_ask([A, B, C], SLOW_SECONDS) == [B]
    choice.reserved(reservation(B, 3))
    assert choice.to_ask([A, B, C], 10) == []
    assert not choice.is_waiting(10)
    choice.reserved(reservation(A, 10))
    assert choice.to_ask([A, B, C], 3 + LIFE_SECONDS / 2) == [B]
    choice.reserved(reservation(B, 3 + LIFE_SECONDS / 2))
    assert {one.relay for one in choice.held} == {A, B}
    choice.to_ask([A, B, C], 10 + LIFE_SECONDS)
    assert [one.relay for one in choice.held] == [B], "one too many lapses"


def test_a_relay_that_is_away_is_tried_often_without_a_place_and_at_once_with_a_link() -> None:
    choice, now = RelayChoice(), 0.0
    for _ in range(10):
        choice.failed(A, "unreachable", now, is_away=True)
        now = choice.next_at([A], now)
    choice.failed(A, "unreachable", now, is_away=True)
    assert choice.next_at([A], now) == now + AWAY_DELAY_SECONDS
    choice.reserved(reservation(B, now, 1e6))
    assert choice.to_ask([A, B], now) == [A], "what kept both away may be over"
    choice.failed(A, "unreachable", now, is_away=True)
    assert choice.next_at([A, B], now) == now + AWAY_DELAY_WITH_A_PLACE_SECONDS
    choice.linked(A)
    assert choice.to_ask([A, B], now) == [A]
    choice.failed(A, "full", now)
    choice.linked(A)
    assert choice.to_ask([A, B], now) == []


def test_what_is_not_needed_lapses_and_is_taken_up_again_when_it_is() -> None:
    choice = RelayChoice()
    for relay in (A, B):
        choice.reserved(reservation(relay, 0))
    choice.wanted = 0
    assert choice.to_ask([A, B, C], LIFE_SECONDS - 1) == []
    assert choice.holds(A)
    choice.wanted = WANTED
    assert choice.to_ask([A, B, C], LIFE_SECONDS - 1) == [A, B]
    choice.failed(A, "busy", LIFE_SECONDS - 1)
    choice.wanted = 0
    assert choice.to_ask([A, B, C], LIFE_SECONDS) == []
    assert choice.held == ()


def test_forgiving_makes_all_of_them_worth_asking() -> None:
    choice = RelayChoice()
    for relay in (A, B):
        choice.failed(relay, "unreachable", 0, NO_RELAY_SECONDS)
    assert choice.to_ask([A, B], 1) == []
    choice.forgive()
    assert choice.to_ask([A, B], 1) == [A, B]


def test_only_so_many_relays_are_remembered() -> None:
    choice = RelayChoice()
    for number in range(10 * MOST_CANDIDATES):
        relay = PeerId(str(number))
        if number % 2:
            choice.failed(relay, "no", 0)
        else:
            choice.reserved(reservation(relay, 0))
            choice.lost(relay)
    assert len(choice.why) == MOST_CANDIDATES


# ---- what a relay says of itself

PUBLIC, PRIVATE = "/ip4/8.8.8.8/tcp/4001", "/ip4/192.168.1.7/tcp/4001"
VICTIM, VICTIM6 = "/ip4/9.9.9.9/tcp/443", "/ip6/2001:4860::1/tcp/443"

told_addresses = some.lists(
    some.sampled_from(
        [PUBLIC, "/ip4/8.8.8.8/tcp/9", PRIVATE, VICTIM, VICTIM6, "/ip4/127.0.0.1/tcp/22",
         "/ip4/8.8.8.8/udp/4001/quic-v1", "/dns/example.org/tcp/1", "/ip4/8.8.8.8/tcp/0",
         "/ip4/8.8.8.8/tcp/1/p2p-circuit", "/ip4/224.0.0.1/tcp/1", "", "nonsense"]
    ),
    max_size=16,
)  # fmt: skip


@given(told_addresses)
def test_of_a_relay_on_the_internet_other_addresses_of_the_same_kind_are_not_passed_on(
    told: list[str],
) -> None:
    passed = addresses_to_pass_on(PUBLIC, tuple(told))
    assert passed[0] == PUBLIC
    assert set(passed) <= {PUBLIC, "/ip4/8.8.8.8/tcp/9", VICTIM6}
    assert len(passed) == len(set(passed)) <= ADDRESSES_PER_RELAY


@given(told_addresses)
def test_of_a_relay_in_our_own_network_one_public_address_is_passed_on(told: list[str]) -> None:
    passed = addresses_to_pass_on(PRIVATE, tuple(told))
    assert passed[0] == PRIVATE
    public = {"/ip4/8.8.8.8/tcp/4001", "/ip4/8.8.8.8/tcp/9", VICTIM}
    assert len(public & set(passed)) <= 1
    assert set(passed) <= {PRIVATE, VICTIM6} | public


# ---- in a world


class Home:
    """A node that keeps places, as a process of its own."""

    def __init__(self, world: SimulatedWorld, candidates: Callable[[], list[Hub]]) -> None:
        self.network = world.add_node("home", NodeSettings(dialable=False))
        self._candidates = candidates
        self.changes = 0
        self.reservations = Reservations(self.network, self._peers, self._changed)
        world.start(self.network, lambda _: self.reservations.run())

    def _peers(self) -> list[PeerId]:
        hubs = self._candidates()
        for hub in hubs:
            self.network.learn_addresses(hub.peer, hub.network.addresses())
        return [hub.peer for hub in hubs]

    def _changed(self) -> None:
        self.changes += 1

    @property
    def relays(self) -> set[PeerId]:
        return {one.relay for one in self.reservations.held}


@asynccontextmanager
async def hubs_in(
    world: SimulatedWorld, count: int, limits: RelayLimits | None = None
) -> AsyncIterator[list[Hub]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(hub_in(world, limits, name=f"hub-{number}"))
            for number in range(count)
        ]


@simulated
async def test_a_node_has_two_places_at_once_and_announces_both(world: SimulatedWorld) -> None:
    async with hubs_in(world, 3) as hubs:
        home = Home(world, lambda: hubs)
        await home.reservations.asked_once.wait()
        assert home.relays == {hubs[0].peer, hubs[1].peer}
        assert set(home.reservations.addresses()) == {
            f"{hub.network.address}/p2p-circuit" for hub in hubs[:2]
        }
        assert [hub.relay.counts().reservations for hub in hubs] == [1, 1, 0]


@pytest.mark.slow
@simulated
async def test_a_place_is_kept_for_a_day_by_renewing_it_at_half_of_its_life(
    world: SimulatedWorld,
) -> None:
    async with hubs_in(world, 2, RelayLimits(reservation_seconds=1800)) as hubs:
        home = Home(world, lambda: hubs)
        await home.reservations.asked_once.wait()
        for _ in range(24 * 60 - 1):
            await trio.sleep(60)
            assert home.relays == {hub.peer for hub in hubs}
            assert [hub.relay.counts().reservations for hub in hubs] == [1, 1]
        assert [hub.relay.counts().reserved for hub in hubs] == [96, 96]


@pytest.mark.parametrize("skew_seconds", [-7200.0, -1000.0, 1000.0, 7200.0])
@simulated
async def test_a_place_is_kept_though_the_clocks_differ(
    world: SimulatedWorld, skew_seconds: float
) -> None:
    async with hubs_in(world, 2) as hubs:
        for hub in hubs:
            world.set_clock_skew(hub.network, skew_seconds)
        Home(world, lambda: hubs)
        for _ in range(4 * 60):
            await trio.sleep(60)
            assert [hub.relay.counts().reservations for hub in hubs] == [1, 1]


@pytest.mark.parametrize(
    ("how", "noticed_seconds"),
    [
        ("ends", LATENCY_SECONDS),
        ("crashes", LATENCY_SECONDS),
        ("falls silent", SETTINGS.silence_seconds),
        ("stops", SETTINGS.silence_seconds),
    ],
)
@simulated
async def test_a_relay_that_dies_is_replaced(
    world: SimulatedWorld, how: str, noticed_seconds: float
) -> None:
    async with hubs_in(world, 3) as hubs:
        home = Home(world, lambda: hubs)
        await home.reservations.asked_once.wait()
        dead = hubs[0].network
        if how == "ends":
            await dead.aclose()
        elif how == "stops":
            world.stop(dead)
        else:
            world.crash(dead, silently=how == "falls silent")
        await trio.sleep(noticed_seconds + REPLACED_SECONDS)
        assert home.relays == {hubs[1].peer, hubs[2].peer}


@simulated
async def test_a_silent_candidate_does_not_delay_the_next_one(world: SimulatedWorld) -> None:
    async with hubs_in(world, 3) as hubs:
        deaf = _liar(world, _silent)
        home = Home(world, lambda: [*hubs[:2], deaf, hubs[2]])
        await home.reservations.asked_once.wait()
        assert home.relays == {hubs[0].peer, hubs[1].peer}
        world.crash(hubs[0].network, silently=True)
        await trio.sleep(SETTINGS.silence_seconds + SLOW_SECONDS + REPLACED_SECONDS)
        assert home.relays == {hubs[1].peer, hubs[2].peer}


@simulated
async def test_full_relays_are_passed_over_for_others(world: SimulatedWorld) -> None:
    async with (
        hubs_in(world, 2, RelayLimits(reservations=0)) as full,
        hub_in(world, name="free") as free,
        hub_in(world, name="also-free") as also_free,
    ):
        home = Home(world, lambda: [*full, free, also_free])
        await trio.sleep(2)
        assert home.relays == {free.peer, also_free.peer}
        assert "no place left" in home.reservations.why_none()


@simulated
async def test_a_full_relay_is_asked_less_and_less_often(world: SimulatedWorld) -> None:
    async with hub_in(world, RelayLimits(reservations=0)) as full:
        Home(world, lambda: [full])
        await trio.sleep(3600)
        asked = full.relay.refusals.total()
        assert 10 <= asked <= 16  # 2, 4, 8, … 512, and then every 600 seconds


@simulated
async def test_when_all_relays_are_down_for_two_minutes_their_places_come_back(
    world: SimulatedWorld,
) -> None:
    async with hubs_in(world, 2) as hubs:
        home = Home(world, lambda: hubs)
        await home.reservations.asked_once.wait()
        cuts = world.partition([home.network], [hub.network for hub in hubs])
        await trio.sleep(120)
        assert home.relays == set()
        assert home.reservations.addresses() == ()
        world.heal(cuts)
        await trio.sleep(BACK_SECONDS)
        assert home.relays == {hub.peer for hub in hubs}


@pytest.mark.parametrize("away_seconds", [10, 119, 121, 124, 1200])
@simulated
async def test_relays_that_come_back_after_a_crash_are_found_in_time(
    world: SimulatedWorld, away_seconds: int
) -> None:
    async with hubs_in(world, 2) as hubs:
        home = Home(world, lambda: hubs)
        await home.reservations.asked_once.wait()
        cuts = world.partition([home.network], [hub.network for hub in hubs])
        for hub in hubs:
            world.break_link(home.network, hub.network)
        await trio.sleep(away_seconds)
        assert home.relays == set()
        world.heal(cuts)
        await trio.sleep(BACK_SECONDS)
        assert home.relays == {hub.peer for hub in hubs}


@simulated
async def test_a_new_network_is_tried_at_once(world: SimulatedWorld) -> None:
    async with hubs_in(world, 2) as hubs:
        home = Home(world, lambda: hubs)
        cuts = world.partition([home.network], [hub.network for hub in hubs])
        await trio.sleep(600)
        world.heal(cuts)
        home.reservations.look_again()
        await trio.sleep(1)
        assert home.relays == {hub.peer for hub in hubs}


@simulated
async def test_a_candidate_that_appears_is_asked_when_it_is_linked(world: SimulatedWorld) -> None:
    async with hub_in(world) as hub:
        known: list[Hub] = []
        home = Home(world, lambda: known)
        await trio.sleep(60)
        assert "no relay is known" in home.reservations.why_none()
        known.append(hub)
        home.network.learn_addresses(hub.peer, hub.network.addresses())
        await home.network.connect(hub.peer)
        await trio.sleep(1)
        assert home.relays == {hub.peer}


# ---- relays that lie, in a world


def _answering(answer: Any) -> StreamHandler:
    async def handle(stream: Stream) -> None:
        await messages.read(stream, Hop)
        raw = answer if isinstance(answer, bytes) else messages.encode(answer)
        await stream.send_all(raw)

    return handle


def _granted(expire: int, addresses: tuple[str, ...] = ()) -> Any:
    answer = Hop(type=HopType.STATUS, status=Status.OK)
    answer.reservation.expire = expire
    answer.reservation.addrs.extend(messages.packed(addresses))
    return answer


def _liar(world: SimulatedWorld, handler: StreamHandler) -> Hub:
    network = world.add_node("liar")
    network.serve(HOP, handler)
    return Hub(world, network, None)  # type: ignore[arg-type]  # it only pretends to have one


async def _linked(world: SimulatedWorld, liar: Hub) -> SimulatedNetwork:
    home = world.add_node("home")
    home.learn_addresses(liar.peer, liar.network.addresses())
    await home.connect(liar.peer)
    return home


@pytest.mark.parametrize(
    ("expire", "believed_seconds"),
    [
        pytest.param(0, SHORTEST_SECONDS, id="in the past"),
        pytest.param(1_767_225_601, SHORTEST_SECONDS, id="in a second"),
        pytest.param(1_767_225_600 + 100 * 365 * 86_400, LONGEST_SECONDS, id="in a century"),
        pytest.param(2**64 - 1, LONGEST_SECONDS, id="at the end of time"),
    ],
)
@simulated
async def test_the_time_that_a_relay_says_is_believed_within_bounds(
    world: SimulatedWorld, expire: int, believed_seconds: float
) -> None:
    liar = _liar(world, _answering(_granted(expire)))
    home = await _linked(world, liar)
    found = await reserve(home, liar.peer)
    now = trio.current_time()
    assert found.ends_at == pytest.approx(now + believed_seconds, abs=2)
    assert found.renew_at == pytest.approx(now + believed_seconds / 2, abs=2)


@simulated
async def test_a_relay_that_says_it_ends_at_once_is_not_asked_all_the_time(
    world: SimulatedWorld,
) -> None:
    asked = 0
    answer = _answering(_granted(0))

    async def count(stream: Stream) -> None:
        nonlocal asked
        asked += 1
        await answer(stream)

    liar = _liar(world, count)
    home = Home(world, lambda: [liar])
    await trio.sleep(3600)
    assert home.relays == {liar.peer}
    assert asked <= 3600 / (SHORTEST_SECONDS / 2) + 1


@simulated
async def test_only_addresses_at_the_place_of_the_link_are_announced(
    world: SimulatedWorld,
) -> None:
    told = ("/ip4/10.9.9.9/tcp/22", "/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.0/tcp/80")
    liar = _liar(world, _answering(_granted(0, told)))
    home = await _linked(world, liar)
    found = await reserve(home, liar.peer)
    assert found.addresses == (
        f"{liar.network.address}/p2p-circuit",
        f"/ip4/10.0.0.0/tcp/80/p2p/{liar.peer}/p2p-circuit",
    )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="the end"),
        pytest.param(b"\x05hello", id="no protobuf"),
        pytest.param(b"\xff\xff\xff", id="too long"),
        pytest.param(bytes([0x81, 0x20]) + bytes(LONGEST_MESSAGE_BYTES + 1), id="a byte too long"),
    ],
)
@simulated
async def test_garbage_is_no_reservation(world: SimulatedWorld, answer: bytes) -> None:
    liar = _liar(world, _answering(answer))
    home = await _linked(world, liar)
    with pytest.raises((RemoteMisbehaviour, trio.BrokenResourceError)):
        await reserve(home, liar.peer)


async def _silent(_stream: Stream) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(_silent, id="silent"),
        pytest.param(_answering(b"\x05hello"), id="garbage"),
        pytest.param(_answering(Hop(type=HopType.STATUS, status=299)), id="unknown status"),
        pytest.param(_answering(Hop(type=HopType.RESERVE)), id="a question"),
    ],
)
@simulated
async def test_a_relay_that_answers_badly_costs_no_place_elsewhere(
    world: SimulatedWorld, handler: StreamHandler
) -> None:
    liar = _liar(world, handler)
    async with hubs_in(world, 2) as hubs:
        home = Home(world, lambda: [liar, *hubs])
        await trio.sleep(TALK_SECONDS + 1)
        assert home.relays == {hub.peer for hub in hubs}
        await trio.sleep(600)
        assert home.relays == {hub.peer for hub in hubs}


@simulated
async def test_a_relay_that_is_just_starting_is_asked_again_soon(world: SimulatedWorld) -> None:
    network = world.add_node("starting")
    starting = Hub(world, network, None)  # type: ignore[arg-type]  # it has no relay yet
    home = Home(world, lambda: [starting])
    await trio.sleep(2)
    assert home.reservations.why_none() == f"{starting.peer}: it is no relay"
    relay = Relay(network, RelayLimits())
    async with trio.open_nursery() as nursery:
        await nursery.start(relay.run)
        await trio.sleep(STARTING_SECONDS)
        assert home.relays == {starting.peer}
        nursery.cancel_scope.cancel()


@simulated
async def test_a_peer_that_is_no_relay_is_asked_twice_an_hour(world: SimulatedWorld) -> None:
    network = world.add_node("plain")
    plain = Hub(world, network, None)  # type: ignore[arg-type]  # it has none
    home = Home(world, lambda: [plain])
    await trio.sleep(60)
    assert home.reservations.why_none() == f"{plain.peer}: it is no relay"
    before = home.network.messages_sent
    await trio.sleep(NO_RELAY_SECONDS - 100)
    assert home.network.messages_sent == before
