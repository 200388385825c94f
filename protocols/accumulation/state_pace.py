"""Decides how fast this peer sends state, and to which newcomer first.

    cost = ServingCost()                          # of a peer that trains
    cost.computes(); ...; cost.computed()         # the training thread, around each batch
    cost.exchanges(); ...; cost.averaged(rounds)  # around each exchange of a round, with its times
    pace = UploadPace(most_bytes_per_second, cost)
    async with pace.turn(count, order, say_alive):
        ...                                       # send this many bytes

In this file: `ServingCost` measures what serving costs training, `UploadPace` gives out turns, and
`DownloadDesk` decides which peers may download now, and how long the others wait.

**The rate.** Serving takes processor time and the interpreter from training, on one machine a
hundred times as much as on another, and takes uplink from rounds. So both are measured: batches
during which something was sent are compared with batches during which nothing was, and the
exchanges of rounds in the same way. Together they say how many seconds of training a byte costs.

A peer may spend a twentieth of its time. Time that it does not spend is saved, up to SAVED_SECONDS,
and is then spent in a burst, in which batches take half as long again. A newcomer whose state
arrives at once has hardly any steps to catch up with, and costs less in all. When nothing is saved,
the rate slows training by a twentieth. One stretch of batches in REST_EVERY, and one exchange, is
left alone, to compare with. Nothing rests while a round gathers: the round may be waiting for the
newcomer that is being served.

**The order.** Turns go to the peer that has been served for the longest time, and among its
transfers to results before pieces, because results are forgotten first. If the rate is enough for
one newcomer but not for two, they catch up one after the other; with equal shares neither would. A
peer that has its state and needs only results goes first. The next turn is given when the bytes of
the last one are sent, or are stuck for BLOCKED_SECONDS. So when this machine is the bottleneck, the
first peer still gets everything.

Easy to get wrong: single batches and rounds vary by more than the effect that is measured. The cost
of a byte is a mean over the last stretches, in which those with the highest rate count most.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from auth.bounded_map import BoundedMap
from protocols.accumulation.state_messages import STALL_SECONDS
from protocols.identity import PeerId

MOST_SLOWDOWN: Final = 0.05
"""The share of its time that a training peer spends on serving."""

SAVED_SECONDS: Final = 3.0
"""Training time that a peer may spend at once: a twentieth of a minute, or a gigabyte at the
supposed cost. A peer has it from its start."""

BURST_SLOWDOWN: Final = 0.5
"""How much longer a batch may take in a burst: 167 MB/s at the supposed cost."""

SUPPOSED_COST: Final = 3e-9
"""Core seconds for each byte: encryption, copies and the kernel. A peer that has measured nothing
assumes it. It counts as SUPPOSED_WEIGHT stretches at SUPPOSED_RATE, or at the rate tried lately if
that is lower, so that measurements of a machine with a higher cost prevail."""
SUPPOSED_RATE: Final = 8e6
SUPPOSED_WEIGHT: Final = 1.0

STRETCH_SECONDS: Final = 0.1  # of computing: shorter ones measure the clock and the scheduler
REST_EVERY: Final = 8  # stretches, and rounds; in one of them nothing is sent
LONGEST_REST_SECONDS: Final = 5.0  # a third of a newcomer's patience with a source
QUIET_STRETCHES: Final = 16  # quiet stretches to compare with
FEWEST_QUIET: Final = 3
FORGETTING: Final = 0.95  # a stretch's weight relative to the next one: about the last twenty count
LARGEST_DIFFERENCE: Final = 0.5  # a batch that takes longer did something else, an evaluation;
LARGEST_TIMES: Final = 3.0  # unless this many times the assumed slowdown is more than that
GROWTH: Final = 2.0  # at most this many times the rate tried lately
SLOWEST_BYTES_PER_SECOND: Final = 1e6  # a third of a percent of a core, whatever batches measured
SLOWEST_BESIDE_ROUNDS: Final = 1e5  # a tenth of an uplink of 8 Mb/s, whatever rounds measured
SHARE_SPEED: Final = 0.25  # weight of the last round in the share of time that rounds take
LATELY_SENT_SECONDS: Final = 0.05  # resolution of the record of what was sent
MOST_REMEMBERED: Final = 4096  # entries of that record: an exchange of three minutes

LARGEST_TURN_BYTES: Final = 1 << 20
SMALLEST_TURN_BYTES: Final = 4 << 10
TURN_SECONDS: Final = 0.05
BLOCKED_SECONDS: Final = 0.05
"""A longer turn waits for the other side's link (of 160 Mb/s or less) and not for this machine, so
another peer may be served meanwhile."""
TURNS_MEASURED: Final = 8
CATCH_UP_SECONDS: Final = 0.05  # turns missed because the loop was busy, which are made up for
ALIVE_SECONDS: Final = STALL_SECONDS / 4  # how often a waiting peer is told that we are alive

Order = tuple[int, int, int]
"""0 for a peer that needs only results (it is nearly caught up), else 1; its place in line; and
among one peer's transfers, 0 for results and 1 for pieces."""


