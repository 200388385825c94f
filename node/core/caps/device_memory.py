"""A GPU's own memory: how much there is, how much this process holds, and the owner's cap of it.

    if has_own_memory(devices):
        device_bytes(devices)                               # of the smallest of them
        keep_below(caps.device_memory_bytes, devices)       # before anything is put there
    device_memory_in_use()                                  # for the screen and for `status`

Torch enforces the cap: an allocation above it fails as if the GPU had no more memory, so the
benchmark takes smaller batches, and so does the training loop. With several GPUs, the cap is that
of each.

The cap is for torch's memory, with what it keeps for later batches. The driver's own comes on top,
some hundred megabytes for each process, which torch can neither limit nor count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

IN_MACHINES_MEMORY: Final = ("cpu", "mps")
"""Devices that compute in the machine's own memory: Apple's GPU shares it."""


def has_own_memory(devices: Sequence[str]) -> bool:
    """Whether these devices compute in memory of their own."""
    return not any(one.startswith(IN_MACHINES_MEMORY) for one in devices)


def device_bytes(devices: Sequence[str]) -> int | None:
    """How much memory the smallest of these GPUs has; None if they use the machine's."""
    import torch

    if not has_own_memory(devices):
        return None
    return min(torch.cuda.get_device_properties(one).total_memory for one in devices)


def keep_below(most_bytes: int | None, devices: Sequence[str]) -> None:
    """Let torch take no more than this of each of these GPUs."""
    import torch

    if most_bytes is None or not has_own_memory(devices):
        return
    for one in devices:
        there = torch.cuda.get_device_properties(one).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / there), one)


def device_memory_in_use() -> int | None:
    """The GPU's memory that torch holds, of the fullest of several; None if it uses none. It does
    not import torch: a node that does not train answers, too."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not hasattr(cuda, "memory_reserved") or not cuda.is_initialized():
        return None
    return max(int(cuda.memory_reserved(number)) for number in range(cuda.device_count()))
