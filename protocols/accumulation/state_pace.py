"""How fast state leaves this peer, all downloads together, and who is served first.

    cost = ServingCost()                          # of a peer that trains
    cost.computes(); ...; cost.computed()         # the training thread, around each batch
    pace = UploadPace(most_bytes_per_second, cost)
    await pace.turn(count, order, say_alive)      # then send so many bytes

Serving takes processor time and the interpreter from the training beside it, on one machine a
hundred times as much as on another. So it is measured: batches during which something was sent are
compared with batches during which nothing was, and as much is sent as slows a batch by
MOST_SLOWDOWN. One stretch of batches in REST_EVERY is left alone, so that there is something to
compare with.

Turns go to the peer that has been served for the longest time, and of its transfers to results
before pieces, because results are forgotten first: where the rate is enough for one newcomer and
not for two, they get in one after the other; with equal shares neither would. A peer that has its
state and needs only results goes before all.

Easy to get wrong: single batches vary by more than what is measured. The cost of a byte is a mean
over the last stretches, in which those count most that sent most.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from protocols.accumulation.state_messages import STALL_SECONDS

MOST_SLOWDOWN: Final = 0.05
"""How much longer a batch may take while this peer serves."""

SUPPOSED_COST: Final = 3e-9
"""Of a core, in seconds a byte: encryption, copies and the kernel. It is believed of a peer that
has measured nothing yet, and counts as SUPPOSED_WEIGHT stretches at SUPPOSED_RATE, or at what was
tried lately where that is less: a machine on which a byte costs more is believed."""
SUPPOSED_RATE: Final = 8e6
SUPPOSED_WEIGHT: Final = 1.0

STRETCH_SECONDS: Final = 0.1  # of computing: shorter ones measure the clock and the scheduler
REST_EVERY: Final = 8  # stretches; in one of them nothing is sent
LONGEST_REST_SECONDS: Final = 5.0  # a third of a newcomer's patience with a source
QUIET_STRETCHES: Final = 16  # that are compared with
FEWEST_QUIET: Final = 3
FORGETTING: Final = 0.95  # a stretch counts so much of the one after it: about the last twenty
LARGEST_DIFFERENCE: Final = 0.5  # a batch that takes longer did something else, an evaluation
GROWTH: Final = 2.0  # at most so many times what was tried lately
SLOWEST_BYTES_PER_SECOND: Final = 1e6  # a third of a percent of a core, whatever was measured

LARGEST_TURN_BYTES: Final = 1 << 20
SMALLEST_TURN_BYTES: Final = 4 << 10
TURN_SECONDS: Final = 0.05
CATCH_UP_SECONDS: Final = 0.05  # of turns that were missed because the loop was busy
ALIVE_SECONDS: Final = STALL_SECONDS / 4  # how often one is told, in a long wait, that we are there

Order = tuple[int, int, int]
"""0 of a peer that needs only results, which is nearly in; its place in the line; and of one peer's
transfers, 0 for results and 1 for pieces."""


class ServingCost:
    """What serving costs the training. `computes` and `computed` are for the training thread, the
    rest is for trio's; each attribute has one writer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent_bytes = 0
        # the training thread's
        self._began: tuple[float, int] | None = None
        self._batches, self._seconds, self._bytes = 0, 0.0, 0
        self._quiet: deque[float] = deque(maxlen=QUIET_STRETCHES)
        self._slowed, self._weight = 0.0, 0.0
        self._fastest = 0.0
        self._since_quiet = 0
        self.bytes_per_second = MOST_SLOWDOWN / SUPPOSED_COST
        """What may be sent."""
        self._is_to_rest = False

    def sent(self, count: int) -> None:
        self._sent_bytes += count

    @property
    def rests(self) -> bool:
        """Whether nothing is to be sent now, for the batch under way to be compared with."""
        began = self._began
        if not self._is_to_rest or began is None:
            return False
        return self._clock() < began[0] + LONGEST_REST_SECONDS

    def computes(self) -> None:
        """A batch begins."""
        self._began = self._clock(), self._sent_bytes

    def computed(self) -> None:
        """It has ended."""
        if self._began is None:
            return
        (began, sent), self._began = self._began, None
        self._batches += 1
        self._seconds += self._clock() - began
        self._bytes += self._sent_bytes - sent
        if self._seconds >= STRETCH_SECONDS:
            self._take(self._seconds / self._batches, self._bytes / self._seconds)
            self._batches, self._seconds, self._bytes = 0, 0.0, 0

    def _take(self, seconds: float, rate: float) -> None:
        """A stretch with so many seconds for a batch, while so many bytes a second were sent."""
        self._is_to_rest = False
        if not rate:
            self._quiet.append(seconds)
            self._since_quiet = 0
            return
        self._since_quiet += 1
        if self._since_quiet >= REST_EVERY - 1 or len(self._quiet) < FEWEST_QUIET:
            self._is_to_rest = True
        if len(self._quiet) < FEWEST_QUIET:
            return
        slower = seconds / statistics.median(self._quiet) - 1.0
        slower = min(max(slower, -LARGEST_DIFFERENCE), LARGEST_DIFFERENCE)
        self._slowed = FORGETTING * self._slowed + rate * slower
        self._weight = FORGETTING * self._weight + rate * rate
        self._fastest = max(rate, FORGETTING * self._fastest)
        supposed = SUPPOSED_WEIGHT * min(SUPPOSED_RATE, self._fastest) ** 2
        cost = (self._slowed + SUPPOSED_COST * supposed) / (self._weight + supposed)
        most = GROWTH * max(self._fastest, MOST_SLOWDOWN / SUPPOSED_COST)
        allowed = MOST_SLOWDOWN / cost if cost > 0.0 else most
        self.bytes_per_second = max(SLOWEST_BYTES_PER_SECOND, min(allowed, most))


