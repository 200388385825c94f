"""`potluck run check`: every mistake of a run.toml, and what the run costs who takes part.

Easy to get wrong: the traffic depends on how fast everybody computes, which nobody knows before. So
it is said for a number of machines like this one, and both numbers can be given.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from node.commands.output import Output
from node.run.folder import RunFolder
from node.run.mistakes import WrongDefinition

if TYPE_CHECKING:
    from node.run.costs import Costs, Traffic
    from node.run.definition import RunDefinition

MEGA = 1_000_000
SMALL_BATCHES = 4  # in a step: then it is within an eighth of its target (batch_plan.py)
SLOW_LINK_MBPS = 10  # what is said of the download; a bad home connection
HIGH_TRAFFIC_PER_HOUR = 10_000 * MEGA  # a month's quota of many home lines in a day


def run(arguments: argparse.Namespace) -> int:
    from node.run.checking import check
    from node.run.costs import costs_of
    from node.run.trusted import trusted_modules

    output = Output.of(arguments)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    trusted = trusted_modules(arguments.trust_module)
    definition, mistakes = check(folder.text(), trusted)
    if definition is None:
        raise WrongDefinition.of(mistakes)
    costs = costs_of(definition, trusted)
    speed = arguments.samples_per_s or measured_here(definition, trusted)
    traffic = costs.traffic(volunteers=arguments.volunteers, samples_per_second=speed)
    most = definition.training.samples_at_once
    pins = unpinned(definition, trusted)
    typed = shlex.quote(arguments.folder)
    next_ = f"No mistake was found. next: `potluck run start {typed}`"
    output.data(
        {
            "run": definition.name,
            "mistakes": [],
            "parameters": costs.parameters,
            "memory_bytes": costs.memory_bytes(most),
            "memory_bytes_least": costs.memory_bytes(1),
            "samples_at_once": most,
            "download_bytes": costs.state_bytes,
            "disk_bytes": costs.disk_bytes,
            "keeper_disk_bytes": costs.keeper_disk_bytes,
            "volunteers": arguments.volunteers,
            "samples_per_second": round(speed, 3),
            "samples_per_second_measured": arguments.samples_per_s is None,
            "step_seconds": round(traffic.step_seconds, 3),
            "round_bytes": traffic.round_bytes,
            "up_bytes_per_hour": traffic.up_bytes_per_hour,
            "down_bytes_per_hour": traffic.down_bytes_per_hour,
            "run_seconds": _run_seconds(definition, traffic),
            "sha256_of_modules": dict(pins),
        },
        "\n".join([*_lines(definition, costs, traffic, speed, arguments), *_advice(pins), next_]),
    )
    return 0


def measured_here(definition: RunDefinition, trusted: dict[str, Path]) -> float:
    """Samples per second of this machine, by computing for a few seconds."""
    from node.caps.devices import AUTO, choose_device
    from node.run.building import build_task
    from node.trainer.benchmark import measure

    task = build_task(definition, device=choose_device(AUTO), trusted=trusted)
    training = definition.training
    return measure(task, most=training.samples_at_once, target=training.batch).samples_per_second


def _run_seconds(definition: RunDefinition, traffic: Traffic) -> float | None:
    steps = definition.training.steps
    return round(steps * traffic.step_seconds, 1) if steps else None


def _step_sizes(definition: RunDefinition) -> list[tuple[str, str]]:
    """How far a step may be from its target, where one batch of a peer is a good part of that."""
    training = definition.training
    target, batch = training.batch * training.local_steps, training.samples_at_once
    if SMALL_BATCHES * batch <= target:
        return []
    return [
        (
            "a step",
            f"{max(target - batch // 2, batch):,} to {target + batch // 2:,} samples of all, as "
            f"batches come to it: samples_at_once of {max(1, target // SMALL_BATCHES):,} or less "
            f"keeps it near to {target:,}",
        )
    ]


def _lines(
    definition: RunDefinition,
    costs: Costs,
    traffic: Traffic,
    speed: float,
    arguments: argparse.Namespace,
) -> list[str]:
    most = definition.training.samples_at_once
    who = "each like this machine" if arguments.samples_per_s is None else "each"
    many = f"{arguments.volunteers} volunteer{'s' if arguments.volunteers > 1 else ''}"
    download_seconds = costs.state_bytes * 8 / (SLOW_LINK_MBPS * MEGA)
    rows = [
        ("model", f"{_name(definition)}: {costs.parameters:,} parameters"),
        (
            "memory",
            f"{_size(costs.memory_bytes(most))} with {most} samples at once; "
            f"{_size(costs.memory_bytes(1))} with one",
        ),
        *_step_sizes(definition),
        (
            "joining",
            f"{_size(costs.state_bytes)} to fetch first: {_time(download_seconds)} "
            f"at {SLOW_LINK_MBPS} Mb/s",
        ),
        (
            "disk",
            f"{_size(costs.disk_bytes)} while joining; {_size(costs.keeper_disk_bytes)} where the "
            "checkpoints are kept",
        ),
        (
            "speed",
            f"{speed:,.1f} samples/s {who}: with {many} a step of "
            f"{definition.training.batch:,} takes {_time(traffic.step_seconds)}",
        ),
        (
            "traffic",
            f"{_size(traffic.up_bytes_per_hour)} up and {_size(traffic.down_bytes_per_hour)} down "
            f"per hour for each of them, {_size(traffic.round_bytes)} in a step",
        ),
    ]
    seconds = _run_seconds(definition, traffic)
    if seconds is not None:
        rows.append(("time", f"{definition.training.steps:,} steps: {_time(seconds)}"))
    lines = [f"{name:<9}{text}" for name, text in rows]
    if traffic.up_bytes_per_hour > HIGH_TRAFFIC_PER_HOUR:
        lines.append(
            "That is much traffic: a larger batch, blockwise-int8 or local_steps make it less, in "
            "proportion."
        )
    return lines


def unpinned(definition: RunDefinition, trusted: Mapping[str, Path]) -> dict[str, str]:
    """By table, the hash of each module's file that the definition does not ask for yet."""
    from node.run.trusted import sha256_of

    tables = {"model": definition.model, "data": definition.data}
    return {
        where: sha256_of(trusted[table["module"]])
        for where, table in tables.items()
        if "module" in table and "sha256" not in table
    }


def _advice(pins: Mapping[str, str]) -> Iterator[str]:
    for where, digest in pins.items():
        yield (
            f'With sha256 = "{digest}" below [{where}] every volunteer has to have this very file.'
        )


def _name(definition: RunDefinition) -> str:
    model = definition.model
    words = [model.get("name") or f"the module {model.get('module')}", model.get("size", "")]
    return " ".join(str(word) for word in words if word)


def _size(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            value = count / unit
            return f"{value:.1f} {name}" if value < 100 else f"{value:,.0f} {name}"
    return f"{count:.0f} bytes"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
