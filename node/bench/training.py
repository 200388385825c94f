"""`potluck bench training`: how much of their time peers compute, with their averaging delayed
and not.

Peers in processes of their own train one small model together, over uplinks that are slow enough
for the averaging to matter. A run has some steps to warm up and some that are measured; it is done
once with `delayed` and once without, one after the other.

    utilisation   a peer's time in its own forward and backward passes, by the wall: everything
                  else (accumulating, waiting, stepping) is lost. The least of all peers counts.

The bar holds where hiding the averaging is possible at all: where it takes less time than the
peers need to compute the next step's samples.

Easy to get wrong: the peers share the machine's cores. A pass takes longer when others compute,
and that is computing all the same; but samples per second say nothing about more machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from node.bench.machine import machine_facts
from node.bench.training_audit import Audit
from node.bench.training_swarm import Talk, Training, TrainingSwarm, open_training_swarm

BAR_UTILISATION = 0.95
LONGEST_STEP_SECONDS = 60.0  # of the whole run; a bench's steps take some seconds
MANNERS = ("delayed", "waiting")


@dataclass(frozen=True)
class TrainingEffort:
    """`up_mbps`: each peer's uplink, 0 for no limit; `steps` are measured after `warm_up_steps`."""

    peers: int = 4
    target_batch: int = 2048
    steps: int = 6
    warm_up_steps: int = 2
    batch: int = 32
    context: int = 64
    width: int = 64
    layers: int = 2
    up_mbps: float = 4.0
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
    holds = bool(judged) and judged["averaging_s_p50"] < judged["accumulating_s_p50"]
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
        manner={"delayed": manner == "delayed"},
        codec=effort.codec,
        up_bytes_per_second=effort.up_mbps * 1e6 / 8,
    )
    async with open_training_swarm(training) as swarm:
        for number in range(effort.peers):
            say(f"starting peer {number + 1} of {effort.peers}")
            await swarm.start(held_out=number == 0)
        await _until_all_train(swarm, effort.peers)
        first = await _epoch_of_all(swarm) + effort.warm_up_steps
        await swarm.until_epoch(first, LONGEST_STEP_SECONDS * (effort.warm_up_steps + 1))
        before = await swarm.ask_all("cpu")
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


async def _until_all_train(swarm: TrainingSwarm, peers: int) -> None:
    """Until everybody has caught up and is in the same rounds."""
    await swarm.until_epoch(1, LONGEST_STEP_SECONDS * peers)


async def _epoch_of_all(swarm: TrainingSwarm) -> int:
    asked = await swarm.ask_all("progress")
    return int(max(one["epoch"] for one in asked.values()))


def figures_of(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    audit: Audit,
    steps: list[dict[str, Any]],
    peers: int,
) -> dict[str, Any]:
    """What lies between two looks at all peers, and what their steps say."""
    shares = {
        number: _more(before, after, number, "computing_seconds")
        / _more(before, after, number, "at")
        for number in after
    }
    waits = [
        _more(before, after, number, "waiting_seconds") / _more(before, after, number, "at")
        for number in after
    ]
    samples = sum(_more(before, after, number, "samples") for number in after)
    seconds = statistics.mean(_more(before, after, number, "at") for number in after)
    cpu = sum(_more(before, after, number, "seconds") for number in after)
    complete = [line for line in steps if len(line["members"]) == peers]
    return {
        "utilisation": round(min(shares.values()), 4),
        "utilisation_mean": round(statistics.mean(shares.values()), 4),
        "waiting": round(max(waits), 4),
        "samples_per_s": round(samples / seconds, 1),
        "cpu_s_per_million_samples": round(cpu / samples * 1e6, 1),
        "accumulating_s_p50": _median_of(steps, "accumulating_seconds"),
        "averaging_s_p50": _median_of(steps, "averaging_seconds"),
        "stepping_s_p50": _median_of(steps, "stepping_seconds"),
        "steps": len({line["epoch"] for line in steps}),
        "complete": round(len(complete) / max(1, len(steps)), 3),
        "loss": [round(loss, 4) for _, loss in audit.loss_curve()],
        "digests_equal": not any("different states" in failure for failure in audit.failures),
        "failures": audit.failures,
    }


def _more(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    number: int,
    name: str,
) -> float:
    return float(after[number][name] - before[number][name])


def _median_of(steps: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(line[name] for line in steps), 3) if steps else 0.0
