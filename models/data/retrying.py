"""Retries interrupted reading: a limited number of times, after growing waits.

The waits are given to the caller as pauses, and not slept through: meanwhile the examples in its
buffer, or another source, can be trained on.
"""

from __future__ import annotations

from models.data.clock import Clock
from models.data.errors import Interrupted, ShardBroken
from models.data.examples import OnRetry, Pause

WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # a restarted server or router is back after these
PROGRESS_BYTES = 64 * 1024  # so many bytes later, the next interruption is a first one again


class Attempts:
    """Counts the interruptions of one shard. Made for each reading of it."""

    def __init__(self, clock: Clock, on_retry: OnRetry) -> None:
        self._clock = clock
        self._on_retry = on_retry
        self._failed = 0
        self._byte = 0

    @property
    def clock(self) -> Clock:
        return self._clock

    def interrupted(self, error: Interrupted, byte: int) -> Pause:
        """How long to wait. ShardBroken after too many attempts.

        `byte` is how far reading has come, in any unit that grows with progress.
        """
        if byte >= self._byte + PROGRESS_BYTES:
            self._failed = 0
        self._byte = max(self._byte, byte)
        if self._failed == len(WAITS_SECONDS):
            raise ShardBroken(f"{error}, after {self._failed} attempts.") from error
        wait = max(WAITS_SECONDS[self._failed], error.retry_seconds)
        self._failed += 1
        self._on_retry(str(error), self._failed + 1, wait)
        return Pause(self._clock.now() + wait)
