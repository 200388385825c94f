"""`potluck peers`: who else is in the run, and how each is reached."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from node.commands.output import Output, printable

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "peers",
        help="show who else is in the run, and how each is reached",
        description="The other peers of the run, as the node that trains in this home knows them: "
        "what each does, how it is reached (direct, relayed, or none: no link to it just now), "
        "how many samples it has for the next step and how fast they come. All of that is what "
        "they say of themselves; what does not count of it is said as well. Exit code 4 when no "
        "node trains here.",
        example="potluck peers\npotluck peers --json",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.commands.steering import ask_trainer
    from node.trainer.questions import VIEW

    view = ask_trainer(arguments, VIEW)
    if Output.of(arguments).json:
        print(json.dumps({"run": view["run"], "peers": view["peers"]}), flush=True)
        return 0
    _show(view)
    return 0


def _show(view: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True)
    peers = view["peers"]
    if not peers:
        console.print(f"{printable(view['run'])}: nobody else is in the run at the moment.")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("peer", no_wrap=True)
    for name in ("does", "way"):
        table.add_column(name)
    for name in ("step", "samples", "samples/s", "rtt"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for peer in peers:
        table.add_row(
            Text(printable(peer["name"] or peer["peer"])),
            peer["role"],
            peer["reach"],
            _number(peer["epoch"], 0),
            _number(peer["samples"], 0),
            _number(peer["samples_per_second"], 1),
            "" if peer["round_trip_ms"] is None else f"{peer['round_trip_ms']:.1f} ms",
            Text(printable(peer["ignored"])),
        )
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
