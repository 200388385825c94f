"""`potluck run invite`: the text that volunteers paste after `potluck join`.

It has the run's name, addresses of peers that are in it, and the fingerprint of the organiser's
key; for a closed run also the address of its auth server, and perhaps a code.

A run is closed because its peers have passes, not because an invite says so. So this home's auth
server or pass decides whether the invite names an auth server.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output
from node.app.invite_file import check_flags, with_words, write_new
from node.app.views.auth_moments import life, now_ms, utc
from node.core.wrong_use import WrongUse
from node.run.folder import RunFolder, organiser_here
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from auth.invites import Invite
    from auth.server.settings import Settings
    from node.app.auth_places import AuthPlaces
    from node.core.configuration import Configuration
    from node.run.invite import RunInvite

CODE_LIFE_MS = life("7d")
MOST_ADDRESSES = 6  # of this node: more make the invite longer, and are unlikely to help
STATUS_SECONDS = 5.0


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.views.qr import draw_qr
    from node.run.invite import RunInvite, write_invite

    output = Output.of(arguments)
    file = Path(arguments.file).expanduser() if arguments.file else None
    _check(arguments, file)
    configuration = configuration_for(arguments)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    folder.text()  # raises if it is not a run's folder
    signed = folder.signed(organiser_here(configuration.places, folder))
    if signed is None:
        raise WrongUse(
            f"The run in {folder.path} is not signed yet.",
            why="Volunteers verify the organiser's signature before anything else.",
            advice=f"`potluck run start {shlex.quote(arguments.folder)}` signs it and starts its "
            "first peer.",
        )
    name = signed.definition.name
    bootstrap = tuple(arguments.bootstrap) or addresses_of_node_here(configuration, name)
    access, code = access_to(configuration, arguments, name)
    expires_ms = _expiry(arguments, code)
    invite = RunInvite(name, bootstrap, signed.organiser, expires_ms, access)
    text = write_invite(invite)
    if file is not None:
        write_new(file, for_a_file(invite, text, code))
    output.data(
        {
            "invite": text,
            "run": name,
            "organiser": invite.organiser,
            "bootstrap": list(bootstrap),
            "expires_ms": expires_ms or None,
            "closed": access is not None,
            "auth_url": access.auth_url if access else None,
            "code_id": code["view"]["code_id"] if code else None,
            "code_expires_ms": code["view"]["expires_ms"] if code else None,
            "file": str(file.absolute()) if file else None,
        },
        str(file) if file else text,
    )
    if not output.json:
        draw_qr(text, wanted=wants_qr(arguments.qr, bootstrap))
        output.say(what_it_is_worth(invite, code))
    return 0


def _check(arguments: argparse.Namespace, file: Path | None) -> None:
    check_flags(arguments.name, new_code=arguments.new_code, file=file)
    arguments.bootstrap = peers_named(arguments.bootstrap)


def peers_named(bootstrap: Sequence[str]) -> list[str]:
    """The peers in --bootstrap, in their canonical form; WrongUse for more than an invite holds."""
    from auth.fields import MOST_ADDRESSES as MOST_IN_AN_INVITE
    from node.core.peer_address import parse_peer_address

    if len(bootstrap) > MOST_IN_AN_INVITE:
        raise WrongUse(
            f"{len(bootstrap)} addresses do not fit into an invite.",
            why=f"An invite has room for {MOST_IN_AN_INVITE}.",
            advice="Name a few peers that are always there: newcomers hear of the others from "
            "them.",
        )
    return [parse_peer_address(one).text for one in bootstrap]


def addresses_of_node_here(configuration: Configuration, run_name: str) -> tuple[str, ...]:
    """The addresses of the node that runs in this home, for others. WrongUse if it is in another
    run."""
    from node.core.control_client import NoRunningNode, ask_once

    try:
        status: Mapping[str, Any] = ask_once(
            configuration.places.control_socket, "status", {}, silence_seconds=STATUS_SECONDS
        )
    except NoRunningNode:
        raise WrongUse(
            "There is no address to put into the invite: no node runs in this home.",
            why="An invite names peers that are in the run.",
            advice="Start one (`potluck run start`), or name peers with --bootstrap ADDRESS.",
        ) from None
    its_run = run_in(status)
    if its_run not in ("", run_name):
        raise WrongUse(
            f"The node that runs here is in {its_run}, not in {run_name}.",
            why="An invite names peers that are in the run.",
            advice="For another run use another home: --home DIRECTORY; or name peers with "
            "--bootstrap ADDRESS.",
        )
    found = worth_naming(status.get("addresses", ()))
    if not found:
        raise PotluckError(
            "The node that runs here cannot be dialled: it has no address.",
            advice="Name other peers of the run with --bootstrap ADDRESS.",
        )
    return found


def run_in(status: Mapping[str, Any]) -> str:
    """The run that a node's status names; empty for a node in none, or in an unknown one."""
    training, membership = status.get("training") or {}, status.get("membership") or {}
    return str(training.get("run") or membership.get("run") or "")


