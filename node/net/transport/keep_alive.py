"""Noticing that the other side is gone without a message, with one clock for all connections.

If a process is killed, its kernel closes the socket, and the peer notices at once. If a process is
stopped, a laptop sleeps, or a link drops all packets, nothing is noticed by itself. So `KeepAlive`
(no I/O, no clock) pings a connection that was silent for a while, and gives it up if it stays
silent. Any byte is a sign of life, not only the answer to a ping.

Two things make it sooner. If the kernel waits for an acknowledgement of what it has sent, and none
comes, then the link carries nothing. It is the other kernel that acknowledges, so a busy process or
a full queue there is not taken for a dead link. And when one connection of a node was given up, all
others that are silent are pinged at once, because mostly it is our own network that has lost them.

A peer may also send a byte now and then, and read nothing. Everything here that waits until
something was sent would wait for ever, and what is queued would stay. So a connection is given up
as well if the other side takes next to nothing of what is being sent, whatever it says meanwhile.

Time is counted in *beats*, moments at which our own event loop really ran, not in seconds. If this
process was the one that was stopped (or busy, or asleep), the peer's bytes are unread in our
socket, and by the clock every peer would seem dead at once. Every beat lets the reader run first.

`Beats` makes them. Most of a node's hundreds of connections are idle. With a task each that sleeps
for a second, the wake-ups of some fifty microseconds would be most of the node's work. One task
that calls them all in turn takes two microseconds for each. A beat has a few parts and each
connection belongs to one of them, so thousands of connections never block the loop at once. A part
without members costs no wake-up.

Between two calls of a member there is at least most of a beat in which the loop has run, however
late the task is woken. The keep-alive relies on that.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable

import trio

# Short enough that "silent for five seconds" is noticed within seven (within nine on the side that
# does not lead); long enough to cost nothing on a thousand idle connections.
BEAT_SECONDS = 1.0

# On a link with a long queue an answer may take several times the slowest recent round trip.
PATIENCE_IN_ROUND_TRIPS = 4

# So long without any acknowledgement means that the link is dead. The kernel has sent the same
# again four times by then. A full line of 1 Mb/s may hold two seconds of data in each direction,
# and changing between two base stations takes a second or two.
UNACKNOWLEDGED_SECONDS = 5.0

# The same, once another connection was given up.
DOUBTED_SECONDS = 3.0

# A connection that is being sent something must carry so many bytes in so long: 34 a second, below
# any modem. Through a relay only whole batches are seen to leave, half a megabyte at most.
STUCK_SECONDS = 120.0
PROGRESS_BYTES = 4096

# The kernel knows the round trip of a full line as it is now, but it grows while the queue does.
ROUND_TRIPS_ELSEWHERE = 2
REMEMBERED_BEATS = 8

# Round trips are measured this often even while data flows, because windows depend on them.
MEASURE_EVERY_SECONDS = 15.0

# And on each of the first beats: the very first measurement is wrong while both processes are busy
# with the handshake.
EARLY_MEASUREMENTS = 3


# The side that does not lead waits longer by this: the beats of the two are up to one apart, and
# the ping takes a while.
BEATS_BEHIND = 2


class LifeVerdict(enum.Enum):
    FINE = "fine"
    PING = "ping"
    GONE = "gone"
    STUCK = "stuck"
    """It is there, and takes nothing. That says nothing about other connections."""


def beat_seconds(silence_seconds: float, deadline_seconds: float) -> float:
    """The length of a beat for these times."""
    return min(BEAT_SECONDS, silence_seconds / 4, deadline_seconds / 4)


class KeepAlive:
    """Gets the count of received bytes once a beat; decides what to do.

    One side of a connection `leads`: it pings first, and its ping is the other side's sign of life.
    Otherwise both would ping at the same time, as both heard the last byte then.
    """

    def __init__(
        self, silence_seconds: float, deadline_seconds: float, *, leads: bool = True
    ) -> None:
        self.beat_seconds = beat_seconds(silence_seconds, deadline_seconds)
        self._silence_beats = self._beats(silence_seconds) + (0 if leads else BEATS_BEHIND)
        self._deadline_seconds = deadline_seconds
        self._silent_beats = 0
        self._waiting_beats = 0
        self._asked_at: int | None = None  # after so many silent beats
        self._is_doubted = False
        self._beats_since_ping = 0
        self._bytes_seen = 0
        self._early_left = EARLY_MEASUREMENTS
        self._stuck_beats = 0
        self._stuck_at = 0

    def beat(
        self,
        bytes_received: int,
        slowest_round_trip: float | None,
        *,
        unacknowledged_seconds: float | None = None,
        slowest_elsewhere: float = 0.0,
        doubted: bool = False,
        delivered_while_sending: int | None = None,
    ) -> LifeVerdict:
        """`unacknowledged_seconds`: how long ago the last acknowledgement came, if something waits
        for one. `slowest_elsewhere`: the slowest round trip on any connection of the node now; if
        one of them fills the line, all wait in the same queue. `doubted`: another connection was
        given up since the last beat. `delivered_while_sending`: the bytes that the other side
        has taken so far, if a send waits for it."""
        if self._is_stuck(delivered_while_sending):
            return LifeVerdict.STUCK
        self._beats_since_ping += 1
        self._waiting_beats = 0 if unacknowledged_seconds is None else self._waiting_beats + 1
        if bytes_received != self._bytes_seen:
            self._bytes_seen = bytes_received
            self._silent_beats = 0
            self._asked_at, self._is_doubted = None, False
            if self._beats_since_ping >= self._beats(MEASURE_EVERY_SECONDS) or self._early_left:
                self._early_left = max(0, self._early_left - 1)
                return self._ping()
            return LifeVerdict.FINE
        self._silent_beats += 1
        self._is_doubted = self._is_doubted or doubted
        slowest = max(
            PATIENCE_IN_ROUND_TRIPS * (slowest_round_trip or 0.0),
            ROUND_TRIPS_ELSEWHERE * slowest_elsewhere,
        )
        if self._waiting_beats:
            # the first of these bytes may have been sent just before the first of these beats
            waited = min(
                unacknowledged_seconds or 0.0, (self._waiting_beats - 1) * self.beat_seconds
            )
            patience = DOUBTED_SECONDS if self._is_doubted else UNACKNOWLEDGED_SECONDS
            if waited >= max(patience, slowest):
                return LifeVerdict.GONE
        if self._asked_at is None:
            is_due = self._is_doubted or self._silent_beats >= self._silence_beats
            return self._ask() if is_due else LifeVerdict.FINE
        if self._silent_beats >= self._asked_at + self._beats(max(self._deadline_seconds, slowest)):
            return LifeVerdict.GONE
        return LifeVerdict.FINE

    def _is_stuck(self, delivered: int | None) -> bool:
        if delivered is None or delivered >= self._stuck_at + PROGRESS_BYTES:
            self._stuck_beats = 0
            self._stuck_at = delivered or 0
        else:
            self._stuck_beats += 1
        return self._stuck_beats >= self._beats(STUCK_SECONDS)

    def _ask(self) -> LifeVerdict:
        self._asked_at = self._silent_beats
        return self._ping()

    def _ping(self) -> LifeVerdict:
        self._beats_since_ping = 0
        return LifeVerdict.PING

    def _beats(self, seconds: float) -> int:
        return math.ceil(seconds / self.beat_seconds)


PARTS = 4  # of 4,096 connections a quarter is called in two milliseconds

Member = Callable[[], None]


class Beats:
    """Calls each member once a beat, while `run` runs. A member must not raise, and may leave.

    Invariant: a member is in one part; `_somebody` is set while there are members.
    """

    def __init__(self, beat_seconds: float) -> None:
        self.beat_seconds = beat_seconds
        self.given_up = 0
        """How many members have found their other side to be gone. A member that sees a new number
        doubts its own."""
        self._slowest: deque[float] = deque([0.0], maxlen=REMEMBERED_BEATS)
        self._parts: list[dict[Member, None]] = [{} for _ in range(PARTS)]
        self._part_of: dict[Member, int] = {}
        self._somebody = trio.Event()

    @property
    def slowest_round_trip(self) -> float:
        """The slowest that a member saw in the last beats; 0 if none did."""
        return max(self._slowest)

    def saw_round_trip(self, seconds: float) -> None:
        """A member has sent something, and its round trip is this long now."""
        self._slowest[-1] = max(self._slowest[-1], seconds)

    def join(self, member: Member) -> None:
        """Call this member from now on, for the first time in about a beat."""
        part = min(range(PARTS), key=lambda one: len(self._parts[one]))
        self._part_of[member] = part
        self._parts[part][member] = None
        self._somebody.set()

    def leave(self, member: Member) -> None:
        part = self._part_of.pop(member, None)
        if part is not None:
            del self._parts[part][member]

    async def run(self) -> None:
        """Make beats, for ever."""
        now = 0
        while True:
            if not self._part_of:
                self._somebody = trio.Event()
                await self._somebody.wait()
            steps = self._steps_from(now)
            await trio.sleep(steps * self.beat_seconds / PARTS)
            if now + steps >= PARTS:
                self._slowest.append(0.0)
            now = (now + steps) % PARTS
            for member in tuple(self._parts[now]):
                member()

    def _steps_from(self, now: int) -> int:
        """The number of parts to the next one with members; a full round leads to the same one."""
        for steps in range(1, PARTS):
            if self._parts[(now + steps) % PARTS]:
                return steps
        return PARTS
