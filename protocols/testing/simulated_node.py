"""One node of a simulated world: the contract of `protocols.network`, in memory.

Everything that it does to others goes through a link (`link`), and everything that takes time is a
call on the world's timeline. Its only own tasks are the running handlers.

A crash is not a close. A crashed node must not say goodbye. Its tasks must find everything closed
before they are cancelled; otherwise their clean-up would still send.
"""

from __future__ import annotations

import logging
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import trio

from nat.addresses import without_peer
from protocols.errors import ProtocolMisuse, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import (
    LITTLE_BYTES,
    LinkEvent,
    LinkFacts,
    Reach,
    Sighting,
    Stream,
    StreamHandler,
    TrafficFacts,
    TraversableNetwork,
)
from protocols.testing import traversal
from protocols.testing.dialler import check, dial
from protocols.testing.link import Link, LinkEnd
from protocols.testing.link_model import LinkSettings, Pipe, segment_bytes
from protocols.testing.settings import NodeSettings
from protocols.testing.stream import SimulatedStream
from protocols.testing.timeline import Timeline

if TYPE_CHECKING:
    from protocols.testing.link import LinkEnd, WireMessage
    from protocols.testing.world import SimulatedWorld

logger = logging.getLogger(__name__)

ADDRESSES_PER_PEER = 16  # a home has two or three; more are stale or false
REPLACED_LINK_SECONDS = 60.0  # as py-libp2p does after a hole punch
EVENTS_PER_SUBSCRIBER = 256  # a subscriber further behind than this misses the oldest

_ADDRESS = re.compile(
    r"/(ip4/\d+\.\d+\.\d+\.\d+|ip6/[0-9a-f:]+|dns[46]?/[\w.-]+)/tcp/\d+"
    r"(/p2p/\w+/p2p-circuit)?(/p2p/(?P<owner>\w+))?"
)

EventSender = trio.MemorySendChannel[LinkEvent]
EventReceiver = trio.MemoryReceiveChannel[LinkEvent]


