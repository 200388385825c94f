"""One epoch's state: live, while training goes on, and as a copy in memory of its own.

Both compute their manifest and so their digest, which is equal if their bytes are equal. They are
made from a model and an optimizer; a fetched state and a checkpoint become a `TrainingState` as
well. The memory of a `TrainingState` *is* the stream that is sent and written to disk: tensors are
views of it.

Easy to get wrong: a digest is computed over the bytes at the time of the call. Do not write into
the memory of a `TrainingState` once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from protocols.accumulation.optimizer_state import (
    cloned,
    load,
    names_of_parameters,
    optimizer_tree,
    prepared,
)
from protocols.accumulation.signature import (
    LONGEST_TENSOR_NAME,
    MOST_DIMENSIONS,
    VALUE_TYPES,
    Signature,
    TensorSpec,
    ValueType,
    differences,
)
from protocols.accumulation.state_manifest import (
    ALIGNMENT_BYTES,
    DIGEST_BYTES,
    PIECE_BYTES,
    Manifest,
    StateRefused,
    check_kinds,
    encode,
    is_of_model,
    join,
    name_of,
    offsets_of,
    pack,
    piece_span,
    separate,
    shaped_like,
    unpack,
)
from protocols.errors import MalformedMessage
from protocols.tensors import TensorReader, gpu_of, is_on_gpu, raw_bytes

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in VALUE_TYPES}
_NAMES: dict[torch.dtype, ValueType] = {_DTYPES[name]: name for name in VALUE_TYPES}
_ZEROS = memoryview(bytes(ALIGNMENT_BYTES))


@dataclass(frozen=True)
class LiveState:
    """The state while training goes on: tensors that are not copied, and metadata.

    Made by `look`. Read it only under `StateLock.reading`, and only until that ends.
    """

    run: str
    epoch: int
    history: bytes
    signature: Signature
    specs: tuple[TensorSpec, ...]  # by ascending name
    tensors: Mapping[str, Tensor]
    metadata: bytes
    piece_bytes: int = PIECE_BYTES

    def copy(self, memory: Tensor | None = None) -> TrainingState:
        """Copy all of it into memory of its own: `memory` if that has the right size, else new one.

        Tensors on a GPU are copied through pinned host memory.
        """
        offsets = offsets_of(self.specs)
        size = offsets[-1] + self.specs[-1].bytes if self.specs else 0
        devices = {tensor.device for tensor in self.tensors.values() if is_on_gpu(tensor)}
        if memory is None or memory.numel() != size:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices))
        end = 0
        with torch.no_grad():
            for spec, start in zip(self.specs, offsets, strict=True):
                memory[end:start].zero_()
                end = start + spec.bytes
                _view(memory, spec, start).copy_(self.tensors[spec.name], non_blocking=True)
        for device in devices:
            gpu_of(device).synchronize(device)
        return TrainingState(self._header(), memory)

    def manifest(self) -> Manifest:
        """The manifest that a copy would have, without a copy. This hashes the whole state."""
        pieces = _PieceHashes(self.piece_bytes)
        for part in self._stream():
            pieces.add(part)
        return _with_pieces(self._header(), pieces.finish())

    def _header(self) -> Manifest:
        return Manifest(
            run=self.run,
            epoch=self.epoch,
            history=self.history,
            signature=self.signature.digest,
            optimizer=self.signature.optimizer,
            tensors=self.specs,
            metadata=self.metadata,
            piece_bytes=self.piece_bytes,
            pieces=b"",
        )

    def _stream(self) -> Iterator[memoryview]:
        """The bytes of the stream, in order. Each part is valid until the next one."""
        reader, end = TensorReader(), 0
        for spec, start in zip(self.specs, offsets_of(self.specs), strict=True):
            yield _ZEROS[: start - end]
            yield from reader.parts(self.tensors[spec.name])
            end = start + spec.bytes


class TrainingState:
    """One epoch's state in memory of its own."""

    def __init__(self, header: Manifest, memory: Tensor) -> None:
        """`memory` is the stream. If `header` has no digests of pieces, they are computed when they
        are first needed, which takes 60 ms for 100 MB."""
        self._header = header
        self._memory = memory
        self._offsets = dict(
            zip((one.name for one in header.tensors), offsets_of(header.tensors), strict=True)
        )
        self._specs = {one.name: one for one in header.tensors}

    @property
    def run(self) -> str:
        return self._header.run

    @property
    def epoch(self) -> int:
        return self._header.epoch

    @property
    def history(self) -> bytes:
        return self._header.history

    @property
    def metadata(self) -> bytes:
        return self._header.metadata

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self._header.tensors

    @property
    def memory(self) -> Tensor:
        """The stream."""
        return self._memory

    @cached_property
    def signature(self) -> Signature:
        return self._header.model()

    @cached_property
    def manifest(self) -> Manifest:
        """With the digests of all pieces."""
        if self._header.pieces or not len(self._memory):
            return self._header
        pieces = _PieceHashes(self._header.piece_bytes)
        pieces.add(raw_bytes(self._memory))
        return _with_pieces(self._header, pieces.finish())

    @cached_property
    def body(self) -> bytes:
        """The manifest as it travels."""
        return encode(self.manifest)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the state. They are equal only if every byte of it is."""
        return name_of(self.body)

    @property
    def extra(self) -> dict[str, Any]:
        """The `extra` that was given to `capture`. Its tensors are views of the stream."""
        extra: dict[str, Any] = self.tree()["extra"]
        return extra

    def piece(self, number: int) -> memoryview:
        """A view of the bytes of one piece."""
        span = piece_span(number, self._header.piece_bytes, len(self._memory))
        return raw_bytes(self._memory)[span]

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor, by the name it travels under."""
        return _view(self._memory, self._specs[name], self._offsets[name])

    def model_tensors(self) -> dict[str, Tensor]:
        """Views of parameters and buffers, by their names in the model."""
        return {
            one.name.partition("/")[2]: self.tensor(one.name)
            for one in self.specs
            if is_of_model(one)
        }

    def tree(self) -> dict[str, Any]:
        """Everything beside the model itself, with views of the tensors in their places."""
        tensors = {name: self.tensor(name) for name in self._specs}
        tree = join(unpack(self.metadata), tensors)
        if not isinstance(tree, dict) or set(tree) != {"optimizer", "scheduler", "extra"}:
            raise MalformedMessage("The metadata of a state does not have its three parts.")
        parts = tree["optimizer"]
        if parts is not None and (
            not isinstance(parts, dict)
            or set(parts) != {"groups", "statistics", "rest"}
            or not isinstance(parts["groups"], list)
            or not isinstance(parts["statistics"], dict)
            or not isinstance(parts["rest"], dict)
        ):
            raise MalformedMessage("The metadata of a state has an optimizer without its parts.")
        if not isinstance(tree["extra"], dict):
            raise MalformedMessage("The extra part of a state's metadata has no names.")
        return tree


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of a tensor. StateRefused if it has no plain bytes."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.dtype}, {tensor.layout}"
        raise StateRefused(
            f"{name} is a tensor that cannot travel ({kind}).",
            why=f"A state holds dense tensors of {', '.join(VALUE_TYPES)}.",
        )
    if len(name) > LONGEST_TENSOR_NAME or tensor.dim() > MOST_DIMENSIONS:
        raise StateRefused(f"{name[:80]} has too long a name or too many dimensions to travel.")
    return TensorSpec(name, dtype, tuple(tensor.shape))


