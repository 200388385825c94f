"""The largest growth of this process's resident memory during some work."""

from __future__ import annotations

import trio

from node.core.status import memory_in_use

SAMPLE_SECONDS = 0.02  # a burst of 16 MiB takes about as long to arrive


class PeakMemory:
    """Samples from `start` on; `growth_bytes` is the largest sample less the first."""

    def __init__(self) -> None:
        self._first = 0
        self._largest = 0
        self._started = trio.Event()

    def start(self) -> None:
        self._first = self._largest = memory_in_use() or 0
        self._started.set()

    def sample(self) -> None:
        self._largest = max(self._largest, memory_in_use() or 0)

    def growth_bytes(self) -> int:
        self.sample()
        return self._largest - self._first

    async def run(self) -> None:
        await self._started.wait()  # until then it costs nothing
        while True:
            await trio.sleep(SAMPLE_SECONDS)
            self.sample()
