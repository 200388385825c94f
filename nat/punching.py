"""Making a relayed link direct: DCUtR, libp2p's way to punch a hole, over TCP simultaneous open.

    puncher = Puncher(network, outside)
    nursery.start_soon(puncher.run)

When somebody reaches this node through a relay, this node drives: it asks the other side for its
outside addresses, measures the round trip through the relay, says "now", waits for half a round
trip, and both connect from their listening ports to each other at the same moment. If the other
side can be dialled, this node first just dials it.

Both sides also tell how their routers map ports (`kinds.py`; a field of ours, which others skip).
Where two such routers cannot meet nothing is tried; otherwise it is tried again after each of
RETRY_SECONDS, as long as the link is still relayed. No verdict is final: after VERDICT_SECONDS all
of it begins anew, because a router may be another one by then, or have been taken for another kind.

What a peer says is hostile. It could name other people's addresses, to make us send packets there,
and nobody tells us where it is: its relay does not, and the protocol has no bound of its own. So at
most MOST_DIALLED addresses are tried, those at one IPv4 address and in one IPv6 /64, only for a
peer with a relayed link, once in LEAST_GAP_SECONDS for each, and at most MOST_AT_ONCE times at
once, of which MOST_OF_A_PEER are for one peer. We connect to what one peer names for at most
DIALLED_SECONDS in ten minutes. No hole is punched to a port of a well-known service. A private
address is tried only if our own outside address is private as well, and one of this machine only if
ours is.

Both sides may drive at once, if each has asked a relay for a circuit to the other. Then the one
with the smaller peer id does not answer, so that only one attempt goes on.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import trio

from nat import messages
from nat.addresses import host_of, ip_of, is_global, port_of, site_of, without_peer
from nat.kinds import Nat, can_punch
from nat.messages import HolePunch, PunchType
from protocols.errors import PotluckError, ProtocolNotServed, RemoteMisbehaviour, Unreachable
from protocols.identity import PeerId
from protocols.network import Reach, Stream, TraversableNetwork

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

DCUTR: Final = "/libp2p/dcutr"

TALK_SECONDS: Final = 10.0  # for the messages of one attempt, through a slow relay
PUNCH_SECONDS: Final = 5.0  # a SYN that the router dropped is sent again after 1 and 3 s
DIAL_SECONDS: Final = 3.0  # for a peer that says that it can be dialled
RETRY_SECONDS: Final = (0.5, 5.0, 60.0, 600.0)
VERDICT_SECONDS: Final = 4000.0  # twice as long as a helper's word counts (reachability.py)
LONGEST_ROUND_TRIP_SECONDS: Final = 4.0
MOST_DIALLED: Final = 4
LEAST_PORT: Final = 1024  # routers map no ports to those below, which are of well-known services
DIALLED_SECONDS: Final = 60.0  # a series of attempts that all fail takes up to 40
DIALLED_WITHIN_SECONDS: Final = 600.0
MOST_AT_ONCE: Final = 32
MOST_OF_A_PEER: Final = 4  # an attempt that hangs does not keep it from trying again
MOST_DRIVEN: Final = 256  # peers whose links are relayed now, most of them waiting for the next try
LEAST_GAP_SECONDS: Final = 0.25
PEERS_REMEMBERED: Final = 1024

log = logging.getLogger("potluck.nat")


@dataclass(frozen=True)
class Outside:
    """How this node looks from outside: its router's kind, and the addresses that lead to it."""

    nat: Nat = Nat.UNKNOWN
    addresses: tuple[str, ...] = ()


class PunchOutcome(enum.Enum):
    """How one attempt ended. The value is its name in the metrics."""

    PUNCHED = "punched"
    DIALLED = "dialled"
    HOPELESS = "hopeless"
    FAILED = "failed"
    NOT_SPOKEN = "not_spoken"
    FLOOD = "flood"

    @property
    def is_direct(self) -> bool:
        return self in (PunchOutcome.PUNCHED, PunchOutcome.DIALLED)

    @property
    def is_verdict(self) -> bool:
        """Whether another attempt on this link would be of no use for VERDICT_SECONDS."""
        return self in (PunchOutcome.HOPELESS, PunchOutcome.NOT_SPOKEN)


def at_one_home(addresses: Iterable[str]) -> tuple[str, ...]:
    """Of addresses of TCP, the first MOST_DIALLED at the sites of the first of each IP version.
    Pure."""
    homes: dict[str, str] = {}
    at_home = (
        one
        for one in dict.fromkeys(addresses)
        if homes.setdefault(one.split("/")[1], site_of(one)) == site_of(one)
    )
    return tuple(islice(at_home, MOST_DIALLED))


