"""What the parts of rpc share: limits, counts, penalties, and the guard.

Every limit is per node and bounds what others can make it hold or do. The figures below suit a
volunteer's machine; a backbone raises the totals.

Easy to get wrong: the counts of things in flight are balanced by hand, so whatever adds to one
takes away in a `finally`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import trio

from protocols.engagements import Engagements
from protocols.errors import PotluckError, RemoteMisbehaviour
from protocols.frame_sender import QueuedBytes
from protocols.guard import Exchange, Guard
from protocols.identity import PeerId
from protocols.patience import Patience
from protocols.penalties import Penalties
from protocols.shut_out import ShutOut

log = logging.getLogger("potluck.rpc")


@dataclass(frozen=True)
class RpcLimits:
    """How much of everything.

    The first two bound our own calls, the rest what others ask of us. Our own limit towards one
    peer is below what the peer allows us, so that a well-behaved node waits here (its calls
    queue) instead of being told Busy there.
    """

    calls_per_peer: int = 128
    """Own calls in flight on one stream; more wait for their turn, within their deadline."""
    calls_in_total: int = 8192
    """Own calls in flight and waiting; more are refused with Busy at once."""
    served_per_peer: int = 256
    """Calls of one peer in hand; each holds at most one request and one response."""
    served_in_total: int = 2048
    """Calls of all peers in hand."""
    transfers_per_peer: int = 32
    """Bulk transfers that one peer has open here."""
    transfers_in_total: int = 1024
    """Bulk transfers that all peers have open here: in the largest group of averaging each of 255
    sends to each, some of them once more after an attempt that failed; and states are fetched."""
    streams_per_peer: int = 64
    """Streams of one peer, of both sorts; more are reset."""
    streams_per_stranger: int = 16
    """The same of a peer that the guard does not know yet. Each may hold a request on its way."""
    queued_bytes_in_total: int = 64 << 20
    """Requests and answers that wait to be sent, on all streams. Above it a stream may hold 64 KiB
    instead of a megabyte: peers that ask much and read nothing get no more than that."""
    open_seconds: float = 20.0
    """Opening a stream, dialling included: as long as a hole punch may take."""
    idle_seconds: float = 120.0
    """A call stream that was not used for so long is closed by the side that opened it."""
    served_idle_seconds: float = 600.0
    """A call stream that a peer opened and does not use; long after its own side should close."""
    stall_seconds: float = 30.0
    """Without progress inside a message, or with nothing taken by a reader, a stream is reset."""
    first_frame_seconds: float = 30.0
    """A stream that a peer opened must say something within this."""


@dataclass
class RpcStatistics:
    """What rpc did so far, and what it has in hand. Counts are since it was opened."""

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
    """How many of something are in hand, for each peer and in total. Empty peers leave no trace."""

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
        """Count one more, unless that is over a limit."""
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
    """Shared by all streams of one Rpc."""

    def __init__(self, guard: Guard, limits: RpcLimits) -> None:
        self.guard = guard
        self.limits = limits
        self.counts = RpcStatistics()
        self.penalties = Penalties()
        self.served = Tally(limits.served_per_peer, limits.served_in_total)
        self.transfers = Tally(limits.transfers_per_peer, limits.transfers_in_total)
        self.queued = QueuedBytes(limits.queued_bytes_in_total)
        self.streams = Tally(limits.streams_per_peer, limits.streams_per_peer * 1024)
        self.engagements = Engagements()
        self.shut_out = ShutOut()
        self.patience = Patience()

    def misbehaved(self, peer: PeerId, protocol: str, error: RemoteMisbehaviour) -> None:
        """A peer broke the protocol: avoid it for a while, and name it in the log, once."""
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
        """Whether a stream that this peer opened is looked at, and counted as its own."""
        now = trio.current_time()
        if len(self.shut_out) and not self.shut_out.lets_in(peer, now):
            return False
        if self.avoided_for(peer) > 0.0:
            return False
        few = self.streams.of(peer) < self.limits.streams_per_stranger
        return (few or self.guard.knows(peer)) and self.streams.enter(peer)

    def shut_out_because(self, peer: PeerId) -> PotluckError | None:
        """Why nothing is asked of a peer; None if it is not shut out."""
        return self.shut_out.reason(peer) if len(self.shut_out) else None

    def accepted(self, exchange: Exchange) -> None:
        """The guard accepted something that this peer said: with a token, it may be back."""
        if len(self.shut_out) and exchange.credentials is not None:
            self.shut_out.readmit(exchange.peer)

    def refused(self, peer: PeerId) -> float:
        """The guard refused this peer something; how long to read no more of where it came from."""
        return self.patience.refused(peer, trio.current_time())

    def statistics(self) -> RpcStatistics:
        return dataclasses.replace(
            self.counts,
            requests_in_flight=self.served.total,
            transfers_open=self.transfers.total,
            served_streams=self.streams.total,
            peers_avoided=len(self.penalties.avoided(trio.current_time())),
            peers_shut_out=len(self.shut_out),
        )
