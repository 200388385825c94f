"""`potluck leave`: have the node that trains here leave its run and end."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.core.places import Places

ENDING_SECONDS = 3.0  # beyond those in which it may keep a last checkpoint, and say nothing


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "leave",
        help="leave the run, and end the node that trains",
        description="Make the node that trains in this home leave after the current round, as the "
        "first Ctrl-C does, and wait until it has ended: five seconds at most, or up to 27 if it "
        "keeps checkpoints, for the last one. It prints how much "
        "stays on the disk for the next time: the pass, records, what was seen of runs, and a "
        "partly downloaded state, which is removed when this home joins another run. Exit code 4 "
        "if no node trains here.",
        example="potluck leave\npotluck leave --now",
    )
    parser.add_argument(
        "--now", action="store_true", help="leave at once, without waiting for the round"
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.cli.interruption import KEEPING_SECONDS
    from node.app.trainer_client import asking
    from node.core.control_client import NodeWentAway
    from node.core.running_lock import has_let_go, holder_of
    from node.training.questions import LEAVE

    output = Output.of(arguments)
    details = {"at_once": arguments.now}
    seconds = KEEPING_SECONDS + ENDING_SECONDS
    places = configuration_for(arguments).places
    holder = holder_of(places.lock_file)
    with asking(arguments, LEAVE, details, silence_seconds=seconds) as answers:
        next(answers)
        if not output.json:
            output.say("Leaving.")
        gave: dict[str, Any] = {}
        with suppress(NodeWentAway):  # the node's connection closes when it has ended
            while True:
                gave = next(answers)
    has_ended = has_let_go(places.lock_file, holder, ENDING_SECONDS)
    kept = kept_in_home(places)
    done = [f"given {gave['samples']:,} samples"] if gave.get("samples") else []
    if gave.get("expert_rows"):
        done.append(f"computed {gave['expert_rows']:,} rows with its experts")
    what = f", having {' and '.join(done)}" if done else ""
    end = "and ended" if has_ended else "and is about to end"
    told = {"left": True, "ended": has_ended, **gave, **kept}
    output.data(told, f"It has left{what}, {end}.{words_of(kept)}")
    return 0


def kept_in_home(places: Places) -> dict[str, Any]:
    from node.run.kept import fetched_in_part_bytes, kept_bytes

    return {
        "kept_in": str(places.data_folder),
        "kept_bytes": kept_bytes(places),
        "fetched_in_part_bytes": fetched_in_part_bytes(places),
    }


def words_of(kept: dict[str, Any]) -> str:
    """The last line: the size of the kept files."""
    from node.core.caps.units import in_words

    words = f" {in_words(kept['kept_bytes'])} stay in {kept['kept_in']} for the next time"
    in_part = kept["fetched_in_part_bytes"]
    if in_part:
        words += f", {in_words(in_part)} of them of a state that was being fetched"
    return f"{words}."
