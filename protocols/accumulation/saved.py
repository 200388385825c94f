"""A state as a dictionary of two tensors, for the user's own checkpoints.

    safetensors.torch.save_file(optimizer.state_dict(), path)
    optimizer.load_state_dict(safetensors.torch.load_file(path))

Easy to get wrong: what comes back from a disk may be damaged, or not be ours at all; it is checked
against the digests in its own manifest before anything is taken from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
import torch
from torch import Tensor

from protocols.accumulation.state_manifest import StateRefused, read_manifest
from protocols.accumulation.training_state import TrainingState
from protocols.tensors import raw_bytes

MANIFEST, STREAM = "potluck manifest", "potluck state"


def to_saved(state: TrainingState) -> dict[str, Any]:
    """The memory of the state itself is in it, and no copy."""
    return {
        MANIFEST: torch.frombuffer(bytearray(state.body), dtype=torch.uint8),
        STREAM: state.memory,
    }


def from_saved(saved: Mapping[str, Any]) -> TrainingState:
    """StateRefused unless it is whole."""
    manifest, memory = saved.get(MANIFEST), saved.get(STREAM)
    if not (_is_bytes(manifest) and _is_bytes(memory)):
        raise StateRefused(
            "This is no state of a collaborative optimizer.",
            why="It was not made by its state_dict().",
            advice="Load the state of a plain torch optimizer into a plain torch optimizer.",
        )
    body = bytes(raw_bytes(manifest))
    header = read_manifest(body)
    if header.stream_bytes != len(memory):
        raise StateRefused("The saved state is not whole: bytes of it are missing.")
    state = TrainingState(msgspec.structs.replace(header, pieces=b""), memory)
    if state.body != body:
        raise StateRefused("The saved state is damaged: its bytes are not those of its manifest.")
    return state


def _is_bytes(value: object) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.dtype is torch.uint8
        and value.dim() == 1
        and value.device.type == "cpu"
    )
