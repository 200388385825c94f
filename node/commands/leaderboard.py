"""`potluck leaderboard`: who gave what to the run, as the others confirm it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from node.commands.output import Output, printable

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

GATHERING_SECONDS = 60.0  # asking others takes up to 15, and adding up a long run some more

COLUMNS = ("", "who", "samples", "averaged for others", "service", "longest", "devices")
LONGEST_NAME = 24  # characters; who has no name is shown by the end of the peer id


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "leaderboard",
        help="show who gave what to the run",
        description="What everybody gave to the run in which the node of this home trains: samples "
        "that are in steps of the run, bytes averaged for others, hours of service, and the "
        "longest service without a break. The devices of one person are added up. Who brings no "
        "samples and helps the others is listed in a table of its own.\n\n"
        "Nobody's own word counts: every peer signs a record of the steps that it was in, and of "
        "each step that is taken which most of the others confirm. The node asks the peers that "
        "are there for their records, and for those that they keep of others who have left. Exit "
        "code 4 when no node trains here.",
        example="potluck leaderboard\npotluck leaderboard --json",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.commands.steering import asking

    with asking(arguments, "trainer leaderboard", silence_seconds=GATHERING_SECONDS) as answers:
        board = next(answers)
    if Output.of(arguments).json:
        print(json.dumps(board), flush=True)
        return 0
    for line in board_lines(board):
        print(printable(line))
    return 0


def board_lines(board: dict[str, Any]) -> Iterator[str]:
    """For a person."""
    records = "1 record" if board["records"] == 1 else f"{board['records']:,} records"
    yield f"{board['run']}: {board['steps']:,} steps, from {records}"
    if not (board["people"] or board["helpers"]):
        yield "Nothing can be credited yet: as far as this node knows, no step of this run was made"
        yield "by several people. If it has not entered the run yet, ask again when it has."
    if board["people"]:
        yield ""
        yield from _table(board["people"])
    if board["helpers"]:
        yield ""
        yield "Helpers, who bring no samples:"
        yield from _table(board["helpers"])
    if board["unheard"]:
        yield ""
        count = len(board["unheard"])
        yield f"{count} of {board['asked']} peers gave no record; what they saw may be missing."


def _table(ranks: list[dict[str, Any]]) -> Iterator[str]:
    rows = [COLUMNS, *(_row(one) for one in ranks)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    for row in rows:
        cells = [
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    from node.caps.units import in_words

    name = one["person"]
    name = f"…{name[-8:]}" if len(name) > LONGEST_NAME else name
    return (
        f"{one['rank']:,}",
        f"{name} (you)" if one["is_me"] else name,
        f"{one['samples']:,}",
        in_words(one["averaged_bytes"]),
        _hours(one["service_seconds"]),
        _hours(one["longest_seconds"]),
        f"{one['devices']:,}",
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600.0:,.1f} h" if seconds >= 360.0 else f"{seconds / 60.0:.1f} min"
