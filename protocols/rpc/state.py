"""The shared state of rpc: limits, counts, penalties, and the guard.

Each limit is per node and bounds what others can make it hold or do. The defaults suit a
volunteer's machine; a backbone raises the totals.

Counts of things in flight are balanced by hand: code that adds to one must subtract in a `finally`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import trio

from protocols.errors import PotluckError, RemoteMisbehaviour
from protocols.guard import Exchange, Guard
from protocols.identity import PeerId
from protocols.rpc.frames import QueuedBytes, UnfinishedMessages
from protocols.rpc.peers import OpenWork, Penalties, RefusalPace, ShutOut

log = logging.getLogger("potluck.rpc")


@dataclass(frozen=True)
class RpcLimits:
    """The limits of one Rpc.

    The first two bound our own calls, the rest what others ask of us. Our limit for calls to one
    peer is lower than the peer's limit for us. So a well-behaved node queues its calls here, and
    does not get Busy from there.
    """

    calls_per_peer: int = 128
    """Own calls in flight on one stream; more wait for a slot, within their deadline."""
    calls_in_total: int = 8192
    """Own calls in flight and waiting; more are refused with Busy at once."""
    served_per_peer: int = 256
    """Running calls of one peer; each holds at most one request and one response."""
    served_in_total: int = 2048
    """Running calls of all peers."""
    transfers_per_peer: int = 32
    """Open bulk transfers of one peer."""
    transfers_in_total: int = 1024
    """Open bulk transfers of all peers.

    In the largest averaging group each of 255 peers sends to each other one, some once more after a
    failed attempt. Fetching states needs some too.
    """
    streams_per_peer: int = 64
    """Streams of one peer, of both kinds; more are reset."""
    streams_per_stranger: int = 16
    """The same for a peer that the guard does not know yet. Each stream may hold one request."""
    queued_bytes_in_total: int = 64 << 20
    """Requests and answers waiting to be sent, on all streams.

    Above it a stream may hold 64 KiB instead of a megabyte, to limit peers that ask much and read
    nothing.
    """
    unfinished_bytes_in_total: int = 256 << 20
    """What has come of messages that are not whole, on all streams.

    Above it the peer with most loses the streams of its own; a peer that the guard does not know
    goes first.
    """
    open_seconds: float = 20.0
    """For opening a stream, dialling included: as long as a hole punch may take."""
    idle_seconds: float = 120.0
    """A call stream that is idle for so long is closed by the side that opened it."""
    served_idle_seconds: float = 600.0
    """An idle call stream of a peer is closed, long after the peer should have done so."""
    stall_seconds: float = 30.0
    """A stream is reset if a message on it, or its reader, makes no progress for so long."""
    first_frame_seconds: float = 30.0
    """A stream that a peer opened must carry its first frame within this time."""


@dataclass
class RpcStatistics:
    """Counts of rpc's work since it was opened, and of the calls and transfers in flight."""

    calls_made: int = 0
    calls_answered: int = 0
    calls_failed: int = 0
    calls_cancelled: int = 0
    calls_timed_out: int = 0
    calls_in_flight: int = 0
    call_streams_opened: int = 0
    call_streams: int = 0
    requests_served: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    requests_refused_busy: int = 0
    requests_in_flight: int = 0
    served_streams: int = 0
    transfers_opened: int = 0
    transfers_served: int = 0
    transfers_open: int = 0
    chunk_bytes_sent: int = 0
    chunk_bytes_received: int = 0
    misbehaviours: int = 0
    peers_avoided: int = 0
    peers_shut_out: int = 0


class Tally:
    """Counts something for each peer and in total. Peers with a count of zero are dropped."""

    def __init__(self, per_peer: int, in_total: int) -> None:
        self._per_peer = per_peer
        self._in_total = in_total
        self._of_peer: dict[PeerId, int] = {}
        self.total = 0

    def of(self, peer: PeerId) -> int:
        return self._of_peer.get(peer, 0)

    def has_room(self, peer: PeerId) -> bool:
        return self._of_peer.get(peer, 0) < self._per_peer and self.total < self._in_total

    def enter(self, peer: PeerId) -> bool:
        """Count one more if no limit forbids it; return whether it was counted."""
        if not self.has_room(peer):
            return False
        self._of_peer[peer] = self._of_peer.get(peer, 0) + 1
        self.total += 1
        return True

    def leave(self, peer: PeerId) -> None:
        self.total -= 1
        mine = self._of_peer[peer] - 1
        if mine:
            self._of_peer[peer] = mine
        else:
            del self._of_peer[peer]


class RpcState:
    """The state that all streams of one Rpc share."""

    def __init__(self, guard: Guard, limits: RpcLimits) -> None:
        self.guard = guard
        self.limits = limits
        self.counts = RpcStatistics()
        self.penalties = Penalties()
        self.served = Tally(limits.served_per_peer, limits.served_in_total)
        self.transfers = Tally(limits.transfers_per_peer, limits.transfers_in_total)
        self.queued = QueuedBytes(limits.queued_bytes_in_total)
        self.unfinished = UnfinishedMessages(limits.unfinished_bytes_in_total, guard.knows)
        self.streams = Tally(limits.streams_per_peer, limits.streams_per_peer * 1024)
        self.open_work = OpenWork()
        self.shut_out = ShutOut()
        self.pace = RefusalPace()

    def misbehaved(self, peer: PeerId, protocol: str, error: RemoteMisbehaviour) -> None:
        """Avoid a peer that broke the protocol for a while, and name it in the log, once."""
        self.counts.misbehaviours += 1
        now = trio.current_time()
        strikes = self.penalties.strike(peer, now)
        level = logging.WARNING if strikes == 1 else logging.DEBUG
        log.log(
            level,
            "peer %s broke %s and is avoided for %.0f s: %s",
            peer,
            protocol,
            self.penalties.avoided_for(peer, now),
            error,
        )

    def avoided_for(self, peer: PeerId) -> float:
        if not len(self.penalties):
            return 0.0
        return self.penalties.avoided_for(peer, trio.current_time())

    def takes_stream(self, peer: PeerId) -> bool:
        """Whether to accept a stream that this peer opened. If so, count it."""
        now = trio.current_time()
        if len(self.shut_out) and not self.shut_out.lets_in(peer, now):
            return False
        if self.avoided_for(peer) > 0.0:
            return False
        few = self.streams.of(peer) < self.limits.streams_per_stranger
        return (few or self.guard.knows(peer)) and self.streams.enter(peer)

    def shut_out_reason(self, peer: PeerId) -> PotluckError | None:
        """Why a peer is shut out; None if it is not."""
        return self.shut_out.reason(peer) if len(self.shut_out) else None

    def accepted(self, exchange: Exchange) -> None:
        """The guard accepted a message of this peer. If it has a token, readmit it."""
        if len(self.shut_out) and exchange.credentials is not None:
            self.shut_out.readmit(exchange.peer)

    def refused(self, peer: PeerId) -> float:
        """The guard refused a message of this peer; return for how long to stop reading from it."""
        return self.pace.refused(peer, trio.current_time())

    def statistics(self) -> RpcStatistics:
        return dataclasses.replace(
            self.counts,
            requests_in_flight=self.served.total,
            transfers_open=self.transfers.total,
            served_streams=self.streams.total,
            peers_avoided=len(self.penalties.avoided(trio.current_time())),
            peers_shut_out=len(self.shut_out),
        )
