"""What a protocol may ask of the world. Nothing in here is libp2p's.

Two networks keep this contract: `node/libp2p_network.py` (real) and `node/simulated_network.py`
(in memory, under a virtual clock and a seed). One set of tests runs against both
(tests/contract/). A protocol that is written against this module alone can therefore be proven
under every fault before it meets the internet.

The words: a *link* is what we have with one peer (at most one is used at a time, direct before
relayed); a *stream* is one ordered two-way byte channel on it, for one protocol; `open` makes a
stream, `serve` answers those that others open. Addresses are multiaddr strings that end in
`/p2p/<peer id>` when they name the peer.

Easy to get wrong: time and chance come from here too (`wall_time`, `random`), never from `time`
or `random` directly, or a simulation stops being repeatable. Durations use `trio.current_time`.
"""

from __future__ import annotations

import enum
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import trio
from trio.abc import HalfCloseableStream

from protocols.identity import Identity, PeerId


class Reach(enum.Enum):
    """How a peer is reached right now."""

    DIRECT = "direct"
    RELAYED = "relayed"
    NONE = "none"


@dataclass(frozen=True)
class LinkFacts:
    """What is known and measured of the link to one peer, at one moment.

    `round_trip_seconds` and the two rates are None until something measured them. Rates are the
    best that a busy link has carried over the last while, in bytes per second of payload.
    `connected_at` is in `trio.current_time()`.
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


@dataclass(frozen=True)
class TrafficFacts:
    """What this node has sent and received since it started, over all its links, as the network
    carries it: with handshakes, encryption and headers. Only grows."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class LinkEvent:
    """The link to a peer came up, went away, or changed how it is reached (relayed to direct)."""

    peer: PeerId
    reach: Reach
    was: Reach


class Stream(HalfCloseableStream):
    """One ordered, reliable, two-way byte channel with an authenticated peer.

    The trio contract holds: `receive_some` returns b"" after the other side's `send_eof`, as
    often as it is asked; `trio.ClosedResourceError` after our own close or reset, and for sending
    after our own `send_eof`; `trio.BrokenResourceError` when the other side reset the stream or
    the link is gone. One task may send while another receives; two tasks sending at once, or two
    receiving, raise `trio.BusyResourceError`. Whoever waits when the stream ends is woken with
    the error. Sending nothing is a checkpoint and sends nothing.

    Cancellation: a cancelled receive loses no bytes. A cancelled send may have sent part of its
    data; the stream is still sound, but the sender of a framed protocol should reset it.

    `aclose` ends our sending side politely (as `send_eof` does: what was sent before still
    arrives) and stops receiving: what is unread or still arrives is discarded, and the other
    side, if it goes on sending or waits to, is told by a reset. `reset` ends both directions at
    once, drops what is queued, never blocks, and is safe to call twice. At the other end a reset
    breaks receiving only if the end of stream had not arrived before it; so an answer followed by
    `aclose` is read whole, even when part of the request was never read.
    Backpressure is end to end: `send_all` returns when the bytes are queued within a bounded
    buffer, and waits while the reader on the other side does not read.
    """

    @property
    @abstractmethod
    def remote_peer(self) -> PeerId:
        """Who is at the other end, as proven by the channel."""

    @property
    @abstractmethod
    def protocol(self) -> str: ...

    @abstractmethod
    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        """Wait for at least one byte, write what is there into `buffer`; 0 only at the end.

        An empty buffer is a ValueError, as `receive_some(0)` is.
        """

    def receive_now(self, buffer: memoryview | bytearray) -> int:  # noqa: ARG002  others use it
        """Write what is there already into `buffer`, without waiting; how much that was.

        0 says nothing about the stream, and a network may always answer it: then wait.
        """
        return 0

    async def send_parts(self, start: bytes, rest: memoryview) -> None:
        """Send both, one behind the other, in one step; else as `send_all`."""
        await self.send_all(b"".join((start, rest)))

    @abstractmethod
    def reset(self) -> None:
        """Drop the stream at once in both directions. Never blocks."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(ABC):
    """One node's view of the world. Made, run and ended by the node's nursery.

    When it has ended, its streams are broken, its handlers cancelled, and `connect`, `open`,
    `ping` and `serve` raise `trio.ClosedResourceError`.
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
        """Chance: unpredictable on a real network, seeded in a simulation."""

    @abstractmethod
    def wall_time(self) -> float:
        """This machine's clock, in seconds since 1970. It may be wrong: peers' clocks differ."""

    @abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial us, each ending in /p2p/<our id>; announce addresses first."""

    @abstractmethod
    def learn_addresses(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember where a peer may be dialled. Bounded per peer: the newest are kept.

        What is no address, or names another peer, is left out in silence: addresses come from
        strangers.
        """

    @abstractmethod
    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """The addresses that are known for a peer."""

    @abstractmethod
    def link(self, peer: PeerId) -> LinkFacts | None:
        """The link to a peer as it is now, or None when there is none."""

    @abstractmethod
    def links(self) -> tuple[LinkFacts, ...]:
        """All links there are now."""

    def traffic(self) -> TrafficFacts:
        """What was sent and received in all; a network that does not count says nothing."""
        return TrafficFacts()

    @abstractmethod
    def link_events(self) -> AbstractContextManager[trio.MemoryReceiveChannel[LinkEvent]]:
        """Subscribe to changes: `with network.link_events() as events: async for event in events`.

        The channel is bounded; a subscriber that falls far behind misses the oldest events.
        """

    @abstractmethod
    async def connect(self, peer: PeerId) -> LinkFacts:
        """Make sure there is a link; Unreachable with every address's failure when there is none.

        Known addresses are tried side by side, likelier ones with a small head start. A failure
        is not remembered: the next call tries again. Cancelling leaves no half-open connection.
        When somebody else answers at an address, that address has failed. Connecting to oneself
        is a misuse.
        """

    @abstractmethod
    async def check_dialable(self, peer: PeerId, addresses: Iterable[str]) -> str:
        """Whether a peer can be dialled at one of these addresses; returns the one that answered.

        Makes a connection of its own, whatever link there is, lets the other side prove that it
        is this peer, and hangs up. Unreachable with every address's failure when none answers.
        Nothing is remembered, and the link, if any, is not touched. An address that needs a relay
        has failed: the question is whether the peer can be dialled without one.
        """

    @abstractmethod
    async def disconnect(self, peer: PeerId) -> None:
        """Close the link, if any; its streams break. Returns when it is closed on our side."""

    @abstractmethod
    async def ping(self, peer: PeerId) -> float:
        """Measure the round trip to a connected peer, in seconds; `link` shows it from then on.

        Unreachable if there is no link, or if it dies meanwhile.
        """

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream, connecting first if need be.

        Unreachable when there is no way to the peer; ProtocolNotServed when the peer does not
        serve that protocol; Unreachable also when the link dies meanwhile, or the peer resets the
        stream at once (it has as many as it allows). No deadline of its own beyond the dial's:
        callers use `trio.fail_after`. Cancelling leaves no stream behind.
        """

    @abstractmethod
    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` in a task of its own for each stream that a peer opens for `protocol`.

        When it returns, the stream is closed if it was not; when it raises, the stream is reset,
        the error is logged, and nothing else is affected. Serving a protocol twice is a misuse
        (`ProtocolMisuse`).
        """

    @abstractmethod
    def stop_serving(self, protocol: str) -> None:
        """Accept no further streams for `protocol`; those that run go on. Twice is harmless."""
