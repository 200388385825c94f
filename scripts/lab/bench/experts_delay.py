"""`scripts/bench experts --delay-ms …`: delays cost many batches in flight little, and one much.

Section 4.1 of Learning@home: a model of mixtures whose experts are some milliseconds away is
trained twice with each delay, with 64 batches in flight (`AsyncTrainer`) and with one batch at a
time, which is naive model parallelism through the same layers. The experts are in this process
(local_experts.py). Every call of them takes an exponential time in addition to its computation.

How much delay 64 batches can hide depends on how long the computation of one takes: `compute_ms`.
A batch waits in each of its four passes (two mixtures, forward and backward) for the slowest of its
16 calls: 3.4 delays on average. So of a second each it waits 13.5 seconds, and the others must have
work for as long: 64 batches of 0.21 seconds have just so much. The paper's batches are larger. The
default size here is the smallest whose batches take clearly longer on one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lab import Talk
from lab.bench.machine import machine_facts
from lab.guest_thread import in_guest_thread

if TYPE_CHECKING:
    from torch import Tensor, nn

    from protocols.guest import Portal

EXPERTS, ACTIVE = (4, 4), 4
BARS = ((200.0, 0.95), (1000.0, 0.85))
"""Up to so many milliseconds, so much must be kept of the throughput without delay."""
PATIENCE_SECONDS = 3600.0  # no call is given up, so that all delays have the same work


@dataclass(frozen=True)
class DelayEffort:
    """`seconds` of measuring for each delay, at least, from the moment on when the first batches in
    flight are done. With more `turns` all delays are measured again, and medians are told, so that
    other work on the machine meets all delays alike."""

    delays_ms: tuple[float, ...]
    in_flight: int = 64
    seconds: float = 15.0
    turns: int = 1
    layers: int = 2
    width: int = 256
    inner: int = 1024
    batch: int = 256

    @staticmethod
    def quick(delays_ms: tuple[float, ...]) -> DelayEffort:
        """Enough to see that it works: so small batches hide no long delay."""
        return DelayEffort(delays_ms, seconds=0.5, width=64, inner=128, batch=32)


async def measure_delays(effort: DelayEffort, say: Talk) -> dict[str, Any]:
    """Batches per second with each delay, of both ways, and what is kept of those without."""
    import torch

    torch.set_num_threads(1)  # there are threads enough
    machine, began = machine_facts(), time.monotonic()
    turns = []
    for _ in range(effort.turns):
        rows = []
        for delay in effort.delays_ms:
            (asynchronous, processor), (naive, naive_processor) = [
                await in_guest_thread(partial(_trained, effort, delay, in_flight))
                for in_flight in (effort.in_flight, 1)
            ]
            rows.append(
                {
                    "delay_ms": delay,
                    "async_per_s": asynchronous,
                    "async_processor_s": processor,
                    "naive_per_s": naive,
                    "naive_processor_s": naive_processor,
                }
            )
            say(f"{delay:g} ms: {asynchronous:.2f}/s with many in flight, {naive:.2f}/s with one")
        turns.append(rows)
    medians = medians_of(turns)
    return figures_of(medians) | {
        "naive_processor_s": round(min(row["naive_processor_s"] for row in medians), 4),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def medians_of(turns: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """The rows of the delays, each with the medians over the turns."""
    return [
        {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for rows in zip(*turns, strict=True)
    ]


def figures_of(rows: list[dict[str, float]]) -> dict[str, Any]:
    """What is kept of the throughput with the least delay, and whether the bars are met."""
    least = min(rows, key=lambda row: row["delay_ms"])
    told = [
        {
            "delay_ms": row["delay_ms"],
            "async_per_s": round(row["async_per_s"], 3),
            "async_kept": round(row["async_per_s"] / least["async_per_s"], 3),
            "async_processor_s": round(row["async_processor_s"], 4),
            "naive_per_s": round(row["naive_per_s"], 3),
            "naive_kept": round(row["naive_per_s"] / least["naive_per_s"], 3),
        }
        for row in rows
    ]
    return {
        "compute_ms": round(1000.0 / least["async_per_s"], 1),
        "delays": told,
        "met": all(row["async_kept"] >= bar_of(row["delay_ms"]) for row in told),
    }


def bar_of(delay_ms: float) -> float:
    """What must be kept with this delay; nothing with a longer one than the bars have."""
    return next((kept for longest, kept in BARS if delay_ms <= longest), 0.0)


def _trained(
    effort: DelayEffort, delay_ms: float, in_flight: int, portal: Portal
) -> tuple[float, float]:
    """Train for the measuring time, in a thread of its own. Returns the batches per second, and how
    many seconds the processor computed for one, whatever else the machine did."""
    import torch

    from protocols.experts import AsyncTrainer

    model = _model(effort, delay_ms / 1000.0, portal)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count, began, computed = 0, 0.0, 0.0
    for turn, _ in enumerate(AsyncTrainer(model, _loss_of, in_flight=in_flight).run(_data(effort))):
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if turn < in_flight:
            began, computed = now, time.process_time()  # until those that began at once are done
            continue
        count += 1
        # whole rounds of those in flight: they began together, and some are still in step
        if count % in_flight == 0 and now - began >= effort.seconds:
            portal.post(portal.end)  # what is in flight would take another second or twenty
            return count / (now - began), (time.process_time() - computed) / count
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


# Output


def lines_of(result: dict[str, Any]) -> str:
    many = f"{result['settings']['in_flight']} in flight"
    lines = [f"{'delay':>8}{many:>16}{'kept':>8}{'one at a time':>16}{'kept':>8}"]
    for row in result["delays"]:
        lines.append(
            f"{row['delay_ms']:>5g} ms{row['async_per_s']:>14.2f}/s{row['async_kept']:>8.2f}"
            f"{row['naive_per_s']:>14.2f}/s{row['naive_kept']:>8.2f}"
        )
    bars = " and ".join(f"{kept:g} up to {longest:g} ms" for longest, kept in BARS)
    lines.append(
        f"A batch takes {result['compute_ms']:g} ms to compute. At least must be kept: {bars}."
    )
    return "\n".join(lines)
