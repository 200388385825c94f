"""A link: one connection between two nodes, as each of its two ends sees it.

An end carries messages to the other one (`carry`), keeps its streams by number, and knows
whether it is alive. The two ends die separately: the one that closes knows at once, the other
when the goodbye arrives, or, where nothing arrives any more, when the keep-alive gives up.

A message is held back on the way while its path is cut or its sender is stopped, and at the
receiver while that one is stopped. Held messages keep their order and go on when the reason has
gone, as retransmission would bring them; what was on the wire is never lost while the
connection lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from node.simulation.link_model import LONGEST_SEGMENT_BYTES, LinkSettings, Pipe, segment_bytes
from node.simulation.rate_meter import RateMeter
from node.simulation.stream import SimulatedStream
from node.simulation.trace import Kind
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach

if TYPE_CHECKING:
    from node.simulated_network import SimulatedWorld
    from node.simulation.simulated_node import SimulatedNetwork


class Message(NamedTuple):
    """Something on the wire, and what it does at the other end."""

    entered: float  # when its sender gave it to the wire
    kind: Kind
    size: int
    deliver: Callable[..., None]
    arguments: tuple[Any, ...]

    def split(self, size: int) -> tuple[Message, Message]:
        """The first `size` bytes of a data message, and the rest."""
        number, segment = self.arguments
        return (
            self._replace(size=size, arguments=(number, segment[:size])),
            self._replace(size=self.size - size, arguments=(number, segment[size:])),
        )


class Link:
    """Two ends and what they share."""

    def __init__(
        self,
        number: int,
        dialler: SimulatedNetwork,
        listener: SimulatedNetwork,
        address: str,
    ) -> None:
        self.number = number
        self.streams_opened = 0
        self.impeded_since: float | None = None  # nothing gets through in one of the directions
        near = LinkEnd(self, dialler, listener, inbound=False, remote_address=address)
        far = LinkEnd(self, listener, dialler, inbound=True, remote_address=dialler.address)
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
        self.streams: dict[int, SimulatedStream] = {}
        self.bytes_sent = 0
        self.bytes_received = 0
        self.send_rate = RateMeter()
        self.receive_rate = RateMeter()
        self.round_trip_seconds: float | None = None
        self.connected_at = self._timeline.now()
        self._remote_address = remote_address
        self.path: LinkSettings = node.world.path(node, to)
        self.reach = Reach.RELAYED if self.path.relayed else Reach.DIRECT
        self._pipe = Pipe(self.path.bytes_per_second)
        self._last_arrival = 0.0
        self._held_on_path: deque[Message] = deque()
        self._held_at_receiver: deque[Message] = deque()
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
        )

    # -- the wire --------------------------------------------------------------------------

    def segment_bytes(self) -> int | None:
        """How much to hand over at once, so that no pipe on the way is held for long."""
        limit = segment_bytes(self._pipe.bytes_per_second, self.node.upload.bytes_per_second)
        if limit is None and self.other.node.download.bytes_per_second is not None:
            return LONGEST_SEGMENT_BYTES  # it is cut finer over there, by what comes in
        return limit

    def carry(self, kind: Kind, size: int, deliver: Callable[..., None], *arguments: Any) -> float:
        """Send one message to the other end; returns when it has left our side."""
        now = self._timeline.now()
        if kind is not Kind.GOODBYE:
            self.node.about_to_send()
            if not self.alive:
                return now  # the node has died instead of sending it
        left = self._pipe.pass_through(self.node.upload.pass_through(now, size), size)
        arrival = max(left + self.path.delay(self.world.chance), self._last_arrival)
        self._last_arrival = arrival
        if size:
            self.bytes_sent += size
            self.node.bytes_sent += size
            self.send_rate.record(now, size)
        message = Message(now, kind, size, deliver, arguments)
        self._timeline.at(arrival, self._arrive, message)
        return left

    def _arrive(self, message: Message) -> None:
        if self._held_on_path or self._is_held_on_path(message):
            self._held_on_path.append(message)
            return
        self.other.node.download.take(self, message)

    def _is_held_on_path(self, message: Message) -> bool:
        stopped_at = self.node.stopped_at
        if stopped_at is not None and message.entered >= stopped_at:
            return True
        return self.world.is_cut(self.node, self.other.node)

    def deliver(self, message: Message) -> None:
        """All of this message is at the other end now."""
        other = self.other
        if self._held_at_receiver or other.node.stopped_at is not None:
            self._held_at_receiver.append(message)
            return
        self.world.record(message.kind, self.node, other.node, message.size)
        if other.alive:
            if message.size:
                other.bytes_received += message.size
                other.receive_rate.record(self._timeline.now(), message.size)
            message.deliver(*message.arguments)
        elif (
            self.alive and message.kind is not Kind.GOODBYE and self.world.machine_is_up(other.node)
        ):
            # a connection that its owner no longer knows: the kernel over there says so
            self._timeline.at(
                self._timeline.now() + other.path.latency_seconds,
                self.break_now,
                "the other side no longer has this connection",
            )

    def release_held(self) -> None:
        """Send on what was held, as far as nothing holds it any more."""
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

    # -- what the wire brings --------------------------------------------------------------

    def on_data(self, number: int, segment: bytes) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.data_arrived(segment)

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
            self.carry(Kind.NOT_SERVED, 0, self.other.on_opened, number, False)
            return
        inbound = sum(stream.inbound for stream in self.streams.values())
        if inbound >= self.node.settings.inbound_streams_per_link:
            self.carry(Kind.RESET, 0, self.other.on_reset, number)
            return
        stream = SimulatedStream(self, number, protocol, inbound=True)
        self.streams[number] = stream
        self.carry(Kind.OPENED, 0, self.other.on_opened, number, True)
        self.node.run_handler(handler, stream)

    def on_opened(self, number: int, served: bool) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.opened_arrived(served=served)

    def on_ping(self, number: int) -> None:
        self.carry(Kind.PONG, 0, self.other.on_pong, number)

    def on_pong(self, number: int) -> None:
        answer = self._answers.get(number)
        if answer is not None:
            answer.set()

    # -- what the node does with it --------------------------------------------------------

    async def round_trip(self) -> float:
        """Send an empty message there and back; Unreachable if the link dies meanwhile."""
        self._check_alive()
        self._pings += 1
        number = self._pings
        answer = self._answers[number] = trio.Event()
        started = self._timeline.now()
        try:
            self.carry(Kind.PING, 0, self.other.on_ping, number)
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
        self.carry(Kind.OPEN, 0, self.other.on_open, number, protocol)
        await stream.wait_opened()
        return stream

    def forget_stream(self, number: int) -> None:
        self.streams.pop(number, None)

    def close(self, why: str) -> None:
        """Say goodbye and be gone; the other end learns of it when the goodbye arrives."""
        self.say_goodbye(why)
        self.break_now(why)

    def say_goodbye(self, why: str, *, after_seconds: float = 0.0) -> None:
        """Tell the other end that this one closes; what was sent before arrives before it."""
        if self.alive and after_seconds:
            self._timeline.at(self._timeline.now() + after_seconds, self._carry_goodbye, why)
        elif self.alive:
            self._carry_goodbye(why)

    def _carry_goodbye(self, why: str) -> None:
        self.carry(Kind.GOODBYE, 0, self.other.break_now, f"{self.node.name}: {why}")

    def break_now(self, why: str) -> None:
        """This end is gone: its streams break, whoever waits for an answer is told."""
        if not self.alive:
            return
        self.alive = False
        self.world.record(Kind.BROKEN, self.node, self.other.node)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.link_gone(why)
        for answer in self._answers.values():
            answer.set()
        self.node.link_down(self)
        if not self.other.alive:
            self.world.forget_link(self.link)
