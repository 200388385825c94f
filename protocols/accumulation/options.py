"""Checks which options of the optimizer go together, and describes how a run makes its steps.

Options that contradict each other, or would silently do nothing, are refused by name when the
optimizer is made. Otherwise the mistake would be noticed much later or never.

Easy to get wrong: peers with other tensors, another optimizer, batch or clipping must not count
each other's samples. The signature (training_description.py) tells them apart: it is in every slot,
and the first history is made from it. Make it before the optimizer has stepped or taken a state,
because schedules change the settings of param groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from blake3 import blake3

from protocols.accumulation.lineage import first_history
from protocols.accumulation.optimizer_state import OWN_SETTINGS
from protocols.accumulation.parameters import Codecs
from protocols.accumulation.powersgd import LARGEST_RANK
from protocols.accumulation.signature import LONGEST_OPTIMIZER_NAME
from protocols.accumulation.steps import Steps
from protocols.accumulation.training_description import TrainingDescription, as_setting
from protocols.errors import ProtocolMisuse
from protocols.tensors import CODECS, TensorReader

_PARAMETERS = b"potluck initial parameters 1\0"

PRECISIONS = ("float32", "bf16", "fp16")


def autocast_to(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """The context in which a batch's loss is computed on a device of this type ("cuda")."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device_type, torch.bfloat16 if precision == "bf16" else torch.float16)


def check_options(
    *,
    delayed: bool,
    local_steps: int,
    fragments: int,
    max_norm: float | None,
    average_parameters_every: int,
    last_epoch: int,
    precision: str,
    auxiliary: bool,
    codec: Codecs,
    powersgd_rank: int,
    approximate: bool,
) -> None:
    """Raise ProtocolMisuse, with the names, for options that cannot work."""
    if local_steps < 1:
        raise ProtocolMisuse(f"local_steps={local_steps} makes no steps; 1 averages gradients.")
    if fragments < 1:
        raise ProtocolMisuse(
            f"fragments={fragments} exchanges nothing; 1 exchanges all parameters at once."
        )
    if fragments > 1 and local_steps == 1:
        raise ProtocolMisuse(
            f"fragments={fragments} does not go without local_steps > 1.",
            why="Every gradient is averaged at once. Only how far local steps went can wait.",
            advice=f"Set local_steps to a multiple of {fragments}, or leave fragments out.",
        )
    if local_steps % fragments:
        raise ProtocolMisuse(
            f"local_steps={local_steps} cannot be divided among fragments={fragments}.",
            why="A fragment is exchanged after every local_steps / fragments steps.",
            advice=f"Set local_steps to {-(-local_steps // fragments) * fragments}, or another "
            f"multiple of {fragments}.",
        )
    if delayed and local_steps > 1:
        raise ProtocolMisuse(
            "delayed=True and local_steps > 1 do not go together.",
            why="Local steps already spread a round over many batches.",
            advice="Use delayed=True on links that carry a round within an epoch, local_steps on "
            "slower ones.",
        )
    if average_parameters_every and local_steps > 1:
        raise ProtocolMisuse(
            "average_parameters_every and local_steps > 1 do not go together.",
            why="With local steps all peers have the same parameters, to the bit, after a round.",
            advice="Leave average_parameters_every out.",
        )
    named = {codec} if isinstance(codec, str) else set(codec.values())
    sparse = [one for one in sorted(named) if CODECS[one].is_sparse]
    if sparse and local_steps == 1:
        raise ProtocolMisuse(
            f"The codec {sparse[0]} goes with local_steps > 1 only.",
            why="It sends one value in four; with local steps, peers send the others later.",
            advice="Choose another codec, or local_steps of some 50.",
        )
    if not 0 <= powersgd_rank <= LARGEST_RANK:
        raise ProtocolMisuse(
            f"powersgd_rank={powersgd_rank} is no rank; it is 1 to {LARGEST_RANK:,}, or 0 to send "
            "gradients whole."
        )
    if powersgd_rank and local_steps > 1:
        raise ProtocolMisuse(
            f"powersgd_rank={powersgd_rank} and local_steps={local_steps} do not go together.",
            why="It shortens gradients. With local steps, peers exchange how far they went.",
            advice="Leave powersgd_rank out and take a codec of few bits, or leave local_steps "
            "out.",
        )
    if powersgd_rank and approximate:
        raise ProtocolMisuse(
            f"powersgd_rank={powersgd_rank} and approximate=True do not go together.",
            why="All peers must have the same factors, to the bit, and over a grid they do not "
            "get the same bits.",
            advice="Leave approximate out: more peers than a group holds then average by cohorts.",
        )
    if average_parameters_every < 0:
        raise ProtocolMisuse(
            f"average_parameters_every={average_parameters_every} is not a number of steps."
        )
    if last_epoch < 0:
        raise ProtocolMisuse(f"last_epoch={last_epoch} is not a number of steps.")
    if auxiliary and delayed:
        raise ProtocolMisuse(
            "auxiliary=True and delayed=True do not go together.",
            why="An auxiliary peer computes no batches during which a step could be made.",
            advice="Leave delayed out; the others may still use it.",
        )
    if precision not in PRECISIONS:
        raise ProtocolMisuse(f'precision="{precision}" is none of {", ".join(PRECISIONS)}.')
    if max_norm is not None and not 0.0 < max_norm < math.inf:
        raise ProtocolMisuse(
            f"max_norm={max_norm} is not a norm to clip to.", advice="Leave it out to clip nothing."
        )


