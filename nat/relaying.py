"""The relay that a public node offers: libp2p's circuit relay v2, with an honest budget.

    relay = Relay(network, RelayLimits(circuits=64), admits=is_member)
    await nursery.start(relay.run)

A node that nobody can dial *reserves* a place here. From then on others reach it by a *circuit*:
two streams, one to each of them, between which the relay carries bytes that it cannot read. Both
protocols are libp2p's, so peers of other implementations can use the relay if it admits them.

Promises:

- Only peers that `admits` lets in get a reservation or a circuit, and only over a direct link.
- The end of one circuit ends nothing but this circuit.
- A place is given back when its peer's link ends, and when the reservation expires.
- No limit is exceeded, whoever asks; each refusal is counted by its reason. The rate of each
  circuit and of all together is kept by reading no faster, so that senders wait.
- Memory is bounded: a circuit holds two streams and, while bytes pass, at most COPY_BYTES for each
  direction.

The rules are in `Places`, which is pure; `Relay` talks and carries.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import base58
import trio

from nat import messages
from nat.addresses import site_of
from nat.messages import Hop, HopType, Status, Stop, StopType
from nat.relay_limits import RelayLimits
from protocols.errors import PotluckError, RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.network import Network, Reach, Stream

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # the stubs of trio that libp2p brings know it only there

HOP: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP: Final = "/libp2p/circuit/relay/0.2.0/stop"

TALK_SECONDS: Final = 10.0  # for one message, from a peer that has a link
COPY_BYTES: Final = 128 * 1024  # two packets of the channel; nothing is held while nothing comes
IDLE_SECONDS: Final = 180.0  # a link pings several times in this time, whatever made it
ANSWER_SECONDS: Final = 8.0  # for the target of a circuit; the asker still waits then
TELL_AGAIN_SECONDS: Final = 60.0  # between two log lines on refusals for the same reason
MOST_ASKING: Final = 256  # streams that ask at the same time; each costs a task and little memory
MOST_ASKING_PER_PEER: Final = 32  # of those; one that says nothing holds a place for TALK_SECONDS
MOST_ASKING_PER_SITE: Final = 128  # of those; behind a provider's address many lose a relay at once

log = logging.getLogger("potluck.relay")


class Refusal(enum.Enum):
    """Why a relay refused. The value is its name in the metrics."""

    NOT_ADMITTED = "not_admitted"
    RELAYED_LINK = "relayed_link"
    RESERVATIONS = "reservations"
    SITE = "reservations_per_site"
    NO_RESERVATION = "no_reservation"
    ITSELF = "to_itself"
    CIRCUITS = "circuits"
    PEER = "circuits_per_peer"
    SHARE = "circuits_per_asker"
    MONTH = "month_bytes"
    UNREACHED = "not_answered"
    BUSY = "busy"

    @property
    def status(self) -> Status:
        return _STATUS.get(self, Status.RESOURCE_LIMIT_EXCEEDED)


_STATUS: Final = {
    Refusal.NOT_ADMITTED: Status.PERMISSION_DENIED,
    Refusal.RELAYED_LINK: Status.PERMISSION_DENIED,
    Refusal.RESERVATIONS: Status.RESERVATION_REFUSED,
    Refusal.SITE: Status.RESERVATION_REFUSED,
    Refusal.NO_RESERVATION: Status.NO_RESERVATION,
    Refusal.ITSELF: Status.PERMISSION_DENIED,
    Refusal.UNREACHED: Status.CONNECTION_FAILED,
}


class RelayPlaces:
    """Who has a reservation and who a circuit. Pure; times are arguments.

    When half of the relay's circuits are taken, or half of those with one peer, an asker has only a
    share, so that neither can be shut off from others: each site a quarter of all and a half of
    those with one peer, each key an eighth of those with one peer. Until then one site, which may
    be many homes behind one address, can have all.

    Invariants: never more than the limits; `_sites`, `_ends` and `_shares` count what `_until` and
    the open circuits hold, and have no entry of zero.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self._until: dict[PeerId, tuple[float, str]] = {}  # and its site
        self._sites: Counter[str] = Counter()
        self._ends: Counter[PeerId] = Counter()
        self._shares: Counter[tuple[str, ...]] = Counter()
        self.circuits = 0

    @property
    def reservations(self) -> int:
        return len(self._until)

    def reserve(self, peer: PeerId, site: str, now: float) -> Refusal | None:
        """Give this peer a place, or keep it for longer."""
        self.expire(now)
        _, old_site = self._until.get(peer, (0.0, None))
        if old_site is None and len(self._until) >= self.limits.reservations:
            return Refusal.RESERVATIONS
        if old_site != site and self._sites[site] >= self.limits.reservations_per_site:
            return Refusal.SITE
        self.give_back(peer)
        self._until[peer] = (now + self.limits.reservation_seconds, site)
        self._sites[site] += 1
        return None

    def has_place(self, peer: PeerId, now: float) -> bool:
        until, _ = self._until.get(peer, (float("-inf"), ""))
        return now < until

    def give_back(self, peer: PeerId) -> None:
        """This peer's link is gone. May be called for any peer."""
        _, site = self._until.pop(peer, (0.0, None))
        if site is not None:
            _less(self._sites, site)

    def expire(self, now: float) -> None:
        for peer in [peer for peer, (until, _) in self._until.items() if until <= now]:
            self.give_back(peer)

    def join(self, source: PeerId, site: str, target: PeerId, now: float) -> Refusal | None:
        """Count a circuit from a peer at this site to another; `part` gives it back."""
        if source == target:
            return Refusal.ITSELF
        if not self.has_place(target, now):
            return Refusal.NO_RESERVATION
        if self.circuits >= self.limits.circuits:
            return Refusal.CIRCUITS
        if max(self._ends[source], self._ends[target]) >= self.limits.circuits_per_peer:
            return Refusal.PEER
        shares = self._shares_of(source, site, target)
        few_left = 2 * self.circuits >= self.limits.circuits
        few_of_target = 2 * self._ends[target] >= self.limits.circuits_per_peer
        if (few_left or few_of_target) and any(
            self._shares[share] >= most for share, most in shares.items()
        ):
            return Refusal.SHARE
        self.circuits += 1
        self._ends.update((source, target))
        self._shares.update(shares.keys())
        return None

    def part(self, source: PeerId, site: str, target: PeerId) -> None:
        self.circuits -= 1
        for end in (source, target):
            _less(self._ends, end)
        for share in self._shares_of(source, site, target):
            _less(self._shares, share)

    def _shares_of(self, source: PeerId, site: str, target: PeerId) -> dict[tuple[str, ...], int]:
        """The shares that this circuit is of, and the most circuits of each."""
        per_peer = self.limits.circuits_per_peer
        return {
            (site,): max(1, self.limits.circuits // 4),
            (site, target): max(1, per_peer // 2),
            (source, target): max(1, per_peer // 8),
        }


def _less(counts: Counter[Any], key: Any) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class Pace:
    """A rate, first come, first served. Pure."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    def take(self, size: int, now: float) -> float:
        """When these bytes may go on, if they have come now."""
        if not self._rate:
            return now
        start = max(now, self._free_at)
        self._free_at = start + size / self._rate
        return start


@dataclass
class RelayCounts:
    """For the metrics. All but the first two only grow."""

    reservations: int = 0
    circuits: int = 0
    reserved: int = 0
    connected: int = 0
    carried_bytes: int = 0


class Relay:
    """The service. `admits` finds out whether a peer may use it, and may take some seconds for it.

    `month_left` says how many bytes of a budget remain, `spend` is told of each that is carried.
    """

    def __init__(
        self,
        network: Network,
        limits: RelayLimits,
        *,
        admits: Callable[[PeerId], Awaitable[bool]] | None = None,
        month_left: Callable[[], int] | None = None,
        spend: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._network = network
        self._limits = limits
        self._admits = admits
        self._month_left = month_left
        self._spend = spend
        self._places = RelayPlaces(limits)
        self._pace = Pace(limits.bytes_per_second)
        self._asking: Counter[PeerId] = Counter()
        self._asking_sites: Counter[str] = Counter()
        self._reserved = self._connected = self._carried = 0
        self.refusals: Counter[Refusal] = Counter()
        self._told_at: dict[Refusal, float] = {}

    def counts(self) -> RelayCounts:
        self._places.expire(trio.current_time())
        return RelayCounts(
            self._places.reservations,
            self._places.circuits,
            self._reserved,
            self._connected,
            self._carried,
        )

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        with self._network.link_events() as events:
            self._network.serve(HOP, self._answer)
            task_status.started()
            try:
                async for event in events:
                    if event.reach is not Reach.DIRECT:
                        self._places.give_back(event.peer)
            finally:
                self._network.stop_serving(HOP)

    # ---- what peers ask

    async def _answer(self, stream: Stream) -> None:
        peer, site = stream.remote_peer, self._site(stream.remote_peer)
        if (
            self._asking.total() >= MOST_ASKING
            or self._asking[peer] >= MOST_ASKING_PER_PEER
            or self._asking_sites[site] >= MOST_ASKING_PER_SITE
        ):
            self._refuse(peer, Refusal.BUSY, "a question")
            stream.reset()
            return
        self._asking[peer] += 1
        self._asking_sites[site] += 1
        circuit = None
        try:
            with trio.fail_after(TALK_SECONDS):
                asked = await messages.read(stream, Hop)
                if asked.type == HopType.RESERVE:
                    await self._reserve(stream)
                elif asked.type == HopType.CONNECT:
                    circuit = await self._connect(stream, site, asked.peer.id)
                else:
                    await _say(stream, Status.UNEXPECTED_MESSAGE)
        except RemoteMisbehaviour:
            with trio.move_on_after(TALK_SECONDS):
                await _say(stream, Status.MALFORMED_MESSAGE)
        except (trio.BrokenResourceError, trio.TooSlowError):
            stream.reset()  # the asker has gone, or says nothing
        finally:
            _less(self._asking, peer)
            _less(self._asking_sites, site)
        if circuit is not None:
            await circuit.run()

    async def _reserve(self, stream: Stream) -> None:
        peer = stream.remote_peer
        refusal = await self._why_not(peer)
        link = self._network.link(peer)
        if refusal is None and link is not None:
            site, now = site_of(link.remote_address), trio.current_time()
            refusal = self._places.reserve(peer, site, now)
        if refusal is not None:
            self._refuse(peer, refusal, "a reservation")
            await _say(stream, refusal.status)
            return
        self._reserved += 1
        answer = Hop(type=HopType.STATUS, status=Status.OK)
        answer.reservation.expire = int(
            self._network.wall_time() + self._limits.reservation_seconds
        )
        answer.reservation.addrs.extend(messages.packed(self._network.addresses()))
        self._add_limit(answer)
        await messages.send(stream, answer)

    async def _connect(self, stream: Stream, site: str, target_bytes: bytes) -> _Circuit | None:
        source = stream.remote_peer
        target = PeerId(base58.b58encode(target_bytes[:64]).decode())
        refusal = await self._why_not(source)
        refusal = refusal or self._places.join(source, site, target, trio.current_time())
        if refusal is not None:
            self._refuse(source, refusal, f"a circuit to {target}")
            await _say(stream, refusal.status)
            return None
        joined = _Joined(self._places, source, site, target)
        far = None
        try:
            far = await self._ask_target(source, target)
            if far is None:
                self._refuse(source, Refusal.UNREACHED, f"a circuit to {target}")
                joined.part()
                await _say(stream, Status.CONNECTION_FAILED)
                return None
            answer = Hop(type=HopType.STATUS, status=Status.OK)
            self._add_limit(answer)
            await messages.send(stream, answer)
        except BaseException:
            joined.part()
            if far is not None:
                far.reset()
            raise
        self._connected += 1
        return _Circuit(self, joined, stream, far)

    async def _ask_target(self, source: PeerId, target: PeerId) -> Stream | None:
        """A stream to the target, which has accepted; None if it did not in time."""
        link = self._network.link(target)
        if link is None or link.reach is not Reach.DIRECT:
            return None  # it is only reached over the link that it holds
        with trio.move_on_after(ANSWER_SECONDS):
            try:
                far = await self._network.open(target, STOP)
            except PotluckError:
                return None
            if await self._accepts(far, source):
                return far
        return None

    async def _accepts(self, far: Stream, source: PeerId) -> bool:
        """Whether the target takes this circuit; if not, its stream is reset."""
        try:
            ask = Stop(type=StopType.CONNECT)
            ask.peer.id = base58.b58decode(source)
            self._add_limit(ask)
            await messages.send(far, ask)
            said = await messages.read(far, Stop)
            if (said.type, said.status) == (StopType.STATUS, Status.OK):
                return True
        except (RemoteMisbehaviour, trio.BrokenResourceError):
            pass
        except BaseException:
            far.reset()
            raise
        far.reset()
        return False

    async def _why_not(self, peer: PeerId) -> Refusal | None:
        link = self._network.link(peer)
        if link is None or link.reach is not Reach.DIRECT:
            return Refusal.RELAYED_LINK
        if self._admits is not None and not await self._admits(peer):
            return Refusal.NOT_ADMITTED
        if self._month_left is not None and self._month_left() <= 0:
            return Refusal.MONTH
        return None

    def _site(self, peer: PeerId) -> str:
        """From where a peer asks; of one that has just left, nowhere."""
        link = self._network.link(peer)
        return "" if link is None else site_of(link.remote_address)

    def _refuse(self, peer: PeerId, refusal: Refusal, what: str) -> None:
        """Count it. The log has one line a minute for each reason, however often peers ask."""
        self.refusals[refusal] += 1
        now = trio.current_time()
        if now - self._told_at.get(refusal, float("-inf")) < TELL_AGAIN_SECONDS:
            return
        self._told_at[refusal] = now
        link = self._network.link(peer)
        where = "" if link is None else f" at {link.remote_address}"
        so_far = self.refusals[refusal]
        log.info("refused %s%s %s: %s (%d so far)", peer, where, what, refusal.value, so_far)

    def _add_limit(self, message: Any) -> None:
        limits = self._limits
        if limits.circuit_seconds or limits.circuit_bytes:
            message.limit.duration = limits.circuit_seconds
            message.limit.data = limits.circuit_bytes

    # ---- carrying

    def has_budget(self) -> bool:
        return self._month_left is None or self._month_left() > 0

    async def wait_turn(self, own: Pace, size: int) -> None:
        """Wait until this many bytes of a circuit may go on, and count them."""
        self._carried += size
        self._spend(size)
        now = trio.current_time()
        turn = max(own.take(size, now), self._pace.take(size, now))
        if turn > now:
            await trio.sleep_until(turn)

    def pace_of_circuit(self) -> Pace:
        return Pace(self._limits.circuit_bytes_per_second)

    @property
    def limits(self) -> RelayLimits:
        return self._limits


class _Joined:
    """The place of one circuit. Giving it back twice counts once."""

    def __init__(self, places: RelayPlaces, source: PeerId, site: str, target: PeerId) -> None:
        self._places: RelayPlaces | None = places
        self._of = (source, site, target)

    def part(self) -> None:
        places, self._places = self._places, None
        if places is not None:
            places.part(*self._of)


class _Circuit:
    """Two streams, and what one of them brings carried to the other, both ways."""

    def __init__(self, relay: Relay, joined: _Joined, near: Stream, far: Stream) -> None:
        self._relay = relay
        self._joined = joined
        self._near = near
        self._far = far

    async def run(self) -> None:
        """Carry until both directions have ended, one breaks, or a limit is reached."""
        limits = self._relay.limits
        ends = trio.CancelScope()
        if limits.circuit_seconds:
            ends.deadline = trio.current_time() + limits.circuit_seconds
        try:
            with ends:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, self._near, self._far, ends)
                    nursery.start_soon(self._carry, self._far, self._near, ends)
            if not ends.cancelled_caught:  # no reset, which would drop what is still queued
                await self._near.aclose()
                await self._far.aclose()
                return
        except BaseException:
            self._reset()
            raise
        finally:
            self._joined.part()
        self._reset()

    def _reset(self) -> None:
        self._near.reset()
        self._far.reset()

    async def _carry(self, source: Stream, target: Stream, ends: trio.CancelScope) -> None:
        limit, pace = self._relay.limits.circuit_bytes, self._relay.pace_of_circuit()
        carried = 0
        try:
            while True:
                with trio.move_on_after(IDLE_SECONDS) as waiting:
                    data = await source.receive_some(COPY_BYTES)
                if waiting.cancelled_caught:
                    break
                if not data:
                    await target.send_eof()
                    return
                carried += len(data)
                if (limit and carried > limit) or not self._relay.has_budget():
                    break
                await self._relay.wait_turn(pace, len(data))
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        ends.cancel()


async def _say(stream: Stream, status: Status) -> None:
    await messages.send(stream, Hop(type=HopType.STATUS, status=status))
