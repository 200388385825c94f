"""A node's traffic on all its TCP connections together: counted, and limited in each direction.

    ticket = throttle.ask(size, wake)      # bulk; `wake` is called when it is granted
    ticket = throttle.ask_small(wake)      # goes first, and may borrow
    throttle.done(ticket)                  # sent, and charged meanwhile; or not sent

`Traffic` counts what the network carries: the bytes written to and read from sockets (with
handshakes, frames and encryption), the headers of their segments, and the acknowledgements of the
other direction. Payload alone would be some percent less than a provider bills. `Throttle` limits
one direction to so many bytes a second. Tickets wait in one of two lines, first come, first served,
small ones before bulk. `Traffic` charges the bytes that really went over the wire. A task has to
run `run`.

Asking never waits. A ticket that is done twice, or never granted, costs nothing.

Every ticket must be done; otherwise its bytes are lost for the life of the node. The kernel chooses
its own segments and acknowledgements. So headers are counted by its segment size, with an
acknowledgement for every second segment. Once a second the kernel (on Linux) also tells how much
was lost and resent.

`sending_seconds` are those in which bytes of the node were on their way: its uplink carries them,
or they wait for it in the buffers of this machine and of its router. `sending_bytes` arrived
meanwhile. Both grow from one look to the next. When the first bytes of a burst were sent is known.
The last ones arrived at some moment since the look before, so half of the usual time between looks
counts. Where `LITTLE_BYTES` or fewer are carried, neither grows, so that signs of life make no
uplink seem fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from protocols.network import LITTLE_BYTES

BATCH_SECONDS = 0.02
"""The size of a turn of bulk, in time: short, so that others wait little behind it."""

LEAST_BATCH_BYTES = 4096
"""Smaller batches would have a tenth of headers, and count as small themselves."""

SMALL_BYTES = 2048 + 152
"""Reserved by a small ticket: the largest small frame, with a packet and headers around it."""

BUFFERED_SECONDS = 0.15
"""The limit for unread bytes in all connections' buffers together, in time."""

READ_SECONDS = 0.05
"""How far all connections together read ahead of their turn, in time."""

LEAST_WAIT_SECONDS = 0.001
"""A shorter sleep would end before a clock has moved."""

BUSY_SECONDS = 1.0
"""A connection that carried bulk within this time shares the buffers."""


class Ticket:
    """One turn. `is_granted` is True until it is done."""

    __slots__ = ("is_granted", "on_granted", "size")

    def __init__(self, size: float, on_granted: Callable[[], None]) -> None:
        self.size = size
        self.on_granted = on_granted
        self.is_granted = False


