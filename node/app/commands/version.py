"""`potluck version`: the version of potluck. The quickest command, which a test ensures."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from node.app.cli.output import Output
from node.net import VERSION

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    subparsers.add_parser(
        "version",
        help="print the version",
        description="Print the version of potluck; with --json also Python's and the platform's.",
        example="potluck version --json",
    )


def run(arguments: argparse.Namespace) -> int:
    python = ".".join(str(part) for part in sys.version_info[:3])
    Output.of(arguments).data(
        {"potluck": VERSION, "python": python, "platform": sys.platform},
        f"potluck {VERSION}",
    )
    return 0
