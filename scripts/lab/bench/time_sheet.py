"""Where a training loop's time goes, part by part, as its thread sees it.

    sheet = TimeSheet()
    with sheet.on(COMPUTING):
        loss.backward()
    sheet.add(WAITING, 0.2)
    sheet.batch_ended(samples=32)
    sheet.told()                            # as it was at the end of the last batch

Promise: the figures of `told` were noted at one moment, the end of a batch. So the difference of
two looks is of whole batches, and its parts never add up to more than the time between.

`on` and `add` are for the training thread alone; any thread may call `told`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

COMPUTING: Final = "computing"  # forward and backward passes
ADDING: Final = "adding"  # `step` of a batch amid an epoch: counting its gradients
TURNING: Final = "turning"  # `step` where a round began or a state came: taking, stepping, copying
WAITING: Final = "waiting"  # for the network, in whichever `step`
RECORDING: Final = "recording"  # the bench's own: logs, digests, the loss on held-out samples
REST: Final = "rest"  # of the loop
PARTS: Final = (COMPUTING, ADDING, TURNING, WAITING, REST)
"""The parts of a loop's time; RECORDING is the bench's own, and is taken off."""


class TimeSheet:
    """Of one thread. Invariant: `_told` is replaced and never changed."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((COMPUTING, ADDING, TURNING, WAITING, RECORDING), 0.0)
        self._batches = self._samples = 0
        self._told: Mapping[str, Any] = {}
        self._note()

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] += time.monotonic() - began

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] += seconds

    def batch_ended(self, samples: int) -> None:
        self._batches += 1
        self._samples += samples
        self._note()

    def told(self) -> dict[str, Any]:
        """Seconds of each part so far, `at` which moment, with how many batches and samples."""
        return dict(self._told)

    def _note(self) -> None:
        self._told = {
            "at": time.monotonic(),
            "batches": self._batches,
            "samples": self._samples,
            **self._seconds,
        }


def parts_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of each of PARTS between two looks at a sheet, without what the bench recorded.

    Their sum is the loop's own time."""
    seconds = {
        part: float(after[part] - before[part]) for part in (COMPUTING, ADDING, TURNING, WAITING)
    }
    own = (after["at"] - before["at"]) - (after[RECORDING] - before[RECORDING])
    return seconds | {REST: max(0.0, own - sum(seconds.values()))}
