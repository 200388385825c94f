"""`potluck run`: the organiser's commands, from an empty folder to a run that others join.

This module defines the commands and their help texts. Their work is in run_init.py, run_check.py,
run_sign.py, run_start.py and run_invite.py; the run itself, for organiser and volunteer alike, is
in node/run/.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.app.commands.parser import CommandParser, Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands.parser import CommandParser
    from node.app.commands.run_start import add_start

    parser = subparsers.add_parser(
        "run",
        help="define a run, start it, and invite others to it",
        description="A run is one training of one model by many machines. Its organiser writes "
        "what is trained into run.toml, signs it, starts the first peer and invites others. "
        "docs/organisers.md goes from an idea to a running collaboration in fifteen minutes.",
        example="potluck run init poem\npotluck run check poem\npotluck run start poem\n"
        "potluck run invite poem",
    )
    actions: argparse._SubParsersAction[CommandParser] = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=CommandParser
    )
    _add_init(actions)
    _add_check(actions)
    _add_sign(actions)
    add_start(actions)
    _add_invite(actions)


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"node.app.commands.run_{arguments.action}")
    code: int = module.run(arguments)
    return code


def add_folder(parser: CommandParser) -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        default=".",
        help="the run's folder, as `run init` made it (this one)",
    )


def add_trust(parser: CommandParser) -> None:
    parser.add_argument(
        "--trust-module",
        metavar="FILE",
        action="append",
        default=[],
        help="this Python file may be executed as the module of its name that the run asks for; "
        "may be given several times",
    )


def _add_init(actions: Subparsers) -> None:
    init = actions.add_parser(
        "init",
        help="write a new run.toml, with everything in it explained",
        description="Write DIR/run.toml with every key explained, and make the organiser's key if "
        "there is none. As it is written it trains a small GPT on the source code of Python's "
        "standard library, which two weak processor cores can do. A run that is there already is "
        "not touched.",
        example="potluck run init poem\npotluck run init ~/runs/poem --name bengali-poems",
    )
    init.add_argument("folder", metavar="DIR", help="a folder for the run; made if it is missing")
    init.add_argument("--name", metavar="NAME", help="the run's name (that of the folder)")


def _add_check(actions: Subparsers) -> None:
    from node.app.commands.parser import positive_count, positive_number

    check = actions.add_parser(
        "check",
        help="find every mistake in run.toml, and say what the run costs a volunteer",
        description="Say everything that is wrong in DIR/run.toml, each with its place; and, if "
        "nothing is, what a volunteer pays: memory, disk, and traffic per hour. A batch of each "
        "source of the data is read, and a pass made over one. For the traffic "
        "this machine computes for two seconds, and the volunteers are taken to be like it. "
        "Exit code 2 if there is a mistake, 4 if the data cannot be read.",
        example="potluck run check poem\npotluck run check poem --volunteers 30\n"
        "potluck run check poem --offline\npotluck run check poem --samples-per-s 40 --json",
    )
    add_folder(check)
    check.add_argument(
        "--volunteers",
        type=positive_count,
        default=8,
        metavar="N",
        help="how many there are (8)",
    )
    check.add_argument(
        "--samples-per-s",
        type=positive_number,
        metavar="N",
        help="what each of them computes (what this machine does, which is measured)",
    )
    check.add_argument(
        "--offline",
        action="store_true",
        help="do not open the data: neither read a batch nor make a pass over it",
    )
    add_trust(check)


def _add_sign(actions: Subparsers) -> None:
    sign = actions.add_parser(
        "sign",
        help="make run.toml binding, under the organiser's key",
        description="Check DIR/run.toml and sign it, byte by byte, with the organiser's key. From "
        "then on it is what peers give out and volunteers verify; one that was signed later takes "
        "its place at whoever starts after that, and an older one is refused. Those who train go "
        "on with theirs until they are started again, and are told of it within a few minutes. "
        "Signing what is signed already changes nothing.\n\n"
        "Who trains with another model, optimizer, schedule, batch or codec is apart from the "
        "others. So such a change of a run that is being trained, or has been, is refused, unless "
        "--apart says that it is meant: when everybody has left, and before they start again.",
        example="potluck run sign poem",
    )
    add_folder(sign)
    sign.add_argument(
        "--apart",
        action="store_true",
        help="sign it although those who take it will not train with those who have not",
    )
    add_trust(sign)


def _add_invite(actions: Subparsers) -> None:
    from node.app.commands.auth_moments import life

    invite = actions.add_parser(
        "invite",
        help="print what volunteers paste after `potluck join`",
        description="Print an invite: the run's name, where its peers are, and the fingerprint of "
        "the organiser's key, by which a volunteer knows the definition to be genuine. On a "
        "terminal there is a QR code as well. The addresses are those of the node that runs in "
        "this home, unless --bootstrap names others; several are better than one.\n\n"
        "It is no secret, unless the run is closed and --new-code puts an enrolment code into it: "
        "then it goes to one person, where nobody else reads. For that the auth server has to be "
        "on this machine.",
        example="potluck run invite poem\npotluck run invite poem --expires 30d\n"
        "potluck run invite poem --new-code --name alice --file alice.invite",
    )
    add_folder(invite)
    invite.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a peer of the run to join at, instead of this home's node; may be given several "
        "times",
    )
    invite.add_argument(
        "--expires",
        type=life,
        metavar="TIME",
        help="until when it is good: 12h, 7d, 4w (for ever; one with a code, as long as that)",
    )
    invite.add_argument(
        "--new-code",
        action="store_true",
        help="put a fresh enrolment code into it, good for one, of the auth server on this machine",
    )
    invite.add_argument(
        "--name", metavar="NAME", help="with --new-code: who it is for, shown as code:NAME"
    )
    invite.add_argument(
        "--file", metavar="FILE", help="write it into this new file, which only you can read"
    )
    invite.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        help="draw a QR code, or not (if this is a terminal)",
    )
