"""`potluck leaderboard`: the contributions to the run, as the others confirm them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.output import (
    Output,
    as_json,
    columns_of,
    counted,
    folded,
    one_line,
    printable,
)

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

GATHERING_SECONDS = 60.0  # asking others takes up to 15, and adding up a long run some more
CHECKING_SECONDS = 240.0  # up to 15 for each of a few keepers on top

ALONE = "alone"  # this column is only there if somebody has made steps alone
SERVED = "served"  # and this one if somebody has served experts
WITNESSES = "witnesses"
COLUMNS = (
    *("", "who", "samples", ALONE, SERVED),
    *("averaged", "service", "longest", "devices", WITNESSES),
)
WHO = 1  # the column that is shortened if the terminal is narrow
LONGEST_NAME = 40  # characters; a username may have a hundred
SHORTEST_NAME = 12  # below this, lines instead of a table


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "leaderboard",
        help="show everybody's contribution to the run",
        description="Show everybody's contribution to this node's run: samples in steps of the "
        "run, bytes averaged for others, time of service, and the longest service without a break. "
        "The devices of one person are added up. Peers that helped without samples have a table of "
        "their own. Samples in steps that somebody made alone, from which the run continued, have "
        "a column of their own, and so have others' samples that a person's experts computed.\n\n"
        "Nobody's own word counts. Every peer signs a record of its steps. A step counts as most "
        "of the other peers confirm it, and never for more than this node has seen if it was "
        "there. The node asks the present peers for their records, and for records of peers that "
        "have left. A person's witnesses are the others who recorded a step with it: 12 of 14 "
        "means that 12 of them confirm all that is credited, and 2 say less of a step.\n\n"
        "With --check it also asks the peers that keep the run (`potluck backbone`, `potluck run "
        "start`) for their sums and the records behind them, adds up the same records, and shows "
        "the differences. Exit code 1 if there are any, or if there is no peer to check. If this "
        "node is the only one that keeps the run, it says so, with exit code 0: its own table "
        "comes from the records. Exit code 4 if no node trains or serves experts here.",
        example="potluck leaderboard\npotluck leaderboard --check\npotluck leaderboard --json",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the keepers' sums with the signed records",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.trainer_client import asking

    details = {"check": arguments.check}
    patience = CHECKING_SECONDS if arguments.check else GATHERING_SECONDS
    with asking(arguments, "trainer leaderboard", details, silence_seconds=patience) as answers:
        board = next(answers)
    if Output.of(arguments).json:
        print(as_json(board), flush=True)
    else:
        columns = columns_of(sys.stdout)
        for line in board_lines(board, columns):
            print(folded(printable(line), columns, "  "))
        for line in check_lines(board) if arguments.check else ():
            print(folded(printable(line), columns, "  "))
    return DONE if not arguments.check or is_proven(board) else FAILED


def is_proven(board: dict[str, Any]) -> bool:
    """Whether all the run's keepers agree with the records, and there was at least one. This node
    counts as one if it keeps records, since it has added them up itself."""
    checks = board["checks"]
    return bool(checks or board["keeps"]) and all(map(_agrees, checks))


def board_lines(board: dict[str, Any], columns: int | None = None) -> Iterator[str]:
    """For a person, on a terminal with this many columns."""
    records = "1 record" if board["records"] == 1 else f"{board['records']:,} records"
    seen = f"{board['seen_steps']:,} of them seen by this node"
    yield f"{board['run']}: {board['steps']:,} steps, {seen}; from {records}"
    if not (board["people"] or board["helpers"]):
        yield "Nothing can be credited yet: as far as this node knows, no step of this run was made"
        yield "by several people. If it has not entered the run yet, ask again later."
    if board["people"]:
        yield ""
        yield from _table(board["people"], columns)
    if _any_alone(board["people"]):
        yield ""
        yield "Alone: samples in steps that a person made alone, by that person's own word;"
        yield "the run continued from those steps."
    if board["helpers"]:
        yield ""
        yield "Helpers, without samples:"
        yield from _table(board["helpers"], columns)
    if _any_served([*board["people"], *board["helpers"]]):
        yield ""
        yield "Served: samples of others that a person's experts computed, by the word of those who"
        yield "trained with them. Several servers of one sample have a part of it each."
    if board["unheard"]:
        yield ""
        count = len(board["unheard"])
        asked = counted(board["asked"], "peer")
        yield f"{count} of {asked} gave no record; steps that only they saw may be missing."


def check_lines(board: dict[str, Any]) -> Iterator[str]:
    """The results of checking the keepers."""
    from node.core.display_name import short

    yield ""
    if board["keeps"] and not board["checks"]:
        yield (
            "Checked: nothing. This node keeps the run's records itself, and no other peer here "
            "does. The figures above are the sums of the signed records."
        )
    elif not board["checks"]:
        yield "Checked: nothing. No other peer here keeps this run's records."
    for check in board["checks"]:
        who = f"the keeper {short(check['keeper'])}"
        if check["trouble"]:
            yield f"Not checked: {who}. {one_line(check['trouble'])}"
            continue
        what = f"{check['steps']:,} steps, {check['pages']:,} pages of records"
        if _agrees(check):
            people = (
                "1 person's sum is" if check["people"] == 1 else f"{check['people']:,} sums are"
            )
            yield f"Checked: {who} ({what}): {people} what the signed records add up to."
        else:
            yield f"WRONG: {who} ({what}) differs from the signed records:"
            for words in check["differences"]:
                yield f"  {one_line(words)}"
            if check["without"]:
                yield f"  it cannot show {check['without']:,} of the pages behind its sums"
        if check["left_out"]:
            yield f"  {check['left_out']:,} pages that are here are not in its sums (yet)"


def _agrees(check: dict[str, Any]) -> bool:
    return not (check["trouble"] or check["differences"] or check["without"])


def _table(ranks: list[dict[str, Any]], columns: int | None) -> Iterator[str]:
    rows = [_row(one) for one in ranks]
    absent = {
        name
        for name, is_there in (
            (ALONE, _any_alone),
            (SERVED, _any_served),
            (WITNESSES, _any_witnessed),
        )
        if not is_there(ranks)
    }
    shown = [place for place, name in enumerate(COLUMNS) if name not in absent]
    table = [[row[place] for place in shown] for row in (COLUMNS, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    if columns is not None:
        others = sum(widths) - widths[WHO] + 2 * (len(widths) - 1)
        widths[WHO] = min(widths[WHO], columns - others)
        if widths[WHO] < min(SHORTEST_NAME, max(len(row[WHO]) for row in table)):
            yield from _list(rows)
            return
    for row in table:
        cells = [
            _who(cell, width).ljust(width) if place == WHO else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _list(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """For a terminal with no room for a table."""
    for rank, name, *figures in rows:
        yield f"{rank}. {name}"
        told = zip(COLUMNS[2:], figures, strict=True)
        yield "  " + ", ".join(f"{what} {figure}" for what, figure in told if figure)


def _any_alone(ranks: list[dict[str, Any]]) -> bool:
    return any(one["alone_steps"] for one in ranks)


def _any_served(ranks: list[dict[str, Any]]) -> bool:
    return any(one["served_samples"] for one in ranks)


def _any_witnessed(ranks: list[dict[str, Any]]) -> bool:
    return any(one["witnesses"] for one in ranks)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    from node.core.caps.units import in_words

    return (
        f"{one['rank']:,}",
        _name(one) + (" (you)" if one["is_me"] else ""),
        f"{one['samples']:,}",
        f"{one['alone_samples']:,}" if one["alone_steps"] else "",
        f"{one['served_samples']:,}" if one["served_samples"] else "",
        in_words(one["averaged_bytes"]),
        _hours(one["service_seconds"]),
        _hours(one["longest_seconds"]),
        f"{one['devices']:,}",
        f"{one['confirming']:,} of {one['witnesses']:,}" if one["witnesses"] else "",
    )


def _name(one: dict[str, Any]) -> str:
    """A person's name has a provider and a colon; in an open run it is a peer."""
    from node.core.display_name import label

    person, peer = one["person"], one["peer"]
    is_peer = ":" not in person and len(person) > LONGEST_NAME
    verified = "" if is_peer else person
    return label(person if is_peer else peer, verified, one["name"], LONGEST_NAME)


def _who(text: str, width: int) -> str:
    """Shorten the names, and keep the end of the key."""
    if len(text) <= width:
        return text
    names, _, key = text.rpartition(" …")
    return f"{names[: max(width - len(key) - 3, 0)]}… …{key}" if names else text[:width]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600.0:,.1f} h" if seconds >= 360.0 else f"{seconds / 60.0:.1f} min"
