"""`scripts/bench join`: from `potluck join` on a clean home to the first accepted sample.

A closed run is going on: an auth server, an organiser's peer that keeps the state, and volunteers
who train. Then `potluck join` is run with an invite and an enrolment code, in an empty home. The
clock starts before that process does, and stops when it reports that others have made a step with
its samples.

The parts are the newcomer's events with their times; they follow one another without gaps
(`PARTS`).

The last part also depends on the run: no sample is accepted before the present step is full. So the
time of a step of this run is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import node.net.network  # noqa: F401 - a node imports it when it starts; its time is not ours
from lab import Talk
from lab.bench.closed_run import ClosedRun, Heard, Size, accepted, has, open_closed_run
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed
from node.training.happenings import (
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

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

BAR_SECONDS: Final = 20.0
STEPS_BEFORE: Final = 3  # of the others, before the newcomer: then the swarm is running

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
                say(f"a newcomer comes, {number + 1} of {effort.repeats}")
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


# Flags and output


WHAT = {
    "imports": "the interpreter, and what a node needs",
    "login": "a key, and a pass for the enrolment code",
    "node": "the node listens",
    "meeting": "the others are met",
    "definition": "the definition is fetched and verified",
    "torch": "torch is loaded; it began at once, and this is the rest",
    "cost": "the run's costs are computed and shown",
    "build": "the model is built",
    "benchmark": "this machine is measured",
    "catch_up": "the run's state is fetched and verified",
    "accepted": "a batch is computed, and the others make a step with it",
}


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    width = max(map(len, WHAT))
    parts = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parser = kinds.add_parser(
        "join",
        help="from `potluck join` on a clean home to the first accepted sample",
        description="Start a closed run on this machine (an auth server, an organiser's peer that "
        "keeps its state, volunteers that train), and let newcomers with an enrolment code and an "
        "empty home join it, one after another. The seconds of each part, in order:\n\n"
        f"{parts}\n\n"
        "Figures are medians. If there are several processors, the run's processes share the first "
        "and the newcomer has the others, because it would have a machine of its own. The exit "
        "code is 1 if it takes 20 seconds or more.",
        example="scripts/bench join\nscripts/bench join --repeat 5 --volunteers 2 --json",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--repeat", positive_count, 3, "how many newcomers")
    add_flag(parser, "--volunteers", positive_count, 1, "how many volunteers train already")
    add_flag(
        parser,
        "--width",
        positive_count,
        204,
        "the width of the model; the default makes 25 MB of state",
    )
    add_flag(parser, "--batch", positive_count, 128, "samples of a step")


def run(arguments: argparse.Namespace) -> int:
    from lab.bench.closed_run import Size

    effort = FirstSampleEffort(
        repeats=arguments.repeat,
        volunteers=arguments.volunteers,
        size=Size(width=arguments.width, batch=arguments.batch),
    )

    return report(arguments, partial(measure_first_sample, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = [
        f"{name:12}{seconds:>7.2f} s  {WHAT[name]}" for name, seconds in result["parts"].items()
    ]
    spread, megabytes = result["spread"], result["fetched_bytes"] / 1e6
    return "\n".join(
        [
            *lines,
            f"{'in all':12}{result['seconds']:>7.2f} s  ({spread['min']:.2f} to "
            f"{spread['max']:.2f}; less than {result['bar_seconds']:g})",
            f"{megabytes:.1f} MB were fetched; a step of the others took "
            f"{result['step_seconds']:.2f} s",
        ]
    )
