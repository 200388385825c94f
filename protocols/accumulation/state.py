"""The state of training at one epoch: all that a newcomer needs to go on as if it had always been
there.

    state = capture(model.named_parameters(), model.named_buffers(), optimizer, scheduler,
                    extra={"scale": 65536.0}, run="shakespeare", epoch=7, history=history)
    state.digest                                             # 32 bytes: the name of this state
    extra = restore(state, model.named_parameters(), model.named_buffers(), optimizer, scheduler)

Parameters are named `model/<name>`, buffers `buffer/<name>`, the optimizer's statistics
`optimizer/statistics/<parameter>/<key>`, tensors of `extra` by their path `extra/…`. Settings of
param groups, schedules and counters are in the metadata.

Promises: a state that was captured, or fetched, or loaded, and is restored and captured again, has
the same digest. `restore` checks everything by name before it touches anything.

Easy to get wrong: between two steps a forward pass may change buffers (batch norm counts what it
sees). Whoever has such buffers hands over a copy that was made at the step, or the digest names
values that are gone when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from protocols.accumulation.optimizer_state import (
    cloned,
    load,
    names_of_parameters,
    optimizer_tree,
    prepared,
)
from protocols.accumulation.signature import Signature, differences
from protocols.accumulation.state_manifest import PIECE_BYTES, StateRefused
from protocols.accumulation.state_tree import check_kinds, pack, separate, shaped_like
from protocols.accumulation.training_state import LiveState, TrainingState, spec_of

__all__ = ["LiveState", "StateRefused", "TrainingState", "capture", "look", "restore"]

NamedTensors = Iterable[tuple[str, Tensor]]


def look(
    named_parameters: NamedTensors,
    buffers: NamedTensors = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
    extra: dict[str, Any] | None = None,
    *,
    run: str,
    epoch: int,
    history: bytes = b"",
    piece_bytes: int = PIECE_BYTES,
) -> LiveState:
    """What `capture` copies, not copied. `extra`: tensors and plain values, nested if need be.

    `piece_bytes` is the same at all peers of a run. StateRefused, by name, for anything that
    cannot travel.
    """
    parameters = dict(named_parameters)
    tensors = {f"model/{name}": one for name, one in parameters.items()}
    tensors |= {f"buffer/{name}": one for name, one in buffers}
    signature = Signature(_kind(optimizer), tuple(spec_of(*one) for one in tensors.items()))
    tree = {
        "optimizer": _optimizer_tree(optimizer, parameters),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "extra": extra or {},
    }
    metadata = pack(separate(tree, "", tensors))
    specs = tuple(spec_of(name, tensors[name]) for name in sorted(tensors))
    return LiveState(run, epoch, history, signature, specs, tensors, metadata, piece_bytes)


def capture(
    named_parameters: NamedTensors,
    buffers: NamedTensors = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
    extra: dict[str, Any] | None = None,
    *,
    run: str,
    epoch: int,
    history: bytes = b"",
) -> TrainingState:
    """A copy of the state as it is now. Call it while nobody steps, or with the lock for reading.

    `extra`: tensors and plain values, nested if need be. StateRefused, by name, for anything that
    cannot travel.
    """
    return look(
        named_parameters,
        buffers,
        optimizer,
        scheduler,
        extra,
        run=run,
        epoch=epoch,
        history=history,
    ).copy()


def restore(
    state: TrainingState,
    named_parameters: NamedTensors,
    buffers: NamedTensors = (),
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any | None = None,
) -> dict[str, Any]:
    """Put a state in place of the present one; returns its `extra`.

    Everything is checked by name before anything is touched: StateRefused lists the differences.
    Without an optimizer (or scheduler) its part of the state is left alone. Call it under
    `StateLock.changing`.
    """
    parameters, others = dict(named_parameters), dict(buffers)
    mine = {f"model/{name}": one for name, one in parameters.items()}
    mine |= {f"buffer/{name}": one for name, one in others.items()}
    _check_fits(state, mine, optimizer)
    tree = state.tree()
    loadable = None
    if optimizer is not None:
        if tree["optimizer"] is None:
            raise StateRefused("The state has no optimizer, and there is one here.")
        names = names_of_parameters(optimizer, parameters)
        loadable = prepared(optimizer, names, tree["optimizer"])
    schedule = None
    if scheduler is not None:
        if tree["scheduler"] is None:
            raise StateRefused("The state has no schedule, and there is one here.")
        schedule = _schedule_like(tree["scheduler"], scheduler.state_dict())
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(state.tensor(name))
    if optimizer is not None and loadable is not None:
        load(optimizer, loadable)
    if scheduler is not None:
        scheduler.load_state_dict(schedule)
    return state.extra


def _schedule_like(theirs: Any, own: Mapping[str, Any]) -> Any:
    """StateRefused unless it is one of this kind: torch's schedules take over whatever names they
    are given, and so would lose those of another."""
    check_kinds({} if theirs is None else theirs, own, "the schedule")
    other = sorted(theirs.keys() ^ own.keys(), key=str)
    if other:
        raise StateRefused(
            f"The schedule of the state is another: {other[0]} is only "
            f"{'here' if other[0] in own else 'there'}.",
            advice="Take the schedule that the run's organiser has published.",
        )
    return cloned(shaped_like(theirs, own))


def _check_fits(
    state: TrainingState, mine: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> None:
    kind = state.signature.optimizer if optimizer is None else _kind(optimizer)
    here = Signature(kind, tuple(spec_of(*one) for one in mine.items()))
    found = differences(here, state.signature)
    if found:
        raise StateRefused(
            f"The state of epoch {state.epoch} is of another model: {'; '.join(found)}.",
            advice="Build the model, dtype and optimizer that it was made with.",
        )


def _optimizer_tree(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    return optimizer_tree(optimizer, names_of_parameters(optimizer, parameters))


def _kind(optimizer: torch.optim.Optimizer | None) -> str:
    return "" if optimizer is None else type(optimizer).__name__
