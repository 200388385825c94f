"""Describes a model from outside, and says in words how two models differ. Pure.

    mine = Signature(optimizer="AdamW", tensors=(TensorSpec("model/wte", "float32", (256, 64)), …))
    mine.digest                              # 16 bytes, in this peer's progress slot
    differences(mine, theirs)                # ["model/wte is 256×64 here and 512×64 there", …]

A signature names the parameters and buffers with their shapes and dtypes, and the kind of
optimizer. Peers that differ in any of these can neither average with one another nor take one
another's state. Values, devices and the version of torch are not in it.

Easy to get wrong: the statistics of an optimizer are not in it either, because a fresh optimizer
has none before its first step. Their size in a state is bounded instead (state_manifest.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from blake3 import blake3
from msgspec import Meta

from protocols.rpc import Message, encode

SIGNATURE_BYTES = 16  # it takes 2^64 tries to find two models that collide, for no gain
LONGEST_TENSOR_NAME = 512  # characters; that of a deeply nested module is about 100
LONGEST_OPTIMIZER_NAME = 128
LARGEST_DIMENSION = 1 << 40
MOST_DIMENSIONS = 16
DIFFERENCES_TOLD = 5  # in words; more would say nothing new

ValueType = Literal[
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
VALUE_TYPES: tuple[ValueType, ...] = get_args(ValueType)
_VALUE_BYTES: dict[ValueType, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_DOMAIN = b"potluck model signature 1\0"

Dimension = Annotated[int, Meta(ge=0, le=LARGEST_DIMENSION)]


class TensorSpec(Message, frozen=True):
    """A tensor without its values."""

    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_TENSOR_NAME)]
    dtype: ValueType
    shape: Annotated[tuple[Dimension, ...], Meta(max_length=MOST_DIMENSIONS)]

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.values * _VALUE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """The tensors of a model by ascending name, and the kind of its optimizer."""

    optimizer: str
    tensors: tuple[TensorSpec, ...]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(sorted(self.tensors, key=lambda one: one.name)))
        content = encode((self.optimizer, self.tensors))
        object.__setattr__(self, "digest", blake3(_DOMAIN + content).digest(SIGNATURE_BYTES))

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.tensors)

    @property
    def values(self) -> int:
        return sum(one.values for one in self.tensors)


def differences(mine: Signature, theirs: Signature) -> list[str]:
    """How the other model differs from this peer's, in words; empty if it does not.

    At most DIFFERENCES_TOLD differences, and then the number of further ones.
    """
    found = []
    if mine.optimizer != theirs.optimizer:
        found.append(f"the optimizer is {mine.optimizer} here and {theirs.optimizer} there")
    found += tensor_differences(mine.tensors, theirs.tensors)
    if len(found) > DIFFERENCES_TOLD:
        more = len(found) - DIFFERENCES_TOLD
        found = [*found[:DIFFERENCES_TOLD], f"and {more:,} more"]
    return found


def tensor_differences(mine: Sequence[TensorSpec], theirs: Iterable[TensorSpec]) -> list[str]:
    """One sentence for each tensor that is not alike on both sides."""
    here = {one.name: one for one in mine}
    there = {one.name: one for one in theirs}
    found = []
    for name, own in here.items():
        other = there.get(name)
        if other is None:
            found.append(f"{name} is only here")
        elif own.shape != other.shape:
            own_shape, other_shape = shape_text(own.shape), shape_text(other.shape)
            found.append(f"{name} is {own_shape} here and {other_shape} there")
        elif own.dtype != other.dtype:
            found.append(f"{name} is {own.dtype} here and {other.dtype} there")
    found += [f"{name} is only there" for name in there if name not in here]
    return found


def torch_release(version: str) -> str:
    """`2.13` of `2.13.0+cu130`: the part that must be equal for two peers to share a state.

    Patches and builds compute the same up to rounding; another release may keep other statistics.
    """
    return ".".join(version.partition("+")[0].split(".")[:2])


def shape_text(shape: Sequence[int]) -> str:
    """`256×64`, or `one value` for a tensor without dimensions."""
    return "×".join(f"{one}" for one in shape) if shape else "one value"
