"""`potluck bench interference`: what a bulk transfer costs the training in the same process."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

WHAT = {
    "alone": "nothing is transferred",
    "elsewhere": "the same bytes between two other processes",
    "receiving": "into the process that trains",
    "sending": "out of the process that trains",
}


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count, positive_number, positive_seconds

    arms = "\n".join(f"  {arm:9}  {what}" for arm, what in WHAT.items())
    parser = kinds.add_parser(
        "interference",
        help="what a transfer costs the training in the same process",
        description="Train a small model in a thread of a process whose node receives or sends "
        "at a steady rate meanwhile, and count the steps per second, in short windows that take "
        f"turns:\n\n{arms}\n\n"
        "`kept` is the rate beside the transfer as a share of the rate alone. If the training's "
        "threads take every core, the CPU time of the process at the other end is taken off the "
        "rate alone, since no volunteer's machine spends it. Figures are medians. Exit code 1 if "
        "less than 0.9 is kept.",
        example="potluck bench interference --json\n"
        "potluck bench interference --threads 2\n"
        "potluck bench interference --width 64 --batch 2",
    )
    add_flag(parser, "--megabytes", positive_number, 50.0, "transferred per second")
    add_flag(parser, "--threads", positive_count, 1, "of the training")
    add_flag(parser, "--width", positive_count, 128, "of the model")
    add_flag(parser, "--layers", positive_count, 4, "of the model")
    add_flag(parser, "--batch", positive_count, 8, "samples of a step")
    add_flag(parser, "--turns", positive_count, 15, "windows of each kind")
    how_long = "how long each window is"
    add_flag(parser, "--seconds", positive_seconds, 1.0, how_long, metavar="SECONDS")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.interference import InterferenceEffort, measure_interference
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = InterferenceEffort(
        megabytes=arguments.megabytes,
        seconds=arguments.seconds,
        turns=arguments.turns,
        threads=arguments.threads,
        width=arguments.width,
        layers=arguments.layers,
        batch=arguments.batch,
    )

    async def measure() -> int:
        result = await measure_interference(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    lines = [f"{'':10}{'steps/s':>9}{'kept':>8}{'least':>8}{'most':>8}{'MB/s':>8}"]
    for arm, told in result["arms"].items():
        lines.append(
            f"{arm:10}{told['steps_per_s']:>9}{told['kept']:>8}{told['kept_least']:>8}"
            f"{told['kept_most']:>8}{told['MB_per_s']:>8}  {WHAT[arm]}"
        )
    lines.append(
        f"A step takes {result['step_ms']} ms alone; {result['kept']} is kept "
        f"(at least {result['bar_kept']:g})."
    )
    return "\n".join(lines)
