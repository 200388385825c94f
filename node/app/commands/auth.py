"""`potluck auth`: the moderators' commands, from `auth init` to excluding a person.

This module defines the commands, flags and help texts. The acts are in node/app/moderation.py;
auth_acts.py brings an act to the running server, or into a stopped one's database; auth_view.py
has the answers for a person.

A moderator who wants to exclude somebody is in a hurry. So every act says what it did, what it did
not do, and the command that comes next.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from node.app.commands.auth_moments import life

if TYPE_CHECKING:
    from node.app.commands.parser import CommandParser, Subparsers


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
    from node.app.commands.parser import CommandParser

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
    from node.app.commands.parser import positive_count

    parser.add_argument(
        "--limit",
        type=positive_count,
        default=LINES_SHOWN,
        metavar="N",
        help=f"print at most so many ({LINES_SHOWN})",
    )


def add_bootstrap(parser: CommandParser) -> None:
    from node.app.commands.configured import add_setting_flag

    add_setting_flag(parser, "dht.bootstrap")
    add_settings(parser)


def add_settings(parser: CommandParser) -> None:
    """For commands that read auth.toml themselves, as `auth serve` does."""
    parser.add_argument(
        "--settings", metavar="FILE", help="read settings from this file instead of auth.toml"
    )


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands import auth_serve
    from node.app.commands.parser import CommandParser

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
    _add_allow(actions)
    _add_ends(actions)
    _add_list(actions)
    _add_codes(actions)
    _add_keys(actions)
    _add_invite(actions)
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
    }.get(act, "auth_acts")
    code: int = importlib.import_module(f"node.app.commands.{module}").run(arguments)
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
    from node.app.commands.auth_moments import since

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


STATES = ("allowed", "denied", "revoked")


def _add_allow(actions: Subparsers) -> None:
    allow = actions.add_parser(
        "allow",
        help="let somebody take part",
        description="Put a name on the list of those who may take part. A name is "
        "`provider:login`, such as github:alice; the login alone is enough where there is only "
        "one provider. Whoever proves to be that login at that provider gets in from then on. "
        "Somebody who is allowed already gets the roles that are given. It also takes back a "
        f"`deny`, and a `revoke` of a person, a peer or a token. {HOW}",
        example="potluck auth allow github:alice\n"
        "potluck auth allow github:bob --role backbone --role volunteer\n"
        "potluck auth allow alice --reason 'asked in the forum, 21 November'",
    )
    allow.add_argument(
        "target",
        metavar="NAME",
        help="provider:login, such as github:alice; or the peer id or serial that was revoked",
    )
    add_roles(allow, "as what: may be given several times; by default volunteer")
    allow.add_argument(
        "--rebind",
        action="store_true",
        help="let go of whoever has this name now: all its tokens are revoked, and the next one "
        "who logs in under it has it; for a login that has changed hands",
    )
    add_settings(allow)
    add_reason(allow)


def _add_ends(actions: Subparsers) -> None:
    deny = actions.add_parser(
        "deny",
        help="take somebody off the list, and what they hold with it",
        description="Take a name off the list of those who may take part, and revoke every token "
        "of theirs that lives: within a minute every node refuses them and closes what it had "
        f"open with them. `potluck auth allow` puts them back. {HOW}",
        example="potluck auth deny github:alice --reason 'asked to leave'",
    )
    deny.add_argument("name", metavar="NAME", help="provider:login, such as github:alice")
    revoke = actions.add_parser(
        "revoke",
        help="throw somebody out, everywhere, within a minute",
        description="Revoke a person, a peer or one token. It goes into the signed, numbered list "
        "that every node follows: within a minute each one refuses them and closes what it had "
        "open with them. A revoked person can neither log in nor renew, with any key; a revoked "
        "peer not with that key; a revoked token takes nothing else along. `potluck auth allow` "
        "takes it back.\n\n"
        "When the server is stopped, the new list is signed here and stored in the swarm's "
        "directory through the run's endpoints. Exit code 4 when it is revoked here and nobody "
        "could be told.",
        example="potluck auth revoke github:alice --reason 'sends garbage'\n"
        "potluck auth revoke 12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8",
    )
    revoke.add_argument(
        "target",
        metavar="NAME|PEER|SERIAL",
        help="a name, a peer id, or the serial of a token as `potluck auth list` shows them",
    )
    for parser in (deny, revoke):
        add_reason(parser)
    spread = actions.add_parser(
        "spread",
        help="store the revocations in the directory again",
        description="Sign nothing new: take the newest list of revocations and store it in the "
        "swarm's directory through the run's endpoints, as `revoke` does when the server is "
        "stopped. For when nobody could be reached at that time. Exit code 4 when nobody can be "
        "reached now.",
        example="potluck auth spread\n"
        "potluck auth spread --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    for parser in (deny, revoke, spread):
        add_bootstrap(parser)


def _add_list(actions: Subparsers) -> None:
    listing = actions.add_parser(
        "list",
        help="show who may take part, and who does",
        description="Show the accounts: their roles, whether they are allowed, denied or revoked, "
        "when they were last seen, and how many tokens of theirs live. With a name, that account "
        "with each of its tokens. At most --limit lines are printed, and how many more there are.",
        example="potluck auth list\n"
        "potluck auth list --state denied\n"
        "potluck auth list --tokens --json\n"
        "potluck auth list github:alice",
    )
    which = listing.add_mutually_exclusive_group()
    which.add_argument("name", metavar="NAME", nargs="?", help="only this account, with its tokens")
    which.add_argument(
        "--tokens",
        action="store_true",
        help="instead of accounts: every token that lives, and which peer holds it",
    )
    which.add_argument(
        "--revocations",
        action="store_true",
        help="instead of accounts: which names, peers and tokens are revoked, and until when "
        "nodes are told",
    )
    listing.add_argument("--role", choices=ROLES, help="only accounts with this role")
    listing.add_argument("--state", choices=STATES, help="only accounts in this state")
    add_limit(listing)


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
    from node.app.commands.parser import positive_count

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