class _Slowdown:
    """Measures how much longer something takes for each byte a second that is sent beside it. For
    one thread, but any may read `cost`."""

    def __init__(self, supposed_cost: float) -> None:
        self._supposed_cost = supposed_cost
        self._quiet: deque[float] = deque(maxlen=QUIET_STRETCHES)
        self._slowed, self._weight = 0.0, 0.0
        self._since_quiet = 0
        self.fastest = 0.0
        """The highest rate lately, in bytes a second."""
        self.cost = supposed_cost
        """In seconds for each byte sent."""
        self.is_to_rest = False
        """Whether nothing should be sent beside the next one."""

    def take(self, seconds: float, rate: float) -> None:
        """Add a measurement: it took this long, at this many bytes a second."""
        self.is_to_rest = False
        if not rate:
            self._quiet.append(seconds)
            self._since_quiet = 0
            return
        self._since_quiet += 1
        if self._since_quiet >= REST_EVERY - 1 or len(self._quiet) < FEWEST_QUIET:
            self.is_to_rest = True
        if len(self._quiet) < FEWEST_QUIET:
            return
        slower = seconds / statistics.median(self._quiet) - 1.0
        largest = max(LARGEST_DIFFERENCE, LARGEST_TIMES * self.cost * rate)
        slower = min(max(slower, -largest), largest)
        self._slowed = FORGETTING * self._slowed + rate * slower
        self._weight = FORGETTING * self._weight + rate * rate
        self.fastest = max(rate, FORGETTING * self.fastest)
        supposed = SUPPOSED_WEIGHT * min(SUPPOSED_RATE, self.fastest) ** 2
        slowed = self._slowed + self._supposed_cost * supposed
        self.cost = max(0.0, slowed / (self._weight + supposed))


