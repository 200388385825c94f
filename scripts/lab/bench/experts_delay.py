"""`scripts/bench experts-delay`: latency costs many batches in flight nothing, and one everything.

Section 4.1 of Learning@home: a model of mixtures whose experts are some milliseconds away is
trained twice with each delay, with 64 batches in flight (`AsyncTrainer`) and with one batch at a
time, which is naive model parallelism through the same layers. The experts are in this process
(local_experts.py). Every call of them takes an exponential time in addition to its computation.

How much delay 64 batches can hide depends on how long the computation of one takes: `compute_ms`.
A batch waits in each pass for the slowest of its calls, so a pass takes two to three delays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.guest_thread import in_guest_thread

if TYPE_CHECKING:
    from torch import Tensor, nn

    from node.app.commands.parser import Subparsers
    from protocols.guest import Portal

EXPERTS, ACTIVE = (4, 4), 4
BAR_KEPT = 0.8  # of the throughput without delay; the paper's figure shows about as much
BAR_UP_TO_MS = 200.0
PATIENCE_SECONDS = 3600.0  # no call is given up, so that all delays have the same work


@dataclass(frozen=True)
class DelayEffort:
    """`seconds` of measuring for each delay, at least, from the moment on when the first batches in
    flight are done."""

    delays_ms: tuple[float, ...]
    in_flight: int
    seconds: float
    layers: int
    width: int
    inner: int
    batch: int


async def measure_delays(effort: DelayEffort, say: Talk) -> dict[str, Any]:
    """Batches per second with each delay, of both ways, and what is kept of those without."""
    import torch

    torch.set_num_threads(1)  # there are threads enough
    machine, began = machine_facts(), time.monotonic()
    rows = []
    for delay in effort.delays_ms:
        asynchronous, naive = [
            await in_guest_thread(partial(_batches_per_second, effort, delay, in_flight))
            for in_flight in (effort.in_flight, 1)
        ]
        rows.append({"delay_ms": delay, "async_per_s": asynchronous, "naive_per_s": naive})
        say(f"{delay:g} ms: {asynchronous:.2f}/s with many in flight, {naive:.2f}/s with one")
    return figures_of(rows) | {
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def figures_of(rows: list[dict[str, float]]) -> dict[str, Any]:
    """What is kept of the throughput with the least delay, and whether the bar is met."""
    least = min(rows, key=lambda row: row["delay_ms"])
    told = [
        {
            "delay_ms": row["delay_ms"],
            "async_per_s": round(row["async_per_s"], 3),
            "async_kept": round(row["async_per_s"] / least["async_per_s"], 3),
            "naive_per_s": round(row["naive_per_s"], 3),
            "naive_kept": round(row["naive_per_s"] / least["naive_per_s"], 3),
        }
        for row in rows
    ]
    return {
        "compute_ms": round(1000.0 / least["async_per_s"], 1),
        "delays": told,
        "bar_kept": BAR_KEPT,
        "bar_up_to_ms": BAR_UP_TO_MS,
        "met": all(
            row["async_kept"] >= BAR_KEPT for row in told if row["delay_ms"] <= BAR_UP_TO_MS
        ),
    }


def _batches_per_second(
    effort: DelayEffort, delay_ms: float, in_flight: int, portal: Portal
) -> float:
    """Train for the measuring time, in a thread of its own."""
    import torch

    from protocols.experts import AsyncTrainer

    model = _model(effort, delay_ms / 1000.0, portal)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count, began = 0, 0.0
    for turn, _ in enumerate(AsyncTrainer(model, _loss_of, in_flight=in_flight).run(_data(effort))):
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if turn < in_flight:
            began = now  # again and again, until those are done that all began at once
            continue
        count += 1
        # whole rounds of those in flight: they began together, and some are still in step
        if count % in_flight == 0 and now - began >= effort.seconds:
            portal.post(portal.end)  # what is in flight would take another second or twenty
            return count / (now - began)
    raise AssertionError("the data has no end")


def _model(effort: DelayEffort, delay_seconds: float, portal: Portal) -> nn.Module:
    import torch
    from torch import nn

    from lab.bench.local_experts import LocalExperts
    from models.experts import build_expert
    from protocols.experts import DMoE, ExpertGrid, GridGate

    torch.manual_seed(0)
    grid = ExpertGrid("ffn", EXPERTS)
    inner = [effort.inner, effort.inner]
    settings = {"name": "feed-forward", "width": effort.width, "inner": inner}

    def layer(number: int) -> nn.Module:
        experts = LocalExperts(
            {grid.at(at): build_expert(settings, seed=at) for at in range(grid.cells)},
            lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            delay_seconds=delay_seconds,
            seed=number,
        )
        return DMoE(
            GridGate(effort.width, grid),
            experts,
            portal,
            k=ACTIVE,
            grace_seconds=PATIENCE_SECONDS,
            timeout_seconds=PATIENCE_SECONDS,
        )

    return nn.Sequential(*map(layer, range(effort.layers)), nn.LayerNorm(effort.width))


def _data(effort: DelayEffort) -> Iterator[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(effort.batch, effort.width, generator=generator)


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch).square().mean()
    return loss


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from lab.bench.experts_convergence import numbers
    from node.app.commands.parser import add_flag, positive_count, positive_seconds

    parser = kinds.add_parser(
        "experts-delay",
        help="the throughput of training with experts that are far away",
        description="Train a model of mixtures of experts whose calls take an exponential time in "
        "addition, with many batches in flight and with one at a time, and count batches per "
        "second. Everything is in this process. The exit code is 1 if many in flight keep less "
        f"than {BAR_KEPT:g} of their throughput without delay, up to {BAR_UP_TO_MS:g} ms.",
        example="scripts/bench experts-delay --json\n"
        "scripts/bench experts-delay --delay-ms 0,200 --seconds 20",
    )
    parser.set_defaults(measure=run)
    delays = "mean delays of a call, in milliseconds"
    add_flag(parser, "--delay-ms", numbers, "0,10,50,100,200,1000", delays, metavar="MS,…")
    add_flag(parser, "--in-flight", positive_count, 64, "batches in flight")
    how_long = "how long to measure with each delay, at least"
    add_flag(parser, "--seconds", positive_seconds, 5.0, how_long, metavar="SECONDS")
    add_flag(parser, "--layers", positive_count, 2, "how many mixtures the model has")
    add_flag(parser, "--width", positive_count, 128, "the width of the model")
    add_flag(parser, "--inner", positive_count, 256, "the inner width of an expert")
    add_flag(parser, "--batch", positive_count, 128, "samples of a batch")


def run(arguments: argparse.Namespace) -> int:
    effort = DelayEffort(
        delays_ms=arguments.delay_ms,
        in_flight=arguments.in_flight,
        seconds=arguments.seconds,
        layers=arguments.layers,
        width=arguments.width,
        inner=arguments.inner,
        batch=arguments.batch,
    )
    return report(arguments, partial(measure_delays, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    many = f"{result['settings']['in_flight']} in flight"
    lines = [f"{'delay':>8}{many:>16}{'kept':>8}{'one at a time':>16}{'kept':>8}"]
    for row in result["delays"]:
        lines.append(
            f"{row['delay_ms']:>5g} ms{row['async_per_s']:>14.2f}/s{row['async_kept']:>8.2f}"
            f"{row['naive_per_s']:>14.2f}/s{row['naive_kept']:>8.2f}"
        )
    lines.append(
        f"A batch takes {result['compute_ms']:g} ms to compute. At least {result['bar_kept']:g} "
        f"must be kept with many in flight, up to {result['bar_up_to_ms']:g} ms."
    )
    return "\n".join(lines)
