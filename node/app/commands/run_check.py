"""`potluck run check`: every mistake in a run.toml, and what the run costs its volunteers.

It also tries everything that the text alone does not show: it reads a batch of each source, and
makes a pass over one. `--offline` leaves that out, and says so.

The traffic depends on how fast everybody computes, which is unknown in advance. So it is given for
a number of machines like this one, and both numbers can be set by flags.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder
from node.run.mistakes import WrongDefinition

if TYPE_CHECKING:
    from node.run.building import RunTask
    from node.run.costs import Costs, RunTraffic
    from node.run.definition import RunDefinition

MEGA = 1_000_000
FAR_SHARE = 1.15  # of its target: planned steps stay below that, also where few batches make one
SLOW_LINK_MBPS = 10  # the link for the download's example; a bad home connection
EXAMPLE_SERVER_BYTES = 4 << 30  # the memory of a small server
LEFT_OUT = ("whether the data can be read", "a pass over a batch of it")  # by --offline
MOST_VOLUNTEERS = 1_000_000_000
MOST_SAMPLES_PER_S = 1_000_000_000
HIGH_TRAFFIC_PER_HOUR = 10_000 * MEGA  # a month's quota of many home lines in a day


def run(arguments: argparse.Namespace) -> int:
    from node.run.checking import check
    from node.run.costs import costs_of
    from node.run.trusted import trusted_modules

    output = Output.of(arguments)
    _refuse_more_than_all(arguments)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    trusted = trusted_modules(arguments.trust_module)
    definition, mistakes = check(folder.text(), trusted)
    if definition is None:
        raise WrongDefinition.of(mistakes)
    costs = costs_of(definition, trusted)
    tried = None if arguments.offline else _first_batch(definition, trusted, output)
    task = tried.task if tried else None
    speed = arguments.samples_per_s or measured_here(definition, trusted, task)
    traffic = costs.traffic(volunteers=arguments.volunteers, samples_per_second=speed)
    most = definition.training.samples_at_once
    least_samples, most_samples = step_samples(definition, arguments.volunteers)
    pins = unpinned(definition, trusted)
    typed = shlex.quote(arguments.folder)
    found = "No mistake was found" + (", as far as was checked" if tried is None else "")
    next_ = f"{found}. next: `potluck run start {typed}`"
    output.data(
        {
            "run": definition.name,
            "mistakes": [],
            "parameters": costs.parameters,
            "memory_bytes": costs.memory_bytes(most),
            "memory_bytes_least": costs.memory_bytes(1),
            "memory_bytes_beside_gpu": costs.memory_bytes(most, on_gpu=True),
            "gpu_bytes": costs.gpu_bytes(most),
            "memory_bytes_beside_gpu_offload": costs.memory_bytes(most, on_gpu=True, offload=True),
            "gpu_bytes_offload": costs.gpu_bytes(most, offload=True),
            "samples_at_once": most,
            "step_samples_least": least_samples,
            "step_samples_most": most_samples,
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
            "first_loss": None if tried is None else tried.loss,
            "experts": _figures_of_experts(definition, costs, trusted),
            "left_out": list(LEFT_OUT) if tried is None else [],
        },
        "\n".join(
            [
                *_lines(definition, trusted, costs, traffic, speed, arguments, tried),
                *_advice(pins),
                next_,
            ]
        ),
    )
    return 0


@dataclass(frozen=True)
class _FirstBatch:
    """The results for the data: `seconds` of reading it, and the loss of a pass over it."""

    task: RunTask
    seconds: float
    loss: float


def _first_batch(
    definition: RunDefinition, trusted: Mapping[str, Path], output: Output
) -> _FirstBatch:
    from node.run.dry_run import DataTrial, pass_over

    output.say("reading a first batch of the data …")
    began = time.monotonic()
    batch = DataTrial(definition, trusted, output.say).read()
    seconds = time.monotonic() - began
    task = _task(definition, trusted)
    if task.compiled is not None:
        output.say("compiling the model …")
    first = _FirstBatch(task, seconds, pass_over(task, batch))
    trouble = "" if task.compiled is None else task.compiled.take_trouble()
    if trouble:
        output.say(f"warning: {trouble}")
    return first


def measured_here(
    definition: RunDefinition, trusted: Mapping[str, Path], task: RunTask | None = None
) -> float:
    """Samples per second of this machine, by computing for a few seconds."""
    from node.training.batch_size import measure

    if task is None:  # nothing was opened, and nothing should be
        if "module" in definition.data:
            raise WrongUse(
                "How fast this machine is cannot be measured with --offline.",
                why="The run's batches come from a module, and the measurement would open its "
                "data.",
                advice="Give a machine's speed: --samples-per-s N.",
            )
        task = _task(definition, trusted)
    training = definition.training
    return measure(task, most=training.samples_at_once, target=training.batch).samples_per_second


def _refuse_more_than_all(arguments: argparse.Namespace) -> None:
    """WrongUse for figures that no run has: products of them have no end."""
    for flag, value, most in (
        ("--volunteers", arguments.volunteers, MOST_VOLUNTEERS),
        ("--samples-per-s", arguments.samples_per_s or 0.0, MOST_SAMPLES_PER_S),
    ):
        if value > most:
            raise WrongUse(f"{flag} is more than any run has.", why=f"It may be up to {most:,}.")


def _task(definition: RunDefinition, trusted: Mapping[str, Path]) -> RunTask:
    from node.core.caps.devices import AUTO, choose_device
    from node.run.building import build_task

    return build_task(definition, device=choose_device(AUTO), trusted=trusted)


def _run_seconds(definition: RunDefinition, traffic: RunTraffic) -> float | None:
    steps = definition.training.steps
    return round(steps * traffic.step_seconds, 1) if steps else None


def step_samples(definition: RunDefinition, volunteers: int) -> tuple[int, int]:
    """The least and most samples of a step of all peers, with this many volunteers. A step comes as
    near to its target as whole batches do; but if one batch is a good part of the target, all
    volunteers begin theirs."""
    from node.training.batch_size import limit_of
    from protocols.accumulation.batch_plan import may_be_planned

    training = definition.training
    target = training.step_samples
    batch = limit_of(training.samples_at_once, training.batch)
    if may_be_planned(batch, target):
        return target - batch // 2, target + batch // 2
    whole = -(-target // batch) * batch
    return whole, whole + (volunteers - 1) * batch


def _step_sizes(definition: RunDefinition, volunteers: int) -> list[tuple[str, str]]:
    """Where that is far from its target."""
    target = definition.training.step_samples
    least, most = step_samples(definition, volunteers)
    if most <= FAR_SHARE * target:
        return []
    words = f"{least:,} to {most:,} samples of all, as one sample of each is much of {target:,}"
    return [("a step", f"{words}: a larger batch keeps it near to the target")]


def _lines(
    definition: RunDefinition,
    trusted: Mapping[str, Path],
    costs: Costs,
    traffic: RunTraffic,
    speed: float,
    arguments: argparse.Namespace,
    tried: _FirstBatch | None,
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
        *_step_sizes(definition, arguments.volunteers),
        (
            "on a GPU",
            f"{_size(costs.gpu_bytes(most))} of its memory with {most} samples at once, and "
            f"{_size(costs.memory_bytes(most, on_gpu=True))} of the machine's"
            f"{_offloaded(costs, most)}",
        ),
        (
            "joining",
            f"{_size(costs.state_bytes)} to fetch first: {_time(download_seconds)} at "
            f"{SLOW_LINK_MBPS} Mb/s",
        ),
        (
            "disk",
            f"{_size(costs.disk_bytes)} while joining; {_size(costs.keeper_disk_bytes)} where the "
            "checkpoints are kept",
        ),
        (
            "speed",
            f"{speed:,.1f} samples/s {who}: with {many} a step of "
            f"{definition.training.step_samples:,} takes {_time(traffic.step_seconds)}",
        ),
        (
            "traffic",
            f"{_size(traffic.up_bytes_per_hour)} up and {_size(traffic.down_bytes_per_hour)} down "
            f"per hour for each of them, {_size(traffic.round_bytes)} in a step",
        ),
    ]
    rows += rows_of_experts(definition, costs, trusted)
    seconds = _run_seconds(definition, traffic)
    if seconds is not None:
        rows.append(("time", f"{definition.training.steps:,} steps: {_time(seconds)}"))
    data = f"not checked (--offline): {' and '.join(LEFT_OUT)}"
    if tried is not None:
        data = f"a batch was read in {_time(tried.seconds)}; its loss is {tried.loss:.3f}"
    rows.append(("data", data))
    lines = [f"{name:<9}{text}" for name, text in rows]
    if traffic.up_bytes_per_hour > HIGH_TRAFFIC_PER_HOUR:
        lines.append(
            "That is much traffic, most of it for calling experts: blockwise-int8 or a smaller k "
            "below [experts] makes it less."
            if _are_mostly_calls(costs, traffic, speed)
            else "That is much traffic: a larger batch, blockwise-int8 or local_steps make it "
            "less, in proportion."
        )
    return lines


def _offloaded(costs: Costs, most: int) -> str:
    """How that changes with --offload, where it does."""
    if costs.offloaded == costs.with_gpu:
        return ""
    there = costs.gpu_bytes(most, offload=True)
    here = costs.memory_bytes(most, on_gpu=True, offload=True)
    return f"; with --offload {_size(there)} and {_size(here)}"


def _are_mostly_calls(costs: Costs, traffic: RunTraffic, speed: float) -> bool:
    return 2 * costs.call_up_bytes * speed * 3600.0 > traffic.up_bytes_per_hour


def _figures_of_experts(
    definition: RunDefinition, costs: Costs, trusted: Mapping[str, Path]
) -> dict[str, Any] | None:
    """What serving experts costs, and calling them; None for a run without."""
    from node.run.experts import (
        grids,
        most_experts,
        parameters_of_an_expert,
        saved_bytes,
        server_bytes,
    )

    if definition.experts is None:
        return None
    return {
        "grids": {grid.name: list(grid.sizes) for grid in grids(definition)},
        "cells": sum(grid.cells for grid in grids(definition)),
        "parameters": parameters_of_an_expert(definition, trusted),
        "server_bytes": server_bytes(definition, trusted),
        "saved_bytes": saved_bytes(definition, trusted),
        "in_a_server_of_4_gib": most_experts(
            EXAMPLE_SERVER_BYTES, server_bytes(definition, trusted)
        ),
        "up_bytes_per_sample": costs.call_up_bytes,
        "down_bytes_per_sample": costs.call_down_bytes,
    }


def rows_of_experts(
    definition: RunDefinition, costs: Costs, trusted: Mapping[str, Path]
) -> list[tuple[str, str]]:
    found = _figures_of_experts(definition, costs, trusted)
    if found is None or definition.experts is None:
        return []
    sizes = " x ".join(map(str, definition.experts.sizes))
    grids = "1 grid" if len(found["grids"]) == 1 else f"{len(found['grids'])} grids"
    holds = found["in_a_server_of_4_gib"]
    link = SLOW_LINK_MBPS * MEGA / 8 / max(1, costs.call_up_bytes)
    sample = "each example of a mixture" if "module" in definition.model else "each sample"
    return [
        (
            "experts",
            f"{grids} of {sizes}: room for {found['cells']:,} experts of {found['parameters']:,} "
            "parameters",
        ),
        (
            "serving",
            f"{_size(found['server_bytes'])} of memory and {_size(found['saved_bytes'])} of disk "
            f"for each expert; a server of 4 GiB holds "
            f"{'all of them' if holds >= found['cells'] else f'{holds:,}'}",
        ),
        (
            "calling",
            f"{_size(costs.call_up_bytes)} up and {_size(costs.call_down_bytes)} down for "
            f"{sample}: at most {link:,.1f} per second at {SLOW_LINK_MBPS} Mb/s",
        ),
    ]


def unpinned(definition: RunDefinition, trusted: Mapping[str, Path]) -> dict[str, str]:
    """By table, the hash of each module's file, if the definition does not ask for it yet."""
    from node.run.trusted import sha256_of, tables_of_modules

    return {
        where: sha256_of(trusted[table["module"]])
        for where, table in tables_of_modules(definition)
        if "sha256" not in table
    }


def _advice(pins: Mapping[str, str]) -> Iterator[str]:
    for where, digest in pins.items():
        yield f'With sha256 = "{digest}" below [{where}] every volunteer needs exactly this file.'


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
