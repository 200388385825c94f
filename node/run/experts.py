"""The experts of a run, from its `[experts]` section: what they are, and how a fresh one is made.

    directory_name(definition)              # where they are announced
    grids(definition)                       # one ExpertGrid for each mixture of the model
    make = maker(definition, trusted)       # Maker: from a uid to its ExpertBackend
    server_bytes(definition, trusted)       # memory that a server needs for each expert
    most_experts(4 << 30, each)             # how many of so many bytes fit into this memory
    call_bytes(definition, trusted)         # what a trainer sends and gets for each sample

A fresh expert has the same weights wherever it is made: they follow from the run's seed and its
uid. `trusted`: the files of `--trust-module` (trusted.py); `[experts.network]` may name one, which
then defines

    def build_expert(settings, *, seed): ...    # an nn.Module with a `row_shape`, such as (1024,)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from node.core.caps.memory import PROCESS_BYTES
from node.run.costs import FLOAT_BYTES, HEADERS, KEPT_APART, statistics_of
from protocols.errors import ProtocolMisuse
from protocols.experts import ExpertGrid, Uid

if TYPE_CHECKING:
    import torch

    from node.run.definition import ExpertsSection, RunDefinition
    from protocols.experts import ExpertBackend

    Maker = Callable[[Uid], ExpertBackend]
    NetworkBuilder = Callable[[int | None], Any]
    """The network has a `row_shape`, as those of models/experts.py."""
    Trusted = Mapping[str, Path]

NOTHING: Final[Mapping[str, Path]] = MappingProxyType({})


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


def directory_name(definition: RunDefinition) -> str:
    """Under which name the run's experts are announced. Servers and trainers whose definitions have
    another kind of experts under the same run's name do not find each other."""
    return f"{definition.name}/{definition.kind_of_experts}"


def network_builder(definition: RunDefinition, trusted: Trusted = NOTHING) -> NetworkBuilder:
    """A function from a seed to the network of an expert; None: only to look at it. UntrustedModule
    and BrokenModule."""
    from torch import nn

    from models.experts import build_expert
    from node.run.trusted import (
        blamed_on,
        file_of,
        function_in,
        load_trusted,
        own_settings,
        wrong_result,
    )

    table = section_of(definition).network
    if "module" not in table:
        return lambda seed: build_expert(table, seed=seed)
    module = load_trusted(table, trusted, "experts' network")
    build, file, settings = (
        function_in(module, "build_expert"),
        file_of(module),
        own_settings(table),
    )

    def make(seed: int | None) -> nn.Module:
        with blamed_on(file, "build_expert"):
            network = build(settings, seed=seed or 0)
            shape = getattr(network, "row_shape", None)
        sizes = shape if isinstance(shape, tuple) and shape else (0,)
        if not isinstance(network, nn.Module) or not all(
            isinstance(size, int) and size > 0 for size in sizes
        ):
            must = "must give an nn.Module with a row_shape, a tuple of sizes"
            raise wrong_result(file, build, must, f"{type(network).__name__} with {shape!r:.100}")
        return network.eval()

    return make


def maker(
    definition: RunDefinition, trusted: Trusted = NOTHING, *, device: str | torch.device = "cpu"
) -> Maker:
    """A function that makes a fresh expert on this device. Raises models' errors for settings that
    cannot be built, and not later."""
    from models.registry import optimizer_factory, schedule_factory
    from protocols.experts import ExpertBackend, Rows

    section, seed = section_of(definition), definition.training.seed
    build = network_builder(definition, trusted)
    row_shape = tuple(build(None).row_shape)
    optimizer_of = optimizer_factory(section.optimizer)
    schedule_of = None if section.schedule is None else schedule_factory(section.schedule)

    def make(uid: Uid) -> ExpertBackend:
        network = build(seed_of(seed, uid)).to(device)
        rows = Rows(row_shape)
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


def parameters_of_an_expert(definition: RunDefinition, trusted: Trusted = NOTHING) -> int:
    from models.trainable import parameter_count

    return parameter_count(network_builder(definition, trusted)(None))


def saved_bytes(definition: RunDefinition, trusted: Trusted = NOTHING) -> int:
    """What one expert takes on a disk, and on the way to another server: its parameters and the
    statistics of its optimizer."""
    statistics = statistics_of(section_of(definition).optimizer)
    return FLOAT_BYTES * parameters_of_an_expert(definition, trusted) * (1 + statistics)


def server_bytes(definition: RunDefinition, trusted: Trusted = NOTHING) -> int:
    """The memory that a server needs for each expert: what is saved, and a gradient. What it needs
    for a batch is the same for all its experts together."""
    gradient = FLOAT_BYTES * parameters_of_an_expert(definition, trusted)
    return int(KEPT_APART * (saved_bytes(definition, trusted) + gradient))


def most_experts(memory_bytes: int, each: int) -> int:
    """How many experts of so many `server_bytes` a server can hold in this memory, beside its
    process and its queue."""
    from protocols.experts import MOST_BYTES

    free = memory_bytes - PROCESS_BYTES - MOST_BYTES
    return max(0, free // max(1, each))


def rows_of_a_sample(definition: RunDefinition) -> int:
    """How many examples each mixture gets of one sample; 1 for a module's model, which alone
    knows."""
    from models.registry import model_settings

    if "module" in definition.model:
        return 1
    return int(getattr(model_settings(definition.model), "context", 1))


def call_bytes(definition: RunDefinition, trusted: Trusted = NOTHING) -> tuple[int, int]:
    """What a trainer sends to experts for each sample, and gets from them: its rows go to `k`
    experts of each mixture. Forward, inputs go and outputs come; backward, the inputs go again with
    the gradients, and gradients come."""
    from protocols.tensors import CODECS

    section = section_of(definition)
    encoded = CODECS[section.codec].encoded_bytes(
        math.prod(network_builder(definition, trusted)(None).row_shape)
    )
    rows = rows_of_a_sample(definition) * section.k * len(section.grids)
    once = int(HEADERS * rows * encoded)
    return 3 * once, 2 * once
