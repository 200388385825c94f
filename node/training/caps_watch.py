"""Watches the owner's caps while a node trains: closes the gate, counts traffic, reports use.

    async with open_caps(caps, gate, places, traffic=node.network.traffic) as watched:
        ...
        watched.used()            # for the screen and for `status`
        watched.batch_share       # 1.0, or less when memory is short: the trainer shrinks its batch
        watched.must_leave        # None, or the error with which to leave (memory), set once
    watched.expect(bytes, run)   # the first download: the quota may have less left

The gate is closed under the names `schedule`, `quota` and `idle`, with words for the owner and,
if known, the time at which training goes on.

Promises: the gate is right when the block is entered (a peer outside of its schedule does not train
one batch). The caps no longer close it when the block is left. The quota's ledger has all bytes
that the process has carried, from the first, and is written when the block is left. The process is
kept to as many processor cores as it may have threads (cores.py).

A closed gate stops computing, not traffic, which the trainer decides about. Byte limits are
enforced in the transport whatever the gate does.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from node.core.caps.cores import KeptCores, kept_to_cores
from node.core.caps.device_memory import device_memory_in_use
from node.core.caps.idleness import LOOK_SECONDS as IDLE_LOOK_SECONDS
from node.core.caps.idleness import Idleness, OtherLoad, SignsOfUse
from node.core.caps.ledger import Ledger, LedgerFile, QuotaStanding, month_after, month_of
from node.core.caps.memory import LEAVE_ABOVE, LOOK_SECONDS, BackStop, MemoryWatch, TooLarge
from node.core.caps.settings import Caps
from node.core.caps.timetable import ALWAYS, Wall, wall_clock
from node.core.caps.units import in_words
from node.core.caps.used import CapsUsed
from node.core.places import Places
from node.core.status import memory_in_use
from node.training.gate import Gate
from node.training.happenings import Began
from protocols.blocking import in_thread
from protocols.errors import PotluckError
from protocols.network import TrafficFacts

CORES_SECONDS = 20.0  # between two looks for the least busy cores

RATE_SECONDS = 10.0
"""Rates are shown, and promised, over this long."""


class CapsClocks(msgspec.Struct, frozen=True):
    """Sources of time and of the machine's state; tests bring their own."""

    moment: Callable[[], float] = time.time
    wall: Wall = wall_clock
    memory: Callable[[], int | None] = memory_in_use
    device_memory: Callable[[], int | None] = device_memory_in_use


