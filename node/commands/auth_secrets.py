"""`potluck auth codes, keys, invite`: what can be typed about what lets people in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.commands.auth_flags import (
    HOW,
    add_bootstrap,
    add_limit,
    add_reason,
    add_roles,
    add_settings,
    group,
)
from node.commands.auth_moments import life

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parsers(actions: Subparsers) -> None:
    _add_codes(actions)
    _add_keys(actions)
    _add_invite(actions)


def _add_codes(actions: Subparsers) -> None:
    codes = group(
        actions,
        "codes",
        help="make, show and cancel enrolment codes",
        description="An enrolment code lets somebody in without any identity provider: whoever "
        "has it takes part. Codes are kept hashed, so each is shown once, when it is made.",
        example="potluck auth codes new\npotluck auth codes list\npotluck auth codes cancel c3",
    )
    new = codes.add_parser(
        "new",
        help="make a code",
        description="Make an enrolment code and print it, once. With a name the person is that "
        f"account; without, each who comes gets a name made from the code's id. {HOW}",
        example="potluck auth codes new --name bob --life 2d\n"
        "potluck auth codes new --uses 30 --note 'workshop in Dhaka'\n"
        "potluck auth codes new --name bob --file bob.code",
    )
    from node.commands.parser import positive_count

    new.add_argument("--name", metavar="NAME", help="who it is for, such as bob or code:bob")
    new.add_argument(
        "--uses", type=positive_count, default=1, metavar="N", help="how often it works (1)"
    )
    new.add_argument(
        "--life",
        type=life,
        default=life("7d"),
        metavar="TIME",
        help="how long it works: 30min, 12h, 7d (7d)",
    )
    add_roles(new, "what it lets people be: may be given several times; by default volunteer")
    add_reason(new, flag="--note", help="what it is for; kept with it")
    new.add_argument(
        "--file",
        metavar="FILE",
        help="write it into this new file, which only you can read, for --code-file",
    )
    listing = codes.add_parser(
        "list",
        help="show the codes that work",
        description="Show the codes that still work: id, for whom, uses, until when. The "
        "codes themselves are not kept.",
        example="potluck auth codes list\npotluck auth codes list --all --json",
    )
    listing.add_argument(
        "--all", action="store_true", help="also those used up, expired or cancelled"
    )
    add_limit(listing)
    cancel = codes.add_parser(
        "cancel",
        help="let a code work no more",
        description="Let a code work no more. Whoever came in with it stays in; `potluck auth "
        "revoke` is for that.",
        example="potluck auth codes cancel c3",
    )
    cancel.add_argument("code", metavar="CODE", help="its id, such as c3, or the code itself")
    add_reason(cancel)


def _add_keys(actions: Subparsers) -> None:
    keys = group(
        actions,
        "keys",
        help="rotate, show and withdraw the keys that sign tokens",
        description="Tokens are signed with an auth key. A new key is endorsed by the one before "
        "it, so that every invite that is out goes on working.",
        example="potluck auth keys list\npotluck auth keys rotate",
    )
    keys.add_parser(
        "list",
        help="show the auth keys",
        description="Show each auth key: its id, its fingerprint, since when it signs, until when "
        "what it signed is accepted, and whether it was withdrawn.",
        example="potluck auth keys list\npotluck auth keys list --json",
    )
    rotate = keys.add_parser(
        "rotate",
        help="sign with a new key soon",
        description="Make a new auth key, endorsed by the present one. Nodes hear of it at once; "
        "it signs once the overlap is over, and what the old key signed counts until it expires: "
        "nobody notices, and invites that are out go on working. A key that somebody else may "
        "have is not rotated but withdrawn.",
        example="potluck auth keys rotate --reason 'every year in November'\n"
        "potluck auth keys rotate --overlap 5min",
    )

    rotate.add_argument(
        "--overlap",
        type=life,
        metavar="TIME",
        help="how long the old key still signs while nodes hear of the new one (1h)",
    )
    withdraw = keys.add_parser(
        "withdraw",
        help="let nothing count that a key has signed",
        description="For a key that somebody else has: nothing that it signed counts any more, on "
        "any node, within a minute. Where it is the one in use a new one is made first, and signs "
        "at once. Nodes that are still allowed get new tokens by themselves, while the server "
        "runs. Then send new invites: who has only one that names the withdrawn key cannot be "
        "protected from whoever else has that key.",
        example="potluck auth keys withdraw 5f3a9c01d2e4b677 --reason 'the backup was stolen'",
    )
    withdraw.add_argument("key", metavar="KEY", help="its id, as `potluck auth keys list` shows it")
    for parser in (rotate, withdraw):
        add_reason(parser)
    add_bootstrap(withdraw)


def _add_invite(actions: Subparsers) -> None:
    invite = actions.add_parser(
        "invite",
        help="print what volunteers need to find the run",
        description="Print the invite: the run's name, where to join, where the auth server is, "
        "and the fingerprint of its key. It is no secret and lets nobody in by itself, unless a "
        "code is put into it: then whoever has it takes part.",
        example="potluck auth invite\n"
        "potluck auth invite --new-code --name bob\n"
        "potluck auth invite --file potluck.invite",
    )
    invite.add_argument(
        "--new-code",
        action="store_true",
        help="make an enrolment code for one use within 7 days, and put it into the invite",
    )
    invite.add_argument("--name", metavar="NAME", help="with --new-code: who it is for")
    invite.add_argument(
        "--file", metavar="FILE", help="write the invite into this new file instead of printing it"
    )
    add_settings(invite)
