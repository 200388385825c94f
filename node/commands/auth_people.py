"""`potluck auth allow, deny, revoke, spread, list`: what can be typed about people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.commands.auth_flags import (
    HOW,
    ROLES,
    add_bootstrap,
    add_limit,
    add_reason,
    add_roles,
    add_settings,
)

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

STATES = ("allowed", "denied", "revoked")


def add_parsers(actions: Subparsers) -> None:
    _add_allow(actions)
    _add_ends(actions)
    _add_list(actions)


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