def worth_naming(addresses: Iterable[str]) -> tuple[str, ...]:
    """A few addresses that others may reach, the likeliest first: names, then internet addresses,
    then local networks; addresses of this machine alone only if there is no other."""
    ranked = sorted(dict.fromkeys(addresses), key=_rank)
    others = [address for address in ranked if _rank(address) < _LOOPBACK]
    return tuple((others or ranked)[:MOST_ADDRESSES])


def wants_qr(wanted: bool | None, addresses: Iterable[str]) -> bool | None:
    """Whether to draw a QR code. By default not for an invite that only works on this machine,
    because codes are read by another one."""
    leads_elsewhere = any(_rank(address) < _LOOPBACK for address in addresses)
    return wanted if wanted is not None or leads_elsewhere else False


_NAMED, _GLOBAL, _PRIVATE, _LOOPBACK = range(4)


def _rank(address: str) -> int:
    kind, host = [*address.split("/"), "", "", ""][1:3]
    if kind.startswith("dns"):
        return _NAMED
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return _PRIVATE
    if number.is_loopback or number.is_link_local:
        return _LOOPBACK
    return _GLOBAL if number.is_global else _PRIVATE


def access_to(
    configuration: Configuration, arguments: argparse.Namespace, run_name: str
) -> tuple[Invite | None, Mapping[str, Any] | None]:
    """The access for a closed run, and the code that was made for it."""
    from auth.invites import Invite
    from node.core.access.pass_file import load_pass

    here = _auth_server_here(arguments, run_name)
    if here is not None:
        return here
    if arguments.new_code:
        raise WrongUse(
            "There is no code to put into the invite.",
            why=f"Only the auth server of {run_name} makes codes, and it is not in this home.",
            advice="Make the invite where `potluck auth serve` runs, or leave --new-code out.",
        )
    kept = load_pass(configuration.places.pass_file)
    if kept is None or kept.run != run_name:
        return None, None
    return Invite(run_name, (), kept.auth_url, kept.fingerprint, "", kept.pin), None


def _auth_server_here(
    arguments: argparse.Namespace, run_name: str
) -> tuple[Invite, Mapping[str, Any] | None] | None:
    here = auth_server_of(run_name, getattr(arguments, "home", None))
    if here is None:
        return None
    places, settings = here
    if not arguments.new_code:
        return local_access(places, settings)
    return local_access(places, settings, arguments.name, with_code=True)


def local_access(
    places: AuthPlaces, settings: Settings, name: str | None = None, *, with_code: bool = False
) -> tuple[Invite, Mapping[str, Any] | None]:
    """The access at the auth server of this home, and the code that was made for it."""
    from auth.invites import Invite
    from node.app.auth_acts import perform_act
    from node.app.commands.auth_invite import certificate_pin, fingerprint_to_pin, new_code

    keys: Sequence[Mapping[str, Any]] = perform_act(places, "keys-list", {})[0]["keys"]
    pinned = fingerprint_to_pin(keys, settings, now_ms())
    code = new_code(places, name) if with_code else None
    secret = code["code"] if code else ""
    pin = certificate_pin(settings)
    return Invite(settings.run, (), settings.public_url, pinned, secret, pin), code


def auth_server_of(run_name: str, home: str | None) -> tuple[AuthPlaces, Settings] | None:
    """The places and settings of this home's auth server, if it is this run's."""
    from node.app.auth_places import find_auth_places

    places = find_auth_places(os.environ, home=home)
    if not places.settings_file.exists():
        return None
    from auth.server.settings import read_settings

    settings = read_settings(places.settings_file)
    return (places, settings) if settings.run == run_name else None


def _expiry(arguments: argparse.Namespace, code: Mapping[str, Any] | None) -> int:
    """In whole seconds, as in the invite; 0: never."""
    moments = [now_ms() + arguments.expires] if arguments.expires else []
    if code is not None:
        moments.append(code["view"]["expires_ms"])
    return min(moments, default=0) // 1000 * 1000


def for_a_file(invite: RunInvite, text: str, code: Mapping[str, Any] | None) -> str:
    words = [
        f"# An invite to the run {invite.run}. Keep this file, and type:",
        "#   potluck join --invite-file FILE",
    ]
    return with_words(words, text, code)


def what_it_is_worth(invite: RunInvite, code: Mapping[str, Any] | None) -> str:
    until = f" It is valid until {utc(invite.expires_ms)}." if invite.expires_ms else ""
    if code is None:
        secret = "" if invite.access is None else " People log in when they join."
        return f"It is no secret. To take part: `potluck join INVITE`.{secret}{until}"
    view = code["view"]
    return (
        f"It contains a code ({view['code_id']}) for one use: send it privately. To take part: "
        f"`potluck join --invite-file FILE`.{until}"
    )
