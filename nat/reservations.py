"""A private node's places at relays: find them, keep them, and find others when they are lost.

    reservations = Reservations(network, candidates)
    nursery.start_soon(reservations.run)
    reservations.addresses()            # circuit addresses to announce

Two relays are held at once, so that the loss of one is not the loss of the node. A reservation is
renewed at half of its life over the link that it hangs on, and a live one is never dropped for
another. A relay that is lost is replaced at once. While one that was asked says nothing, another is
asked beside it. One that refused is asked again with a growing delay, and after the others. One
that could not be reached is tried again within seconds as long as there is no place at all: the
backbones of a run may all be away for a minute.

A node that needs no relay any more renews nothing, and its places lapse.

`RelayChoice` decides, and is pure. What a relay says is not believed: its reservation lasts at most
LONGEST_SECONDS and at least SHORTEST_SECONDS here, and of its addresses only those are passed on
that lie where the link goes. Otherwise it could make us send everybody to somebody else's address.
There are two exceptions. If the link goes to a private address, others need a public one. And one
address of the other IP version is taken, because ours does not tell what that should be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import trio

from nat import messages
from nat.addresses import ip_of, is_global, port_of, without_peer
from nat.messages import Hop, HopType, Status
from nat.relaying import HOP, TALK_SECONDS
from protocols.errors import PotluckError, ProtocolNotServed, Unreachable
from protocols.identity import PeerId
from protocols.network import Network, Reach

WANTED: Final = 2
SHORTEST_SECONDS: Final = 120.0  # a relay that lies about its time must not be asked all the time
# As long as our own relays give. A relay tells when by its clock a reservation ends. If that is an
# hour ahead of ours, or ours an hour behind, a longer one would end before we renew it.
LONGEST_SECONDS: Final = 1800.0
SLOW_SECONDS: Final = 2.0  # for a dial and an answer; then the next candidate is asked as well
FIRST_DELAY_SECONDS: Final = 2.0
LONGEST_DELAY_SECONDS: Final = 600.0
# A relay that comes back is found within this time by a node without a place. 256 such nodes dial
# it some forty times a second.
AWAY_DELAY_SECONDS: Final = 8.0
AWAY_DELAY_WITH_A_PLACE_SECONDS: Final = 60.0
JITTER: Final = 0.5  # of a delay
NO_RELAY_SECONDS: Final = 1800.0  # for a peer that does not serve the protocol
STARTING_SECONDS: Final = 15.0  # the first time: a relay that starts listens before it serves it
MOST_CANDIDATES: Final = 64
ADDRESSES_PER_RELAY: Final = 3
NO_RELAY: Final = "it is no relay"

log = logging.getLogger("potluck.nat")


@dataclass(frozen=True)
class Reservation:
    """A place at one relay. `renew_at` and `ends_at` are in trio's time."""

    relay: PeerId
    addresses: tuple[str, ...]
    """Circuit addresses without the final /p2p/<us>."""
    renew_at: float
    ends_at: float


@dataclass(frozen=True)
class _Failure:
    """The last question to a relay that came to nothing.

    `share`: of the delay, so that nodes that lost a relay together do not return together.
    `is_away`: there is no link to it either.
    """

    why: str
    at: float = float("-inf")
    delay_seconds: float = 0.0
    share: float = 1.0
    is_away: bool = False


