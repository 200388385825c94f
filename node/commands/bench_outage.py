"""`potluck bench outage`: a volunteer whose network goes, whose machine sleeps, whose address
changes: how long until it is back by itself."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

USUAL = ("stopped:5", "stopped:40", "pulled:3", "pulled:60", "swallowed:60", "moved:0")


def add_parser(kinds: Subparsers) -> None:
    parser = kinds.add_parser(
        "outage",
        help="a volunteer's network goes, its machine sleeps, its address changes",
        description="Start a closed run on this machine, with three volunteers in network "
        "namespaces of their own (as root, on Linux), and let one of them have a trouble after "
        "another:\n\n"
        "  stopped    its process is stopped, as by a lid that is closed\n"
        "  pulled     its interface is down\n"
        "  swallowed  its interface is up, and nothing arrives anywhere\n"
        "  moved      its address is another one from now on\n\n"
        "Nobody helps it back. Told is how long after each trouble's end others have made a step "
        "with its samples, how long the others were without a step, and whether all have made the "
        f"same steps. Without TROUBLE: {', '.join(USUAL)}. Exit code 1 if one takes more than 30 s "
        "to be back, or anybody's steps differ.",
        example="potluck bench outage\npotluck bench outage pulled:600 --json\n"
        "potluck bench outage stopped:120 moved:0",
    )
    parser.add_argument(
        "troubles",
        metavar="TROUBLE",
        nargs="*",
        help="which, a colon, and for how many seconds: pulled:60",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.bench.outage import OutageEffort, measure_outage, trouble
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = OutageEffort(tuple(trouble(one) for one in arguments.troubles or USUAL))

    async def measure() -> int:
        result = await measure_outage(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    for one in result["troubles"]:
        differs = (
            f"; NOT THE SAME STEPS: {one['differing_steps']}" if one["differing_steps"] else ""
        )
        lines.append(
            f"{one['trouble']:15}back after {one['back_seconds']:.1f} s; the others were at most "
            f"{one['others_longest_without_step_seconds']:.1f} s without a step (usually "
            f"{one['others_step_seconds']:.1f} s){differs}"
        )
        lines += [f"    {told}" for told in one["told"]]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
