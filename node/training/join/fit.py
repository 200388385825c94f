"""Does the run fit this machine, and how much will it use? Decided before anything but the run's
definition is downloaded.

    check_any_fits(caps, run)                                         # before torch is loaded
    fit = check_fits(costs, caps, devices, definition)                # TooLarge, in words
    three_lines(Use(...))                                             # for the owner to read

A run above the owner's cap is refused. Without a cap the machine's memory is the limit: a
definition is a few lines of text, and may ask for a model of terabytes. On a CPU the whole estimate
counts as the machine's memory. With a GPU there are two estimates: its own memory has a cap and a
size, too, and the machine's holds the rest.

The benchmark (node/training/batch_size.py) finds how many samples fit. On a CPU they share the
memory with the results of steps, which a peer keeps while others follow the run by them. A peer
that keeps a run alive without training needs no memory for samples.

The three lines say what this machine will give, and how to stop. Memory, disk and traffic are
estimated from the run's definition (node/run/costs.py), not measured. Unknown figures are left out.

A container may have less memory than its machine. Loading torch alone comes near a small cap, and
must not be taken for memory that this process computed with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.core.caps.device_memory import has_own_memory
from node.core.caps.memory import (
    DEVICE,
    DEVICE_WITH_THE_LEAST,
    HOST,
    PROCESS_BYTES,
    TooLarge,
    refuse_above,
)
from node.core.caps.units import in_words

if TYPE_CHECKING:
    from node.core.caps.settings import Caps
    from node.run.costs import Costs
    from node.run.definition import RunDefinition
    from node.training.join.wish import ServingWish


CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")  # of a container, with version 2
SHARE_OF_RESULTS: Final = 0.5
"""The largest part of a cap's memory above the run's minimum; the rest is for samples."""


@dataclass(frozen=True)
class Fit:
    """- `most_samples`: the most that fit at once.
    - `most_kept_bytes`: the memory that the owner's cap leaves, beside these samples, for results
      of steps that others follow the run by; infinite without a cap.
    - `most_followed_bytes`: the same for the results by which this peer itself follows the run,
      before it computes.
    """

    most_samples: int
    most_kept_bytes: float = math.inf
    most_followed_bytes: float = math.inf


def check_any_fits(caps: Caps, run: str) -> None:
    """TooLarge if the owner allows less memory than any run takes."""
    if caps.memory_bytes is not None and caps.memory_bytes < PROCESS_BYTES:
        raise TooLarge(
            f"{run} needs more than {in_words(PROCESS_BYTES)} of memory, as every run does; this "
            f"node may hold {in_words(caps.memory_bytes)}.",
            why="limits.max_memory (--max-memory) sets this limit.",
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
    device_bytes: int | None = None,
) -> Fit:
    """The fit. TooLarge if not even one sample fits, or the run itself where none are computed.
    `machine_bytes`, `device_bytes`: how much there is of the machine's memory, and of a GPU's."""
    run, most = definition.name, definition.training.samples_at_once
    on_gpu = has_own_memory(devices)
    one, offload = int(computes), caps.offload
    least = costs.memory_bytes(one, on_gpu=on_gpu, offload=offload)
    refuse_above(HOST, caps.memory_bytes, machine_bytes, least, run)
    cap, room = caps.memory_bytes, machine_bytes
    kept = followed = math.inf
    if cap is not None:
        kept = min(costs.results_bytes, SHARE_OF_RESULTS * (cap - least))
        followed = cap - costs.memory_bytes(0, on_gpu=on_gpu, offload=offload)
        room = int(cap - kept)
    if on_gpu:
        device_cap = caps.device_memory_bytes
        least_there = costs.gpu_bytes(one, offload=offload)
        has_less = not offload and costs.gpu_bytes(one, offload=True) < least_there
        kind = DEVICE if has_less else DEVICE_WITH_THE_LEAST
        refuse_above(kind, device_cap, device_bytes, least_there, run)
        room = device_bytes if device_cap is None else device_cap
    if room is None:
        return Fit(most, kept, followed)
    if on_gpu:
        fitting = len(devices) * costs.most_samples_on_gpu(room, offload=offload)
    else:
        fitting = costs.most_samples(room)
    return Fit(max(1, min(most, fitting)), kept, followed)


SHARE_FOR_EXPERTS: Final = 0.5
"""The largest part of the free memory that experts get by themselves: of the machine's where its
owner set no limit, and of what training leaves."""
SHARE_OF_CELLS: Final = 0.25
"""The largest part of the run's cells that a peer serves by itself, so that others find some."""
REQUESTS_BYTES: Final = 200_000_000  # of batches that wait or are computed at a server


def memory_for_experts(
    cap_bytes: int | None, there_bytes: int | None, training_bytes: int, *, on_gpu: bool = False
) -> int | None:
    """The memory for experts beside training with this much, 0 if this peer only serves: of a GPU's
    memory if they are there, or of the machine's. None if the system does not say how much there
    is."""
    whole = there_bytes if cap_bytes is None else cap_bytes
    if whole is None:
        return None
    used = training_bytes if on_gpu else max(PROCESS_BYTES, training_bytes)
    left = max(0, whole - used - REQUESTS_BYTES)
    is_shared = cap_bytes is None or training_bytes > 0
    return int(left * SHARE_FOR_EXPERTS) if is_shared else left