class UploadPace:
    """Turns of all transfers. `most_bytes_per_second`: what the owner allows, None: no limit.
    `cost`: what it costs the training here; None: nothing trains."""

    def __init__(
        self, most_bytes_per_second: float | None, cost: ServingCost | None = None
    ) -> None:
        self._most, self._cost = most_bytes_per_second, cost
        self._free_at = 0.0
        self._waiting: list[tuple[Order, int]] = []
        self._number = 0
        self._changed = trio.Event()

    @property
    def bytes_per_second(self) -> float | None:
        """What may be sent now; None: no limit."""
        if self._cost is None:
            return self._most
        allowed = self._cost.bytes_per_second
        return allowed if self._most is None else min(allowed, self._most)

    @property
    def turn_bytes(self) -> int:
        """How much may be sent in one turn."""
        rate = self.bytes_per_second
        if rate is None:
            return LARGEST_TURN_BYTES
        return min(max(int(rate * TURN_SECONDS), SMALLEST_TURN_BYTES), LARGEST_TURN_BYTES)

    async def turn(
        self, count: int, order: Order, say_alive: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait until so many bytes may be sent, which they will be; and let the peer that is to get
        them know meanwhile that we are there."""
        self._number += 1
        mine = order, self._number
        self._waiting.append(mine)
        try:
            alive_at = trio.current_time() + ALIVE_SECONDS
            while (wait := self._wait_of(mine)) > 0.0:
                with trio.move_on_after(min(wait, alive_at - trio.current_time())):
                    await self._changed.wait()
                if trio.current_time() >= alive_at:
                    await say_alive()
                    alive_at = trio.current_time() + ALIVE_SECONDS
            self._take(count)
        finally:
            self._waiting.remove(mine)
            self._changed.set()
            self._changed = trio.Event()

    def _wait_of(self, mine: tuple[Order, int]) -> float:
        """For how long to sleep before looking again; 0.0: it is this one's turn."""
        if mine != min(self._waiting):
            return ALIVE_SECONDS  # or until another one has had its turn
        if self._cost is not None and self._cost.rests:
            return TURN_SECONDS
        return max(0.0, self._free_at - trio.current_time())

    def _take(self, count: int) -> None:
        rate, now = self.bytes_per_second, trio.current_time()
        if self._cost is not None:
            self._cost.sent(count)
        if rate is not None:
            self._free_at = max(self._free_at, now - CATCH_UP_SECONDS) + count / rate