class ServingCost:
    """Measures what serving costs training. `computes` and `computed` are for the training thread,
    the rest is for trio's. Each attribute has one writer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the training thread's."""
        self._clock = clock
        self._sent_bytes = 0
        # the training thread's
        self._began: tuple[float, int] | None = None
        self._batches, self._seconds, self._bytes = 0, 0.0, 0
        self._of_batches = _Slowdown(SUPPOSED_COST)
        # trio's
        self._of_rounds = _Slowdown(0.0)
        self._exchanges_since: float | None = None
        self._last_exchange: float | None = None
        self._share_of_rounds = 1.0
        self._sent: deque[tuple[float, int]] = deque(maxlen=MOST_REMEMBERED)
        self._saved, self._saved_at = SAVED_SECONDS, 0.0

    @property
    def seconds_per_byte(self) -> float:
        """The training time that sending a byte costs; 0.0: no cost was measured."""
        batch = min(self._of_batches.cost, MOST_SLOWDOWN / SLOWEST_BYTES_PER_SECOND)
        round_ = self._of_rounds.cost * self._share_of_rounds
        return batch + min(round_, MOST_SLOWDOWN / SLOWEST_BESIDE_ROUNDS)

    def bytes_per_second(self, now: float) -> float:
        """The rate at which this peer may send now."""
        slowdown = BURST_SLOWDOWN if self._saved_by(now) > 0.0 else MOST_SLOWDOWN
        most = GROWTH * max(self._of_batches.fastest, slowdown / SUPPOSED_COST)
        cost = self.seconds_per_byte
        return min(slowdown / cost, most) if cost > 0.0 else most

    def sent(self, count: int, now: float) -> None:
        self._saved = self._saved_by(now) - count * self.seconds_per_byte
        self._saved_at = now
        self._sent_bytes += count
        if self._sent and now < self._sent[-1][0] + LATELY_SENT_SECONDS:
            now = self._sent.pop()[0]
        self._sent.append((now, self._sent_bytes))

    def rests(self, now: float) -> bool:
        """Whether to send nothing now, so that the batch or exchange under way can be compared
        with."""
        began, exchanges = self._began, self._exchanges_since
        if self._of_rounds.is_to_rest and exchanges is not None:
            return now < exchanges + LONGEST_REST_SECONDS
        if not self._of_batches.is_to_rest or began is None:
            return False
        return self._clock() < began[0] + LONGEST_REST_SECONDS

    # -- batches

    def computes(self) -> None:
        """A batch begins."""
        self._began = self._clock(), self._sent_bytes

    def computed(self) -> None:
        """The batch has ended."""
        if self._began is None:
            return
        (began, sent), self._began = self._began, None
        self._batches += 1
        self._seconds += self._clock() - began
        self._bytes += self._sent_bytes - sent
        if self._seconds >= STRETCH_SECONDS:
            self._of_batches.take(self._seconds / self._batches, self._bytes / self._seconds)
            self._batches, self._seconds, self._bytes = 0, 0.0, 0

    # -- rounds

    def exchanges(self, now: float) -> None:
        """An exchange of a round begins."""
        self._exchanges_since = now

    def averaged(self, exchanges: Sequence[tuple[float, float]]) -> None:
        """The round has ended; its exchanges took place at these times, from when to when. The rest
        of a round tells nothing about the cost of serving: there the peers wait for one another."""
        self._exchanges_since = None
        for began, ended in exchanges:
            seconds = ended - began
            if seconds <= 0.0:
                continue
            self._of_rounds.take(seconds, self._sent_between(began, ended) / seconds)
            last = self._last_exchange
            if last is not None and ended > last:
                share = min(1.0, seconds / (ended - last))
                self._share_of_rounds += SHARE_SPEED * (share - self._share_of_rounds)
            self._last_exchange = ended

    def _sent_between(self, began: float, ended: float) -> int:
        """Bytes sent between the two moments, at the resolution of the record."""
        until, total = 0, 0
        for moment, total in reversed(self._sent):
            if moment <= ended:
                until = max(until, total)
            if moment <= began:
                break
        return max(0, until - total)

    def _saved_by(self, now: float) -> float:
        """Seconds of training time that may be spent at once."""
        return min(SAVED_SECONDS, self._saved + MOST_SLOWDOWN * (now - self._saved_at))


