"""GPUs: devices that compute what is launched, while the host goes on.

    gpu = gpu_of(tensor.device)                        # torch.cuda, or None
    if gpu is not None:
        event = gpu.Event()

Pinned memory, events and streams are for such devices only. Everything that uses them asks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GPUS = {"cuda"}
"""Types of devices. A laboratory adds its double."""


def gpu_of(device: torch.device) -> Any:
    """Torch's module for a GPU, which has `Event`, `Stream` and so on, as torch.cuda; None for any
    other device, which potluck waits for."""
    return torch.get_device_module(device) if device.type in GPUS else None


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type in GPUS


def record(event: Any, device: torch.device) -> None:
    """Record what was launched on this GPU so far. By itself torch takes the process's current one,
    which another GPU is that an owner has chosen (`--device cuda:1`)."""
    event.record(gpu_of(device).current_stream(device))
