"""`potluck bench join`: from `potluck join` on a clean home to the first accepted sample."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

WHAT = {
    "imports": "the interpreter, and what a node needs",
    "login": "a key, and a pass for the enrolment code",
    "node": "the node listens",
    "meeting": "the others are met",
    "definition": "the definition is fetched and verified",
    "torch": "torch is loaded, which has begun at once: what is left of it",
    "cost": "what the run takes is worked out, and told",
    "build": "the model is built",
    "benchmark": "this machine is measured",
    "catch_up": "the run's state is fetched and verified",
    "accepted": "a batch is computed, and others make a step with it",
}


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count

    width = max(map(len, WHAT))
    parts = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parser = kinds.add_parser(
        "join",
        help="from `potluck join` on a clean home to the first accepted sample",
        description="Start a closed run on this machine (an auth server, an organiser's peer that "
        "keeps its state, volunteers who train), and let newcomers with an enrolment code and an "
        "empty home join it, one after the other. The seconds of each part, in order:\n\n"
        f"{parts}\n\n"
        "Figures are medians. The run's processes share the first processor where there are "
        "several, and the newcomer has the others: it would have a machine of its own. Exit code 1 "
        "if it takes 20 seconds or more.",
        example="potluck bench join\npotluck bench join --repeat 5 --volunteers 2 --json",
    )
    add_flag(parser, "--repeat", positive_count, 3, "how many newcomers")
    add_flag(parser, "--volunteers", positive_count, 1, "who train already")
    add_flag(parser, "--width", positive_count, 204, "of the model, by default 25 MB of state")
    add_flag(parser, "--batch", positive_count, 128, "samples of a step")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.closed_run import Size
    from node.bench.first_sample import FirstSampleEffort, measure_first_sample
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = FirstSampleEffort(
        repeats=arguments.repeat,
        volunteers=arguments.volunteers,
        size=Size(width=arguments.width, batch=arguments.batch),
    )

    async def measure() -> int:
        result = await measure_first_sample(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


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
