"""`potluck leave`: have the node that trains here leave its run and end."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

ENDING_SECONDS = 8.0  # five are promised


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "leave",
        help="leave the run, and end the node that trains",
        description="Have the node that trains in this home leave after the round that is under "
        "way, as the first Ctrl-C does, and wait until it has ended: five seconds at most. "
        "Exit code 4 when no node trains here.",
        example="potluck leave\npotluck leave --now",
    )
    parser.add_argument("--now", action="store_true", help="at once, without waiting for the round")


def run(arguments: argparse.Namespace) -> int:
    from node.commands.steering import asking
    from node.control_client import NodeWentAway
    from node.trainer.questions import LEAVE

    output = Output.of(arguments)
    details = {"at_once": arguments.now}
    with asking(arguments, LEAVE, details, silence_seconds=ENDING_SECONDS) as answers:
        next(answers)
        if not output.json:
            output.say("Leaving.")
        gave: dict[str, Any] = {}
        with suppress(NodeWentAway):  # that is how it says that it has ended
            while True:
                gave = next(answers)
    samples = f", having given {gave['samples']:,} samples" if gave.get("samples") else ""
    output.data({"left": True, **gave}, f"It has left{samples}, and ended.")
    return 0