class Throttle:
    """Invariant: a ticket is in one line, granted, or done."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.batch_bytes = max(LEAST_BATCH_BYTES, int(BATCH_SECONDS * bytes_per_second))
        self._bucket = TokenBucket(bytes_per_second, now)
        self._small: deque[Ticket] = deque()
        self._bulk: deque[Ticket] = deque()
        self._asked = trio.Event()
        self._busy: dict[object, float] = {}

    # ---- turns

    def ask(self, size: int, on_granted: Callable[[], None]) -> Ticket:
        """A turn for so much bulk; 0 for bytes that were charged already."""
        return self._line_up(Ticket(size, on_granted), self._bulk)

    def ask_small(self, on_granted: Callable[[], None]) -> Ticket:
        """A turn for a small message."""
        return self._line_up(Ticket(SMALL_BYTES, on_granted), self._small)

    def done(self, ticket: Ticket) -> None:
        """The bytes were sent, or will not be."""
        if ticket.is_granted:
            ticket.is_granted = False
            self._bucket.take(-ticket.size, trio.current_time())
            return
        for line in (self._small, self._bulk):
            if ticket in line:
                line.remove(ticket)

    async def turn(self, *, is_small: bool) -> None:
        """Wait until nothing is owed (a small turn may owe a little). Cancellation gives the turn
        up.
        """
        granted = trio.Event()
        ticket = self.ask_small(granted.set) if is_small else self.ask(0, granted.set)
        try:
            if not ticket.is_granted:
                await granted.wait()
        finally:
            self.done(ticket)

    def charge(self, size: float) -> None:
        """Count so many bytes as carried."""
        self._bucket.take(size, trio.current_time())

    async def run(self) -> None:
        """Grant turns, for ever."""
        while True:
            seconds = self._grant()
            if seconds is None:
                self._asked = trio.Event()
                await self._asked.wait()
            else:
                # A small request may come while bulk is waited for.
                self._asked = trio.Event()
                with trio.move_on_after(max(seconds, LEAST_WAIT_SECONDS)):
                    await self._asked.wait()

    def _line_up(self, ticket: Ticket, line: deque[Ticket]) -> Ticket:
        line.append(ticket)
        if not (len(self._small) + len(self._bulk) == 1 and self._waits() <= 0):
            self._asked.set()
        else:
            line.clear()
            self._give(ticket)
        return ticket

    def _grant(self) -> float | None:
        """Grant all turns that are due; return the seconds until the next; None without waiters."""
        while (seconds := self._waits()) <= 0:
            ticket = (self._small or self._bulk).popleft()
            self._give(ticket)
            ticket.on_granted()
        return None if seconds == float("inf") else seconds

    def _give(self, ticket: Ticket) -> None:
        ticket.is_granted = True
        self._bucket.take(ticket.size, trio.current_time())

    def _waits(self) -> float:
        now = trio.current_time()
        if self._small:
            return self._bucket.small_waits(now)
        if self._bulk:
            return self._bucket.bulk_waits(self._bulk[0].size, now)
        return float("inf")

    # ---- the share of each peer that receives

    def busy_with(self, who: object) -> int:
        """`who` carries bulk now; return how many do, or did a moment ago."""
        now = trio.current_time()
        self._busy.pop(who, None)
        self._busy[who] = now
        for one, at in list(self._busy.items()):
            if now - at <= BUSY_SECONDS:
                break
            del self._busy[one]
        return len(self._busy)

    def buffer_bytes(self, busy: int) -> int:
        """How many unread bytes the kernel may hold for each of so many connections with bulk."""
        return int(BUFFERED_SECONDS * self.bytes_per_second / max(1, busy))

    def read_bytes(self, busy: int) -> int:
        """How many bytes each of so many connections reads at once."""
        return max(LEAST_BATCH_BYTES, int(READ_SECONDS * self.bytes_per_second / max(1, busy)))


# How many bytes may leave (or come) now at a limited rate: a token bucket.
#
# Tokens, one for each byte, come at the rate and are saved up to a short burst. Bulk takes tokens,
# and waits if there are too few. A small message (a sign of life, a step of an agreement) may also
# borrow a little: it must not wait for bulk, and bulk can easily wait for it. Bytes that cannot be
# asked for beforehand (headers, acknowledgements, handshakes) are charged, and later senders pay
# them.
#
# In any time of W seconds, at most this much is granted:
#
#     rate · (W + BURST_SECONDS + BORROWED_SECONDS) + one small message
#
# That is 2.5 % above the limit in ten seconds. Bytes that wait in the kernel come on top. There is
# no clock: times are arguments.
#
# The level may be far below zero after a charge. Then nothing is granted until it has recovered:
# otherwise the limit would not hold.


BURST_SECONDS = 0.2
"""The savings of an idle time: a loop that is busy for a fifth of a second loses nothing."""

BORROWED_SECONDS = 0.05

# The tolerance for rounding errors in the level.
ROUNDING_BYTES = 1e-6


class TokenBucket:
    """Invariant: the level is at most the burst."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.burst_bytes = BURST_SECONDS * bytes_per_second
        self.borrowed_bytes = BORROWED_SECONDS * bytes_per_second
        self._level = self.burst_bytes
        self._at = now

    def level(self, now: float) -> float:
        """How many bytes may leave now; below zero after a charge."""
        if now > self._at:
            self._level += (now - self._at) * self.bytes_per_second
            self._level = min(self._level, self.burst_bytes)
            self._at = now
        return self._level

    def take(self, size: float, now: float) -> None:
        """Take these bytes now, even below zero. A negative size gives bytes back."""
        self._level = min(self.level(now) - size, self.burst_bytes)

    def bulk_waits(self, size: float, now: float) -> float:
        """Seconds until so much bulk may leave. More than a burst leaves with a full bucket."""
        return self._seconds_to(min(size, self.burst_bytes), now)

    def small_waits(self, now: float) -> float:
        """Seconds until a small message may leave."""
        return self._seconds_to(-self.borrowed_bytes, now)

    def _seconds_to(self, level: float, now: float) -> float:
        missing = level - self.level(now) - ROUNDING_BYTES
        return max(0.0, missing / self.bytes_per_second)


HEADERS_BYTES = 52
"""The headers of a segment over IPv4: 20 for IP, 20 for TCP, 12 for its timestamps. IPv6 has 20
more.
"""

ETHERNET_SEGMENT_BYTES = 1448
"""Assumed if the kernel does not tell: 1,500 less the headers."""


LOOK_SECONDS = 0.02
"""Between two looks at what is on its way, on average: the time of a chunk on an uplink of 100
Mb/s."""

LONGEST_LOOK_SECONDS = 1.5 * LOOK_SECONDS

GOLDEN = 0.618034
"""Steps of this share, without the whole, are spread evenly, however many there are."""

UNTOLD_SECONDS = 10.0
"""If the system does not tell what is on its way: for how long that which was sent counts as such.
An uplink may then seem slower than it is, but no faster, unless it needs longer for one packet."""


