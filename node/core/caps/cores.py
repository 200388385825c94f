"""Keeps this whole process on so many processor cores (Linux): the meaning of `--threads`.

    with kept_to_cores(caps.threads) as kept:
        kept.look()                   # now and then: move to cores in less demand

torch computes with so many threads, and beside them run the event loop, the reader of the data and
the encoder of a round. An owner who asks for one thread expects that one core is busy and the
others are free. So the kernel is told to run the whole process on that many cores, at all times. On
other systems the number only limits the computing threads, and the rest comes on top: a tenth of a
core during a round.

It takes the cores that the fewest other processes are bound to, so that two nodes with `--threads
1` do not share a core while another is free. Two that begin at the same moment notice that a little
later. The kernel itself moves unbound processes out of the way.

The cores of a process are set for each of its threads. A new thread inherits those of the thread
that made it.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

MOST_LOOKED_AT: Final = 4096  # processes; each takes some 20 microseconds
PASSES: Final = 4  # over the threads: one that is made meanwhile is found in the next pass
PLATFORM: str = sys.platform


class KeptCores:
    """`kept_to_cores` makes this.

    Invariant: `cores` are some of `_all`, the cores of the process before; None if it is not bound.
    """

    def __init__(self, all_cores: frozenset[int], number: int) -> None:
        self._all, self._number = all_cores, number
        self.cores: frozenset[int] | None = None

    def look(self) -> None:
        """Move to the cores in least demand, if that is better. Takes milliseconds."""
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
def kept_to_cores(threads: int | None) -> Iterator[KeptCores]:
    """Bind the process during the block. None, or more than there are cores, changes nothing."""
    if threads is None or not PLATFORM.startswith("linux"):
        yield KeptCores(frozenset(), 0)
        return
    before = frozenset(os.sched_getaffinity(0))
    kept = KeptCores(before, threads if threads < len(before) else 0)
    kept.look()
    try:
        yield kept
    finally:
        kept.let_go()


def wanted(cores: Iterable[int], kept: Iterable[frozenset[int]]) -> int:
    """How often these cores are in the sets."""
    chosen = frozenset(cores)
    return sum(len(chosen & one) for one in kept)


def least_wanted(
    cores: Iterable[int], kept: Iterable[frozenset[int]], number: int
) -> frozenset[int]:
    """So many of the cores: those in the fewest of the sets."""
    there = tuple(kept)
    order = sorted(cores)
    random.SystemRandom().shuffle(order)
    order.sort(key=lambda core: sum(core in one for one in there))
    return frozenset(order[:number])


def cores_in(text: str) -> frozenset[int]:
    """The cores in a list as in /proc: "0-3,7"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _kept_elsewhere(cores: frozenset[int]) -> Iterator[frozenset[int]]:
    """The cores of the other processes that are bound to only some of ours."""
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
            with suppress(OSError):  # the thread has ended, or the container takes cores away
                os.sched_setaffinity(int(thread), theirs)
        done |= threads


def _names_in(folder: str) -> list[str]:
    """The names in a folder; none without /proc, or without a free descriptor to read it."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