class WatchedCaps:
    """Made by `open_caps`. Any thread may read `batch_share` and `must_leave`."""

    def __init__(
        self,
        caps: Caps,
        gate: Gate,
        ledger: Ledger,
        traffic: Callable[[], TrafficFacts],
        told: Callable[[str], None],
        clocks: CapsClocks,
    ) -> None:
        self.caps = caps
        self.ledger = ledger
        self._gate = gate
        self._traffic = traffic
        self._told = told
        self._clocks = clocks
        self._timetable = caps.timetable
        self._memory = MemoryWatch(caps.memory_bytes)
        self.back_stop = BackStop(caps.memory_bytes)
        self._idleness = Idleness()
        self._standing = QuotaStanding.FINE
        self._expected_bytes = self._expected_from = 0
        self._closed: dict[str, float | None] = {}
        self._readings: deque[tuple[float, TrafficFacts]] = deque()
        self._counted_at: float | None = None

    @property
    def batch_share(self) -> float:
        return self._memory.batch_share

    def has_memory_for(self, count: int) -> bool:
        """Whether so many bytes more keep the process below the cap. Any thread may ask."""
        cap, held = self.caps.memory_bytes, self._clocks.memory()
        return cap is None or held is None or held + count < LEAVE_ABOVE * cap

    def leave_batches_alone(self) -> None:
        """The batches are in a GPU's memory, which the cap of the machine's does not limit."""
        self._memory.batches_are_here = False

    @property
    def must_leave(self) -> PotluckError | None:
        return self._memory.must_leave

    def expect(self, state_bytes: int, run: str) -> None:
        """This much has to be fetched before training. TooLarge if no month's quota covers it. If
        only this month's does not, the node waits for the next month."""
        quota = self.caps.quota_bytes
        if quota is not None and state_bytes > quota:
            raise TooLarge(
                f"{run} begins with a download of {in_words(state_bytes)}; this node may send and "
                f"receive only {in_words(quota)} a month.",
                why="limits.quota (--quota) sets this limit.",
                advice="Allow several times as much, because the rounds come on top. Nothing was "
                "downloaded.",
            )
        self._expected_bytes, self._expected_from = state_bytes, self._traffic().received_bytes
        self.count()

    def hear(self, happening: object) -> None:
        """Take an event of the trainer."""
        if isinstance(happening, Began):  # the state has arrived
            self._expected_bytes = 0

    def used(self) -> CapsUsed:
        """For the screen and for `status`."""
        up, down = self._rates()
        accounts = self.ledger.accounts.now
        known = [moment for moment in self._closed.values() if moment is not None]
        return CapsUsed(
            upload_bytes_per_second=up,
            upload_limit=self.caps.upload_bytes_per_second,
            download_bytes_per_second=down,
            download_limit=self.caps.download_bytes_per_second,
            memory_bytes=self._clocks.memory(),
            memory_limit=self.caps.memory_bytes,
            batch_share=self.batch_share,
            month=accounts.month,
            month_bytes=accounts.total_bytes,
            month_limit=self.caps.quota_bytes,
            paused_by=tuple(self._closed),
            goes_on_at=max(known) if len(known) == len(self._closed) and known else None,
            pauses_at=None if "schedule" in self._closed else self._next_change(),
            device_memory_bytes=self._clocks.device_memory(),
            device_memory_limit=self.caps.device_memory_bytes,
        )

    # ---- one look at everything

    def look(self) -> None:
        """Check everything except the machine's other users. Never waits."""
        now = trio.current_time()
        self._look_at_traffic(now)
        self._look_at_schedule()
        held = self._clocks.memory()
        self._say(self._memory.look(held, now))
        self.back_stop.look(held)

    def look_at_others(self, seen: SignsOfUse) -> None:
        was = self._idleness.is_needed
        self._idleness.look(trio.current_time(), seen)
        if self._idleness.is_needed:
            self._close("idle", f"paused while {self._idleness.why}", None)
        elif was:
            self._open("idle", "nobody else needs this machine: training continues")

    def count(self) -> None:
        """Count the bytes carried until now."""
        self._look_at_traffic(trio.current_time())

    def end(self) -> None:
        """Open the gate for all of the caps' reasons."""
        for name in ("schedule", "quota", "idle"):
            self._gate.open(name)
        self._closed.clear()

    def _look_at_schedule(self) -> None:
        if self.caps.schedule == ALWAYS:
            return
        moment = self._clocks.moment()
        if self._timetable.is_open(self._clocks.wall(moment)):
            self._open("schedule", f"the schedule ({self.caps.schedule}) has begun")
            return
        until = self._next_change()
        goes_on = ""
        if until is not None:
            goes_on = f": continues at {_hour(until, moment, self._clocks.wall)}"
        words = f"outside of the schedule ({self.caps.schedule}){goes_on}"
        self._close("schedule", words, until)

    def _look_at_traffic(self, now: float) -> None:
        facts = self._traffic()
        self._readings.append((now, facts))
        while now - self._readings[0][0] > RATE_SECONDS:
            self._readings.popleft()
        seconds = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        wall = self._clocks.wall(self._clocks.moment())
        self.ledger.count(facts, month_of(wall), seconds)
        quota, standing = self.caps.quota_bytes, self.ledger.standing
        if quota is None:
            return
        month = self.ledger.accounts.now.month
        if standing is QuotaStanding.NEARLY and self._standing is QuotaStanding.FINE:
            used = f"{in_words(self.ledger.used_bytes)} of {in_words(quota)}"
            self._say(f"the quota for {month} is nearly used up: {used}")
        self._standing = standing
        left = quota - self.ledger.used_bytes
        missing = self._expected_bytes - (facts.received_bytes - self._expected_from)
        until = None if self.ledger.doubts_clock else month_after(wall).timestamp()
        if standing is QuotaStanding.USED_UP:
            self._close("quota", f"the quota of {in_words(quota)} for {month} is used up", until)
        elif left < missing:  # what has arrived is counted already
            words = (
                f"{in_words(left)} of the quota for {month} are left, but the run's state has "
                f"{in_words(self._expected_bytes)}"
            )
            self._close("quota", words, until)
        else:
            self._open("quota", "there is quota again: training continues")

    # ---- the parts

    def _next_change(self) -> float | None:
        change = self._timetable.next_change(self._clocks.moment(), self._clocks.wall)
        return None if change is None else float(round(change))

    def _rates(self) -> tuple[float, float]:
        if len(self._readings) < 2:
            return 0.0, 0.0
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        seconds = max(ended - began, LOOK_SECONDS)
        return (
            (last.sent_bytes - first.sent_bytes) / seconds,
            (last.received_bytes - first.received_bytes) / seconds,
        )

    def _close(self, name: str, words: str, until: float | None) -> None:
        if name in self._closed and self._closed[name] == until:
            return  # with the same words, so that nothing is repeated twice a second
        if name not in self._closed:
            self._say(words)
        self._closed[name] = until
        self._gate.close(name, words, until=until)

    def _open(self, name: str, words: str) -> None:
        if name in self._closed:
            del self._closed[name]
            self._say(words)
            self._gate.open(name)

    def _say(self, words: str) -> None:
        if words:
            self._told(words)


