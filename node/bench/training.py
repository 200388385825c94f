"""`potluck bench training`: how much of their time peers compute, with their averaging delayed
and not.

Peers in processes of their own train one small model together, over uplinks that are slow enough
for the averaging to matter. They begin at the same moment; a run has some steps to warm up and some
that are measured; it is done once with `delayed` and once without, one after the other.

    utilisation   a peer's time in its own forward and backward passes, by the wall: everything
                  else (accumulating, waiting, stepping) is lost. The least of all peers counts.
    where         what the time of all peers went into, part by part (time_sheet.py)

The bar holds where hiding the averaging is possible at all: where it takes less time than the
peers need to compute the next step's samples.

The peers share the machine's cores, as volunteers do not: what one of them computes, another one's
step waits for. So a pass does not end with its last operation but takes `idle_ms` longer, in which
the thread sleeps, as it does while an accelerator computes: then all peers together need less than
the machine has (`cores_used` says how much), and their own work besides computing is all there, at
its full price. `idle_ms` of 0 lets them fight for the cores.

Easy to get wrong: `step` and what it waits for are measured; what the bench itself writes down for
its audit (logs, digests, a loss on samples of nobody) is not a part of training, and is taken off
the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from node.bench.machine import machine_facts
from node.bench.time_sheet import COMPUTING, PARTS, WAITING, parts_between
from node.bench.training_audit import Audit
from node.bench.training_swarm import Talk, Training, open_training_swarm

BAR_UTILISATION = 0.95
LONGEST_STEP_SECONDS = 60.0  # of the whole run; a bench's steps take some seconds
MANNERS = ("delayed", "waiting")


@dataclass(frozen=True)
class TrainingEffort:
    """`up_mbps`: each peer's uplink, 0 for no limit; `steps` are measured after `warm_up_steps`;
    `idle_ms`: how long a pass leaves the processor alone."""

    peers: int = 4
    target_batch: int = 2048
    steps: int = 6
    warm_up_steps: int = 2
    batch: int = 32
    context: int = 64
    width: int = 64
    layers: int = 2
    up_mbps: float = 8.0
    idle_ms: float = 100.0
    codec: str = "none"
    manners: tuple[str, ...] = MANNERS

    @property
    def task(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "width": self.width,
            "layers": self.layers,
        }


async def measure_training(
    effort: TrainingEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures of each manner, and whether the bar is met where it holds."""
    machine, began = machine_facts(), time.monotonic()
    result: dict[str, Any] = {}
    for manner in effort.manners:
        say(f"training, {manner}")
        result[manner] = await _measure(effort, manner, say)
    judged = result.get("delayed", {})
    holds = bool(judged) and judged["averaging_s_p50"] < judged["computing_s_per_step"]
    return result | {
        "bar_utilisation": BAR_UTILISATION,
        "bar_holds": holds,
        "met": all(one["digests_equal"] and not one["failures"] for one in result.values())
        and (not holds or judged["utilisation"] >= BAR_UTILISATION),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _measure(effort: TrainingEffort, manner: str, say: Talk) -> dict[str, Any]:
    training = Training(
        target_batch=effort.target_batch,
        task=effort.task,
        manner={"delayed": manner == "delayed", "idle_seconds": effort.idle_ms / 1000},
        codec=effort.codec,
        up_bytes_per_second=effort.up_mbps * 1e6 / 8,
    )
    async with open_training_swarm(training) as swarm:
        say(f"starting {effort.peers} peers")
        await swarm.start_together({"held_out": number == 0} for number in range(effort.peers))
        first = effort.warm_up_steps
        await swarm.until_epoch(first, LONGEST_STEP_SECONDS * (first + 1))
        before = await swarm.ask_all("cpu")
        say(f"measuring {effort.steps} steps")
        await swarm.until_epoch(first + effort.steps, LONGEST_STEP_SECONDS * effort.steps)
        after = await swarm.ask_all("cpu")
        audit = swarm.audit()
        steps = [
            line
            for life in swarm.living
            for line in swarm.lines(life, "StepTaken")
            if first <= line["epoch"] < first + effort.steps
        ]
    return figures_of(before, after, audit, steps, effort.peers)


def figures_of(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    audit: Audit,
    steps: list[dict[str, Any]],
    peers: int,
) -> dict[str, Any]:
    """What lies between two looks at all peers, and what their steps say."""
    parts = [parts_between(before[peer]["sheet"], after[peer]["sheet"]) for peer in after]
    shares = [{name: one[name] / sum(one.values()) for name in PARTS} for one in parts]
    sheets = [(before[peer]["sheet"], after[peer]["sheet"]) for peer in after]
    samples = sum(b["samples"] - a["samples"] for a, b in sheets)
    seconds = statistics.mean(b["at"] - a["at"] for a, b in sheets)
    rate = sum((b["samples"] - a["samples"]) / (b["at"] - a["at"]) for a, b in sheets)
    cores = sum(
        (after[peer]["seconds"] - before[peer]["seconds"])
        / (after[peer]["now"] - before[peer]["now"])
        for peer in after
    )
    batches = sum(b["batches"] - a["batches"] for a, b in sheets)
    computing = sum(one[COMPUTING] for one in parts)
    epochs = statistics.mean(after[peer]["epoch"] - before[peer]["epoch"] for peer in after)
    complete = [line for line in steps if len(line["members"]) == peers]
    return {
        "utilisation": round(min(one[COMPUTING] for one in shares), 4),
        "utilisation_mean": round(statistics.mean(one[COMPUTING] for one in shares), 4),
        "where": {name: round(statistics.mean(one[name] for one in shares), 4) for name in PARTS},
        "waiting": round(max(one[WAITING] for one in shares), 4),
        "pass_ms": round(1000 * computing / batches, 2),
        "samples_per_s": round(rate, 1),
        "cpu_s_per_million_samples": round(cores / rate * 1e6, 1),
        "cores_used": round(cores, 2),
        "computing_s_per_step": round(computing / peers / max(1.0, epochs), 3),
        "accumulating_s_p50": _median_of(steps, "accumulating_seconds"),
        "averaging_s_p50": _median_of(steps, "averaging_seconds"),
        "stepping_s_p50": _median_of(steps, "stepping_seconds"),
        "steps": len({line["epoch"] for line in steps}),
        "complete": round(len(complete) / max(1, len(steps)), 3),
        "measured_s": round(seconds, 1),
        "samples": samples,
        "loss": [round(loss, 4) for _, loss in audit.loss_curve()],
        "digests_equal": not any("different states" in failure for failure in audit.failures),
        "failures": audit.failures,
    }


def _median_of(steps: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(line[name] for line in steps), 3) if steps else 0.0
