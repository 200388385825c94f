"""How many samples this machine computes at once: measured before joining, adjusted in training.

    measured = measure(task, most=training.samples_at_once, target=training.batch)
    size = BatchSize(measured.samples, limit=32)
    size.took(seconds)                       # after each batch; size.size is the next one's

`measure` doubles the batch from one sample. It stops when a batch takes so long that the overhead
is negligible (`ENOUGH_SECONDS`), when the next one would take too long (`LONGEST_SECONDS`: a peer
can leave or join a round only between two batches), when memory runs out, or when a batch would be
a large part of the run's. Nothing is learnt: gradients are dropped and buffers (batch norm's)
restored.

The machine may be busy during the measurement. So `BatchSize` (pure) follows the batches
themselves: it doubles the size after `STEADY` quick batches in a row, and halves it after as many
slow ones. A size that did not fit into memory sets the limit for good: half of it is the largest
from then on.

Where the model is compiled, the size is first chosen without that: to compile takes a minute, and
is done once, for that size. From there on the compiled passes count.

The first pass on any device is many times slower than the second, so each size is tried twice and
the second time counts. Going up and down costs more than staying at either size, so `QUICK_SECONDS`
is far below the time that halves the size again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from node.core.caps.memory import TooLarge
from node.run.out_of_memory import is_out_of_memory
from protocols.tensors import gpu_of

if TYPE_CHECKING:
    from node.run.building import RunTask


ENOUGH_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 4.0  # of the whole benchmark; then the best so far is taken

TARGET_SHARE: Final = 8
"""The run's batch divided by this is the largest here: a step is late by half a batch of every
peer, and samples beyond the target are wasted."""


@dataclass(frozen=True)
class MeasuredBatch:
    """`fits`: the most samples at once that fit into memory, as far as that was tried."""

    micro_batch: int
    batch_seconds: float
    fits: int

    @property
    def samples_per_second(self) -> float:
        return self.micro_batch / self.batch_seconds if self.batch_seconds > 0.0 else 0.0


def measure(
    task: RunTask,
    *,
    most: int,
    target: int,
    goes_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredBatch:
    """Call this in a worker thread. `most`: by the definition and memory; `target`: samples of the
    run's step.

    TooLarge if there is no room for one sample.
    """
    limit, plain = limit_of(most, target), replace(task, compiled=None)
    with task.buffers_stay():
        found = choose(lambda size: _seconds(plain, size, clock), limit, goes_on, clock)
        if task.compiled is None or not task.compiled.is_used or not goes_on():
            return found
        size = found.micro_batch
        seconds = _tried(lambda size: _seconds(task, size, clock), size)
        if seconds is None:  # compiled passes need more memory
            half = max(1, size // 2)
            return MeasuredBatch(half, found.batch_seconds * half / size, half)
        begun = MeasuredBatch(size, seconds, found.fits)
        further = partial(_seconds, task, clock=clock)
        return (
            choose(further, found.fits, goes_on, clock, begun=begun)
            if task.compiled.is_used
            else found  # it then trains as it was measured first
        )


def limit_of(most: int, target: int) -> int:
    """The most samples at once: `most` by the definition and memory, of a run with this target."""
    return max(1, min(most, target // TARGET_SHARE))


def choose(
    seconds_of: Callable[[int], float],
    limit: int,
    goes_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.perf_counter,
    *,
    begun: MeasuredBatch | None = None,
) -> MeasuredBatch:
    """The size to take, by trying sizes up to `limit`: from one sample on, or from what has `begun`
    to be measured. `seconds_of` raises an error for which
    is_out_of_memory is true if a size does not fit; TooLarge if that is the first."""
    began = clock()
    first = _tried(seconds_of, 1) if begun is None else begun.batch_seconds
    if first is None:
        raise TooLarge(
            "There is no room for one sample of this run in memory.",
            why="The model fits, but computing with it does not.",
            advice="Join from a larger machine; if a GPU's memory is too small, --device cpu uses "
            "the machine's own.",
        )
    best = begun or MeasuredBatch(1, first, limit)
    while best.batch_seconds < ENOUGH_SECONDS and best.micro_batch < limit and goes_on():
        size = min(limit, 2 * best.micro_batch)
        if best.batch_seconds * size / best.micro_batch > LONGEST_SECONDS:
            break
        seconds = _tried(seconds_of, size)
        if seconds is None:
            return replace(best, fits=best.micro_batch)
        if seconds > LONGEST_SECONDS:
            break
        best = MeasuredBatch(size, seconds, limit)
        if clock() - began > MOST_SECONDS:
            break
    return best


def _tried(seconds_of: Callable[[int], float], size: int) -> float | None:
    """How long a batch of this size takes; None if it does not fit."""
    try:
        return seconds_of(size)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _seconds(task: RunTask, size: int, clock: Callable[[], float]) -> float:
    """The time of one pass as the run computes it, the second of two."""
    began = 0.0
    try:
        batch = task.made_up_batch(size)  # once: a module's data may take long to open
        for _ in range(2):
            began = clock()
            task.compute(batch)
            _wait_for_device(task)
        return clock() - began
    finally:
        for _name, one in task.named_parameters:
            one.grad = None


def _wait_for_device(task: RunTask) -> None:
    """A GPU computes asynchronously; the time is known only when it is done."""
    for device in task.devices:
        if (gpu := gpu_of(device)) is not None:
            gpu.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


QUICK_SECONDS: Final = 0.1
SLOW_SECONDS: Final = 2.0 * LONGEST_SECONDS
STEADY: Final = 8


class PassClock:
    """How long passes take.

        with clock.passing():
            loss = task.compute(batch)
        seconds = clock.newest()                 # of a pass since the last call, if one has ended

    A GPU is not waited for: events on it say when a pass began and ended.

    Easy to get wrong: by itself an event is of the process's current GPU, and not of `cuda:1`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, gpu_of(device)
        self._seconds: float | None = None
        self._under_way: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def passing(self) -> Iterator[None]:
        began = time.monotonic()
        if self._gpu is None:
            yield
            self._seconds = time.monotonic() - began
            return
        start, end = (self._gpu.Event(enable_timing=True) for _ in range(2))
        stream = self._gpu.current_stream(self._device)
        start.record(stream)
        yield
        end.record(stream)
        self._under_way.append((start, end))

    def newest(self) -> float | None:
        while self._under_way and self._under_way[0][1].query():
            start, end = self._under_way.popleft()
            self._seconds = start.elapsed_time(end) / 1000
        seconds, self._seconds = self._seconds, None
        return seconds


class BatchSize:
    """Invariant: 1 <= size <= limit. `measured_seconds`: the time of a batch of the first size in
    the benchmark; 0 if there was none."""

    def __init__(self, size: int, limit: int, measured_seconds: float = 0.0) -> None:
        self.size = max(1, min(size, limit))
        self.measured_seconds = measured_seconds
        self._limit = max(1, limit)
        self._quick = self._slow = 0

    def took(self, seconds: float, *, may_grow: bool = True) -> None:
        """A batch of this size took this many seconds. Without `may_grow`, it was smaller, because
        memory is short."""
        self._quick = self._quick + 1 if seconds < QUICK_SECONDS else 0
        self._slow = self._slow + 1 if seconds > SLOW_SECONDS else 0
        if self._quick >= STEADY and self.size < self._limit and may_grow:
            self._become(min(self._limit, 2 * self.size))
        elif self._slow >= STEADY and self.size > 1:
            self._become(self.size // 2)

    def did_not_fit(self, size: int) -> None:
        """Memory had no room for this many samples at once."""
        self._limit = max(1, size // 2)
        self._become(min(self.size, self._limit))

    def _become(self, size: int) -> None:
        self.size = size
        self._quick = self._slow = 0
