"""The contract between protocols and the network. It is independent of libp2p.

There are two implementations: `node/net/network.py` (real) and `protocols/testing/world.py` (in
memory, with a virtual clock and a seed). The tests in tests/contract/ run against both. A protocol
that uses only this module can be tested under every fault before it runs on the internet.

A *link* is the connection to one peer. At most one is used at a time, a direct one before a relayed
one. A *stream* is one ordered two-way byte channel on a link, for one protocol. `open` makes a
stream; `serve` answers those that others open. Addresses are multiaddr strings. They end in
`/p2p/<peer id>` if they name the peer.

Take time and randomness from here too (`wall_time`, `random`), never from `time` or `random`
directly: otherwise a simulation is not repeatable. For durations use `trio.current_time`.
"""

from __future__ import annotations

import enum
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

import trio
from trio.abc import HalfCloseableStream

from protocols.identity import Identity, PeerId


class Reach(enum.Enum):
    """How a peer is reached now."""

    DIRECT = "direct"
    RELAYED = "relayed"
    NONE = "none"


@dataclass(frozen=True)
class LinkFacts:
    """The state of the link to one peer at one moment, with its measurements.

    `round_trip_seconds` and the two rates are None until they are measured. A rate is the best that
    a busy link carried recently, in bytes per second of payload. `connected_at` is in
    `trio.current_time()`. `punched`: both sides connected at once, through their routers.
    """

    peer: PeerId
    reach: Reach
    inbound: bool
    remote_address: str
    connected_at: float
    round_trip_seconds: float | None = None
    send_bytes_per_second: float | None = None
    receive_bytes_per_second: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    open_streams: int = 0
    punched: bool = False

    @property
    def way(self) -> str:
        """For people: direct, punched, relayed or none."""
        return "punched" if self.punched else self.reach.value


LITTLE_BYTES = 4096
"""Signs of life and other small messages: an uplink that carries no more is not busy."""


