"""`potluck bench join`: from `potluck join` on a clean home to the first accepted sample.

A closed run is going on: an auth server, an organiser's peer that keeps the state, and volunteers
who train. Then somebody types `potluck join` with an invite and an enrolment code, in a home that
is empty. The clock starts before that process does, and stops when it tells that others have made
a step with samples of it.

The parts are what the newcomer told, and when; they follow one another without gaps (`PARTS`).

Easy to get wrong: the last part is the run's as much as the newcomer's: nobody is accepted before
the step that is being filled. So what a step of this run takes is told beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from node.bench.closed_run import ClosedRun, Heard, Size, accepted, has, open_closed_run
from node.bench.machine import machine_facts
from node.bench.processes import BenchFailed
from node.trainer.stages import (
    ASKING,
    BUILDING,
    ENTERING,
    LOADING,
    LOGGING_IN,
    LOOKING,
    MEASURING,
    STARTING,
    WORKING_OUT,
)

BAR_SECONDS: Final = 20.0
STEPS_BEFORE: Final = 3  # of the others, before somebody comes: then the swarm is running

PARTS: Final = {
    "imports": LOGGING_IN,
    "login": STARTING,
    "node": LOOKING,
    "meeting": ASKING,
    "definition": LOADING,
    "torch": WORKING_OUT,
    "cost": BUILDING,
    "build": MEASURING,
    "benchmark": ENTERING,
}
"""Each part ends when the newcomer begins with this. Then it catches up until the loop begins, and
then it is accepted."""

Talk = Callable[[str], None]


@dataclass(frozen=True)
class FirstSampleEffort:
    """How often it is measured, and in which run."""

    repeats: int = 3
    volunteers: int = 1
    size: Size = field(default_factory=Size)


async def measure_first_sample(
    effort: FirstSampleEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures. BenchFailed if a part of it does not do what it should."""
    began, machine = time.monotonic(), machine_facts()
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        async with open_closed_run(
            Path(folder), effort.size.definition(), one_is_alone=True
        ) as run:
            say(f"{effort.volunteers} join, and train")
            others = [await _volunteer(run, f"volunteer{n}") for n in range(effort.volunteers)]
            for one in others:
                await run.until(
                    lambda one=one: len(one.all("step_taken")) >= STEPS_BEFORE,  # type: ignore[misc]
                    "the first steps",
                    one,
                )
            for number in range(effort.repeats):
                say(f"somebody comes, {number + 1} of {effort.repeats}")
                measured.append(await _newcomer(run, f"newcomer{number}", others[0]))
    totals = [one["seconds"] for one in measured]
    median = statistics.median(totals)
    return {
        "seconds": round(median, 2),
        "bar_seconds": BAR_SECONDS,
        "met": median < BAR_SECONDS,
        "spread": {"min": min(totals), "max": max(totals)},
        "parts": {
            name: round(statistics.median(one["parts"][name] for one in measured), 2)
            for name in measured[0]["parts"]
        },
        "step_seconds": round(statistics.median(one["step_seconds"] for one in measured), 2),
        "fetched_bytes": measured[-1]["fetched_bytes"],
        "volunteers": effort.volunteers,
        "each": measured,
        "machine": machine,
        "bench_seconds": round(time.monotonic() - began, 1),
    }


async def _volunteer(run: ClosedRun, name: str) -> Heard:
    one = run.join(name, await run.code_for(name))
    await run.until(lambda: has(one, "began"), f"the start of {name}", one)
    return one


async def _newcomer(run: ClosedRun, name: str, other: Heard) -> dict[str, Any]:
    code = await run.code_for(name)
    one = run.join(name, code, alone=True)
    await run.until(lambda: accepted(one) is not None, f"the first samples of {name}", one)
    found = accepted(one)
    assert found is not None
    figures = figures_of(one, found[0], other)
    await run.end(one)
    return figures


def figures_of(one: Heard, accepted_at: float, other: Heard) -> dict[str, Any]:
    """How long each part took this newcomer. BenchFailed if it did not tell of one."""
    parts, before = {}, one.began
    for name, beginning in PARTS.items():
        at = _told(one, beginning)
        parts[name], before = round(at - before, 2), at
    entered = one.all("began")[0][0]
    parts["catch_up"] = round(entered - before, 2)
    parts["accepted"] = round(accepted_at - entered, 2)
    caught_up = one.all("caught_up")
    return {
        "seconds": round(accepted_at - one.began, 2),
        "parts": parts,
        "step_seconds": _seconds_of_a_step(other),
        "fetched_bytes": caught_up[0][1]["fetched_bytes"] if caught_up else 0,
    }


def _told(one: Heard, doing: str) -> float:
    for at, event in one.all("preparing"):
        if event["doing"] == doing:
            return at
    raise BenchFailed(f"{one.child.name} did not tell that it was {doing}.")


def _seconds_of_a_step(one: Heard) -> float:
    moments = [at for at, _ in one.all("step_taken")]
    between = [later - earlier for earlier, later in pairwise(moments)]
    return round(statistics.median(between), 2) if between else 0.0