class RelayChoice:
    """Which relay to ask when. Pure; times are arguments. `chance` gives numbers from 0 to 1.

    Invariants: a relay is asked one question at a time. No more than `wanted` reservations are
    renewed; further ones were made because relays that were given up for slow did answer, and
    lapse. At most MOST_CANDIDATES failures are remembered.
    """

    def __init__(self, wanted: int = WANTED, chance: Callable[[], float] = lambda: 0.0) -> None:
        self.wanted = wanted
        self._chance = chance
        self._held: dict[PeerId, Reservation] = {}  # those that are renewed first
        self._asked: dict[PeerId, float] = {}  # when; it has not answered yet
        self._failures: dict[PeerId, _Failure] = {}  # the newest last

    @property
    def held(self) -> tuple[Reservation, ...]:
        return tuple(self._held.values())

    @property
    def why(self) -> dict[PeerId, str]:
        """Why the last question to each relay came to nothing."""
        return {relay: failure.why for relay, failure in self._failures.items()}

    def holds(self, relay: PeerId) -> bool:
        return relay in self._held

    def reserved(self, reservation: Reservation) -> None:
        self._asked.pop(reservation.relay, None)
        self._failures.pop(reservation.relay, None)
        if not self._held:  # what kept all of them away may be over
            for other in self._failures:
                self.linked(other)
        self._held[reservation.relay] = reservation

    def failed(
        self,
        relay: PeerId,
        why: str,
        now: float,
        delay_seconds: float = 0.0,
        *,
        is_away: bool = False,
    ) -> None:
        """A question came to nothing. A reservation that is still held lives on."""
        self._asked.pop(relay, None)
        before = self._delay_of(relay) or FIRST_DELAY_SECONDS / 2
        delay = delay_seconds or min(2 * before, LONGEST_DELAY_SECONDS)
        share = 1.0 if delay_seconds else 1.0 - JITTER * self._chance()
        self._note(relay, _Failure(why, now, delay, share, is_away))

    def lost(self, relay: PeerId, why: str = "its link has ended") -> bool:
        """The link to this relay is gone, and the place with it; whether there was one.

        It may be asked again at once, but after others: it may be dead.
        """
        if self._held.pop(relay, None) is None:
            return False
        delay = self._delay_of(relay) or FIRST_DELAY_SECONDS / 2
        self._note(relay, _Failure(why, delay_seconds=delay, is_away=True))
        return True

    def linked(self, relay: PeerId) -> None:
        """This peer can be reached again. If it was away, it may be asked at once."""
        failure = self._failures.get(relay)
        if failure is not None and failure.is_away:
            self._failures[relay] = replace(failure, at=float("-inf"))

    def forgive(self) -> None:
        """The machine's network is another one: what failed before may work now.

        The questions under way are given up.
        """
        self._asked.clear()
        self._failures = {relay: _Failure(why) for relay, why in self.why.items()}

    def to_ask(self, candidates: Iterable[PeerId], now: float) -> list[PeerId]:
        """The relays to ask now: those to renew, and as many others as are missing.

        They count as asked until `reserved` or `failed` says how it went.
        """
        renewed = {one.relay for one in self.held[: self.wanted]}
        for relay in [one.relay for one in self.held if one.ends_at <= now]:
            if relay in renewed:
                self.lost(relay, "it did not renew the reservation")
            else:
                del self._held[relay]
        renew = [
            one.relay
            for one in self.held[: self.wanted]
            if one.renew_at <= now and self._may_ask(one.relay, now)
        ]
        fresh = [
            relay for relay in candidates if relay not in self._held and self._may_ask(relay, now)
        ]
        fresh.sort(key=self._delay_of)
        asked = [*renew, *fresh[: self._missing(now)]]
        self._asked |= dict.fromkeys(asked, now)
        return asked

    def next_at(self, candidates: Iterable[PeerId], now: float) -> float:
        """When `to_ask` may say something else, if nothing happens before."""
        times = [one.ends_at for one in self.held]
        times += [
            max(one.renew_at, self._not_before(one.relay))
            for one in self.held[: self.wanted]
            if one.relay not in self._asked
        ]
        times += [at + SLOW_SECONDS for at in self._asked.values() if at + SLOW_SECONDS > now]
        if self._missing(now):
            times += [
                self._not_before(relay)
                for relay in candidates
                if relay not in self._held and relay not in self._asked
            ]
        return min(times, default=float("inf"))

    def is_waiting(self, now: float) -> bool:
        """Whether a relay was asked so lately that its answer may be waited for."""
        return any(now < at + SLOW_SECONDS for at in self._asked.values())

    def _missing(self, now: float) -> int:
        """How many relays are to be asked beside those held, and those asked a moment ago."""
        expected = sum(
            relay not in self._held and now < at + SLOW_SECONDS for relay, at in self._asked.items()
        )
        return max(0, self.wanted - len(self._held) - expected)

    def _may_ask(self, relay: PeerId, now: float) -> bool:
        return relay not in self._asked and self._not_before(relay) <= now

    def _not_before(self, relay: PeerId) -> float:
        failure = self._failures.get(relay)
        if failure is None:
            return float("-inf")
        delay = failure.delay_seconds
        if failure.is_away:
            longest = AWAY_DELAY_WITH_A_PLACE_SECONDS if self._held else AWAY_DELAY_SECONDS
            delay = min(delay, longest)
        return failure.at + delay * failure.share

    def _delay_of(self, relay: PeerId) -> float:
        failure = self._failures.get(relay)
        return 0.0 if failure is None else failure.delay_seconds

    def _note(self, relay: PeerId, failure: _Failure) -> None:
        self._failures.pop(relay, None)
        self._failures[relay] = failure
        for forgotten in list(self._failures)[:-MOST_CANDIDATES]:
            del self._failures[forgotten]


