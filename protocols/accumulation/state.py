"""The state of training at one epoch: everything that a newcomer needs to go on as if it had
always been there.

    state = capture(model.named_parameters(), model.named_buffers(), optimizer, scheduler,
                    extra={"scale": 65536.0}, run="shakespeare", epoch=7, history=history)
    state.digest                                             # 32 bytes: the name of this state
    extra = restore(state, model.named_parameters(), model.named_buffers(), optimizer, scheduler)

Stub: signatures are final, bodies follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LiveState:
    """Where the state lies while training goes on: tensors that are not copied, and metadata.

    Made by `look`, in microseconds; read it only under `StateLock.reading`.
    """

    run: str
    epoch: int
    history: bytes

    def copy(self) -> TrainingState:
        """All of it in memory of its own (pinned host memory, where tensors lie on a GPU)."""
        raise NotImplementedError

    def digest(self) -> bytes:
        """The name of this state, without a copy."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainingState:
    """One epoch's state in memory of its own. Nothing else refers to that memory."""

    run: str
    epoch: int
    history: bytes

    @property
    def digest(self) -> bytes:
        """32 bytes that name it: equal exactly if every byte of it is."""
        raise NotImplementedError

    @property
    def signature(self) -> bytes:
        """16 bytes: the names, shapes and dtypes of the model, and the kind of optimizer."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """A view; names are `model/<parameter>`, `buffer/<name>`, `optimizer/<parameter>/<key>`."""
        raise NotImplementedError


def look(
    named_parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]] = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
    extra: dict[str, Any] | None = None,
    *,
    run: str,
    epoch: int,
    history: bytes = b"",
) -> LiveState:
    """What `capture` copies, not copied. `extra`: tensors and plain values, nested if need be.

    StateRefused, by name, for anything that is not a tensor, number, string, bool, None, list,
    tuple or dict of those.
    """
    raise NotImplementedError


def capture(
    named_parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]] = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
    extra: dict[str, Any] | None = None,
    *,
    run: str,
    epoch: int,
    history: bytes = b"",
) -> TrainingState:
    """A copy of the state as it is now. Call it under `StateLock.reading`, or while nobody steps."""
    raise NotImplementedError


def restore(
    state: TrainingState,
    named_parameters: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]] = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
) -> dict[str, Any]:
    """Put a state in place of the present one; returns its `extra`.

    Everything is checked by name before anything is touched: StateRefused lists the differences.
    Call it under `StateLock.changing`.
    """
    raise NotImplementedError
