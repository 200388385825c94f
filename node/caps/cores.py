"""Keeps this whole process to so many processor cores (Linux): what `--threads` promises.

    with kept_to_cores(caps.threads) as kept:
        kept.look()                   # now and then: elsewhere if it is less wanted there

torch computes with so many threads, and beside them there are the event loop, the reader of the
data and what encodes a round. Whoever says one thread means that one core is busy and the others
are theirs. So the kernel is told to run all of it on that many cores, and no window of time has
more. Elsewhere than on Linux the number is that of the threads which compute, and the rest comes on
top: a tenth of a core while a round goes on.

Which cores: those that the fewest other processes are kept to, so that two nodes with `--threads 1`
do not share a core while another is free; two that begin at the same moment find that out a little
later. The kernel moves whatever is not kept anywhere out of the way by itself.

Easy to get wrong: the cores of a process are its threads', each for itself. A new thread begins
with those of the thread that made it.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

MOST_LOOKED_AT: Final = 4096  # processes; a look takes some 20 microseconds each
PASSES: Final = 4  # over the threads: one that is made meanwhile is met in the next
PLATFORM: str = sys.platform


class Kept:
    """Made by `kept_to_cores`. Invariant: `cores` are some of `_all`, which the process had before;
    None where it is kept to none."""

    def __init__(self, all_cores: frozenset[int], number: int) -> None:
        self._all, self._number = all_cores, number
        self.cores: frozenset[int] | None = None

    def look(self) -> None:
        """Take those that are least wanted, if that is any better. Takes milliseconds."""
        if not self._number:
            return
        others = tuple(_kept_elsewhere(self._all))
        best = least_wanted(self._all, others, self._number)
        if self.cores is None or wanted(best, others) < wanted(self.cores, others):
            self.cores = best
            _keep_all(best)

    def let_go(self) -> None:
        if self.cores is not None:
            _keep_all(self._all)


@contextmanager
def kept_to_cores(threads: int | None) -> Iterator[Kept]:
    """While the block runs. None changes nothing, nor does a number above that of the cores."""
    if threads is None or not PLATFORM.startswith("linux"):
        yield Kept(frozenset(), 0)
        return
    before = frozenset(os.sched_getaffinity(0))
    kept = Kept(before, threads if threads < len(before) else 0)
    kept.look()
    try:
        yield kept
    finally:
        kept.let_go()


def wanted(cores: Iterable[int], kept: Iterable[frozenset[int]]) -> int:
    """How often they are in the sets."""
    chosen = frozenset(cores)
    return sum(len(chosen & one) for one in kept)


def least_wanted(
    cores: Iterable[int], kept: Iterable[frozenset[int]], number: int
) -> frozenset[int]:
    """So many of the cores: those in the fewest of the sets; of equal ones, any."""
    there = tuple(kept)
    order = sorted(cores)
    random.SystemRandom().shuffle(order)
    order.sort(key=lambda core: sum(core in one for one in there))
    return frozenset(order[:number])


def cores_in(text: str) -> frozenset[int]:
    """As /proc says it: "0-3,7"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _kept_elsewhere(cores: frozenset[int]) -> Iterator[frozenset[int]]:
    """Of the other processes, the cores of those that are kept to some of ours only."""
    own, seen = str(os.getpid()), 0
    for process in _names_in("/proc"):
        if not process.isdigit() or process == own:
            continue
        seen += 1
        if seen > MOST_LOOKED_AT:
            return
        with suppress(OSError, ValueError, IndexError):
            said = Path("/proc", process, "status").read_text()
            kept = cores_in(said.split("Cpus_allowed_list:", 1)[1].split("\n", 1)[0]) & cores
            if 0 < len(kept) < len(cores):
                yield frozenset(kept)


def _keep_all(cores: Iterable[int]) -> None:
    done: set[str] = set()
    theirs = set(cores)
    for _ in range(PASSES):
        threads = set(_names_in("/proc/self/task") or ["0"]) - done  # 0: this thread, at least
        if not threads:
            return
        for thread in threads:
            with suppress(OSError):  # it has ended, or the container takes cores away
                os.sched_setaffinity(int(thread), theirs)
        done |= threads


def _names_in(folder: str) -> list[str]:
    """None where there is no /proc, or no descriptor left to read it with: no reason to end."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
