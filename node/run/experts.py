"""The experts of a run, from its `[experts]` section: what they are, and how a fresh one is made.

    grids(definition)                       # one ExpertGrid for each mixture of the model
    make = maker(definition)                # Maker: from a uid to its ExpertBackend
    server_bytes(definition)                # memory that a server needs for each expert
    most_experts(definition, 4 << 30)       # how many fit into this memory
    call_bytes(definition)                  # what a trainer sends and gets for each sample

A fresh expert has the same weights wherever it is made: they follow from the run's seed and its
uid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from blake3 import blake3

from node.core.caps.memory import PROCESS_BYTES
from node.run.costs import FLOAT_BYTES, HEADERS, KEPT_APART, STATISTICS
from protocols.errors import ProtocolMisuse
from protocols.experts import ExpertGrid, Uid

if TYPE_CHECKING:
    import torch

    from node.run.definition import ExpertsSection, RunDefinition
    from protocols.experts import ExpertBackend

    Maker = Callable[[Uid], ExpertBackend]


def section_of(definition: RunDefinition) -> ExpertsSection:
    """The run's `[experts]`; ProtocolMisuse for a run without: ask `definition.experts` first."""
    if definition.experts is None:
        raise ProtocolMisuse(f"The run {definition.name} has no experts.")
    return definition.experts


def grids(definition: RunDefinition) -> tuple[ExpertGrid, ...]:
    """The grid of each mixture, in the order of the model's layers; none for a run without."""
    section = definition.experts
    if section is None:
        return ()
    return tuple(ExpertGrid(name, section.sizes) for name in section.grids)


def maker(definition: RunDefinition, *, device: str | torch.device = "cpu") -> Maker:
    """A function that makes a fresh expert on this device. Raises models' errors for settings that
    cannot be built, and not later."""
    from models.experts import build_expert
    from models.registry import optimizer_factory, schedule_factory
    from protocols.experts import ExpertBackend, Rows

    section, seed = section_of(definition), definition.training.seed
    build_expert(section.network, seed=None)
    optimizer_of = optimizer_factory(section.optimizer)
    schedule_of = None if section.schedule is None else schedule_factory(section.schedule)

    def make(uid: Uid) -> ExpertBackend:
        network = build_expert(section.network, seed=seed_of(seed, uid)).to(device)
        rows = Rows(network.row_shape)
        named = list(network.named_parameters())
        if not named:  # `nop` has nothing to learn
            return ExpertBackend(uid, network, rows)
        optimizer = optimizer_of(named)
        return ExpertBackend(
            uid,
            network,
            rows,
            optimizer,
            schedule=None if schedule_of is None else schedule_of(optimizer),
            max_norm=section.max_norm or float("inf"),
        )

    return make


def seed_of(seed: int, uid: Uid) -> int:
    """The seed of an expert's initial weights."""
    return int.from_bytes(blake3(f"{seed}/{uid}".encode()).digest(length=4))


def parameters_of_an_expert(definition: RunDefinition) -> int:
    from models.experts import build_expert
    from models.trainable import parameter_count

    return parameter_count(build_expert(section_of(definition).network, seed=None))


def saved_bytes(definition: RunDefinition) -> int:
    """What one expert takes on a disk, and on the way to another server: its parameters and the
    statistics of its optimizer."""
    statistics = STATISTICS.get(str(section_of(definition).optimizer.get("name")), 2)
    return FLOAT_BYTES * parameters_of_an_expert(definition) * (1 + statistics)


def server_bytes(definition: RunDefinition) -> int:
    """The memory that a server needs for each expert: what is saved, and a gradient. What it needs
    for a batch is the same for all its experts together."""
    gradient = FLOAT_BYTES * parameters_of_an_expert(definition)
    return int(KEPT_APART * (saved_bytes(definition) + gradient))


def most_experts(definition: RunDefinition, memory_bytes: int) -> int:
    """How many experts a server can hold in this memory, beside its process and its queue."""
    from protocols.experts import MOST_BYTES

    free = memory_bytes - PROCESS_BYTES - MOST_BYTES
    return max(0, free // max(1, server_bytes(definition)))


def rows_of_a_sample(definition: RunDefinition) -> int:
    """How many examples each mixture gets of one sample; 1 for a module's model, which alone
    knows."""
    from models.registry import model_settings

    if "module" in definition.model:
        return 1
    return int(getattr(model_settings(definition.model), "context", 1))


def call_bytes(definition: RunDefinition) -> tuple[int, int]:
    """What a trainer sends to experts for each sample, and gets from them: its rows go to `k`
    experts of each mixture. Forward, inputs go and outputs come; backward, the inputs go again with
    the gradients, and gradients come."""
    from protocols.tensors import CODECS

    section = section_of(definition)
    encoded = CODECS[section.codec].encoded_bytes(row_bytes(definition) // FLOAT_BYTES)
    rows = rows_of_a_sample(definition) * section.k * len(section.grids)
    once = int(HEADERS * rows * encoded)
    return 3 * once, 2 * once


def row_bytes(definition: RunDefinition) -> int:
    """One example, as experts compute with it."""
    from models.experts import build_expert

    network = build_expert(section_of(definition).network, seed=None)
    return FLOAT_BYTES * math.prod(network.row_shape)


def largest_call_bytes(definition: RunDefinition) -> int:
    """What one expert gets in a call if all examples of the largest batch go to it."""
    samples = definition.training.samples_at_once
    return samples * rows_of_a_sample(definition) * row_bytes(definition)
