"""Describes what all peers of a run must share, and says in words how another's differs. Pure.

    mine = TrainingDescription(optimizer="AdamW", target_batch=4096, …)
    mine.digest                              # 16 bytes: the signature in this peer's progress slot
    how_it_differs(mine, theirs)             # ["the optimizer's lr is 0.1 here and 0.01 there", …]

Peers with another model or codec never meet in a round. Peers with another learning rate, batch or
clipping would meet, and their parameters would drift apart although the results are the same. So
all of this is in the signature, and peers with another signature do not count. The details do not
fit into a slot. A peer is asked for them (collaboration.py), and they must have the slot's digest.

Easy to get wrong: settings that may differ are not in it: the device, the precision of the batches,
torch's version, whether steps are delayed (the results are the same, and an auxiliary peer has
nothing to delay), and how a torch optimizer computes (`fused`, `foreach`). Code cannot be compared:
only the name of a schedule's class is, and the description in its `described`, which the schedules
of models/schedules.py have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

from blake3 import blake3
from msgspec import Meta, structs

from protocols.accumulation.progress_slot import SIGNATURE_BYTES
from protocols.accumulation.signature import (
    DIFFERENCES_TOLD,
    LONGEST_OPTIMIZER_NAME,
    LONGEST_TENSOR_NAME,
    TensorSpec,
    tensor_differences,
)
from protocols.accumulation.state_manifest import MOST_TENSORS
from protocols.rpc import Message, encode
from protocols.tensors import CodecName

MOST_GROUPS = 1024  # param groups of an optimizer: layer-wise rates need one or two for each layer
MOST_SETTINGS = 64  # of one group
LONGEST_SETTING = 200  # characters

_DOMAIN = b"potluck way of training 3\0"

Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_TENSOR_NAME)]
Word = Annotated[str, Meta(max_length=LONGEST_OPTIMIZER_NAME)]
Setting = tuple[
    Annotated[str, Meta(max_length=LONGEST_SETTING)],
    Annotated[str, Meta(max_length=LONGEST_SETTING)],
]
Settings = Annotated[tuple[Setting, ...], Meta(max_length=MOST_SETTINGS)]
Number = Annotated[int, Meta(ge=0, le=1 << 50)]


class TrainingDescription(Message, frozen=True, dict=True):
    """- `tensors`: parameters (`model/…`) and buffers (`buffer/…`), by ascending name.
    - `codecs`: how each parameter that is trained travels, in their order.
    - `groups`: the settings of the optimizer's param groups as text, by ascending name.
    - `steps`: what is averaged, as a word. `schedule`: its class with its own description, or
      nothing.
    - `max_norm`: 0 clips nothing.
    - `group_size`, `approximate`: which peers are in a round (collaboration.py).
    - `further`: what else belongs to the run, by name. Older peers know no such field; without any,
      the digest is the one that they compute.
    """

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MOST_TENSORS)]
    codecs: Annotated[tuple[tuple[Name, CodecName], ...], Meta(max_length=MOST_TENSORS)]
    optimizer: Word
    groups: Annotated[tuple[Settings, ...], Meta(max_length=MOST_GROUPS)]
    schedule: Word
    steps: Word
    local_steps: Number
    target_batch: Number
    max_norm: Annotated[float, Meta(ge=0.0)]
    average_parameters_every: Number
    group_size: Number
    approximate: bool
    further: Settings = ()

    @cached_property
    def digest(self) -> bytes:
        fields = structs.astuple(self)
        told = fields if self.further else fields[:-1]
        return blake3(_DOMAIN + encode(told)).digest(SIGNATURE_BYTES)


def how_it_differs(mine: TrainingDescription, theirs: TrainingDescription) -> list[str]:
    """The differences in words, each as a clause; empty if there are none. At most
    DIFFERENCES_TOLD, and then the number of further ones."""
    found = tensor_differences(mine.tensors, theirs.tensors)
    if not found:
        found += _codec_differences(dict(mine.codecs), dict(theirs.codecs))
    if mine.optimizer != theirs.optimizer:
        found.append(_differs("the optimizer", mine.optimizer, theirs.optimizer))
    found += [
        _differs(words, _said(own), _said(other))
        for words, own, other in (
            ("the schedule", mine.schedule, theirs.schedule),
            ("what is averaged", mine.steps, theirs.steps),
            ("local_steps", mine.local_steps, theirs.local_steps),
            ("the target batch", mine.target_batch, theirs.target_batch),
            ("max_norm", mine.max_norm, theirs.max_norm),
            (
                "average_parameters_every",
                mine.average_parameters_every,
                theirs.average_parameters_every,
            ),
            ("group_size", mine.group_size, theirs.group_size),
            ("approximate", mine.approximate, theirs.approximate),
        )
        if own != other
    ]
    own, other = dict(mine.further), dict(theirs.further)
    found += [
        _differs(name, own.get(name, "not set"), other.get(name, "not set"))
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    ]
    if mine.optimizer == theirs.optimizer:
        found += _settings_differences(mine.groups, theirs.groups)
    if len(found) > DIFFERENCES_TOLD:
        more = len(found) - DIFFERENCES_TOLD
        found = [*found[:DIFFERENCES_TOLD], f"and {more:,} more"]
    return found


def as_setting(value: Any) -> str:
    """A setting of an optimizer as text that is the same on every machine."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int | float):
        return f"{value:.9g}"  # the last bit of a schedule's cosine differs between machines
    if isinstance(value, list | tuple):
        return ("(" + ", ".join(as_setting(one) for one in value) + ")")[:LONGEST_SETTING]
    if isinstance(value, str):
        return value[:LONGEST_SETTING]
    return type(value).__name__[:LONGEST_SETTING]


def _codec_differences(mine: dict[str, CodecName], theirs: dict[str, CodecName]) -> list[str]:
    """A single clause if all parameters differ in the same way, as they usually do."""
    found = [f"{name} is trained only here" for name in mine if name not in theirs]
    found += [f"{name} is trained only there" for name in theirs if name not in mine]
    if found:
        return found
    other = [name for name in mine if mine[name] != theirs[name]]
    pairs = {(mine[name], theirs[name]) for name in other}
    if len(other) == len(mine) and len(pairs) == 1:
        ((own, their),) = pairs
        return [_differs("the codec", own, their)]
    found = [_differs(f"the codec of {name}", mine[name], theirs[name]) for name in other]
    return found or ([] if list(mine) == list(theirs) else ["the parameters are in another order"])


def _settings_differences(mine: Sequence[Settings], theirs: Sequence[Settings]) -> list[str]:
    if len(mine) != len(theirs):
        return [f"the optimizer has {len(mine):,} param groups here and {len(theirs):,} there"]
    found: dict[str, None] = {}  # each clause once: groups usually differ in the same way
    for own_group, their_group in zip(mine, theirs, strict=True):
        own, other = dict(own_group), dict(their_group)
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                words = f"the optimizer's {name}"
                found[_differs(words, own.get(name, "not set"), other.get(name, "not set"))] = None
    return list(found)


def _differs(what: str, mine: str, theirs: str) -> str:
    return f"{what} is {mine} here and {theirs} there"


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"  # as in a run's definition
    if isinstance(value, int):
        return f"{value:,}"
    return as_setting(value) if value else "none"