def _view(memory: Tensor, spec: TensorSpec, start: int) -> Tensor:
    """A view of a tensor in the stream."""
    part = memory[start : start + spec.bytes]
    return part.view(_DTYPES[spec.dtype]).view(spec.shape)


def _with_pieces(header: Manifest, pieces: bytes) -> Manifest:
    return msgspec.structs.replace(header, pieces=pieces)


class _PieceHashes:
    """Computes the digests of the pieces of a stream, from parts of any size."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._digests: list[bytes] = []
        self._hash = blake3()
        self._room = piece_bytes

    def add(self, part: memoryview) -> None:
        while len(part):
            taken = part[: self._room]
            self._hash.update(taken)
            part = part[len(taken) :]
            self._room -= len(taken)
            if not self._room:
                self._end_piece()

    def finish(self) -> bytes:
        if self._room < self._piece_bytes:
            self._end_piece()
        return b"".join(self._digests)

    def _end_piece(self) -> None:
        self._digests.append(self._hash.digest(DIGEST_BYTES))
        self._hash = blake3()
        self._room = self._piece_bytes


# ---- a state of a model and its optimizer
#
# Makes a state from a model and its optimizer, with everything that a newcomer needs to go on as if
# it had always been there.
#
#   state = capture(model.named_parameters(), model.named_buffers(), optimizer, scheduler,
#                   extra={"scale": 65536.0}, run="shakespeare", epoch=7, history=history)
#   state.digest                                             # 32 bytes: the name of this state
#   extra = restore(state, model.named_parameters(), model.named_buffers(), optimizer, scheduler)
#
# Parameters are named `model/<name>`, buffers `buffer/<name>`, the optimizer's statistics
# `optimizer/statistics/<parameter>/<key>`, tensors of `extra` by their path `extra/…`. Settings of
# param groups, schedules and counters are in the metadata.
#
# Promises: a state that is restored and captured again has the same digest, whether it was
# captured, fetched or loaded. `restore` checks everything by name before it changes anything.
#
# Easy to get wrong: between two steps a forward pass may change buffers (batch norm counts what it
# sees). A caller with such buffers must give a copy that was made at the step. Otherwise the digest
# names values that are gone when a peer asks for them.

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
    """The state that `capture` copies, live. `extra`: tensors and plain values, may be nested.

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
    """A copy of the state now. Call it while no step is made, or with the lock held for reading.

    `extra`: tensors and plain values, may be nested. StateRefused, by name, for anything that
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
    """Replace the present state by this one, and return its `extra`, as `TrainingState.extra`.

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
    """StateRefused unless the state's schedule is of this kind. Torch's schedules take over any
    names that they are given, so one of another kind would go unnoticed."""
    check_kinds({} if theirs is None else theirs, own, "the schedule")
    other = sorted(theirs.keys() ^ own.keys(), key=str)
    if other:
        raise StateRefused(
            f"The state has another kind of schedule: {other[0]} is only "
            f"{'here' if other[0] in own else 'there'}.",
            advice="Use the schedule that the run's organiser has published.",
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
