"""Does the run fit: asked before anything but its definition has been downloaded.

    check_any_fits(caps, run)                                         # before torch is loaded
    most_samples = check_fits(costs, caps, devices, definition)       # TooLarge, in words

Above the owner's cap it is refused. Without a cap the machine itself is one: a definition is a few
lines of text, and may ask for a model of terabytes. Both are about the machine's memory: all of the
estimate where a processor computes, and where a GPU does what is not in the GPU's. How many samples
fit into that is found by trying (node/trainer/benchmark.py). A peer that keeps a run alive without
samples of its own needs no memory for any.

Easy to get wrong: what a container may have is less than what its machine has. And torch alone
comes near a small cap while it is loaded, which then seemed to be what this process had computed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.caps.memory import TooLarge, refuse_above
from node.caps.units import in_words
from node.run.costs import PROCESS_BYTES

if TYPE_CHECKING:
    from node.caps.settings import Caps
    from node.run.costs import Costs
    from node.run.definition import RunDefinition

CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container, with version 2
IN_MACHINES_MEMORY: Final = ("cpu", "mps")
"""Kinds of devices that compute in the machine's own memory: Apple's GPU shares it."""


def check_any_fits(caps: Caps, run: str) -> None:
    """TooLarge where the owner allows less than any run takes, whatever this one is."""
    if caps.memory_bytes is not None and caps.memory_bytes < PROCESS_BYTES:
        raise TooLarge(
            f"{run} needs more than {in_words(PROCESS_BYTES)} of memory, as every run does; this "
            f"node may hold {in_words(caps.memory_bytes)}.",
            why="limits.max_memory (--max-memory) says so.",
            advice="Allow more, or join from a larger machine. Nothing was downloaded.",
        )


def check_fits(
    costs: Costs,
    caps: Caps,
    devices: Sequence[str],
    definition: RunDefinition,
    *,
    computes: bool = True,
    machine_bytes: int | None,
) -> int:
    """How many samples at once are the most that fit. TooLarge if not even one does, or none where
    none are computed."""
    run, most = definition.name, definition.training.samples_at_once
    on_gpu = has_own_memory(devices)
    least = costs.memory_bytes(1 if computes else 0, on_gpu=on_gpu)
    if caps.memory_bytes is not None:
        refuse_above(caps.memory_bytes, least, run)
    elif machine_bytes is not None and least > machine_bytes:
        raise TooLarge(
            f"{run} needs about {in_words(least)} of memory; this machine has "
            f"{in_words(machine_bytes)}.",
            why="It is worked out from the run's definition.",
            advice="Join from a larger machine. --max-memory says how much it may hold instead. "
            "Nothing was downloaded.",
        )
    room = machine_bytes if caps.memory_bytes is None else caps.memory_bytes
    if on_gpu or room is None:
        return most
    return max(1, min(most, costs.most_samples(room)))


def has_own_memory(devices: Sequence[str]) -> bool:
    """Whether what is computed there is not in the machine's memory."""
    return not any(one.startswith(IN_MACHINES_MEMORY) for one in devices)


def machine_memory() -> int | None:
    """Bytes that this machine (or container) has; None where the system does not say."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        limit = CGROUP_LIMIT.read_text("ascii").strip()
    except (OSError, ValueError):
        limit = ""
    return min(found, int(limit)) if limit.isdigit() else found