def description_of(
    steps: Steps,
    *,
    target_batch: int,
    local_steps: int,
    fragments: int,
    max_norm: float | None,
    average_parameters_every: int,
    group_size: int,
    approximate: bool,
    powersgd_rank: int,
    further: Mapping[str, str],
) -> TrainingDescription:
    """The settings that all peers of a run share, from an optimizer that has not stepped yet."""
    inner = steps.inner
    codecs = {one.name: one.codec for layout in steps.layouts for one in layout.segments}
    if fragments > 1:
        further = {"fragments": str(fragments), **further}
    if powersgd_rank:
        further = {"powersgd_rank": str(powersgd_rank), **further}
    return TrainingDescription(
        tensors=steps.look("", 0, b"").signature.tensors,
        codecs=tuple((name, codecs[name]) for name in inner.parameters.names),
        optimizer=type(inner.optimizer).__name__,
        groups=tuple(_settings(group) for group in inner.optimizer.param_groups),
        schedule=_schedule_of(inner.scheduler),
        steps=steps.kind,
        local_steps=local_steps,
        target_batch=target_batch,
        max_norm=max_norm or 0.0,
        average_parameters_every=average_parameters_every,
        group_size=group_size,
        approximate=approximate,
        further=tuple((name, as_setting(text)) for name, text in sorted(further.items())),
    )


def _schedule_of(scheduler: object) -> str:
    """The schedule's class, and its own description (`described`) if it has one. Code cannot be
    compared, and two peers with other rates would drift apart although their results are equal."""
    if scheduler is None:
        return ""
    words = getattr(scheduler, "described", "")
    said = f"{type(scheduler).__name__}({words})" if words else type(scheduler).__name__
    return said[:LONGEST_OPTIMIZER_NAME]


def _settings(group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    shared = {key: one for key, one in group.items() if key not in OWN_SETTINGS}
    return tuple((key, as_setting(one)) for key, one in sorted(shared.items()))


def first_of(steps: Steps, run: str, signature: bytes) -> bytes:
    """The history of a run that begins with these parameters."""
    parameters, reader = blake3(_PARAMETERS), TensorReader()
    for _, one in sorted(steps.shared.everything, key=lambda pair: pair[0]):
        for part in reader.parts(one):
            parameters.update(part)
    return first_history(run, signature, parameters.digest())
