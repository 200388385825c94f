"""`potluck run`: the organiser's commands, from an empty folder to a run that others join.

This module defines the commands and their help texts. Their work is in run_init.py, run_check.py,
run_sign.py, run_start.py and run_invite.py; the run itself, for organiser and volunteer alike, is
in node/run/.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.app.cli.parser import CommandParser, Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands.run_start import add_start

    parser = subparsers.add_parser(
        "run",
        help="define a run, start it, and invite others to it",
        description="A run is the training of one model by many machines. Its organiser describes "
        "it in run.toml, signs this file, starts the first peer and invites others. "
        "docs/organisers.md goes from an idea to a running collaboration in fifteen minutes.",
        example="potluck run init poem\npotluck run check poem\npotluck run start poem\n"
        "potluck run invite poem",
    )
    actions = parser.add_actions("action")
    _add_init(actions)
    _add_check(actions)
    _add_sign(actions)
    add_start(actions)
    _add_invite(actions)


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"node.app.commands.run_{arguments.action}")
    code: int = module.run(arguments)
    return code


def add_folder(parser: CommandParser, default: str | None = ".") -> None:
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        default=default,
        help="the run's folder, as `run init` made it (this one)",
    )


def add_trust(parser: CommandParser) -> None:
    parser.add_argument(
        "--trust-module",
        metavar="FILE",
        action="append",
        default=[],
        help="trust this Python file as the run's module of the same name; may be given several "
        "times",
    )


def add_peer_flags(
    parser: CommandParser, *further_settings: str, without: Container[str] = ()
) -> None:
    """The flags of every peer of a run: its display, trusted modules, limits, network and name.
    `without`: settings that mean nothing to this command."""
    from node.app.cli.configured import add_setting_flag
    from node.core.caps.settings import CAP_KEYS

    parser.add_argument(
        "--plain",
        action="store_true",
        help="print one line for each event instead of the screen, as it does if stdout is no "
        "terminal",
    )
    add_trust(parser)
    network = ("network.listen", "network.announce", "dht.bootstrap", *further_settings)
    own = ("tracking.track", "identity.name", "identity.key_file")
    for key in (*CAP_KEYS, *network, *own):
        if key not in without:
            add_setting_flag(parser, key)


def _add_init(actions: Subparsers) -> None:
    from node.run.template import RECIPES

    init = actions.add_parser(
        "init",
        help="write a new run.toml, with everything in it explained",
        description="Write DIR/run.toml with every key explained, and make the organiser's key if "
        "there is none. Unchanged, the run trains a small model on data that need no download; two "
        "weak processor cores are enough. An existing run is not touched.\n\n"
        "--recipe chooses the model, with the optimizer, schedule and batch that go with it:\n"
        + "\n".join(f"  {name:<8}{recipe.trains}" for name, recipe in RECIPES.items()),
        example="potluck run init poem\npotluck run init ~/runs/poem --name bengali-poems\n"
        "potluck run init words --recipe albert",
    )
    init.add_argument(
        "folder", metavar="DIR", help="the run's folder; it is made if it does not exist"
    )
    init.add_argument("--name", metavar="NAME", help="the run's name (by default the folder's)")
    init.add_argument(
        "--recipe",
        choices=tuple(RECIPES),
        default="gpt",
        help="what the run trains before anything in run.toml is changed (gpt)",
    )


def _add_check(actions: Subparsers) -> None:
    from node.app.cli.parser import positive_count, positive_number

    check = actions.add_parser(
        "check",
        help="find every mistake in run.toml, and show what the run costs a volunteer",
        description="Show every mistake in DIR/run.toml with its place. If there is none, show "
        "what the run costs a volunteer: memory, disk, and traffic per hour. It reads a batch of "
        "each data source, and trains on one. To estimate the traffic it computes for two seconds "
        "and assumes that the volunteers' machines are like this one. Exit code 2 if there is a "
        "mistake, 4 if the data cannot be read.",
        example="potluck run check poem\npotluck run check poem --volunteers 30\n"
        "potluck run check poem --offline\npotluck run check poem --samples-per-s 40 --json",
    )
    add_folder(check)
    check.add_argument(
        "--volunteers",
        type=positive_count,
        default=8,
        metavar="N",
        help="the number of volunteers (8)",
    )
    check.add_argument(
        "--samples-per-s",
        type=positive_number,
        metavar="N",
        help="the samples that each of them computes in a second (by default as many as this "
        "machine, which is measured)",
    )
    check.add_argument(
        "--offline",
        action="store_true",
        help="do not open the data: neither read a batch nor train on it",
    )
    add_trust(check)


def _add_sign(actions: Subparsers) -> None:
    sign = actions.add_parser(
        "sign",
        help="sign run.toml with the organiser's key",
        description="Check DIR/run.toml and sign it, byte by byte, with the organiser's key. Then "
        "peers give it out, and volunteers verify it. Peers that start later take the newest "
        "signed definition and refuse an older one. Peers that are training are told within a few "
        "minutes, and keep theirs until they start again. To sign an unchanged file again changes "
        "nothing.\n\n"
        "Peers with a different model, optimizer, schedule, batch or codec cannot train together. "
        "So such a change is refused while the run is being trained and afterwards, unless you add "
        "--apart: use it when everybody has left, before they start again.",
        example="potluck run sign poem",
    )
    add_folder(sign)
    sign.add_argument(
        "--apart",
        action="store_true",
        help="sign a change that separates the peers that take it from those that do not",
    )
    add_trust(sign)


def _add_invite(actions: Subparsers) -> None:
    from node.app.views.auth_moments import life

    invite = actions.add_parser(
        "invite",
        help="print the invite for `potluck join`",
        description="Print an invite: the run's name, addresses of peers, and the fingerprint of "
        "the organiser's key, by which volunteers recognise the definition. On a terminal it "
        "prints a QR code, too. The addresses are those of the node that runs in this home, unless "
        "--bootstrap names others; several are better than one.\n\n"
        "It is no secret, unless the run is closed and --new-code puts an enrolment code into it: "
        "then send it to one person, privately. For --new-code the auth server has to be on this "
        "machine.",
        example="potluck run invite poem\npotluck run invite poem --expires 30d\n"
        "potluck run invite poem --new-code --name alice --file alice.invite",
    )
    add_folder(invite)
    invite.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a peer of the run to join through, instead of this home's node; may be given several "
        "times",
    )
    invite.add_argument(
        "--expires",
        type=life,
        metavar="TIME",
        help="how long it is valid: 12h, 7d, 4w (for ever; with a code in it, as long as the code)",
    )
    invite.add_argument(
        "--new-code",
        action="store_true",
        help="put a new enrolment code for one use into it, from the auth server on this machine",
    )
    invite.add_argument(
        "--name", metavar="NAME", help="with --new-code: the person's name, shown as code:NAME"
    )
    invite.add_argument(
        "--file", metavar="FILE", help="write it to this new file, which only you can read"
    )
    invite.add_argument(
        "--qr",
        action=argparse.BooleanOptionalAction,
        help="draw a QR code, or not (by default on a terminal)",
    )
