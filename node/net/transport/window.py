"""Flow control of one stream, without I/O: how much each side may send, and when a window grows.

A receive window starts at Yamux's 256 KiB and follows the reader. To never wait, the sender needs
twice as many bytes in flight as the application consumed within one round trip: one half travels
while the other is used. If a window was used up almost whole in one round trip, it was the
bottleneck and says nothing about the link, so it quadruples. So one stream fills a long fat link
after two or three round trips. On a machine short of processors the times may be wrong. So if a
sender has used up its window and the reader waits for more, the window also counts as the
bottleneck. A reader that stops never makes its window grow. Nor does one that stops and then drains
the collected bytes at the speed of memory: only bytes count that were both received and consumed
within the round trip, or were waited for.

All streams of a connection share a budget for growth, and so do all connections of a node.

Yamux cannot take credit back. A window that has grown stays that large; only credit that the sender
has used up is withheld or returned.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from node.net.transport.frames import LARGEST_WINDOW_BYTES
from node.net.transport.settings import INITIAL_WINDOW_BYTES, MIB
from protocols.errors import LimitExceeded

# Both ends are processes that run in slices of about a millisecond. On a faster link the slices are
# the delay to cover, whatever a ping says.
SHORTEST_ROUND_TRIP_SECONDS = 0.002

# Twice what a round trip carries: one half is in flight while the other is consumed.
WINDOW_PER_CONSUMED = 2

# A window of which more than this part was consumed within one round trip was the bottleneck, or
# nearly so. Then it grows more. (TCP's slow start doubles. It begins anew for each connection,
# whereas our streams begin on established connections.)
BRAKE_FRACTION = 3 / 4
WINDOW_PER_CONSUMED_AS_BRAKE = 4

# Credit is returned in thirds of the window: often enough that the sender still has two thirds when
# the update is in flight, more than a round trip carries. An update costs both sides a tenth of a
# message of 256 KiB. Such messages grow a window to 1 MiB, and with quarters each had its own.
UPDATES_PER_WINDOW = 3

# So much the windows of a connection may grow in any case: one stream at 40 MB/s and 100 ms.
OWN_GROWTH_BYTES = 4 * MIB


# For read buffers that are larger than a packet. More than a hundred busy connections get some.
BUFFERS_FRACTION = 1 / 4
LARGEST_LOAN_FRACTION = 1 / 16


class Holder(Protocol):
    """A connection, as NodeBudget sees it."""

    unread_bytes: int
    read_bytes: int

    def drop_fullest_stream(self) -> bool:
        """Reset the stream with most unread bytes; False if none has any."""


class NodeBudget:
    """The unread bytes of all connections of a node, within a limit.

    The threat: Yamux grants each new stream 256 KiB, so a stranger's connection may bring its whole
    budget, and strangers may have hundreds of connections. Windows grow by half of the limit in
    all, beside a little that each connection has for itself, and each may have half of what is
    left. So peers whose readers are slow stay below the limit, and only hundreds of full streams
    that nobody reads exceed it. The connection that holds most then loses its fullest stream. What
    is held counts less where much was read before: the connections of strangers go first.

    Large read buffers have a quarter of the limit beside it. Each connection that brings much
    borrows one, the smaller the less is left, and without one it reads a packet at a time.

    The bytes of a connection that has ended count as long as somebody may still read them. If its
    streams are thrown away instead, that is found when the limit is reached.

    `unread_bytes` is what the holders count in it, and at least the sum over them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._growth_left = limit_bytes // 2
        self._buffers_left = int(limit_bytes * BUFFERS_FRACTION)
        self.unread_bytes = 0
        self._holders: WeakSet[Holder] = WeakSet()

    def join(self, holder: Holder) -> None:
        self._holders.add(holder)

    def keep_limit(self) -> bool:
        """Drop streams as long as the limit is exceeded; False if that did not help."""
        while self.unread_bytes > self._limit:
            by_weight = sorted(self._holders, key=self._weight, reverse=True)
            self.unread_bytes = sum(one.unread_bytes for one in by_weight)
            if self.unread_bytes > self._limit and not any(
                one.drop_fullest_stream() for one in by_weight
            ):
                return False
        return True

    def promise_growth(self, wanted_bytes: int, held_bytes: int) -> int:
        """For a connection that has had so much growth from here."""
        most = (self._growth_left + held_bytes) // 2 - held_bytes
        granted = max(0, min(wanted_bytes, most))
        self._growth_left -= granted
        return granted

    def release_growth(self, grown_bytes: int) -> None:
        self._growth_left += grown_bytes

    def lend_buffer(self, more_bytes: int) -> bool:
        """Whether a connection may read into a buffer that is so much larger."""
        if more_bytes > self._buffers_left * LARGEST_LOAN_FRACTION:
            return False
        self._buffers_left -= more_bytes
        return True

    def return_buffer(self, lent_bytes: int) -> None:
        self._buffers_left += lent_bytes

    def _weight(self, holder: Holder) -> float:
        """What it holds, times the part that this is of all that it brought lately."""
        held = holder.unread_bytes
        return held * held / (held + min(holder.read_bytes, self._limit) + 1)