class Reservations:
    """Keeps the places. `candidates` names the peers that may be relays, the best first."""

    def __init__(
        self,
        network: Network,
        candidates: Callable[[], Iterable[PeerId]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._network = network
        self._candidates = candidates
        self._changed = changed
        self._choice = RelayChoice(chance=network.random.random)
        self._asking: set[trio.CancelScope] = set()
        self._woken = trio.Event()
        self.asked_once = trio.Event()
        """Set when the candidates that were known at first have answered, or are slow."""

    @property
    def held(self) -> tuple[Reservation, ...]:
        return self._choice.held

    def why_none(self) -> str:
        """For people: why there is no relay."""
        reasons = [f"{relay}: {why}" for relay, why in self._choice.why.items()]
        return "; ".join(reasons) or "no relay is known"

    def holds(self, relay: PeerId) -> bool:
        return self._choice.holds(relay)

    def addresses(self) -> tuple[str, ...]:
        """The circuit addresses of this node, the relays in turn."""
        lists = [one.addresses for one in self._choice.held]
        rounds = range(max(map(len, lists), default=0))
        return tuple(each[turn] for turn in rounds for each in lists if turn < len(each))

    def need(self, *, is_needed: bool) -> None:
        """Keep places, or renew none and let them lapse: until then they may still be used."""
        self._choice.wanted = WANTED if is_needed else 0
        self._woken.set()

    def look_again(self) -> None:
        """Ask again soon: there are new candidates, or the network has changed."""
        for question in self._asking:
            question.cancel()
        self._choice.forgive()
        self._woken.set()

    async def run(self) -> None:
        """Find and keep places until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_links)
            while True:
                self._woken = trio.Event()
                now, held = trio.current_time(), self.held
                candidates = list(self._candidates())[:MOST_CANDIDATES]
                for relay in self._choice.to_ask(candidates, now):
                    nursery.start_soon(self._ask, relay)
                for one in held:
                    if not self.holds(one.relay):
                        log.info("the place at the relay %s has lapsed", one.relay)
                if len(self.held) < len(held):
                    self._changed()
                if not self._choice.is_waiting(now):
                    self.asked_once.set()
                with trio.move_on_at(self._choice.next_at(candidates, now)):
                    await self._woken.wait()

    async def _follow_links(self) -> None:
        with self._network.link_events() as events:
            async for event in events:
                if event.reach is Reach.NONE and self._choice.lost(event.peer):
                    log.info("lost the relay %s: its link has ended", event.peer)
                    self._changed()
                    self._woken.set()
                elif event.reach is Reach.DIRECT:
                    self._choice.linked(event.peer)
                    self._woken.set()

    async def _ask(self, relay: PeerId) -> None:
        with trio.CancelScope() as question:
            self._asking.add(question)
            try:
                await self._take_place(relay)
            finally:
                self._asking.discard(question)
        self._woken.set()

    async def _take_place(self, relay: PeerId) -> None:
        try:
            with trio.fail_after(TALK_SECONDS):
                reservation = await reserve(self._network, relay)
        except ProtocolNotServed:
            is_first = self._choice.why.get(relay) != NO_RELAY
            self._failed(relay, NO_RELAY, STARTING_SECONDS if is_first else NO_RELAY_SECONDS)
        except trio.TooSlowError:
            self._failed(relay, f"it did not answer within {TALK_SECONDS:g} s")
        except (PotluckError, trio.BrokenResourceError) as error:
            self._failed(relay, str(error) or "the link was lost")
        else:
            is_new = not self._choice.holds(relay)
            self._choice.reserved(reservation)
            if is_new:
                log.info("reachable through the relay %s", relay)
            self._changed()

    def _failed(self, relay: PeerId, why: str, delay_seconds: float = 0.0) -> None:
        log.debug("no place at %s: %s", relay, why)
        is_away = self._network.link(relay) is None
        said = why.replace(relay, "it")  # its id stands before it
        self._choice.failed(relay, said, trio.current_time(), delay_seconds, is_away=is_away)


class RelayRefused(PotluckError):
    """A relay has no place for us."""


async def reserve(network: Network, relay: PeerId) -> Reservation:
    """Ask a relay for a place, or for more time. The caller sets the deadline."""
    stream = await network.open(relay, HOP)
    try:
        await messages.send(stream, Hop(type=HopType.RESERVE))
        said = await messages.read(stream, Hop)
    finally:
        stream.reset()
    if said.type != HopType.STATUS or said.status != Status.OK:
        raise RelayRefused(_REFUSED.get(said.status, f"it answered {said.status}"))
    link = network.link(relay)
    if link is None or link.reach is not Reach.DIRECT:
        raise Unreachable("The link to the relay was lost.")
    now = trio.current_time()
    seconds = said.reservation.expire - network.wall_time()
    seconds = min(max(seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
    told = (without_peer(text) for text in messages.unpacked(said.reservation.addrs))
    usable = addresses_to_pass_on(without_peer(link.remote_address), tuple(told))
    addresses = tuple(f"{one}/p2p/{relay}/p2p-circuit" for one in usable)
    return Reservation(relay, addresses, now + seconds / 2, now + seconds)


def addresses_to_pass_on(here: str, told: tuple[str, ...]) -> tuple[str, ...]:
    """Of the addresses that a relay tells, those to announce, if our link to it goes `here`. Pure.

    At most ADDRESSES_PER_RELAY, `here` first.
    """
    at = ip_of(here)
    ours: list[str] = []
    elsewhere: dict[int, str] = {}  # by IP version
    for one in told:
        ip = ip_of(one)
        if ip is None or not port_of(one):
            continue
        if ip == at:
            ours.append(one)
        elif is_global(one) and (at is None or not is_global(here) or ip.version != at.version):
            elsewhere.setdefault(ip.version, one)
    return tuple(dict.fromkeys([here, *elsewhere.values(), *ours]))[:ADDRESSES_PER_RELAY]


_REFUSED: Final = {
    Status.RESERVATION_REFUSED: "it has no place left",
    Status.RESOURCE_LIMIT_EXCEEDED: "it has used up what it may carry",
    Status.PERMISSION_DENIED: "it serves only members of its run",
}
