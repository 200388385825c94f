"""`scripts/simulate KIND`: simulates many nodes on one machine, in virtual time.

`KINDS` names the module of each kind. Its `add_parser(kinds)` also names what runs it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from typing import Final

from lab import NOTHING_MEASURED
from node.app.cli.output import Output
from node.app.cli.parser import CommandParser
from node.app.main import Stopped

KINDS: Final = {"dht": "command_dht", "moshpit": "command_moshpit", "run": "command_run"}


def parser(kinds: Iterable[str] = KINDS) -> CommandParser:
    """Of these kinds. Only their modules are loaded, for some load torch."""
    program = CommandParser(
        prog="scripts/simulate",
        description="Simulate thousands of nodes on this machine, in virtual time.",
        example="scripts/simulate dht --nodes 1000",
    )
    subparsers = program.add_subparsers(
        dest="kind", metavar="KIND", required=True, parser_class=CommandParser
    )
    for kind in kinds:
        importlib.import_module(f"lab.simulate.{KINDS[kind]}").add_parser(subparsers)
    return program


def run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.simulate(arguments)
    except Stopped:
        Output.of(arguments).say(NOTHING_MEASURED)
        raise
    return code
