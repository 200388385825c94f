"""A private node's places at relays: find them, keep them, and find others when they are lost.

    reservations = Reservations(network, candidates)
    nursery.start_soon(reservations.run)
    reservations.addresses()            # circuit addresses to announce

Two relays are held at once, so that the loss of one is not the loss of the node. A reservation is
renewed at half of its life over the link that it hangs on, and a live one is never dropped for
another. A relay that is lost is replaced at once; one that refused is asked again with a growing
delay, and after the others.

`RelayChoice` decides, and is pure. What a relay says is not believed: its reservation lasts at most
LONGEST_SECONDS and at least SHORTEST_SECONDS here, and of its addresses only those are passed on
that lie where the link goes. Otherwise it could make us send everybody to somebody else's address.
There are two exceptions. If the link goes to a private address, others need a public one. And one
address of the other IP version is taken, because ours does not tell what that should be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import trio

from nat import messages
from nat.addresses import ip_of, is_global, port_of, without_peer
from nat.messages import Hop, HopType, Status
from nat.relaying import HOP, TALK_SECONDS
from protocols.errors import PotluckError, ProtocolNotServed, RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import Network, Reach

WANTED: Final = 2
SHORTEST_SECONDS: Final = 120.0  # a relay that lies about its time must not be asked all the time
# As long as our own relays give. A relay tells when by its clock a reservation ends. If that is an
# hour ahead of ours, or ours an hour behind, a longer one would end before we renew it.
LONGEST_SECONDS: Final = 1800.0
FIRST_DELAY_SECONDS: Final = 2.0
LONGEST_DELAY_SECONDS: Final = 600.0
NO_RELAY_SECONDS: Final = 1800.0  # for a peer that does not serve the protocol
MOST_CANDIDATES: Final = 64
ADDRESSES_PER_RELAY: Final = 3

log = logging.getLogger("potluck.nat")


@dataclass(frozen=True)
class Reservation:
    """A place at one relay. `renew_at` and `ends_at` are in trio's time."""

    relay: PeerId
    addresses: tuple[str, ...]
    """Circuit addresses without the final /p2p/<us>."""
    renew_at: float
    ends_at: float


class RelayChoice:
    """Which relay to ask when. Pure; times are arguments.

    Invariant: at most WANTED + 1 reservations are held: those that are wanted, and one that was
    made while another was being renewed.
    """

    def __init__(self, wanted: int = WANTED) -> None:
        self._wanted = wanted
        self._held: dict[PeerId, Reservation] = {}
        self._not_before: dict[PeerId, float] = {}
        self._delays: dict[PeerId, float] = {}
        self.why: dict[PeerId, str] = {}
        """Why the last question to each relay came to nothing."""

    @property
    def held(self) -> tuple[Reservation, ...]:
        return tuple(self._held.values())

    def holds(self, relay: PeerId) -> bool:
        return relay in self._held

    def reserved(self, reservation: Reservation) -> None:
        self._held[reservation.relay] = reservation
        self._delays.pop(reservation.relay, None)
        self._not_before.pop(reservation.relay, None)
        self.why.pop(reservation.relay, None)

    def failed(self, relay: PeerId, why: str, now: float, delay_seconds: float = 0.0) -> None:
        """A question came to nothing. A reservation that is still held lives on."""
        before = self._delays.get(relay, FIRST_DELAY_SECONDS / 2)
        delay = delay_seconds or min(2 * before, LONGEST_DELAY_SECONDS)
        self._note(relay, why, delay, not_before=now + delay)

    def lost(self, relay: PeerId, why: str = "its link has ended") -> bool:
        """The link to this relay is gone, and the place with it; whether there was one.

        It may be asked again at once, but after others: it may be dead.
        """
        if self._held.pop(relay, None) is None:
            return False
        self._note(relay, why, self._delays.get(relay, FIRST_DELAY_SECONDS / 2))
        return True

    def _note(self, relay: PeerId, why: str, delay: float, not_before: float = 0.0) -> None:
        self.why.pop(relay, None)  # the newest last
        self.why[relay] = why
        self._delays[relay] = delay
        self._not_before[relay] = not_before
        for forgotten in list(self.why)[:-MOST_CANDIDATES]:
            for table in (self.why, self._delays, self._not_before):
                table.pop(forgotten, None)

    def forgive(self) -> None:
        """The machine's network is another one: what failed before may work now."""
        self._delays.clear()
        self._not_before.clear()

    def to_ask(self, candidates: Iterable[PeerId], now: float) -> list[PeerId]:
        """The relays to ask now: those to renew, and as many others as are missing."""
        for relay in [one.relay for one in self.held if one.ends_at <= now]:
            self.lost(relay, "it did not renew the reservation")
        renew = [one.relay for one in self.held if one.renew_at <= now and self._may(one, now)]
        fresh = [
            relay
            for relay in candidates
            if relay not in self._held and self._not_before.get(relay, 0.0) <= now
        ]
        fresh.sort(key=lambda relay: self._delays.get(relay, 0.0))
        return [*renew, *fresh[: max(0, self._wanted - len(self._held))]]

    def next_at(self, candidates: Iterable[PeerId]) -> float:
        """When `to_ask` may say something else, if nothing happens before."""
        times = [min(max(one.renew_at, self._not_before.get(one.relay, 0.0)), one.ends_at)
                 for one in self.held]  # fmt: skip
        if len(self._held) < self._wanted:
            missing = (relay for relay in candidates if relay not in self._held)
            times += [self._not_before.get(relay, 0.0) for relay in missing]
        return min(times, default=float("inf"))

    def _may(self, one: Reservation, now: float) -> bool:
        return self._not_before.get(one.relay, 0.0) <= now


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
        self._choice = RelayChoice()
        self._woken = trio.Event()
        self.asked_once = trio.Event()
        """Set when all candidates that were known at first have answered, or did not in time."""

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

    def look_again(self) -> None:
        """Ask again soon: there are new candidates, or the network has changed."""
        self._choice.forgive()
        self._woken.set()

    async def run(self) -> None:
        """Find and keep places until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_links)
            while True:
                self._woken = trio.Event()
                candidates = list(self._candidates())[:MOST_CANDIDATES]
                asked = self._choice.to_ask(candidates, trio.current_time())
                async with trio.open_nursery() as asking:
                    for relay in asked:
                        asking.start_soon(self._ask, relay)
                self.asked_once.set()
                next_at = self._choice.next_at(candidates)
                with trio.move_on_at(next_at):
                    await self._woken.wait()

    async def _follow_links(self) -> None:
        with self._network.link_events() as events:
            async for event in events:
                if event.reach is Reach.NONE and self._choice.lost(event.peer):
                    log.info("lost the relay %s: its link has ended", event.peer)
                    self._changed()
                    self._woken.set()
                elif event.reach is Reach.DIRECT:
                    self._woken.set()

    async def _ask(self, relay: PeerId) -> None:
        try:
            with trio.fail_after(TALK_SECONDS):
                reservation = await reserve(self._network, relay)
        except ProtocolNotServed:
            self._failed(relay, "it is no relay", NO_RELAY_SECONDS)
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
        self._choice.failed(relay, why, trio.current_time(), delay_seconds)


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
        raise RemoteMisbehaviour("The link to the relay was lost.")
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