@dataclass(frozen=True)
class TrafficFacts:
    """The bytes that this node has sent and received on all links since it started. Only grows.

    `sent_bytes` and `received_bytes` are what the network carries, with handshakes, encryption and
    headers. `sending_seconds`: for how long more than `LITTLE_BYTES` were on their way out, given
    to the network and not arrived; `sending_bytes`: those that arrived then, without headers.
    Together they tell how fast the uplink is. Bytes that wait for a slow reader count, once its
    buffers are full. A real network looks now and then, so that bursts shorter than that make the
    uplink seem slow. Both are 0 if they are not measured.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sending_bytes: int = 0
    sending_seconds: float = 0.0


@dataclass(frozen=True)
class LinkEvent:
    """The link to a peer came up, went away, or changed how it is reached (relayed to direct)."""

    peer: PeerId
    reach: Reach
    was: Reach


FEW_BYTES = 64


class Stream(HalfCloseableStream):
    """One ordered, reliable, two-way byte channel with an authenticated peer.

    The trio contract holds. `receive_some` returns b"" after the other side's `send_eof`, however
    often it is called. `trio.ClosedResourceError` is raised after our own close or reset, and for
    sending after our own `send_eof`; `trio.BrokenResourceError` when the other side reset the
    stream, the link is gone, or the network dropped the stream because too much was unread. One
    task may send while another receives. If two tasks send at once, or two receive,
    `trio.BusyResourceError` is raised. A task that waits when the stream ends is woken with the
    error. Sending nothing is a checkpoint and sends nothing.

    Cancellation: a cancelled receive loses no bytes. A cancelled send may have sent part of its
    data; the stream is still sound, but the sender of a framed protocol should reset it.

    `aclose` ends our sending side as `send_eof` does: data sent before still arrives. It also stops
    receiving: data that is unread or still arrives is discarded, and if the other side sends more
    or waits to send, it gets a reset. `reset` ends both directions at once and drops what is
    queued. It never blocks, and may be called twice. At the other end a reset breaks receiving only
    if the end of stream had not arrived before it. So an answer followed by `aclose` is read in
    full, even if part of the request was never read.
    Backpressure is end to end: `send_all` returns when the bytes are in a bounded buffer, and waits
    while the reader on the other side does not read.
    """

    @property
    @abstractmethod
    def remote_peer(self) -> PeerId:
        """The peer at the other end, as proven by the channel."""

    @property
    @abstractmethod
    def protocol(self) -> str: ...

    @property
    @abstractmethod
    def last_arrival(self) -> float:
        """When more than `FEW_BYTES` last arrived at once, received or not, by trio's clock; -inf
        before the first. Fewer may only say that the other side is alive."""

    @property
    def over_their_dial(self) -> bool:
        """Whether it runs over a connection that the other side made to us, directly and unhelped.

        `Network.link` does not tell: a peer may have two connections for a moment. False, too, if
        it is not known.
        """
        return False

    @abstractmethod
    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        """Wait for at least one byte and write what is there into `buffer`; 0 only at the end.

        An empty buffer raises ValueError, as `receive_some(0)` does.
        """

    def receive_now(self, buffer: memoryview | bytearray) -> int:  # noqa: ARG002  others use it
        """Write what has already arrived into `buffer`, without waiting. Return the number of
        bytes.

        0 may be returned at any time and says nothing about the stream: then wait.
        """
        return 0

    async def send_parts(self, start: bytes, rest: memoryview) -> None:
        """Send `start` and then `rest`, in one step; otherwise like `send_all`."""
        await self.send_all(b"".join((start, rest)))

    @abstractmethod
    def reset(self) -> None:
        """Drop the stream at once in both directions. Never blocks."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(ABC):
    """The network as one node uses it. The node's nursery runs it.

    After its end its streams are broken and its handlers cancelled, and `connect`, `open`, `ping`
    and `serve` raise `trio.ClosedResourceError`.
    """

    @property
    @abstractmethod
    def identity(self) -> Identity: ...

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    @abstractmethod
    def random(self) -> random.Random:
        """The source of randomness: unpredictable on a real network, seeded in a simulation."""

    @abstractmethod
    def wall_time(self) -> float:
        """This machine's clock, in seconds since 1970. It may be wrong; peers' clocks differ."""

    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """Addresses to dial us at, each ending in /p2p/<our id>. Announce addresses come first."""

    @abstractmethod
    def learn_addresses(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember addresses at which a peer may be dialled. The newest are kept, up to a limit.

        Addresses come from strangers, so invalid ones and those that name another peer are ignored.
        """

    @abstractmethod
    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """The known addresses of a peer."""

    @abstractmethod
    def link(self, peer: PeerId) -> LinkFacts | None:
        """The link to a peer as it is now, or None when there is none."""

    @abstractmethod
    def links(self) -> tuple[LinkFacts, ...]:
        """All current links."""

    def traffic(self) -> TrafficFacts:
        """The bytes sent and received in all; zero on a network that does not count."""
        return TrafficFacts()

    @abstractmethod
    def link_events(self) -> AbstractContextManager[trio.MemoryReceiveChannel[LinkEvent]]:
        """Subscribe to changes: `with network.link_events() as events: async for event in events`.

        The channel is bounded; a subscriber that falls far behind misses the oldest events.
        """

    @abstractmethod
    async def connect(self, peer: PeerId) -> LinkFacts:
        """Make sure that there is a link. Unreachable, with the failure of each address, if not.

        Known addresses are tried in parallel; likelier ones get a small head start. A failure is
        not remembered: the next call tries again. Cancellation leaves no half-open connection. An
        address at which another peer answers has failed. Connecting to this node itself is a
        misuse.
        """

    @abstractmethod
    async def check_dialable(self, peer: PeerId, addresses: Iterable[str]) -> str:
        """Check whether a peer can be dialled at these addresses. Return the one that answered.

        This makes a connection of its own even if there is a link, lets the other side prove that
        it is this peer, and closes it. Unreachable, with the failure of each address, if none
        answers. Nothing is remembered, and the link is not touched. An address that needs a relay
        counts as failed: the check is whether the peer can be dialled without one.
        """

    @abstractmethod
    async def disconnect(self, peer: PeerId) -> None:
        """Close the link, if any; its streams break. Returns when it is closed on our side."""

    @abstractmethod
    async def ping(self, peer: PeerId) -> float:
        """Measure the round trip to a connected peer, in seconds. `link` then shows it.

        Unreachable if there is no link, or if it is lost meanwhile.
        """

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream. Connect first if there is no link.

        ProtocolNotServed if the peer does not serve the protocol. Unreachable if there is no way to
        the peer, if the link is lost meanwhile, or if the peer resets the stream at once because it
        has as many as it allows. There is no timeout except the dial's: use `trio.fail_after`.
        Cancellation leaves no stream behind.
        """

    @abstractmethod
    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` in a task of its own for each stream that a peer opens for `protocol`.

        If the handler returns, its stream is closed unless it already was. If the handler raises,
        its stream is reset and the error is logged; nothing else is affected. Serving a protocol
        twice raises `ProtocolMisuse`.
        """

    @abstractmethod
    def stop_serving(self, protocol: str) -> None:
        """Accept no more streams for `protocol`; running handlers go on. May be called twice."""


@dataclass(frozen=True)
class Sighting:
    """From where a peer saw a fresh connection of ours come.

    `port` is the local port of that connection, `address` what the peer saw, without `/p2p/`.
    """

    port: int
    address: str


class TraversableNetwork(Network):
    """A network that can also be reached through relays and holes: what `nat/` asks of it.

    A *circuit* is a stream to a relay that carries the bytes of a connection to a third peer. A
    link over a circuit is a relayed link, with its own handshake: the relay reads nothing. An
    address with `/p2p-circuit/` is dialled by asking its relay for a circuit.
    """

    @abstractmethod
    def listened_addresses(self) -> tuple[str, ...]:
        """The addresses of this machine on which it listens, without `/p2p/`, loopback last."""

    @abstractmethod
    def announce(self, addresses: Iterable[str]) -> None:
        """Replace the addresses that are announced beside those of the owner's settings.

        For addresses that this machine cannot see: those of its router, and those through relays.
        """

    @abstractmethod
    async def sighting(self, peer: PeerId, *, port: int = 0, ipv4: bool = False) -> Sighting:
        """Let a peer that we have dialled say where a fresh connection of ours comes from.

        The connection is made from this local port, which may be one that we listen on; 0: from a
        free one. With `ipv4` it goes over IPv4, even if the link does not, where that is possible.
        It proves no identity of ours, so that it is no second link, and it is closed before this
        returns. Unreachable if it cannot be made, or the peer does not say, or if
        there is no direct link to the peer that we have dialled.
        """

    @abstractmethod
    def dial_back(
        self, peer: PeerId, address: str, protocol: str
    ) -> AbstractAsyncContextManager[Stream]:
        """Open a stream over a fresh connection to a peer at this address, from a free port.

        The other side sees a stranger's identity, so that it is no second link. Leaving the block
        ends the connection. Unreachable if the address does not answer, ProtocolNotServed as for
        `open`. The caller sets the deadline.
        """

    @abstractmethod
    async def punch(self, peer: PeerId, addresses: Iterable[str], *, initiates: bool) -> LinkFacts:
        """Make a direct link by connecting from the port that we listen on, as the peer does too.

        Both must call it at the same time, one of them with `initiates`, which decides who begins
        the handshake. Each address is tried until the caller's deadline; a connection that the
        peer makes to us meanwhile counts, too. Unreachable if no address can be tried at all.
        """

    @abstractmethod
    async def carry_circuit(self, stream: Stream, peer: PeerId) -> None:
        """Make a relayed link of a circuit that this peer has asked a relay for.

        The peer proves its identity over it. Returns when that link has ended. Unreachable if the
        handshake fails.
        """