class WindowBudget:
    """The sum that all receive windows of one connection may promise together."""

    def __init__(self, limit_bytes: int, of_node: NodeBudget) -> None:
        self._limit = limit_bytes
        self._of_node = of_node
        self._promised = self._grown = self._grown_of_node = 0

    @property
    def promised_bytes(self) -> int:
        return self._promised

    def promise_initial(self) -> None:
        """A new stream's first 256 KiB, which Yamux grants automatically."""
        self._promised += INITIAL_WINDOW_BYTES

    def promise_growth(self, wanted_bytes: int) -> int:
        """As much of the wanted growth as fits, perhaps nothing."""
        room = max(0, min(wanted_bytes, self._limit - self._promised))
        own = min(room, max(0, OWN_GROWTH_BYTES - self._grown))
        of_node = self._of_node.promise_growth(room - own, self._grown_of_node)
        self._grown_of_node += of_node
        self._grown += own + of_node
        self._promised += own + of_node
        return own + of_node

    def release(self, window_bytes: int) -> None:
        """A whole window, or 0."""
        self._promised -= window_bytes
        grown = max(0, window_bytes - INITIAL_WINDOW_BYTES)
        of_node = min(grown, self._grown_of_node)
        self._grown -= grown
        self._grown_of_node -= of_node
        self._of_node.release_growth(of_node)


class ReceiveWindow:
    """How much the peer may still send on one stream.

    Invariant: open credit at the peer + received but unconsumed + consumed but not yet returned =
    `size_bytes`, the window's full size.
    """

    def __init__(self, limit_bytes: int, budget: WindowBudget) -> None:
        self._limit = limit_bytes
        self._budget = budget
        self.size_bytes = INITIAL_WINDOW_BYTES
        self._credit = INITIAL_WINDOW_BYTES  # what the peer may send before the first update
        self._unreturned = 0
        self._round_began: float | None = None
        self._consumed_in_round = 0
        self._received_in_round = 0
        budget.promise_initial()

    @property
    def credit_bytes(self) -> int:
        return self._credit

    def received(self, size: int) -> None:
        """Account for a DATA frame at its header; LimitExceeded if it is more than the peer may
        send.
        """
        if size > self._credit:
            raise LimitExceeded(
                f"A peer sent {size} bytes on a stream whose window had {self._credit} left."
            )
        self._credit -= size
        self._received_in_round += size

    def consumed(
        self, size: int, now: float, round_trip_seconds: float | None, *, starving: bool = False
    ) -> int:
        """The application took `size` bytes. Return the credit to send to the peer, often 0.

        `starving`: it waited for them, took all there were, and did so at once.
        """
        self._unreturned += size
        growth = self._growth(size, now, round_trip_seconds)
        if starving and not self._credit and not growth:
            growth = self._grow_to(WINDOW_PER_CONSUMED_AS_BRAKE * self.size_bytes)
        if not growth and self._unreturned * UPDATES_PER_WINDOW < self.size_bytes:
            return 0
        return self._return_credit(growth)

    def return_all(self) -> int:
        """Everything consumed and not yet returned, as credit to send now."""
        return self._return_credit(0)

    def close(self) -> None:
        """The stream is gone: return its promise to the budget. May be called twice."""
        self._budget.release(self.size_bytes)
        self.size_bytes = 0
        self._credit = 0

    def _return_credit(self, growth: int) -> int:
        credit = self._unreturned + growth
        self._unreturned = 0
        self._credit += credit
        return credit

    def _growth(self, size: int, now: float, round_trip_seconds: float | None) -> int:
        if round_trip_seconds is None or self.size_bytes >= self._limit:
            return 0
        round_trip = max(round_trip_seconds, SHORTEST_ROUND_TRIP_SECONDS)
        if self._round_began is None:
            self._round_began = now
            self._received_in_round = size  # bytes collected before the first read do not count
        self._consumed_in_round += size
        elapsed = now - self._round_began
        if elapsed < round_trip:
            return 0
        carried = min(self._received_in_round, self._consumed_in_round)
        per_round_trip = carried * round_trip / elapsed
        was_brake = per_round_trip > self.size_bytes * BRAKE_FRACTION
        factor = WINDOW_PER_CONSUMED_AS_BRAKE if was_brake else WINDOW_PER_CONSUMED
        wanted = int(factor * per_round_trip)
        self._round_began = now
        self._consumed_in_round = 0
        self._received_in_round = 0
        return self._grow_to(wanted)

    def _grow_to(self, wanted_bytes: int) -> int:
        growth = min(wanted_bytes, self._limit) - self.size_bytes
        if growth <= 0:
            return 0
        granted = self._budget.promise_growth(growth)
        self.size_bytes += granted
        return granted


class SendWindow:
    """How much we may still send on one stream."""

    def __init__(self) -> None:
        self.available_bytes = INITIAL_WINDOW_BYTES

    def take(self, size: int) -> None:
        if size > self.available_bytes:
            raise ValueError("more was sent than the window allows")
        self.available_bytes -= size

    def grant(self, size: int) -> None:
        """The peer sent a window update; LimitExceeded if a 32-bit window cannot be that large."""
        if self.available_bytes + size > LARGEST_WINDOW_BYTES:
            raise LimitExceeded("A peer granted a Yamux window of more than 4 GiB.")
        self.available_bytes += size
