"""Flags that several of `potluck auth`'s commands have, and how they are said."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.commands.parser import CommandParser, Subparsers

ROLES = ("volunteer", "backbone", "moderator", "monitor")

# A page that a person can read; a program asks for more with --limit.
LINES_SHOWN = 50

HOW = (
    "The command asks the running server through its local socket; when the server is stopped it "
    "works on the database itself, and says the same."
)


def group(
    actions: Subparsers, name: str, *, help: str, description: str, example: str
) -> Subparsers:
    from node.commands.parser import CommandParser

    parser = actions.add_parser(name, help=help, description=description, example=example)
    group: Subparsers = parser.add_subparsers(
        dest="act", metavar="ACT", required=True, parser_class=CommandParser
    )
    return group


def add_roles(parser: CommandParser, help: str) -> None:
    parser.add_argument("--role", action="append", choices=ROLES, help=help)


def add_reason(
    parser: CommandParser, *, flag: str = "--reason", help: str = "why; kept in the audit log"
) -> None:
    parser.add_argument(flag, dest="reason", default="", metavar="TEXT", help=help)


def add_limit(parser: CommandParser) -> None:
    from node.commands.parser import positive_count

    parser.add_argument(
        "--limit",
        type=positive_count,
        default=LINES_SHOWN,
        metavar="N",
        help=f"print at most so many ({LINES_SHOWN})",
    )


def add_bootstrap(parser: CommandParser) -> None:
    from node.commands.configured import add_setting_flag

    add_setting_flag(parser, "dht.bootstrap")
    add_settings(parser)


def add_settings(parser: CommandParser) -> None:
    """Of commands that read auth.toml themselves, as `auth serve` has it."""
    parser.add_argument(
        "--settings", metavar="FILE", help="read settings from this file instead of auth.toml"
    )
