"""`potluck resume`: end a pause."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "resume",
        help="end a pause",
        description="End the pause of the node that trains in this home. It catches up with the "
        "others first. If its schedule or quota still keeps it from training, the answer says so. "
        "Exit code 4 if no node trains here.",
        example="potluck resume\npotluck resume --json",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.trainer_client import ask_trainer
    from node.training.questions import RESUME

    resumed = ask_trainer(arguments, RESUME)
    waits = resumed["still_closed"]
    if waits:
        words = "The pause is over." if resumed["was_paused"] else "There was no pause to end."
        words += f" It still waits: {'; '.join(waits)}."
    else:
        words = "Going on." if resumed["was_paused"] else "It was not paused: it trains."
    if resumed.get("not_kept"):
        words += f" A restart pauses it again: the pause cannot be removed ({resumed['not_kept']})."
    Output.of(arguments).data(resumed, words)
    return 0