class SimulatedNetwork(TraversableNetwork):
    """A node in a `SimulatedWorld`, from `add_node` until `aclose`, a crash or the world's end."""

    def __init__(
        self,
        world: SimulatedWorld,
        index: int,
        name: str,
        identity: Identity,
        settings: NodeSettings,
    ) -> None:
        self.world = world
        self.index = index
        self.name = name
        self.settings = settings
        self.upload = Pipe(settings.upload_bytes_per_second)
        self.download = SimulatedDownload(world.timeline, settings.download_bytes_per_second)
        self.clock_skew_seconds = settings.clock_skew_seconds
        self.stopped_at: float | None = None
        self.closed = False  # the process has ended
        self.silent = False  # and so has the machine: nothing answers
        self.handlers: dict[str, StreamHandler] = {}
        self._identity = identity
        self._peer_id = identity.peer_id
        self._random = random.Random(f"{world.seed} {name}")
        self._links: dict[PeerId, LinkEnd] = {}
        self._replaced: dict[int, LinkEnd] = {}  # relayed links that a direct one replaced
        self._addresses: dict[PeerId, dict[str, None]] = {}  # oldest first
        self._subscribers: dict[int, tuple[EventSender, EventReceiver]] = {}
        self._subscriptions = 0
        self._running: dict[int, trio.CancelScope] = {}
        self._runs = 0
        self.messages_sent = 0  # onto the wire, without goodbyes
        self.bytes_sent = self.bytes_received = 0  # on all links, ended ones too
        self._on_their_way = 0  # bytes that streams have accepted, and that have not arrived
        self._sending_bytes = 0
        self._sending_seconds = self._sending_since = 0.0
        self.machine = index  # whose router and address it has
        self.sent_to: set[int] = set()  # machines, from the port that it listens on
        self.symmetric_ports = 0
        self.punching: dict[PeerId, bool] = {}  # and whether this side initiates
        self.asked_as_relays: Counter[PeerId] = Counter()  # at this moment
        self._found: tuple[str, ...] = ()
        self._calls_at_message: dict[int, Callable[[], None]] = {}  # by message number

    def __repr__(self) -> str:
        return f"<simulated node {self.name}>"

    # -- identity and addresses ------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def random(self) -> random.Random:
        return self._random

    def wall_time(self) -> float:
        return self.world.honest_time() + self.clock_skew_seconds

    def time_seen(self) -> float:
        """trio's time as this process sees it.

        A stopped process reads no clock, and sees how late it is when it goes on.
        """
        return trio.current_time() if self.stopped_at is None else self.stopped_at

    @property
    def address(self) -> str:
        """The one address of this node in its world."""
        return f"{self.world.place_of(self.index)}/p2p/{self._peer_id}"

    @property
    def place(self) -> str:
        return self.world.place_of(self.machine)

    @property
    def seen_at(self) -> str:
        """The address that those see to whom this node connects."""
        return f"{self.place}/p2p/{self._peer_id}"

    def addresses(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._found, self.address)))

    def learn_addresses(self, peer: PeerId, addresses: Iterable[str]) -> None:
        known = self._addresses.setdefault(peer, {})  # oldest first
        for address in addresses:
            if not _is_address_of(peer, address):
                continue
            known.pop(address, None)
            known[address] = None
            if len(known) > ADDRESSES_PER_PEER:
                del known[next(iter(known))]

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return tuple(self._addresses.get(peer, {}))

    # -- links -----------------------------------------------------------------------------

    def link(self, peer: PeerId) -> LinkFacts | None:
        end = self._links.get(peer)
        return None if end is None else end.facts()

    def links(self) -> tuple[LinkFacts, ...]:
        return tuple(end.facts() for end in self._links.values())

    def link_end(self, peer: PeerId) -> LinkEnd | None:
        return self._links.get(peer)

    def link_ends(self) -> tuple[LinkEnd, ...]:
        """All ends that are alive: the link to each peer, and replaced relayed links."""
        return (*self._links.values(), *self._replaced.values())

    def link_up(self, end: LinkEnd) -> None:
        """Register a new link. A direct one gives a relayed one some time to end its streams."""
        old = self._links.get(end.peer)
        if old is not None and (old.reach, end.reach) == (Reach.RELAYED, Reach.DIRECT):
            self._replaced[old.link.number] = old
            self.world.timeline.at(
                trio.current_time() + REPLACED_LINK_SECONDS, old.close, "a direct link took over"
            )
        elif old is not None:
            old.break_now("the same peer connected anew")
            old = None
        self._links[end.peer] = end
        was = Reach.NONE if old is None else old.reach
        self._announce(LinkEvent(end.peer, reach=end.reach, was=was))

    def link_down(self, end: LinkEnd) -> None:
        self._replaced.pop(end.link.number, None)
        if self._links.get(end.peer) is end:
            del self._links[end.peer]
            self._announce(LinkEvent(end.peer, reach=Reach.NONE, was=end.reach))

    def inbound_links(self) -> int:
        return sum(end.inbound for end in self._links.values())

    def traffic(self) -> TrafficFacts:
        seconds = self._sending_seconds
        if self._on_their_way > LITTLE_BYTES:
            seconds += self.world.timeline.now() - self._sending_since
        return TrafficFacts(self.bytes_sent, self.bytes_received, self._sending_bytes, seconds)

    def on_their_way(self, more: int, *, arrived: int = 0) -> None:
        """So many bytes more are on their way from this node; or fewer, below zero, of which some
        have arrived."""
        was_sending = self._on_their_way > LITTLE_BYTES
        self._on_their_way += more
        if was_sending:
            self._sending_bytes += arrived
        if (self._on_their_way > LITTLE_BYTES) is was_sending:
            return
        now = self.world.timeline.now()
        if was_sending:
            self._sending_seconds += now - self._sending_since
        self._sending_since = now

    def link_events(self) -> AbstractContextManager[trio.MemoryReceiveChannel[LinkEvent]]:
        return self._subscription()

    @contextmanager
    def _subscription(self) -> Iterator[trio.MemoryReceiveChannel[LinkEvent]]:
        send, receive = trio.open_memory_channel[LinkEvent](EVENTS_PER_SUBSCRIBER)
        # this end drops the oldest event if the channel is full
        with send, receive, receive.clone() as dropping:
            self._subscriptions += 1
            number = self._subscriptions
            self._subscribers[number] = (send, dropping)
            try:
                yield receive
            finally:
                del self._subscribers[number]

    def _announce(self, event: LinkEvent) -> None:
        for send, dropping in self._subscribers.values():
            try:
                send.send_nowait(event)
            except trio.WouldBlock:
                dropping.receive_nowait()
                send.send_nowait(event)

    async def connect(self, peer: PeerId) -> LinkFacts:
        return (await self._linked(peer)).facts()

    async def _linked(self, peer: PeerId) -> LinkEnd:
        await trio.lowlevel.checkpoint()
        self._check_open()
        if peer == self._peer_id:
            raise ProtocolMisuse("A node cannot connect to itself.")
        end = self._links.get(peer)
        if end is not None:
            return end
        return await dial(self, peer)

    async def check_dialable(self, peer: PeerId, addresses: Iterable[str]) -> str:
        await trio.lowlevel.checkpoint()
        self._check_open()
        if peer == self._peer_id:
            raise ProtocolMisuse("A node cannot connect to itself.")
        own = [address for address in addresses if _is_address_of(peer, address)]
        return await check(self, peer, own)

    def link_to(
        self,
        there: SimulatedNetwork,
        address: str,
        *,
        path: LinkSettings | None = None,
        relay: PeerId | None = None,
        punched: bool = False,
    ) -> LinkEnd:
        """Make a link with a node that accepts it; both learn each other's addresses."""
        number = self.world.next_link_number()
        link = Link(number, self, there, address, path=path, relay=relay, punched=punched)
        near, far = link.ends
        self.world.remember_link(link)
        self.learn_addresses(there.peer_id, there.addresses())
        there.learn_addresses(self.peer_id, self.addresses())
        there.link_up(far)
        self.link_up(near)
        return near

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        for end in self.link_ends():
            if end.peer == peer:
                end.close("disconnected")

    async def ping(self, peer: PeerId) -> float:
        await trio.lowlevel.checkpoint()
        self._check_open()
        end = self._links.get(peer)
        if end is None:
            raise Unreachable(f"There is no link to {peer}.", advice="Connect first, then measure.")
        return await end.round_trip()

    # -- traversal -------------------------------------------------------------------------

    def listened_addresses(self) -> tuple[str, ...]:
        return (self.place,)

    def announce(self, addresses: Iterable[str]) -> None:
        self._found = tuple(f"{without_peer(one)}/p2p/{self._peer_id}" for one in addresses)

    async def sighting(  # its links have no version of IP
        self,
        peer: PeerId,
        *,
        port: int = 0,
        ipv4: bool = False,  # noqa: ARG002
    ) -> Sighting:
        return await traversal.sighting(self, peer, port)

    def dial_back(
        self, peer: PeerId, address: str, protocol: str
    ) -> AbstractAsyncContextManager[Stream]:
        return traversal.dial_back(self, peer, address, protocol)

    async def punch(self, peer: PeerId, addresses: Iterable[str], *, initiates: bool) -> LinkFacts:
        self._check_open()
        return await traversal.punch(self, peer, addresses, initiates=initiates)

    async def carry_circuit(self, stream: Stream, peer: PeerId) -> None:
        await traversal.carry_circuit(self, stream, peer)

    # -- streams ---------------------------------------------------------------------------

    async def open(self, peer: PeerId, protocol: str) -> SimulatedStream:
        end = await self._linked(peer)
        return await end.open_stream(protocol)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._check_open()
        if protocol in self.handlers:
            raise ProtocolMisuse(
                f"{protocol} is already served by this node.",
                advice="Call stop_serving first, or serve under another name.",
            )
        self.handlers[protocol] = handler

    def stop_serving(self, protocol: str) -> None:
        self.handlers.pop(protocol, None)

    def run_handler(self, handler: StreamHandler, stream: SimulatedStream) -> None:
        self.world.nursery.start_soon(self._handle, handler, stream)

    async def _handle(self, handler: StreamHandler, stream: SimulatedStream) -> None:
        with self.running():
            try:
                await handler(stream)
            except Exception:
                stream.reset()
                logger.exception("the handler of %s failed; its stream was reset", stream.protocol)
            else:
                await stream.aclose()
        # if it is cancelled, the node has ended: its links are gone, and the streams with them

    # -- the end ---------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block as part of this node: it is cancelled when the node ends."""
        self._runs += 1
        number = self._runs
        with trio.CancelScope() as scope:
            self._running[number] = scope
            if self.closed:
                scope.cancel()
            try:
                yield
            finally:
                del self._running[number]

    def call_at_message(self, message: int, what: Callable[[], None]) -> None:
        """Call `what` when the node is about to send its message of that number, counted from 1."""
        self._calls_at_message[message] = what

    def about_to_send(self) -> None:
        """The link ends call this before each message."""
        self.messages_sent += 1
        what = self._calls_at_message.pop(self.messages_sent, None)
        if what is not None:
            what()

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError("this network has ended")

    async def aclose(self) -> None:
        """End this node gracefully: links say goodbye, handlers are cancelled."""
        self.end(politely=True)
        await trio.lowlevel.checkpoint()

    def end(self, *, politely: bool) -> None:
        """End this node now. Its tasks then find everything closed."""
        if self.closed:
            return
        self.closed = True
        for end in self.link_ends():
            if politely:
                end.close("the node ended")
            else:
                end.break_now("the node crashed")
        self.handlers.clear()
        for send, _ in self._subscribers.values():
            send.close()
        for scope in tuple(self._running.values()):
            scope.cancel()


