"""`potluck completion bash|zsh|fish`: a script that teaches the shell our commands and flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands in the shell",
        description="Print a script that makes the shell complete potluck's commands and flags.",
        example="bash:  source <(potluck completion bash)\n"
        "zsh:   source <(potluck completion zsh)\n"
        "fish:  potluck completion fish > ~/.config/fish/completions/potluck.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    from node.commands.catalogue import build_parser
    from node.commands.completion_scripts import script_for

    script = script_for(arguments.shell, build_parser())
    Output.of(arguments).data({"shell": arguments.shell, "script": script}, script.rstrip("\n"))
    return 0