class UploadPace:
    """Gives turns to all transfers. `most_bytes_per_second`: the owner's limit; None: no limit.
    `cost`: what sending costs training; None: this peer does not train."""

    def __init__(
        self, most_bytes_per_second: float | None, cost: ServingCost | None = None
    ) -> None:
        self._most, self._cost = most_bytes_per_second, cost
        self._free_at = 0.0
        self._waiting: list[tuple[Order, int]] = []
        self._number = 0
        self._sending: dict[int, float] = {}  # since when
        self._lasted: deque[float] = deque(maxlen=TURNS_MEASURED)
        self._changed = trio.Event()

    @property
    def bytes_per_second(self) -> float | None:
        """The rate at which this peer may send now; None: no limit."""
        if self._cost is None:
            return self._most
        allowed = self._cost.bytes_per_second(trio.current_time())
        return allowed if self._most is None else min(allowed, self._most)

    @property
    def turn_bytes(self) -> int:
        """How many bytes may be sent in one turn."""
        rate = self.bytes_per_second
        if rate is None:
            return LARGEST_TURN_BYTES
        return min(max(int(rate * TURN_SECONDS), SMALLEST_TURN_BYTES), LARGEST_TURN_BYTES)

    @property
    def is_busy(self) -> bool:
        """Whether the peers being served take the bytes as fast as they are sent, so that others
        beside them would leave them less. True while that is not known."""
        return sum(self._lasted) <= len(self._lasted) * BLOCKED_SECONDS

    @asynccontextmanager
    async def turn(
        self, count: int, order: Order, say_alive: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Wait until this many bytes may be sent; send them in the block. While it waits,
        `say_alive` is called from time to time."""
        self._number += 1
        number = self._number
        mine = order, number
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
            self._tell_changed()
        began = self._sending[number] = trio.current_time()
        try:
            yield
        finally:
            del self._sending[number]
            self._lasted.append(trio.current_time() - began)
            self._tell_changed()

    def _wait_of(self, mine: tuple[Order, int]) -> float:
        """How long to sleep before checking again; 0.0: it is this one's turn."""
        if mine != min(self._waiting):
            return ALIVE_SECONDS  # or until another one has had its turn
        now = trio.current_time()
        if self._cost is not None and self._cost.rests(now):
            return TURN_SECONDS
        until = max((since + BLOCKED_SECONDS for since in self._sending.values()), default=now)
        return max(0.0, until - now, self._free_at - now)

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _take(self, count: int) -> None:
        rate, now = self.bytes_per_second, trio.current_time()
        if self._cost is not None:
            self._cost.sent(count, now)
        if rate is not None:
            self._free_at = max(self._free_at, now - CATCH_UP_SECONDS) + count / rate


# ---- which peers may download now

KEPT_SECONDS = 10.0  # how long a place waits for its transfer: eight round trips of a bad link
UNUSED_SECONDS = 20.0  # for which a place can be kept by asking for it again
LAPSED_SECONDS = 30.0  # before a peer that did so, and did not begin, gets another place
STUCK_SECONDS = 30.0  # for a turn's bytes: a peer that takes so long leaves room for another one
RESERVED_SECONDS = 2.0  # of these, nobody else is let in for so long; most peers begin sooner
USUAL_WAIT_SECONDS = 0.5
"""The wait when nothing has been sent from which it could be computed: a quarter of
RESERVED_SECONDS, so that a place that is given up stays empty for half a second at most."""
SHORTEST_WAIT_SECONDS = 0.25  # so that nobody asks more than four times a second
LONGEST_WAIT_SECONDS = 60.0
SENIOR_SECONDS = 10.0  # since its last transfer; a step that takes longer leaves time for all
ALONE_STATES = 2.0  # a peer may take so many times its state before others are let in beside it
SENIOR_STATES = 4.0
"""A state, and three times as much in results meanwhile. A peer that needs more goes last."""
MOST_PEERS_AT_THE_DESK = 64  # peers that were served lately


@dataclass
class _Place:
    since: float
    kept_until: float
    transfers: int = 0
    began: float = 0.0
    wanted_bytes: int = 0
    sent_bytes: int = 0
    sending_since: float | None = None

    def is_stuck(self, now: float) -> bool:
        """Whether the peer takes hardly anything, so that others may have what we can send."""
        return self.sending_since is not None and now - self.sending_since >= STUCK_SECONDS

    def seconds_left(self, now: float) -> float:
        if not self.transfers:
            return min(self.kept_until - now, USUAL_WAIT_SECONDS)
        elapsed = now - self.began
        if elapsed <= 0.0 or not self.sent_bytes:
            return USUAL_WAIT_SECONDS
        left = (self.wanted_bytes - self.sent_bytes) * elapsed / self.sent_bytes
        return min(left, max(elapsed, USUAL_WAIT_SECONDS))


@dataclass
class _Served:
    place: int
    last: float
    largest_bytes: int = 0
    sent_bytes: int = 0


class DownloadDesk:
    """Decides which peers may download from this peer now, and how long the others wait. Pure.

        seconds = desk.ask(peer, now, most)    # 0.0: a place is kept for it for some seconds
        desk.begin(peer, now, state_bytes); desk.sent(peer, count, now); desk.end(peer)
        desk.place_in_line(peer, now)          # the lowest has been served longest, and goes first

    Only as many newcomers are served at a time as can all catch up; more would hinder each other. A
    newcomer that takes all that this peer can send is served alone until it has its state: two
    would need twice as long, and the run would be further ahead of both. A newcomer that has to
    wait is told for how long, from what the others have left, and may ask other donors meanwhile.

    Invariant: at most `most` places, each of one peer with a transfer or a reservation.

    Easy to get wrong:

    - A peer that follows the run asks for one result after the other, with no transfer in between.
      So its place in line is remembered for a while. But no peer stays first for ever: after
      SENIOR_STATES times the most that it has asked for at once, it goes last again.
    - The speed of a download is hardly known at its beginning, and a peer that is told to wait too
      long comes back when the run is further. So nobody is told to wait for longer than the present
      downloads have lasted.
    - A place is kept between the manifest and the transfer, but not for long, however often it is
      asked for, and not after the transfer. A peer that comes back after an interruption asks like
      any other. One that takes nothing does not keep others out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[PeerId, _Place] = {}
        self._served = BoundedMap[PeerId, _Served](MOST_PEERS_AT_THE_DESK)
        self._lapsed = BoundedMap[PeerId, float](MOST_PEERS_AT_THE_DESK)
        """When peers lost a place that they had asked for again and again, and not used."""
        self._places_given = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def downloading(self) -> int:
        """How many peers have a transfer open."""
        return sum(place.transfers > 0 for place in self._places.values())

    def ask(
        self,
        peer: PeerId,
        now: float,
        most: int | None = None,
        held_seconds: float = 0.0,
        take_all: Container[PeerId] | None = None,
    ) -> float:
        """0.0 if the peer has a place now; otherwise in how many seconds it should ask again.

        - `most`: how many newcomers may be served at present.
        - `held_seconds`: a peer that was served within this time still counts as one of them: it
          asks for one result after the other.
        - `take_all`: the peers that take all that this peer can send. No newcomer is let in beside
          one of them, or beside one that is about to begin. None: the peer is no newcomer.
        """
        self._forget(now)
        place = self._places.get(peer)
        if place is None:
            left_alone = self._lapsed.get(peer, -math.inf) + LAPSED_SECONDS - now
            if left_alone > 0.0:
                return left_alone
            others = set(self._places)
            if most is not None:
                lately = (
                    one
                    for one, served in self._served.items()
                    if _is_held(served, now, held_seconds)
                )
                others |= {*lately}
                others.discard(peer)
                if len(self._places) < self._most:
                    others -= {one for one, held in self._places.items() if held.is_stuck(now)}
            is_alone = take_all is not None and any(
                self._is_alone(one, held, now, take_all) for one, held in self._places.items()
            )
            if is_alone or len(others) >= min(self._most, most or self._most):
                left = (one.seconds_left(now) for one in self._places.values())
                return min(max(min(left, default=0.0), SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
            place = self._places[peer] = _Place(now, now)
        if place.transfers or now < place.since + UNUSED_SECONDS:
            place.kept_until = now + KEPT_SECONDS
        return 0.0

    def begin(self, peer: PeerId, now: float, state_bytes: int) -> None:
        """A transfer to a peer that has a place has begun."""
        place = self._places[peer]
        if not place.transfers:
            place.began, place.wanted_bytes, place.sent_bytes = now, state_bytes, 0
        place.transfers += 1
        served = self._served_of(peer, now)
        served.largest_bytes = max(served.largest_bytes, state_bytes)

    def place_in_line(self, peer: PeerId, now: float) -> int:
        """The place of a peer that downloads. No two are equal."""
        return self._served_of(peer, now).place

    def sends(self, peer: PeerId, now: float) -> None:
        """Its turn has come; `sent` follows."""
        self._places[peer].sending_since = now

    def sent(self, peer: PeerId, count: int, now: float) -> None:
        self._places[peer].sending_since = None
        self._places[peer].sent_bytes += count
        served = self._served_of(peer, now)
        served.sent_bytes += count
        if served.sent_bytes > SENIOR_STATES * served.largest_bytes:
            served.place, served.sent_bytes = self._last_place(), 0

    def end(self, peer: PeerId) -> None:
        """A transfer has ended. If the peer has no other one, its place is free."""
        place = self._places[peer]
        place.transfers -= 1
        if not place.transfers:
            del self._places[peer]

    def _is_alone(
        self, peer: PeerId, place: _Place, now: float, take_all: Container[PeerId]
    ) -> bool:
        if not place.transfers:
            return now < place.since + RESERVED_SECONDS
        served = self._served.get(peer)
        if served is None or peer not in take_all or now - served.last > SENIOR_SECONDS:
            return False
        return served.sent_bytes <= ALONE_STATES * served.largest_bytes

    def _served_of(self, peer: PeerId, now: float) -> _Served:
        served = self._served.get(peer)
        if served is None or now - served.last > SENIOR_SECONDS:
            served = _Served(self._last_place(), now)
        served.last = now
        self._served[peer] = served
        return served

    def _last_place(self) -> int:
        self._places_given += 1
        return self._places_given

    def _forget(self, now: float) -> None:
        for peer, place in list(self._places.items()):
            if not place.transfers and place.kept_until <= now:
                del self._places[peer]
                if now - place.since >= UNUSED_SECONDS:
                    self._lapsed[peer] = now


def _is_held(served: _Served, now: float, seconds: float) -> bool:
    return now - served.last < seconds
