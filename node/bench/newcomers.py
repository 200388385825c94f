"""How long newcomers take to get into a run that makes its steps meanwhile: a part of
`potluck bench state`.

One peer trains alone, in steps of a known length. Then some newcomers come at the same moment, each
a process with a node of its own on loopback. One is in when it has made a step with its own
samples; its clock starts when its model is there and it looks at the run. Measured beside it: how
much longer the first peer's passes take while it serves them, and which newcomers were told that
they are too slow, after how long.

A pass is a short computation and a pause for the rest of its time, as on an accelerator: otherwise
the peers would fight for this machine's cores, and a step would have no known length.

Easy to get wrong: once a newcomer is in, the run has more samples a second, so its steps become
shorter. Whoever comes last has the hardest run to get into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import trio

from node.bench.processes import BenchFailed
from node.bench.training_swarm import Talk, Training, TrainingProcess, open_training_swarm

PASSES_PER_STEP = 4  # of the first peer alone
LAYERS, HEADS = 3, 4
BYTES_PER_PARAMETER = 12  # float32, and AdamW's two statistics
SETTLED_STEPS = 8  # before the newcomers come
SETTLE_SECONDS = 120.0
BAR_SECONDS = 10.0
GLANCE_SECONDS = 0.2


@dataclass(frozen=True)
class NewcomersEffort:
    """One row of the table: so many come at once. `seconds`: how long they are given."""

    newcomers: int = 2
    step_seconds: float = 0.28
    state_bytes: int = 3_600_000
    seconds: float = 70.0


async def measure_newcomers(effort: NewcomersEffort, say: Talk) -> dict[str, Any]:
    """When each was in, what it cost the peer that served them, and who was told what."""
    training = Training(
        target_batch=PASSES_PER_STEP,
        task={
            "batch": 1,
            "context": 8,
            "width": _width(effort.state_bytes),
            "layers": LAYERS,
            "heads": HEADS,
        },
        manner={"pass_seconds": effort.step_seconds / PASSES_PER_STEP, "digests": False},
    )
    async with open_training_swarm(training) as swarm:
        first = await swarm.start()
        await swarm.until_epoch(SETTLED_STEPS, SETTLE_SECONDS)
        alone = await _pass_seconds(first, SETTLED_STEPS * effort.step_seconds)
        newcomers = await swarm.join(effort.newcomers)
        before = await first.ask("cpu")
        async with trio.open_nursery() as nursery:
            for one in newcomers:
                nursery.start_soon(swarm.train, one, {})
        in_after: dict[int, float] = {}
        with trio.move_on_after(effort.seconds):
            while len(in_after) < len(newcomers):
                await trio.sleep(GLANCE_SECONDS)
                await swarm.ask_all("progress", newcomers)  # which writes down what happened
                for one in newcomers:
                    steps = [
                        line for line in swarm.lines(one, "StepTaken") if line["own_samples"] > 0
                    ]
                    if steps and one.number not in in_after:
                        entered = swarm.lines(one, "enters")[0]["at"]
                        in_after[one.number] = steps[0]["at"] - entered
                        say(f"{one.name} is in after {in_after[one.number]:.1f} s")
        after = await first.ask("cpu")
        serving = _seconds_of_a_pass(before["sheet"], after["sheet"])
        told = {
            one.name: [round(line["at"] - swarm.lines(one, "enters")[0]["at"], 1) for line in lines]
            for one in newcomers
            if (lines := swarm.lines(one, "TooSlowToCatchUp"))
        }
    return {
        "newcomers": effort.newcomers,
        "step_s": effort.step_seconds,
        "state_MB": round(effort.state_bytes / 1e6, 1),
        "in_after_s": sorted(round(seconds, 1) for seconds in in_after.values()),
        "never_in": len(newcomers) - len(in_after),
        "met": len(in_after) == len(newcomers) and max(in_after.values()) <= BAR_SECONDS,
        "told_too_slow_s": told,
        "pass_ms_alone": round(1000 * alone, 1),
        "pass_ms_serving": round(1000 * serving, 1),
        "slowdown": round(serving / alone - 1.0, 3),
    }


async def _pass_seconds(first: TrainingProcess, seconds: float) -> float:
    """Of a pass, over so long."""
    before = await first.ask("cpu")
    await trio.sleep(seconds)
    after = await first.ask("cpu")
    return _seconds_of_a_pass(before["sheet"], after["sheet"])


def _seconds_of_a_pass(before: dict[str, Any], after: dict[str, Any]) -> float:
    batches = after["batches"] - before["batches"]
    if not batches:
        raise BenchFailed("The first peer made no pass while it was measured.")
    return float((after["computing"] - before["computing"]) / batches)


def _width(state_bytes: int) -> int:
    """Of the model whose state has about so many bytes: 12 layers' width squared, and the bytes."""
    parameters = state_bytes / BYTES_PER_PARAMETER
    squared, linear = 12 * LAYERS, 256 + 8
    width = (math.sqrt(linear**2 + 4 * squared * parameters) - linear) / (2 * squared)
    return max(HEADS, round(width / HEADS) * HEADS)