class Carried(NamedTuple):
    """What became of the bytes that a wire has sent."""

    arrived_bytes: int
    """How many are acknowledged; or if the system does not tell, how many were sent. 0 if the
    connection is closed."""
    on_their_way: int | None
    """How many are not; None if the system does not tell."""


class SendingWire(Protocol):
    def carried(self) -> Carried: ...


@dataclass(slots=True)
class _Sending:
    """What a wire has carried until now, and when something was last sent on it."""

    arrived_bytes: int
    last_sent: float


class Traffic:
    """One for each node. `up` and `down` are None without a limit."""

    def __init__(
        self,
        up_bytes_per_second: float | None = None,
        down_bytes_per_second: float | None = None,
    ) -> None:
        now = trio.current_time()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.sending_bytes = 0
        self.sending_seconds = 0.0
        self._senders: dict[SendingWire, _Sending] = {}
        """Those whose bytes may be on their way."""
        self._first_sent: float | None = None  # since the last look
        self._sends = trio.Event()
        self.up = Throttle(up_bytes_per_second, now) if up_bytes_per_second else None
        self.down = Throttle(down_bytes_per_second, now) if down_bytes_per_second else None

    def sent(self, size: int, segment_bytes: int = ETHERNET_SEGMENT_BYTES) -> None:
        """So many bytes were written to a socket with this segment size."""
        carried, acknowledged = _carried(size, segment_bytes)
        self.sent_bytes += carried
        self.received_bytes += acknowledged
        if self.up is not None:
            self.up.charge(carried)
        if self.down is not None and acknowledged:
            self.down.charge(acknowledged)

    def received(self, size: int, segment_bytes: int = ETHERNET_SEGMENT_BYTES) -> None:
        """So many bytes were read from one."""
        carried, acknowledged = _carried(size, segment_bytes)
        self.received_bytes += carried
        self.sent_bytes += acknowledged
        if self.down is not None:
            self.down.charge(carried)
        if self.up is not None and acknowledged:
            self.up.charge(acknowledged)

    def sends_on(self, sender: SendingWire, sent_for: float = 0.0) -> None:
        """Something will be sent on this wire in a moment, or has been for so many seconds."""
        now, sending = trio.current_time(), self._senders.get(sender)
        if self._first_sent is None:
            self._first_sent = now - sent_for
        if sending is None:
            self._senders[sender] = _Sending(sender.carried().arrived_bytes, now)
            self._sends.set()
        else:
            sending.last_sent = now

    async def run(self) -> None:
        """Grant turns to those that wait, and look at what is on its way, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            for throttle in (self.up, self.down):
                if throttle is not None:
                    nursery.start_soon(throttle.run)

    async def _look(self) -> None:
        looked, was_sending, turn = trio.current_time(), False, 0.0
        while True:
            if not self._senders:
                self._sends = trio.Event()
                await self._sends.wait()
                looked = self._first_sent or trio.current_time()  # others may have run since
            # Looks in step with bursts of one length would always see their ends too early.
            turn = (turn + GOLDEN) % 1.0
            await trio.sleep(LOOK_SECONDS * (0.5 + turn))
            on_their_way, arrived = self._look_at_senders(looked)
            now, is_sending = trio.current_time(), on_their_way > LITTLE_BYTES
            if was_sending or is_sending or arrived > LITTLE_BYTES:
                began = looked if was_sending else max(looked, self._first_sent or 0.0)
                self.sending_seconds += now - began
                if not is_sending:  # the last of them arrived at some moment since the last look
                    self.sending_seconds -= min(now - began, LONGEST_LOOK_SECONDS) / 2
                self.sending_bytes += arrived
            looked, was_sending, self._first_sent = now, is_sending, None

    def _look_at_senders(self, looked: float) -> tuple[int, int]:
        """How many bytes are on their way, and how many have arrived since the last look."""
        on_their_way = arrived = 0
        for sender, sending in tuple(self._senders.items()):
            carried = sender.carried()
            of_this = carried.on_their_way
            if of_this is None:
                of_this = LITTLE_BYTES + 1 if looked - sending.last_sent < UNTOLD_SECONDS else 0
            on_their_way += of_this
            arrived += max(0, carried.arrived_bytes - sending.arrived_bytes)
            sending.arrived_bytes = max(sending.arrived_bytes, carried.arrived_bytes)
            if not of_this and sending.last_sent < looked:
                del self._senders[sender]
        return on_their_way, arrived


def _carried(size: int, segment_bytes: int) -> tuple[int, int]:
    """Bytes with the headers around them, and those of the acknowledgements that come back."""
    segments = -(-size // segment_bytes)
    return size + HEADERS_BYTES * segments, HEADERS_BYTES * (segments // 2)