def _is_address_of(peer: PeerId, address: str) -> bool:
    match = _ADDRESS.fullmatch(address)
    return match is not None and match["owner"] in (None, peer)


# A node's download: everything that arrives passes here, in order of arrival.
#
# Without a limit it costs nothing. With one, a message is delivered in slices as its bytes arrive,
# so a reader of one byte a second gets one byte each second. The senders' stream windows limit how
# much waits here.


class SimulatedDownload:
    """Invariant: exactly one call on the timeline is pending while anything waits."""

    def __init__(self, timeline: Timeline, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._timeline = timeline
        self._waiting: deque[tuple[LinkEnd, WireMessage]] = deque()

    def take(self, sender: LinkEnd, message: WireMessage) -> None:
        """Deliver this message when all its bytes, and all before it, have passed."""
        if self.bytes_per_second is None and not self._waiting:
            sender.deliver(message)
            return
        self._waiting.append((sender, message))
        if len(self._waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            sender, message = self._waiting[0]
            limit = segment_bytes(self.bytes_per_second)
            if message.size and self.bytes_per_second is not None and limit is not None:
                size = min(limit, message.size)
                done = self._timeline.now() + size / self.bytes_per_second
                self._timeline.at(done, self._served, size)
                return
            self._waiting.popleft()
            sender.deliver(message)

    def _served(self, size: int) -> None:
        sender, message = self._waiting.popleft()
        if size < message.size:
            message, rest = message.split(size)
            self._waiting.appendleft((sender, rest))
        sender.deliver(message)
        self._serve()
