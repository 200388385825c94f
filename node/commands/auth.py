"""`potluck auth`: the moderators' commands, from `auth init` to throwing somebody out.

This module and auth_people.py, auth_secrets.py are the grammar: what can be typed, and what each
command says about itself. The acts themselves are in node/moderating.py; how an act reaches the
running server, or a stopped one's database, is in auth_acting.py; what a person reads is in
auth_view.py.

Easy to get wrong: `potluck auth` is also typed in a hurry, by somebody who wants another one out.
Every act says what it did, what it did not do, and the command that comes next.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from node.commands.auth_flags import HOW, add_limit, add_settings

if TYPE_CHECKING:
    from node.commands.parser import CommandParser, Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.commands import auth_people, auth_secrets, auth_serve
    from node.commands.parser import CommandParser

    parser = subparsers.add_parser(
        "auth",
        help="run the server that decides who may take part, and moderate",
        description="The auth server decides who may take part in a run: it checks who somebody "
        "is, looks into the list of those allowed, and hands out tokens that live for an hour. "
        "These commands make it, run it and moderate it. docs/moderators.md goes through all of "
        f"it in ten minutes. {HOW}",
        example="potluck auth init\npotluck auth serve\npotluck auth allow github:alice",
    )
    actions: argparse._SubParsersAction[CommandParser] = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=CommandParser
    )
    _add_init(actions)
    auth_serve.add_parser(actions)
    _add_status(actions)
    auth_people.add_parsers(actions)
    auth_secrets.add_parsers(actions)
    _add_audit(actions)
    _add_backup(actions)


def run(arguments: argparse.Namespace) -> int:
    act = " ".join(filter(None, (arguments.action, getattr(arguments, "act", None))))
    module = {
        "init": "auth_init",
        "serve": "auth_serve",
        "status": "auth_status",
        "invite": "auth_invite",
        "deny": "auth_spread",
        "revoke": "auth_spread",
        "spread": "auth_spread",
        "keys withdraw": "auth_spread",
    }.get(act, "auth_acting")
    code: int = importlib.import_module(f"node.commands.{module}").run(arguments)
    return code


def _add_init(actions: Subparsers) -> None:
    init = actions.add_parser(
        "init",
        help="make an auth server here: settings, database, first key",
        description="Write auth.toml with every setting explained, make the database and the "
        "first auth key, and print the key's fingerprint and what to do next. Nothing has to be "
        "answered: what is not given is guessed and can be changed in auth.toml. Done twice it "
        "changes nothing: what is there stays, what is missing is made.",
        example="potluck auth init\n"
        "potluck auth init --run bengali-albert --public-url https://auth.example.org\n"
        "potluck auth init --endpoint /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    init.add_argument(
        "--run",
        metavar="NAME",
        help="the run that tokens are for; by default named after this machine",
    )
    init.add_argument(
        "--public-url",
        metavar="URL",
        help="where volunteers reach the server, such as https://auth.example.org",
    )
    init.add_argument(
        "--endpoint",
        action="append",
        metavar="ADDRESS",
        help="a node of the run, as `potluck listen` prints it, through which others join; may be "
        "given several times",
    )
    add_settings(init)


def _add_status(actions: Subparsers) -> None:
    actions.add_parser(
        "status",
        help="show how the running auth server is",
        description="Ask the running auth server how it is: where it listens, how many tokens of "
        "its live, until when its certificate is good, and which identity providers do not answer. "
        "Exit code 4 when none runs.",
        example="potluck auth status\npotluck auth status --json",
    )


def _add_audit(actions: Subparsers) -> None:
    from node.commands.auth_moments import since

    audit = actions.add_parser(
        "audit",
        help="show who did what, or check that nobody has changed that record",
        description="Show the audit log, the newest first: every join, refusal, renewal, "
        "revocation and moderator's act, with the reason. Records are chained by their hashes; "
        "--verify goes through all of them, finds any edit, and prints the last hash: keep it "
        "elsewhere and give it with --head, and a log that was cut short or written anew shows "
        "too.",
        example="potluck auth audit\n"
        "potluck auth audit --name github:alice --since 2d\n"
        "potluck auth audit --verify",
    )
    audit.add_argument("--verify", action="store_true", help="check the whole chain of hashes")
    audit.add_argument(
        "--head",
        metavar="NUMBER:HASH",
        help="with --verify: what an earlier --verify printed, which the log must still lead to",
    )
    audit.add_argument("--name", metavar="NAME", help="only what concerns this account")
    audit.add_argument(
        "--act",
        dest="of_act",
        metavar="ACT",
        help="only records of this act, such as joined, renewed, refused, allowed, revoked",
    )
    audit.add_argument(
        "--since",
        type=since,
        metavar="TIME",
        help="only what is newer: 30min, 12h, 7d, or a date such as 2026-11-21",
    )
    add_limit(audit)


def _add_backup(actions: Subparsers) -> None:
    backup = actions.add_parser(
        "backup",
        help="copy database and keys into a new folder",
        description="Copy the database, as of one moment, and the auth keys into a new folder "
        "that only you can read, while the server runs or not. The folder is a whole one: put in "
        "the place of the server's, it is the server as of then. Whoever has it can sign tokens: "
        "keep it like a key.",
        example="potluck auth backup\npotluck auth backup /mnt/stick/auth-2026-11-21",
    )
    backup.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="where to, a folder that is not there yet; by default beside the database's, named by "
        "the time",
    )
