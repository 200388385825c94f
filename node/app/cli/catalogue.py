"""The list of commands, and how a command line finds its own.

A command is a module of `node.app.commands` with `add_parser(subparsers)` and
`run(arguments) -> int`. Only the module of the typed command is imported; help, completion and a
mistyped name need all of them. The flags that every command has are added here, so no module can
forget them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence

from node.app.cli.parser import CommandParser

COMMANDS = (
    "demo",
    "version",
    "id",
    "ping",
    "login",
    "whoami",
    "join",
    "experts",
    "pause",
    "resume",
    "leave",
    "peers",
    "leaderboard",
    "page",
    "logs",
    "service",
    "listen",
    "status",
    "doctor",
    "dht",
    "auth",
    "config",
    "plan",
    "export",
    "run",
    "backbone",
    "completion",
)

DESCRIPTION = (
    "Train one neural network together, over home internet, with computers that have nothing in "
    "common."
)

Run = Callable[[argparse.Namespace], int]


def parse(argv: Sequence[str]) -> tuple[Run, argparse.Namespace]:
    """The function that runs this command line, and its arguments. WrongUse for a wrong one."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    named = next((word for word in argv if not word.startswith("-")), None)
    if named is None and "--version" in argv:
        named, argv = "version", ["version", *(word for word in argv if word != "--version")]
    parser = build_parser([named] if named in COMMANDS else COMMANDS)
    arguments = parser.parse_args(argv)
    module = importlib.import_module(f"node.app.commands.{arguments.command}")
    run: Run = module.run
    return run, arguments


def build_parser(names: Sequence[str] = COMMANDS) -> CommandParser:
    """The parser of `potluck` with these commands."""
    parser = CommandParser(
        prog="potluck",
        description=DESCRIPTION,
        example="potluck listen\npotluck ping /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name in names:
        importlib.import_module(f"node.app.commands.{name}").add_parser(subparsers)
    add_flags_of_all(parser)
    parser.add_argument("--version", action="store_true", help="the same as the command `version`")
    return parser


def flags_of_all() -> tuple[str, ...]:
    """The flags that every command has."""
    return tuple(_FLAGS_OF_ALL)


def add_flags_of_all(parser: CommandParser) -> None:
    """Add to each parser the flags that every command has, unless its module brought its own."""
    group = parser.add_argument_group("flags of every command")
    known = parser.flags()
    for flag, options in _FLAGS_OF_ALL.items():
        if flag not in known:
            # A subcommand's default would overwrite a flag given before its name.
            group.add_argument(flag, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]
    for choices in parser.subcommands():
        for subparser in choices.values():
            add_flags_of_all(subparser)


_FLAGS_OF_ALL: dict[str, dict[str, object]] = {
    "--json": {"action": "store_true", "help": "print JSON for programs on stdout"},
    "--home": {
        "metavar": "DIRECTORY",
        "help": "keep the key, settings and socket in this folder instead of the platform's places "
        "(POTLUCK_HOME)",
    },
    "--config": {
        "metavar": "FILE",
        "help": "read settings from this TOML file instead of potluck.toml (POTLUCK_CONFIG)",
    },
    "--debug": {"action": "store_true", "help": "show tracebacks (POTLUCK_DEBUG)"},
}
