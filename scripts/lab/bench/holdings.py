"""What this process holds: memory, tasks and file descriptors."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import trio

from node.core.status import memory_in_use

SAMPLE_SECONDS = 0.02  # a burst of 16 MiB takes about as long to arrive


def tasks_by_name() -> dict[str, int]:
    """The number of this process's tasks by name, to find a leak."""
    root = trio.lowlevel.current_root_task()
    found, names = [root] if root else [], Counter[str]()
    while found:
        task = found.pop()
        names[task.name] += 1
        found += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return dict(names)


def descriptors() -> int:
    """The number of open files and connections."""
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return len(os.listdir(folder))


class PeakMemory:
    """The growth of resident memory during some work. Samples from `start` on; `growth_bytes` is
    the largest sample less the first."""

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
