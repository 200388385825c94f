"""`potluck pause`: stop computing, and stay in the run."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:

    parser = subparsers.add_parser(
        "pause",
        help="stop computing for a while, and stay in the run",
        description="Pause the node that trains in this home until `potluck resume`, or for the "
        "time of --for. It computes nothing, and the others neither wait for it nor fetch from it. "
        "It finishes the current batch or round first, which takes seconds on most links; a "
        "download of the state stops, and continues afterwards. Memory that only computing needs "
        "is released, also a GPU's; the model and its optimizer's state stay (`potluck leave` "
        "releases everything). A pause survives a restart. A new pause replaces it. Exit code 4 if "
        "no node trains here.",
        example="potluck pause\npotluck pause --for 2h\npotluck pause --for 30min --json",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=time_span,
        metavar="TIME",
        help="end the pause after this: 90s, 30min, 2h, 1d (until `potluck resume`)",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.trainer_client import ask_trainer
    from node.training.questions import PAUSE

    details = {} if arguments.seconds is None else {"seconds": arguments.seconds}
    paused = ask_trainer(arguments, PAUSE, details)
    words = str(paused["words"]).capitalize()
    if paused.get("instead_of"):
        words += f" (before: {paused['instead_of']})"
    back = "`potluck resume` ends it" + (" earlier." if paused["until"] else ".")
    if paused.get("not_kept"):
        back += f" A restart would end it, because it cannot be saved ({paused['not_kept']})."
    Output.of(arguments).data(paused, f"{words}. {back}")
    return 0


# An argparse type: a duration as a person types it: 90s, 30min, 2h, 1d, 1h30m.


SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
LONGEST_CHARACTERS = 32
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(s|min|m|h|d|w)\s*")


def time_span(text: str) -> float:
    """In seconds; a bare number is refused, because its unit is easily mistaken."""
    rest, seconds = text.strip().lower(), 0.0
    while rest and len(text) <= LONGEST_CHARACTERS:
        found = _PART.match(rest)
        if found is None:
            break
        seconds += float(found[1]) * SECONDS[found[2]]
        rest = rest[found.end() :]
    if rest or seconds <= 0.0:
        raise argparse.ArgumentTypeError(
            f"{text[:LONGEST_CHARACTERS]!r} is not a length of time, such as 90s, 30min, 2h or 1d"
        )
    return seconds
