"""`potluck pause`: let the machine rest, and stay in the run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.commands.time_span import time_span

    parser = subparsers.add_parser(
        "pause",
        help="stop computing for a while, and stay in the run",
        description="Have the node that trains in this home compute nothing until `potluck "
        "resume`, or for as long as --for says. The others are told, and nobody waits for it or "
        "fetches from it. What is under way is finished first (a batch, a round), which takes "
        "seconds on most links; a state that is being fetched is left, and gone on with "
        "afterwards. Memory that only computing needs is given back, a GPU's as well; the model "
        "and its optimizer's state stay (`potluck leave` gives back everything). A pause outlives "
        "a restart. Pausing again replaces it. Exit code 4 when no node trains here.",
        example="potluck pause\npotluck pause --for 2h\npotluck pause --for 30min --json",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=time_span,
        metavar="TIME",
        help="go on by itself after this: 90s, 30min, 2h, 1d (until `potluck resume`)",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.commands.steering import ask_trainer
    from node.trainer.questions import PAUSE

    details = {} if arguments.seconds is None else {"seconds": arguments.seconds}
    paused = ask_trainer(arguments, PAUSE, details)
    words = str(paused["words"]).capitalize()
    if paused.get("instead_of"):
        words += f" (before: {paused['instead_of']})"
    back = "`potluck resume` goes on" + (" earlier." if paused["until"] else ".")
    if paused.get("not_kept"):
        back += f" A restart would end it: it cannot be written down ({paused['not_kept']})."
    Output.of(arguments).data(paused, f"{words}. {back}")
    return 0