def experts_to_serve(
    run: str, wish: ServingWish, named: int, cells: int, each_bytes: int, room_bytes: int | None
) -> int:
    """How many of the run's experts this peer serves. `named`: how many its owner has named.

    TooLarge if there is no room for as many as the owner wants.
    """
    fit = cells if room_bytes is None else room_bytes // max(1, each_bytes)
    wanted = named if wish.names_cells else wish.most
    if wanted is None:
        return min(fit, math.ceil(cells * SHARE_OF_CELLS))
    wanted = min(wanted, cells)
    if wanted > fit:
        raise TooLarge(
            f"There is no room for {wanted:,} experts of {run}: {fit:,} fit.",
            why=f"Each takes about {in_words(each_bytes)} of memory, and for all of them there is "
            f"{in_words(room_bytes or 0)}.",
            advice="Serve fewer (--experts N), or allow more memory (--max-memory).",
        )
    return wanted


def serving_lines(
    use: Use, experts: int, memory_bytes: int, disk_bytes: int
) -> tuple[str, str, str]:
    """The three lines of a peer that only serves."""
    about = f" ({use.description})" if use.description else ""
    flag = "max-device-memory" if has_own_memory(use.devices) else "max-memory"
    machine = (
        f"{use.run}{about}: serves up to {experts:,} experts on {_devices(use)}, with about "
        f"{in_words(memory_bytes)} of {_whose(use.devices)}{_said(use, flag)} and up to "
        f"{in_words(disk_bytes)} of disk"
    )
    network = "network: the others' batches and their answers, as many as this machine computes"
    network += _said(use, "upload-limit", "up ") + _said(use, "download-limit", "down ")
    network += _said(use, "quota")
    return machine, network, three_lines(use)[2]


def beside_training(experts: int, memory_bytes: int, devices: Sequence[str]) -> str:
    """The line about the experts of a peer that trains as well."""
    return (
        f"experts: serves up to {experts:,} of the run's beside the training, with about "
        f"{in_words(memory_bytes)} more of {_whose(devices)}; --experts 0 serves none"
    )


def _whose(devices: Sequence[str]) -> str:
    """The memory that experts on these devices take."""
    return "the GPU's memory" if has_own_memory(devices) else "memory"


def machine_memory() -> int | None:
    """Bytes of memory of this machine (or container); None if the system does not say."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        limit = CGROUP_LIMIT.read_text("ascii").strip()
    except (OSError, ValueError):
        limit = ""
    return min(found, int(limit)) if limit.isdigit() else found


@dataclass(frozen=True)
class Use:
    """- `devices`: such as ("cpu",). - `threads`: torch's.
    - `memory_bytes`: the machine's memory for the process. - `gpu_bytes`: the (first) GPU's memory,
      if one computes. - `state_bytes`: fetched first.
    - `round_bytes`: each way, for one step of the run. - `caps`: by flag, in words."""

    run: str
    description: str
    devices: tuple[str, ...]
    threads: int
    memory_bytes: int
    state_bytes: int
    disk_bytes: int
    round_bytes: int
    caps: Mapping[str, str]
    begins: bool = False
    gpu_bytes: int = 0


def three_lines(use: Use) -> tuple[str, str, str]:
    """The device and memory; the network traffic; how to stop."""
    about = f" ({use.description})" if use.description else ""
    machine = (
        f"{use.run}{about}: trains on {_devices(use)}, with about {in_words(use.memory_bytes)} of "
        f"memory{_said(use, 'max-memory')}{_on_gpu(use)} and {in_words(use.disk_bytes)} of disk"
    )
    first = f"{in_words(use.state_bytes)} to begin with, then about "
    each = f"{in_words(use.round_bytes)} each way for every step of the run"
    network = f"network: {'' if use.begins else first}{each}"
    network += _said(use, "upload-limit", "up ") + _said(use, "download-limit", "down ")
    network += _said(use, "quota")
    when = [use.caps[name] for name in ("schedule", "when-idle") if name in use.caps]
    times = f" It trains {' and '.join(when)}." if when else ""
    stop = (
        "Ctrl-C leaves within five seconds (twice: at once); from another terminal `potluck "
        f"pause`, `resume`, `leave` and `status`.{times}"
    )
    return machine, network, stop


def _devices(use: Use) -> str:
    names = ", ".join(use.devices)
    if use.devices == ("cpu",):
        return f"the processor with {use.threads} {'thread' if use.threads == 1 else 'threads'}"
    return f"{names} (one peer)" if len(use.devices) > 1 else names


def _on_gpu(use: Use) -> str:
    if not use.gpu_bytes:
        return ""
    whose = "the first GPU's" if len(use.devices) > 1 else "the GPU's"
    return f", {in_words(use.gpu_bytes)} of {whose}{_said(use, 'max-device-memory')}"


def _said(use: Use, flag: str, before: str = "") -> str:
    return f" ({before}{use.caps[flag]})" if flag in use.caps else ""
