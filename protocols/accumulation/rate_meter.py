"""Measures how fast this peer computes samples, from the times of its batches. Pure.

    meter.began(now)                # computing begins, or goes on after a pause
    meter.counted(32, now)          # a batch is ready
    meter.rate(now)

The rate is an average over the last `MEMORY_SECONDS` of computing; pauses (while a round is
averaged, while a state is fetched) do not count. If batches stop, the rate falls by itself: from
twice the usual time of a batch on, it is the rate that the silence allows.

Easy to get wrong: there is no rate before the first batch is ready, and the time before it counts.
A first batch may take ten times as long as any other, so the second one replaces its measurement.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_SECONDS: Final = 10.0
"""Longer than a batch, and shorter than the minutes after which a machine gets busy or free."""

SILENT_AFTER_BATCHES: Final = 2.0


class RateMeter:
    """Invariant: `_seconds` and `_samples` are of the same batches; older ones count less."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds = 0.0
        self._samples = 0.0
        self._batch_seconds = 0.0
        self._batches = 0
        self.largest_batch = 0

    def began(self, now: float) -> None:
        """The next batch is being computed from now on."""
        self._since = now

    def paused(self) -> None:
        """Nothing is computed until `began`, or until a batch is counted."""
        self._since = None

    def counted(self, samples: int, now: float) -> None:
        self.largest_batch = max(samples, self.largest_batch // 2)
        if self._since is not None:
            seconds = max(0.0, now - self._since)
            kept = 0.0 if self._batches == 1 else math.exp(-seconds / MEMORY_SECONDS)
            self._batches += 1
            self._seconds = self._seconds * kept + seconds
            self._samples = self._samples * kept + samples
            self._batch_seconds = seconds
        self._since = now

    def rate(self, now: float) -> float:
        """In samples per second; 0 before the first batch."""
        if self._seconds <= 0.0:
            return 0.0
        usual = self._samples / self._seconds
        if self._since is None:
            return usual
        silence = now - self._since
        batch = max(self._batch_seconds, self.largest_batch / usual)
        if silence <= SILENT_AFTER_BATCHES * batch:
            return usual
        return usual * SILENT_AFTER_BATCHES * batch / silence
