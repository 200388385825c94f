"""The memory limit of this process: checked before joining, and watched while training.

    refuse_above(HOST, caps.memory_bytes, there_bytes, needed_bytes, run)    # TooLarge in words
    watch = MemoryWatch(caps.memory_bytes)
    watch.look(memory_in_use(), now)                      # every half a second
    watch.batch_share, watch.must_leave

The machine's memory and a GPU's own are two kinds, with a limit each. Both are compared with the
estimate here; device_memory.py is the rest of a GPU's.

There are three lines of defence. The estimate refuses runs that cannot fit. A process that comes
near the cap computes smaller batches, and leaves with a message if that does not help. And on Linux
the kernel allows only a little more than the cap (`BackStop`), in case memory grows within one
look.

Memory that was used once is not always given back, so a smaller batch may not show at once. The
share is halved only as often as it can take effect.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from node.core.caps.units import in_words
from protocols.errors import PotluckError

PROCESS_BYTES = 430_000_000
"""Python, torch without its compiler, a node with peers. With a tiny model, three such processes
held 361 to 364 MB at the start and 375 to 377 after two minutes. The rest is for what allocators
keep of a small model's batches, which its shapes underestimate: the tiny GPT was seen to hold 407
to 421 MB with 4 samples at once (452 by these figures) and 471 to 545 with 32 (493). With 377 here
a node would start under a cap and then have to stop because of it."""

SHRINK_ABOVE = 0.85
LEAVE_ABOVE = 0.97
LEAST_BATCH_SHARE = 1 / 8
SHRINK_SECONDS = 10.0
"""So much time for batches of the smaller size before the result is judged."""

LOOK_SECONDS = 0.5
BACK_STOP_SHARE = 1.04
"""Less than the twentieth by which a cap may be exceeded, and more than where leaving begins."""


class TooLarge(PotluckError):
    """A run that needs more memory than the owner allows, or than there is."""

    exit_code = 3


class MemoryUsedUp(PotluckError):
    """This process reached the memory that its owner allows, and left."""

    exit_code = 3


@dataclass(frozen=True)
class MemoryKind:
    """The words for one kind of memory. `has_it`: what has the whole of it."""

    words: str
    has_it: str
    setting: str
    elsewhere: str

    @property
    def flag(self) -> str:
        return f"--{self.setting.replace('_', '-')}"


HOST = MemoryKind("memory", "this machine", "max_memory", "join from a larger machine")
DEVICE = MemoryKind(
    "a GPU's memory",
    "the GPU here",
    "max_device_memory",
    "try --offload, which keeps less there, or --device cpu, which uses the machine's memory",
)
DEVICE_WITH_THE_LEAST = replace(
    DEVICE, elsewhere="try --device cpu, which uses the machine's memory"
)
"""Where --offload is on already, or changes nothing."""


def refuse_above(
    kind: MemoryKind, cap_bytes: int | None, there_bytes: int | None, needed_bytes: int, run: str
) -> None:
    """TooLarge if the run (by the estimate of node/run/costs.py) needs more than the cap; without
    one, more than there is. None: there is no cap, or it is unknown how much there is."""
    needs = f"{run} needs about {in_words(needed_bytes)} of {kind.words}"
    if cap_bytes is not None:
        if needed_bytes <= cap_bytes:
            return
        raise TooLarge(
            f"{needs}; this node may hold {in_words(cap_bytes)}.",
            why=f"limits.{kind.setting} ({kind.flag}) sets this limit.",
            advice=f"Allow {in_words(needed_bytes)} or more, or {kind.elsewhere}. "
            "Nothing was downloaded.",
        )
    if there_bytes is not None and needed_bytes > there_bytes:
        raise TooLarge(
            f"{needs}; {kind.has_it} has {in_words(there_bytes)}.",
            why="This is an estimate from the run's definition.",
            advice=f"{kind.elsewhere.capitalize()}. {kind.flag} overrides the amount that it may "
            "use. Nothing was downloaded.",
        )


class MemoryWatch:
    """Invariant: `batch_share` only shrinks, and `must_leave` is set once."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.memory_bytes = memory_bytes
        self.batch_share = 1.0
        self.must_leave: PotluckError | None = None
        self.batches_are_here = True
        """False if they are in a GPU's memory: smaller ones would free nothing here."""
        self._shrunk_at = float("-inf")

    def look(self, held_bytes: int | None, now: float) -> str:
        """Takes the process's memory now; returns a message to the owner, if any."""
        if self.memory_bytes is None or held_bytes is None or self.must_leave is not None:
            return ""
        share = held_bytes / self.memory_bytes
        if share >= LEAVE_ABOVE:
            self.must_leave = MemoryUsedUp(
                f"This node holds {in_words(held_bytes)} of memory, and may hold "
                f"{in_words(self.memory_bytes)}.",
                why="limits.max_memory (--max-memory) sets this limit, and smaller batches did not "
                "help."
                if self.batch_share < 1.0
                else "limits.max_memory (--max-memory) sets this limit.",
                advice="It left the run before the limit. Allow more, or take part in a smaller "
                "run.",
            )
            return str(self.must_leave)
        if (
            not self.batches_are_here
            or share < SHRINK_ABOVE
            or now - self._shrunk_at < SHRINK_SECONDS
        ):
            return ""
        if self.batch_share <= LEAST_BATCH_SHARE:
            return ""
        self.batch_share /= 2
        self._shrunk_at = now
        return (
            f"{in_words(held_bytes)} of the {in_words(self.memory_bytes)} of memory are in use: "
            f"batches have {self.batch_share:.0%} of their size from now on"
        )


class BackStop:
    """During the block the kernel refuses this process memory above the cap (Linux).

    It counts memory that a process may write to (RLIMIT_DATA). A part of that was never touched and
    is not really used (stacks of threads, for one), so the limit is raised by that part at each
    look. An allocation above it fails as if there were no memory, with torch's own error, and harms
    no other program.
    """

    def __init__(self, memory_bytes: int | None) -> None:
        self._memory_bytes = memory_bytes if _data_bytes() is not None else None
        self._before = (-1, -1)

    def __enter__(self) -> BackStop:
        if self._memory_bytes is not None:
            import resource

            self._before = resource.getrlimit(resource.RLIMIT_DATA)
        return self

    def __exit__(self, *error: object) -> None:
        if self._memory_bytes is not None:
            self._limit(self._before[0])

    def look(self, held_bytes: int | None) -> None:
        """Takes the process's memory now."""
        asked = _data_bytes()
        if self._memory_bytes is None or held_bytes is None or asked is None:
            return
        untouched = max(0, asked - held_bytes)
        self._limit(int(BACK_STOP_SHARE * self._memory_bytes) + untouched)

    def _limit(self, data_bytes: int) -> None:
        import resource

        soft, hard = self._before
        least = min((one for one in (soft, hard) if one >= 0), default=resource.RLIM_INFINITY)
        if data_bytes >= 0 and least >= 0:
            data_bytes = min(data_bytes, least)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, hard))


def _data_bytes() -> int | None:
    """The memory that this process may write to (VmData); None if it is unknown."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
