"""How many samples this machine should compute at once: a few seconds of trying, before joining.

    measured = measure(task, most=training.samples_at_once, target=training.batch)

Batches double from one sample until a batch takes long enough (`ENOUGH_SECONDS`) that what goes on
around it costs nothing beside it, or the next one would take too long (`LONGEST_SECONDS`: a peer
that is told to leave, or is due in a round, can do so between two batches only), or memory says
no, or a batch would be a large part of the whole run's.

Promises: nothing is learnt in it. Gradients are dropped, and buffers (batch norm's) are put back.

Easy to get wrong: the first pass on any device is many times slower than the second. Every size is
therefore tried twice, and the second time counts. And a size that memory has refused here must not
be taken later either, however quick the batches are: `fits` says where that ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from node.caps.memory import TooLarge
from node.trainer.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from node.run.building import RunTask

ENOUGH_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 4.0  # of the whole benchmark; then the best so far is taken

TARGET_SHARE: Final = 8
"""A batch is at most this part of the run's: a step comes late by half a batch of every peer, and
what is over is wasted."""


@dataclass(frozen=True)
class Measurement:
    """`fits`: the most samples at once that memory has room for, as far as that was seen."""

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
) -> Measurement:
    """In a worker thread. `most`: by the definition and memory; `target`: of the run's steps.

    TooLarge where there is no room for one sample.
    """
    limit = limit_of(most, target)
    kept = [(buffer, buffer.clone()) for _name, buffer in task.buffers]
    try:
        return choose(lambda size: _seconds(task, size, clock), limit, goes_on, clock)
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


def limit_of(most: int, target: int) -> int:
    """The most samples at once: `most` by the definition and memory, of a run with this target."""
    return max(1, min(most, target // TARGET_SHARE))


def choose(
    seconds_of: Callable[[int], float],
    limit: int,
    goes_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """The size to take, by trying sizes up to `limit`. `seconds_of` raises what is_out_of_memory
    knows for one that does not fit; TooLarge if that is the first."""
    began = clock()
    first = _tried(seconds_of, 1)
    if first is None:
        raise TooLarge(
            "There is no room for one sample of this run in memory.",
            why="The model fits, and computing with it does not.",
            advice="Join from a larger machine; if a GPU's memory is too small, --device cpu takes "
            "the machine's own.",
        )
    best = Measurement(1, first, limit)
    while best.batch_seconds < ENOUGH_SECONDS and best.micro_batch < limit and goes_on():
        size = min(limit, 2 * best.micro_batch)
        if best.batch_seconds * size / best.micro_batch > LONGEST_SECONDS:
            break
        seconds = _tried(seconds_of, size)
        if seconds is None:
            return replace(best, fits=best.micro_batch)
        if seconds > LONGEST_SECONDS:
            break
        best = Measurement(size, seconds, limit)
        if clock() - began > MOST_SECONDS:
            break
    return best


def _tried(seconds_of: Callable[[int], float], size: int) -> float | None:
    """How long it takes; None if it does not fit."""
    try:
        return seconds_of(size)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _seconds(task: RunTask, size: int, clock: Callable[[], float]) -> float:
    """Of one forward and backward pass in the run's precision, the second of two."""
    began = 0.0
    try:
        batch = task.made_up_batch(size)  # once: a module's data may take long to open
        for _ in range(2):
            began = clock()
            with task.autocast():
                loss = task.loss(batch)
            task.backward(loss)
            _wait_for_device(task)
        return clock() - began
    finally:
        for _name, one in task.named_parameters:
            one.grad = None


def _wait_for_device(task: RunTask) -> None:
    """A GPU is only told to compute; what it takes is known when it is done."""
    for device in task.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()
