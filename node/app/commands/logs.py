"""`potluck logs`: the events of the node that trains here."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from node.app.cli.output import Output, as_json, columns_of, hung, printable

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.parser import positive_count

    parser = subparsers.add_parser(
        "logs",
        help="show the node's events, and follow them",
        description="Show the events of the node that trains in this home since its start, one "
        "line each: the last two thousand. With --follow it continues until Ctrl-C, or until the "
        "node ends. Exit code 4 if no node trains here.",
        example="potluck logs\npotluck logs -f\npotluck logs --last 20 --json",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="continue with new events")
    parser.add_argument(
        "--last", type=positive_count, metavar="N", help="only the last N lines (all)"
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.trainer_client import asking
    from node.core.control_client import ANSWER_SECONDS, NodeWentAway
    from node.training.questions import LINES

    details = {"follow": arguments.follow}
    if arguments.last is not None:
        details["last"] = arguments.last
    silence = None if arguments.follow else ANSWER_SECONDS
    is_json = Output.of(arguments).json
    try:
        with asking(arguments, LINES, details, silence_seconds=silence) as answers:
            for lines in answers:
                for line in lines:
                    _show(line["time"], line["words"], is_json=is_json)
    except NodeWentAway:
        if not arguments.follow:
            raise
    return 0


def _show(moment: float, words: str, *, is_json: bool) -> None:
    if is_json:
        print(as_json({"time": moment, "words": words}), flush=True)
        return
    clock = time.strftime("%H:%M:%S", time.localtime(moment))
    print(hung(f"{clock} ", printable(words), columns_of(sys.stdout)), flush=True)