@asynccontextmanager
async def open_caps(
    caps: Caps,
    gate: Gate,
    places: Places,
    *,
    traffic: Callable[[], TrafficFacts] = TrafficFacts,
    told: Callable[[str], None] | None = None,
    clocks: CapsClocks | None = None,
) -> AsyncIterator[WatchedCaps]:
    """Watch the caps until the block ends. `told` is given a line for the owner at each change: 80
    % of the quota, memory running short, the machine wanted by others.

    Errors of the block come out unwrapped.
    """
    told = told or _unheard
    file = LedgerFile(places.traffic_file)
    accounts, trouble = file.load()
    if trouble:
        told(trouble)
    clocks = clocks or CapsClocks()
    ledger = Ledger(accounts, caps.quota_bytes)
    watched = WatchedCaps(caps, gate, ledger, traffic, told, clocks)
    failure: BaseException | None = None
    try:
        with watched.back_stop, kept_to_cores(caps.threads) as kept:
            watched.look()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_keep_looking, watched, file, told)
                nursery.start_soon(_look_for_cores, kept)
                if caps.when_idle:
                    nursery.start_soon(_look_at_others, watched)
                try:
                    yield watched
                except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                    failure = error
                finally:
                    nursery.cancel_scope.cancel()
    finally:  # if the block was cancelled from outside, the nursery raises here
        watched.count()
        watched.end()
        with trio.CancelScope(shield=True):
            await _save(watched, file, told)
    if failure is not None:
        raise failure


async def _keep_looking(
    watched: WatchedCaps, file: LedgerFile, told: Callable[[str], None]
) -> None:
    trouble = ""
    while True:
        await trio.sleep(LOOK_SECONDS)
        watched.look()
        if file.is_due(watched.ledger.accounts, trio.current_time()):
            said = await _save(watched, file, _unheard)
            if said and said != trouble:
                told(said)
            trouble = said


async def _save(watched: WatchedCaps, file: LedgerFile, told: Callable[[str], None]) -> str:
    now, accounts = trio.current_time(), watched.ledger.accounts
    said = await in_thread(file.save, accounts, now)
    if said:
        told(said)
    return said


async def _look_for_cores(kept: KeptCores) -> None:
    """At a random moment, so that nodes started together do not look at the same time."""
    while True:
        await trio.sleep(CORES_SECONDS * random.uniform(0.5, 1.5))
        await in_thread(kept.look)


async def _look_at_others(watched: WatchedCaps) -> None:
    load = OtherLoad()
    while True:
        seen = await in_thread(load.see)
        watched.look_at_others(seen)
        await trio.sleep(IDLE_LOOK_SECONDS)


def _unheard(words: str) -> None:
    """Ignore the words."""


def _hour(moment: float, now: float, wall: Wall) -> str:
    """The moment as a time of day, with the date if it is not today."""
    then, today = wall(moment), wall(now)
    days = (then.date() - today.date()).days
    if days == 0:
        return f"{then:%H:%M}"
    return f"{then:%H:%M} tomorrow" if days == 1 else f"{then:%H:%M on %A}"