def worth_dialling(claimed: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """Of a peer's outside addresses, those to connect to. Pure."""
    ips = [ip for ip in map(ip_of, own) if ip is not None]
    is_private_place = bool(ips) and not any(is_global(one) for one in own)
    is_this_machine = is_private_place and any(ip.is_loopback for ip in ips)

    def is_usable(address: str) -> bool:
        ip = ip_of(address)
        if ip is None or port_of(address) < LEAST_PORT or ip.is_multicast or ip.is_unspecified:
            return False
        if ip.is_loopback:
            return is_this_machine
        return ip.is_global or is_private_place

    plain = (without_peer(one) for one in claimed)
    return at_one_home(one for one in plain if is_usable(one))


def worth_punching(claimed: tuple[str, ...], own: Outside, their_nat: Nat) -> tuple[str, ...]:
    """Of a peer's outside addresses, those where a hole can be punched. Pure.

    The kinds of routers are about IPv4; IPv6 is not translated.
    """
    can_meet = can_punch(own.nat, their_nat)
    worth = worth_dialling(claimed, own.addresses)
    return tuple(one for one in worth if can_meet or ":" in host_of(one))


class Puncher:
    """Serves DCUtR, and drives it on links that others made to us through a relay.

    `outside` finds out how we look from outside now; a router may forget what it once did.
    """

    def __init__(
        self, network: TraversableNetwork, outside: Callable[[], Awaitable[Outside]]
    ) -> None:
        self._network = network
        self._outside = outside
        self._answering: Counter[PeerId] = Counter()
        self._last: dict[PeerId, float] = {}
        self._paid_until: dict[PeerId, float] = {}
        self._driving: dict[PeerId, trio.CancelScope] = {}
        self._attempting: set[PeerId] = set()
        self._attempts_at_once = trio.CapacityLimiter(MOST_AT_ONCE)
        self.attempts: Counter[PunchOutcome] = Counter()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and drive until cancelled."""
        with self._network.link_events() as events:
            self._network.serve(DCUTR, self._answer)
            task_status.started()
            try:
                async with trio.open_nursery() as nursery:
                    for link in self._network.links():
                        self._drive_if_relayed(link.peer, nursery)
                    async for event in events:
                        if event.reach is Reach.NONE:
                            self._let_go(event.peer)
                        elif event.reach is Reach.DIRECT and event.peer not in self._attempting:
                            self._let_go(event.peer)  # somebody else has made it so
                        elif event.reach is Reach.RELAYED:
                            self._drive_if_relayed(event.peer, nursery)
            finally:
                self._network.stop_serving(DCUTR)

    # ---- the side that was reached through the relay: it drives

    def _drive_if_relayed(self, peer: PeerId, nursery: trio.Nursery) -> None:
        link = self._network.link(peer)
        if link is None or link.reach is not Reach.RELAYED or not link.inbound:
            return
        if peer not in self._driving and len(self._driving) < MOST_DRIVEN:
            scope = self._driving[peer] = trio.CancelScope()
            nursery.start_soon(self._drive, peer, scope)

    def _let_go(self, peer: PeerId) -> None:
        """The relayed link is gone. A new one begins anew, without the delays of this one."""
        scope = self._driving.pop(peer, None)
        if scope is not None:
            scope.cancel()

    async def _drive(self, peer: PeerId, scope: trio.CancelScope) -> None:
        delays = iter((0.0, *RETRY_SECONDS))
        try:
            with scope:
                while True:
                    await trio.sleep(next(delays, VERDICT_SECONDS))
                    async with self._attempts_at_once:
                        if not self._is_relayed(peer):
                            return
                        attempt = await self._attempt(peer)
                    self.attempts[attempt] += 1
                    log.info("a direct link to %s: %s", peer, attempt.value)
                    if attempt.is_direct:
                        return
                    if attempt.is_verdict:
                        delays = iter((VERDICT_SECONDS, *RETRY_SECONDS))
        finally:
            if self._driving.get(peer) is scope:
                del self._driving[peer]

    async def _attempt(self, peer: PeerId) -> PunchOutcome:
        self._attempting.add(peer)
        try:
            return await self._try(peer)
        finally:
            self._attempting.discard(peer)

    async def _try(self, peer: PeerId) -> PunchOutcome:
        newest_first = reversed(self._network.addresses_of(peer))
        dialable = at_one_home(one for one in map(without_peer, newest_first) if is_global(one))
        if dialable and await self._connect(peer, dialable, DIAL_SECONDS, initiates=True):
            return PunchOutcome.DIALLED
        try:
            with trio.fail_after(TALK_SECONDS):
                own = await self._outside()
                stream = await self._network.open(peer, DCUTR)
                async with stream:
                    addresses, wait_seconds, can_ever = await self._agree(stream, own)
        except ProtocolNotServed:
            return PunchOutcome.NOT_SPOKEN
        except (PotluckError, trio.BrokenResourceError, trio.TooSlowError) as error:
            log.debug("no agreement with %s: %r", peer, error)
            return PunchOutcome.FAILED
        if not addresses:
            return PunchOutcome.FAILED if can_ever else PunchOutcome.HOPELESS
        await trio.sleep(wait_seconds)
        punched = await self._connect(peer, addresses, PUNCH_SECONDS, initiates=False)
        return PunchOutcome.PUNCHED if punched else PunchOutcome.FAILED

    async def _agree(self, stream: Stream, own: Outside) -> tuple[tuple[str, ...], float, bool]:
        """The addresses to connect to, and when; no addresses if that would be of no use, and then
        whether it may be otherwise soon, because a side does not know its own address now."""
        asked_at = trio.current_time()
        await messages.send(stream, _connect_message(own))
        said = await _read(stream, PunchType.CONNECT)
        round_trip = min(trio.current_time() - asked_at, LONGEST_ROUND_TRIP_SECONDS)
        claimed = messages.unpacked(said.addrs)
        addresses = worth_punching(claimed, own, _nat_of(said))
        if not addresses:
            return (), 0.0, not (claimed and own.addresses)
        # the other side may have asked a helper before it answered; a ping only takes the way
        round_trip = min(round_trip, await self._network.ping(stream.remote_peer))
        await messages.send(stream, HolePunch(type=PunchType.SYNC))
        return addresses, round_trip / 2, True

    # ---- the side that asked the relay for the circuit

    async def _answer(self, stream: Stream) -> None:
        peer = stream.remote_peer
        if not self._may_answer(peer):
            self.attempts[PunchOutcome.FLOOD] += 1
            stream.reset()
            return
        self._answering[peer] += 1
        try:
            with trio.fail_after(TALK_SECONDS):
                said = await _read(stream, PunchType.CONNECT)
                own = await self._outside()
                await messages.send(stream, _connect_message(own))
                addresses = worth_punching(messages.unpacked(said.addrs), own, _nat_of(said))
                if not addresses:
                    return
                await _read(stream, PunchType.SYNC)
            await self._connect(peer, addresses, PUNCH_SECONDS, initiates=True)
        finally:
            self._answering -= Counter((peer,))

    def _may_answer(self, peer: PeerId) -> bool:
        now = trio.current_time()
        gap = now - self._last.pop(peer, float("-inf"))
        self._last[peer] = now
        if len(self._last) > PEERS_REMEMBERED:
            del self._last[next(iter(self._last))]
        free = self._answering[peer] < MOST_OF_A_PEER and self._answering.total() < MOST_AT_ONCE
        if peer in self._attempting and self._network.peer_id < peer:
            return False  # both drive, and ours goes on
        return free and gap >= LEAST_GAP_SECONDS and self._is_relayed(peer)

    # ---- both

    async def _connect(
        self, peer: PeerId, addresses: tuple[str, ...], seconds: float, *, initiates: bool
    ) -> bool:
        """Whether there is a direct link, after connecting for at most this time."""
        if not self._may_connect(peer, seconds):
            return False
        with trio.move_on_after(seconds):
            try:
                await self._network.punch(peer, addresses, initiates=initiates)
            except Unreachable as error:
                log.debug("no direct link to %s: %s", peer, error)
        link = self._network.link(peer)
        return link is not None and link.reach is Reach.DIRECT

    def _may_connect(self, peer: PeerId, seconds: float) -> bool:
        """Whether this peer may have us connect to what it names for so long; then it counts."""
        now = trio.current_time()
        price = seconds * DIALLED_WITHIN_SECONDS / DIALLED_SECONDS
        paid_until = max(now, self._paid_until.get(peer, now)) + price
        if paid_until > now + DIALLED_WITHIN_SECONDS:
            log.debug("%s had us connect to its addresses too often", peer)
            return False
        self._paid_until.pop(peer, None)
        self._paid_until[peer] = paid_until
        if len(self._paid_until) > PEERS_REMEMBERED:
            del self._paid_until[next(iter(self._paid_until))]
        return True

    def _is_relayed(self, peer: PeerId) -> bool:
        link = self._network.link(peer)
        return link is not None and link.reach is Reach.RELAYED


def _connect_message(own: Outside) -> Any:
    message = HolePunch(type=PunchType.CONNECT, nat=own.nat)
    message.addrs.extend(messages.packed(own.addresses[:MOST_DIALLED]))
    return message


def _nat_of(message: Any) -> Nat:
    try:
        return Nat(message.nat)
    except ValueError:  # of a newer version
        return Nat.UNKNOWN


async def _read(stream: Stream, expected: PunchType) -> Any:
    message: Any = await messages.read(stream, HolePunch)
    if message.type != expected:
        raise RemoteMisbehaviour(f"A hole punch message of kind {message.type} came out of turn.")
    return message
