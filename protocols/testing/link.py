"""A link: one connection between two nodes, as seen from each of its two ends.

An end carries messages to the other end (`carry`), keeps its streams by number, and knows whether
it is alive. The two ends die separately. The one that closes knows at once. The other knows when
the goodbye arrives or, if nothing arrives any more, when the keep-alive times out.

A message is held on the way while its path is cut or its sender is stopped, and at the receiver
while the receiver is stopped. Held messages keep their order and go on afterwards, as with
retransmission. Nothing on the wire is lost while the connection lives.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach
from protocols.testing.link_model import LONGEST_SEGMENT_BYTES, LinkSettings, Pipe, segment_bytes
from protocols.testing.stream import SimulatedStream
from protocols.testing.timeline import Timeline
from protocols.testing.trace import TraceKind

if TYPE_CHECKING:
    from protocols.testing.simulated_node import SimulatedNetwork
    from protocols.testing.world import SimulatedWorld


class WireMessage(NamedTuple):
    """A message on the wire, and the call that delivers it."""

    entered: float  # when its sender put it on the wire
    kind: TraceKind
    size: int
    deliver: Callable[..., None]
    arguments: tuple[Any, ...]

    def split(self, size: int) -> tuple[WireMessage, WireMessage]:
        """The first `size` bytes of a data message, and the rest."""
        number, segment, ends_packet = self.arguments
        return (
            self._replace(size=size, arguments=(number, segment[:size], False)),
            self._replace(size=self.size - size, arguments=(number, segment[size:], ends_packet)),
        )


class Link:
    """Two ends and their shared state."""

    def __init__(
        self,
        number: int,
        dialler: SimulatedNetwork,
        listener: SimulatedNetwork,
        address: str,
        *,
        path: LinkSettings | None = None,
        relay: PeerId | None = None,
        punched: bool = False,
    ) -> None:
        self.number = number
        self.path = path
        self.relay = relay  # that carries it, of a link over a circuit
        self.punched = punched
        self.streams_opened = 0
        self.blocked_since: float | None = None  # since when one direction is blocked
        near = LinkEnd(self, dialler, listener, inbound=False, remote_address=address)
        far = LinkEnd(self, listener, dialler, inbound=True, remote_address=dialler.seen_at)
        near.other, far.other = far, near
        self.ends = (near, far)

    def next_stream_number(self) -> int:
        self.streams_opened += 1
        return self.streams_opened


class LinkEnd:
    """One node's end of a link."""

    other: LinkEnd

    def __init__(
        self,
        link: Link,
        node: SimulatedNetwork,
        to: SimulatedNetwork,
        *,
        inbound: bool,
        remote_address: str,
    ) -> None:
        self.link = link
        self.node = node
        self.world: SimulatedWorld = node.world
        self._timeline = node.world.timeline
        self.peer: PeerId = to.peer_id
        self.inbound = inbound
        self.alive = True
        self.ended = trio.Event()
        self.streams: dict[int, SimulatedStream] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self._on_their_way = 0
        self.send_rate = SliceMeter()
        self.receive_rate = SliceMeter()
        self.round_trip_seconds: float | None = None
        self.connected_at = self._timeline.now()
        self._remote_address = remote_address
        self.path: LinkSettings = link.path or node.world.path(node, to)
        self.reach = Reach.RELAYED if self.path.relayed else Reach.DIRECT
        self._pipe = Pipe(self.path.bytes_per_second)
        self._last_arrival = 0.0
        self._held_on_path: deque[WireMessage] = deque()
        self._held_at_receiver: deque[WireMessage] = deque()
        self._answers: dict[int, trio.Event] = {}
        self._pings = 0

    def __repr__(self) -> str:
        return f"{self.node.name} to {self.other.node.name}"

    def facts(self) -> LinkFacts:
        now = self._timeline.now()
        return LinkFacts(
            peer=self.peer,
            reach=self.reach,
            inbound=self.inbound,
            remote_address=self._remote_address,
            connected_at=self.connected_at,
            round_trip_seconds=self.round_trip_seconds,
            send_bytes_per_second=self.send_rate.bytes_per_second(now),
            receive_bytes_per_second=self.receive_rate.bytes_per_second(now),
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            open_streams=len(self.streams),
            punched=self.link.punched,
        )

    # -- the wire --------------------------------------------------------------------------

    def segment_bytes(self) -> int | None:
        """How much to send at once, so that no pipe on the way is blocked for long."""
        limit = segment_bytes(self._pipe.bytes_per_second, self.node.upload.bytes_per_second)
        if limit is None and self.other.node.download.bytes_per_second is not None:
            return LONGEST_SEGMENT_BYTES  # the receiver cuts it finer, by its own rate
        return limit

    def carry(
        self, kind: TraceKind, size: int, deliver: Callable[..., None], *arguments: Any
    ) -> float:
        """Send one message to the other end. Return when it has left our side."""
        now = self._timeline.now()
        if kind is not TraceKind.GOODBYE:
            self.node.about_to_send()
            if not self.alive:
                return now  # the node died instead of sending it
        left = self._pipe.pass_through(self.node.upload.pass_through(now, size), size)
        arrival = max(left + self.path.delay(self.world.chance), self._last_arrival)
        self._last_arrival = arrival
        if size:
            self.bytes_sent += size
            self.node.bytes_sent += size
            self.send_rate.record(now, size)
        message = WireMessage(now, kind, size, deliver, arguments)
        self._timeline.at(arrival, self._arrive, message)
        return left

    def on_their_way(self, more: int, *, arrived: int = 0) -> None:
        """A stream has accepted so many bytes; or so many have arrived or were dropped, below
        zero."""
        if self.alive:
            self._on_their_way += more
            self.node.on_their_way(more, arrived=arrived)

    def _arrive(self, message: WireMessage) -> None:
        if self._held_on_path or self._is_held_on_path(message):
            self._held_on_path.append(message)
            return
        self.other.node.download.take(self, message)

    def _is_held_on_path(self, message: WireMessage) -> bool:
        stopped_at = self.node.stopped_at
        if stopped_at is not None and message.entered >= stopped_at:
            return True
        return self.world.is_cut(self.node, self.other.node)

    def deliver(self, message: WireMessage) -> None:
        """All of this message has arrived at the other end."""
        other = self.other
        if self._held_at_receiver or other.node.stopped_at is not None:
            self._held_at_receiver.append(message)
            return
        self.world.record(message.kind, self.node, other.node, message.size)
        self.on_their_way(-message.size, arrived=message.size)
        if other.alive:
            if message.size:
                other.bytes_received += message.size
                other.node.bytes_received += message.size
                other.receive_rate.record(self._timeline.now(), message.size)
            message.deliver(*message.arguments)
        elif (
            self.alive
            and message.kind is not TraceKind.GOODBYE
            and self.world.machine_is_up(other.node)
        ):
            # the owner no longer knows this connection: the kernel on that side says so
            self._timeline.at(
                self._timeline.now() + other.path.latency_seconds,
                self.break_now,
                "the other side no longer has this connection",
            )

    def release_held(self) -> None:
        """Send the messages that were held and that nothing holds any more."""
        if self.other.node.stopped_at is None:
            waiting, self._held_at_receiver = self._held_at_receiver, deque()
            for message in waiting:
                self.deliver(message)
        if self._held_on_path and not self._is_held_on_path(self._held_on_path[0]):
            waiting, self._held_on_path = self._held_on_path, deque()
            now = self._timeline.now()
            for message in waiting:
                arrival = max(now + self.path.delay(self.world.chance), self._last_arrival)
                self._last_arrival = arrival
                self._timeline.at(arrival, self._arrive, message)

    # -- arriving messages -----------------------------------------------------------------

    def on_data(self, number: int, segment: bytes, ends_packet: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.data_arrived(segment, ends_packet=ends_packet)

    def on_end(self, number: int) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.end_arrived()

    def on_reset(self, number: int) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.reset_arrived()

    def on_credit(self, number: int, size: int) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.credit_arrived(size)

    def on_open(self, number: int, protocol: str) -> None:
        handler = self.node.handlers.get(protocol)
        if handler is None:
            self.carry(TraceKind.NOT_SERVED, 0, self.other.on_opened, number, False)
            return
        inbound = sum(stream.inbound for stream in self.streams.values())
        if inbound >= self.node.settings.inbound_streams_per_link:
            self.carry(TraceKind.RESET, 0, self.other.on_reset, number)
            return
        stream = SimulatedStream(self, number, protocol, inbound=True)
        self.streams[number] = stream
        self.carry(TraceKind.OPENED, 0, self.other.on_opened, number, True)
        self.node.run_handler(handler, stream)

    def on_opened(self, number: int, served: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.opened_arrived(served=served)

    def on_ping(self, number: int) -> None:
        self.carry(TraceKind.PONG, 0, self.other.on_pong, number)

    def on_pong(self, number: int) -> None:
        answer = self._answers.get(number)
        if answer is not None:
            answer.set()

    # -- used by the node ------------------------------------------------------------------

    async def round_trip(self) -> float:
        """Send an empty message there and back; Unreachable if the link is lost meanwhile."""
        self._check_alive()
        self._pings += 1
        number = self._pings
        answer = self._answers[number] = trio.Event()
        started = self._timeline.now()
        try:
            self.carry(TraceKind.PING, 0, self.other.on_ping, number)
            await answer.wait()
        finally:
            del self._answers[number]
        self._check_alive()
        self.round_trip_seconds = self._timeline.now() - started
        return self.round_trip_seconds

    def _check_alive(self) -> None:
        if not self.alive:
            raise Unreachable(
                f"The link to {self.peer} was lost.",
                why="The other side went away, or the path to it is cut.",
                advice="Connect again.",
            )

    async def open_stream(self, protocol: str) -> SimulatedStream:
        for _ in range(self.world.settings.open_round_trips - 1):
            await self.round_trip()
        self._check_alive()
        number = self.link.next_stream_number()
        stream = SimulatedStream(self, number, protocol, inbound=False)
        self.streams[number] = stream
        self.carry(TraceKind.OPEN, 0, self.other.on_open, number, protocol)
        await stream.wait_opened()
        return stream

    def forget_stream(self, number: int) -> None:
        self.streams.pop(number, None)

    def close(self, why: str) -> None:
        """Say goodbye and close; the other end knows when the goodbye arrives."""
        self.say_goodbye(why)
        self.break_now(why)

    def say_goodbye(self, why: str, *, after_seconds: float = 0.0) -> None:
        """Tell the other end that this one closes. Earlier messages arrive before it."""
        if self.alive and after_seconds:
            self._timeline.at(self._timeline.now() + after_seconds, self._carry_goodbye, why)
        elif self.alive:
            self._carry_goodbye(why)

    def _carry_goodbye(self, why: str) -> None:
        self.carry(TraceKind.GOODBYE, 0, self.other.break_now, f"{self.node.name}: {why}")

    def break_now(self, why: str) -> None:
        """End this end now: its streams break, and waiting tasks get the error."""
        if not self.alive:
            return
        self.on_their_way(-self._on_their_way)
        self.alive = False
        self.ended.set()
        self.world.record(TraceKind.BROKEN, self.node, self.other.node)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.link_gone(why)
        for answer in self._answers.values():
            answer.set()
        self.node.link_down(self)
        if not self.other.alive:
            self.world.forget_link(self.link)


# The measured rate of a link: the best second of the last minute.
#
# A link with little traffic does not show what it could carry. So seconds with little traffic do
# not count, and a link without a busy second has no measured rate.


SLICE_SECONDS = 1.0
MEMORY_SECONDS = 60.0  # an older measurement says little about a home link
BUSY_BYTES = 65_536  # a slice with fewer is no measurement


class SliceMeter:
    """Counts bytes per slice of time and remembers the best recent slices."""

    __slots__ = ("_best", "_bytes", "_started")

    def __init__(self) -> None:
        self._started = float("-inf")
        self._bytes = 0
        self._best: list[tuple[float, int]] = []  # (slice's start, its bytes), bytes decreasing

    def record(self, now: float, size: int) -> None:
        if now - self._started >= SLICE_SECONDS:
            self._close_slice()
            self._started = now
        self._bytes += size

    def bytes_per_second(self, now: float) -> float | None:
        if now - self._started >= SLICE_SECONDS:
            self._close_slice()
        self._best = [entry for entry in self._best if now - entry[0] <= MEMORY_SECONDS]
        best = max(self._bytes, self._best[0][1] if self._best else 0)
        return best / SLICE_SECONDS if best >= BUSY_BYTES else None

    def _close_slice(self) -> None:
        if self._bytes >= BUSY_BYTES:
            while self._best and self._best[-1][1] <= self._bytes:
                self._best.pop()
            self._best.append((self._started, self._bytes))
        self._bytes = 0


# Links that end by themselves: lost for no reason, or given up because nothing gets through.
#
# A real node notices a silent link by its keep-alive. Here there are no pings. Whenever something
# may have changed (a cut, a stop, a silent crash, and the end of each), every link is checked once.
# A link that has become blocked is given up `silence_seconds` later unless it is free again by
# then. So idle links cost nothing.
#
# A stopped node cannot notice anything. It keeps its end, and gets the goodbye that waits for it
# later.


SECONDS_PER_HOUR = 3600.0


class LinkLife:
    """Watches the links of one world."""

    def __init__(self, timeline: Timeline, chance: random.Random, silence_seconds: float) -> None:
        self._timeline = timeline
        self._chance = chance
        self._silence_seconds = silence_seconds

    def add(self, link: Link) -> None:
        """Decide for a new link when it will be lost for no reason, if ever."""
        rate = max(end.path.breaks_per_hour for end in link.ends)
        if rate > 0:
            lasts = self._chance.expovariate(rate / SECONDS_PER_HOUR)
            self._timeline.at(self._timeline.now() + lasts, self._lose, link)

    def check(self, links: Iterable[Link]) -> None:
        """Check these links: something may have changed for them."""
        now = self._timeline.now()
        for link in links:
            is_blocked = any(_is_blocked(end) for end in link.ends)
            if not is_blocked:
                link.blocked_since = None
            elif link.blocked_since is None:
                link.blocked_since = now
                self._timeline.at(now + self._silence_seconds, self._give_up, link, now)

    def _give_up(self, link: Link, since: float) -> None:
        if link.blocked_since == since:
            for end in link.ends:
                if end.node.stopped_at is None:
                    end.close("nothing came through any more")

    def _lose(self, link: Link) -> None:
        for end in link.ends:
            end.break_now("the connection was lost")


def _is_blocked(end: LinkEnd) -> bool:
    source, target = end.node, end.other.node
    return source.stopped_at is not None or source.silent or end.node.world.is_cut(source, target)
