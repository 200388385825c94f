"""`potluck auth`: the moderators' commands, from `auth init` to excluding a person.

This module defines the commands, flags and help texts. The acts are in node/app/moderation.py;
node/app/auth_acts.py brings an act to the running server, or into a stopped one's database;
node/app/views/auth_view.py has the answers for a person.

A moderator who wants to exclude somebody is in a hurry. So every act says what it did, what it did
not do, and the command that comes next.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import TYPE_CHECKING, Any

from node.app.views.auth_moments import life

if TYPE_CHECKING:
    from node.app.auth_places import AuthPlaces
    from node.app.cli.parser import CommandParser, Subparsers


ROLES = ("volunteer", "backbone", "moderator", "monitor")

# A page that a person can read; a program asks for more with --limit.
LINES_SHOWN = 50

HOW = (
    "The command asks the running server through its local socket. When the server is stopped, the "
    "command works on the database itself, with the same answers."
)


def group(
    actions: Subparsers, name: str, *, help: str, description: str, example: str
) -> Subparsers:
    parser = actions.add_parser(name, help=help, description=description, example=example)
    return parser.add_actions("act")


def add_roles(parser: CommandParser, help: str) -> None:
    parser.add_argument("--role", action="append", choices=ROLES, help=help)


def add_reason(
    parser: CommandParser, *, flag: str = "--reason", help: str = "why; kept in the audit log"
) -> None:
    parser.add_argument(flag, dest="reason", default="", metavar="TEXT", help=help)


def add_limit(parser: CommandParser) -> None:
    from node.app.cli.parser import positive_count

    parser.add_argument(
        "--limit",
        type=positive_count,
        default=LINES_SHOWN,
        metavar="N",
        help=f"print at most this many ({LINES_SHOWN})",
    )


def add_bootstrap(parser: CommandParser) -> None:
    from node.app.cli.configured import add_setting_flag

    add_setting_flag(parser, "dht.bootstrap")
    add_settings(parser)


def add_settings(parser: CommandParser) -> None:
    """For commands that read auth.toml themselves, as `auth serve` does."""
    parser.add_argument(
        "--settings", metavar="FILE", help="read settings from this file instead of auth.toml"
    )


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands import auth_serve

    parser = subparsers.add_parser(
        "auth",
        help="run and moderate the server that decides who may take part",
        description="The auth server decides who may take part in a run: it checks people's "
        "identity and the list of allowed names, and hands out tokens that are valid for an hour. "
        "These commands make it, run it and moderate it. docs/moderators.md goes through all of it "
        f"in ten minutes. {HOW}",
        example="potluck auth init\npotluck auth serve\npotluck auth allow github:alice",
    )
    actions = parser.add_actions("action")
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
    }.get(act)
    if act == "allow" and arguments.rebind:  # it revokes as well
        module = "auth_spread"
    if module is None:
        return _perform(arguments, act.replace(" ", "-"))
    code: int = importlib.import_module(f"node.app.commands.{module}").run(arguments)
    return code


def _perform(arguments: argparse.Namespace, act: str) -> int:
    """Perform an act that is nothing but one, and print the answer. Returns the exit code."""
    from pathlib import Path

    from node.app.auth_acts import asked, auth_places_for, perform_act, provider_ids
    from node.app.cli import exit_codes
    from node.app.cli.output import Output
    from node.app.invite_file import check_new, write_new
    from node.app.views.auth_view import show

    if act == "audit" and arguments.verify:
        act = "audit-verify"
    places = auth_places_for(arguments)
    file = None
    if act == "codes-new" and arguments.file:
        file = Path(arguments.file).expanduser()
        check_new(file)  # before the code is made, since it is shown only once
    typed = {**_typed_for(arguments, act, places), "providers": provider_ids(places)}
    answer, _ = perform_act(places, act, asked(act, typed))
    if file is not None:
        write_new(file, f"{answer['code']}\n")
        answer["file"] = str(file.absolute())
    show(act, answer, Output.of(arguments))
    return exit_codes.FAILED if answer.get("sound") is False else exit_codes.DONE


def _typed_for(arguments: argparse.Namespace, act: str, places: AuthPlaces) -> dict[str, Any]:
    from node.app.views.auth_moments import now_ms

    typed = dict(vars(arguments))
    if act == "list":
        _check_filters(arguments)
    if act == "backup":
        typed["folder"] = _backup_folder(arguments.folder, places)
    if act == "keys-rotate" and arguments.key_file is not None:
        typed["key_file"] = _absolute(arguments.key_file)
    if act == "audit" and arguments.since is not None:
        kind, ms = arguments.since
        typed["since_ms"] = ms if kind == "at" else now_ms() - ms
    return typed


def _check_filters(arguments: argparse.Namespace) -> None:
    from node.core.wrong_use import WrongUse

    other = arguments.name or arguments.tokens or arguments.revocations
    if other and (arguments.role or arguments.state):
        raise WrongUse(
            "--role and --state choose accounts, but the command asks for something else.",
            advice="Leave them out; or leave out NAME, --tokens or --revocations.",
        )


def _absolute(typed: str) -> str:
    """A running server has another working directory than this command."""
    from pathlib import Path

    return str(Path(typed).expanduser().absolute())


def _backup_folder(typed: str | None, places: AuthPlaces) -> str:
    if typed is not None:
        return _absolute(typed)
    now = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    return str(places.folder.with_name(f"{places.folder.name}-backup-{now}"))


def _add_init(actions: Subparsers) -> None:
    init = actions.add_parser(
        "init",
        help="make an auth server here: its settings, database and first key",
        description="Write auth.toml with every setting explained, make the database and the first "
        "auth key, and print the key's fingerprint and what to do next. It asks nothing: it "
        "guesses the settings that you do not give, and you can change them in auth.toml. It is "
        "safe to repeat: it makes only what is missing.",
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
        help="the address at which volunteers reach the server, such as https://auth.example.org",
    )
    init.add_argument(
        "--endpoint",
        action="append",
        metavar="ADDRESS",
        help="a node of the run to join through, as `potluck listen` prints it; "
        "may be given several times",
    )
    add_settings(init)


def _add_status(actions: Subparsers) -> None:
    actions.add_parser(
        "status",
        help="show the state of the running auth server",
        description="Show the state of the running auth server: the addresses that it listens on, "
        "the number of its valid tokens, when its certificate expires, and which identity "
        "providers do not answer. Exit code 4 if none is running.",
        example="potluck auth status\npotluck auth status --json",
    )


def _add_audit(actions: Subparsers) -> None:
    from node.app.views.auth_moments import since

    audit = actions.add_parser(
        "audit",
        help="show the audit log, or check that nobody has changed it",
        description="Show the audit log, the newest first: every join, refusal, renewal, "
        "revocation and moderator's act, with the reason. Records are chained by their hashes. "
        "--verify goes through all of them, finds any edit, and prints the last hash. Keep that "
        "elsewhere: with --head it also shows a log that was cut short or written anew.",
        example="potluck auth audit\n"
        "potluck auth audit --name github:alice --since 2d\n"
        "potluck auth audit --verify",
    )
    audit.add_argument("--verify", action="store_true", help="check the whole chain of hashes")
    audit.add_argument(
        "--head",
        metavar="NUMBER:HASH",
        help="with --verify: the hash that an earlier --verify printed; the log must still contain "
        "it",
    )
    audit.add_argument("--name", metavar="NAME", help="only records about this account")
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
        help="only newer records: 30min, 12h, 7d, or a date such as 2026-11-21",
    )
    add_limit(audit)


def _add_backup(actions: Subparsers) -> None:
    backup = actions.add_parser(
        "backup",
        help="copy the database and the keys into a new folder",
        description="Copy the database, as of one moment, and the auth keys into a new folder that "
        "only you can read. The server may be running. To restore it, put this folder in the place "
        "of the server's. Anyone who has it can sign tokens: keep it like a key.",
        example="potluck auth backup\npotluck auth backup /mnt/stick/auth-2026-11-21",
    )
    backup.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="the new folder, which must not exist yet; by default beside the database's, named by "
        "the time",
    )


STATES = ("allowed", "denied", "revoked")


def _add_allow(actions: Subparsers) -> None:
    allow = actions.add_parser(
        "allow",
        help="let a person take part",
        description="Put a name on the list of allowed names. A name is `provider:login`, such as "
        "github:alice; if there is only one provider, the login is enough. From then on the person "
        "with that login can log in. A person who is allowed already gets the given roles. The "
        f"command also takes back a `deny`, and a `revoke` of a person, a peer or a token. {HOW}",
        example="potluck auth allow github:alice\n"
        "potluck auth allow github:bob --role backbone --role volunteer\n"
        "potluck auth allow alice --reason 'asked in the forum, 21 November'",
    )
    allow.add_argument(
        "target",
        metavar="NAME",
        help="provider:login, such as github:alice; or a revoked peer id or serial",
    )
    add_roles(allow, "the person's role; may be given several times; by default volunteer")
    allow.add_argument(
        "--rebind",
        action="store_true",
        help="release the name: revoke all its tokens, and give it to the next person who logs in "
        "under it; for a login that has changed hands. The nodes are told as by `revoke`",
    )
    add_bootstrap(allow)
    add_reason(allow)


def _add_ends(actions: Subparsers) -> None:
    deny = actions.add_parser(
        "deny",
        help="take a person off the list, and revoke their tokens",
        description="Take a name off the list of allowed names, and revoke all its valid tokens: "
        "within a minute every node refuses this person and closes all connections with them. "
        f"`potluck auth allow` puts them back. {HOW}",
        example="potluck auth deny github:alice --reason 'asked to leave'",
    )
    deny.add_argument("name", metavar="NAME", help="provider:login, such as github:alice")
    revoke = actions.add_parser(
        "revoke",
        help="remove a person, a peer or a token from every node within a minute",
        description="Revoke a person, a peer or one token. It goes into the signed, numbered list "
        "that every node follows: within a minute each of them refuses the person, peer or token "
        "and closes its connections. A revoked person can neither log in nor renew, with any key; "
        "a revoked peer cannot with that key; a revoked token affects only itself. `potluck auth "
        "allow` takes it back.\n\n"
        "When the server is stopped, the new list is signed here and stored in the swarm's "
        "directory through the run's endpoints. Exit code 4 if it is revoked here but no node "
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
        description="Store the newest list of revocations in the swarm's directory through the "
        "run's endpoints, as `revoke` does when the server is stopped. Use it if no node could be "
        "reached at that time. It signs nothing new. Exit code 4 if no node can be reached now.",
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
        "when they were last seen, and how many valid tokens they have. With a name, show that "
        "account with each of its tokens. Print at most --limit lines, and how many more there "
        "are.",
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
        help="instead of accounts: every valid token, and the peer that holds it",
    )
    which.add_argument(
        "--revocations",
        action="store_true",
        help="instead of accounts: the revoked names, peers and tokens, and until when nodes are "
        "told",
    )
    listing.add_argument("--role", choices=ROLES, help="only accounts with this role")
    listing.add_argument("--state", choices=STATES, help="only accounts in this state")
    add_limit(listing)


def _add_codes(actions: Subparsers) -> None:
    codes = group(
        actions,
        "codes",
        help="make, show and cancel enrolment codes",
        description="An enrolment code lets a person in without any identity provider: anyone who "
        "has it can take part. Codes are stored hashed, so each is shown once, when it is made.",
        example="potluck auth codes new\npotluck auth codes list\npotluck auth codes cancel c3",
    )
    new = codes.add_parser(
        "new",
        help="make a code",
        description="Make an enrolment code and print it, once. With --name the person gets that "
        f"account; without it, each person gets a name made from the code's id. {HOW}",
        example="potluck auth codes new --name bob --life 2d\n"
        "potluck auth codes new --uses 30 --note 'workshop in Dhaka'\n"
        "potluck auth codes new --name bob --file bob.code",
    )
    from node.app.cli.parser import positive_count

    new.add_argument("--name", metavar="NAME", help="who it is for, such as bob or code:bob")
    new.add_argument(
        "--uses", type=positive_count, default=1, metavar="N", help="how many times it works (1)"
    )
    new.add_argument(
        "--life",
        type=life,
        default=life("7d"),
        metavar="TIME",
        help="how long it works: 30min, 12h, 7d (7d)",
    )
    add_roles(new, "the role that it gives; may be given several times; by default volunteer")
    add_reason(new, flag="--note", help="a note, kept with the code")
    new.add_argument(
        "--file",
        metavar="FILE",
        help="write the code to this new file, which only you can read, for --code-file",
    )
    listing = codes.add_parser(
        "list",
        help="show the valid codes",
        description="Show the codes that are still valid: their id, name, uses and expiry. The "
        "codes themselves are not stored.",
        example="potluck auth codes list\npotluck auth codes list --all --json",
    )
    listing.add_argument(
        "--all", action="store_true", help="also used-up, expired and cancelled codes"
    )
    add_limit(listing)
    cancel = codes.add_parser(
        "cancel",
        help="make a code invalid",
        description="Make a code invalid. People who came in with it stay in; use `potluck auth "
        "revoke` to remove them.",
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
        "it, so earlier invites still work.",
        example="potluck auth keys list\npotluck auth keys rotate",
    )
    keys.add_parser(
        "list",
        help="show the auth keys",
        description="Show each auth key: its id, its fingerprint, since when it signs, until when "
        "its signatures are valid, and whether it was withdrawn.",
        example="potluck auth keys list\npotluck auth keys list --json",
    )
    rotate = keys.add_parser(
        "rotate",
        help="change to a new auth key",
        description="Make a new auth key, endorsed by the present one. Nodes hear of it at once, "
        "and it signs after the overlap. The old key's signatures are valid until they expire, and "
        "earlier invites still work, so nobody notices. If somebody else may have the old key, "
        "withdraw it instead. After a restore from a backup that is older than the key that signed "
        "last, --key gives the server that key back; of several, the newest last.",
        example="potluck auth keys rotate --reason 'every year in November'\n"
        "potluck auth keys rotate --overlap 5min\n"
        "potluck auth keys rotate --key auth-broken/keys/5f3a9c01d2e4b677.key",
    )
    how = rotate.add_mutually_exclusive_group()
    how.add_argument(
        "--overlap",
        type=life,
        metavar="TIME",
        help="how long the old key still signs, while nodes hear of the new one (1h)",
    )
    how.add_argument(
        "--key",
        dest="key_file",
        metavar="FILE",
        help="instead of a new key, the one in this file, which signs at once: a key that nodes "
        "know and a restored backup does not",
    )
    withdraw = keys.add_parser(
        "withdraw",
        help="make everything invalid that a key has signed",
        description="Make everything invalid that this key has signed, on every node, within a "
        "minute. Use it if somebody else has the key. If the key is in use, a new one is made "
        "first, and signs at once. Nodes that are still allowed get new tokens by themselves while "
        "the server runs. Then send new invites: an invite that names the withdrawn key does not "
        "protect its reader from the other owner of that key.",
        example="potluck auth keys withdraw 5f3a9c01d2e4b677 --reason 'the backup was stolen'",
    )
    withdraw.add_argument(
        "key", metavar="KEY", help="the key's id, as `potluck auth keys list` shows it"
    )
    for parser in (rotate, withdraw):
        add_reason(parser)
    add_bootstrap(withdraw)


def _add_invite(actions: Subparsers) -> None:
    invite = actions.add_parser(
        "invite",
        help="print the invite for volunteers",
        description="Print the invite: the run's name, addresses to join at, the auth server's "
        "address, and the fingerprint of its key. It is no secret and lets nobody in by itself. "
        "With a code in it, anyone who has it can take part.",
        example="potluck auth invite\n"
        "potluck auth invite --new-code --name bob\n"
        "potluck auth invite --file potluck.invite",
    )
    invite.add_argument(
        "--new-code",
        action="store_true",
        help="make an enrolment code for one use within 7 days, and put it into the invite",
    )
    invite.add_argument("--name", metavar="NAME", help="with --new-code: the person's name")
    invite.add_argument(
        "--file", metavar="FILE", help="write the invite to this new file instead of printing it"
    )
    add_settings(invite)
