"""How a moderator's act reaches the auth server: through its socket, or straight into the database.

Both ways run the same function, `node.app.moderation.perform`, over the same `Moderation`, so the
same act answers the same. A running server performs the act itself: it alone writes into its
database, and it knows of the act at once. If none runs, the act is done in this process, under the
lock that a server holds, so that no server starts in its middle.

If a socket does not answer, the server may still run. It may be starting or stopped (SIGSTOP), or
the socket may be another home's. Only the lock shows that no server runs. While the lock is held
and the socket is silent, nothing is written, and the command says so.
"""

from __future__ import annotations

import argparse
import getpass
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.app.auth_places import AuthPlaces, find_auth_places, hold_auth_lock
from node.core.control_client import NodeWentAway, NoRunningNode, ask_once
from node.core.running_lock import AlreadyRunning
from protocols.errors import DeadlineExceeded, PotluckError, Refused, Unreachable

# A server that starts, or another moderator's command, holds the lock for less than this.
LOCK_SECONDS = 5.0
LOCK_LOOK_SECONDS = 0.05


class ServerDoesNotAnswer(Unreachable):
    """A server runs, and does not answer at all, in time, or to the end."""


class NoAuthServerHere(PotluckError):
    """There is no database in this home."""

    exit_code = 2


def auth_places_for(arguments: argparse.Namespace) -> AuthPlaces:
    """Where the auth server of this command line keeps its files."""
    return find_auth_places(
        os.environ,
        home=getattr(arguments, "home", None),
        settings_file=getattr(arguments, "settings", None),
    )


def perform_act(
    places: AuthPlaces, act: str, asked: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The answer to an act, and whether it was done in this process because no server runs."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return _ask_server(places.socket, act, asked), False
        except NoRunningNode:
            check_there_is_one(places)
        try:
            with hold_auth_lock(places):
                return _act_here(places, act, asked), True
        except AlreadyRunning as holder:
            if time.monotonic() > deadline:
                raise _server_does_not_answer(places, holder) from None
        time.sleep(LOCK_LOOK_SECONDS)


def moderator() -> str:
    """The user at this terminal, for the audit log. Behind sudo, the user who called it."""
    name = os.environ.get("SUDO_USER") or _user_name()
    return f"local:{name}"


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return f"uid-{os.getuid()}"


def _ask_server(socket: Path, act: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    from node.app.moderation import ACTS

    question = {"act": act, "arguments": dict(asked), "actor": moderator()}
    seconds = ACTS[act].longest_seconds
    try:
        answer: dict[str, Any] = ask_once(socket, "auth", question, silence_seconds=seconds)
    except NodeWentAway:
        raise ServerDoesNotAnswer(
            "The auth server ended during the request, which may or may not have been carried out.",
            why="It was stopped or has crashed; its log says which.",
            advice="`potluck auth audit` shows what was done. It is safe to repeat the command.",
        ) from None
    except DeadlineExceeded:
        raise ServerDoesNotAnswer(
            f"The auth server has not answered for {seconds:g} seconds; it may still carry out the "
            "request.",
            why="It may be stopped (SIGSTOP), swapping, or waiting for its disk.",
            advice="Look at its process. If you have to kill it, these commands work on its "
            "database afterwards.",
        ) from None
    return answer


def _act_here(places: AuthPlaces, act: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Perform it in this process, which holds the lock: no server runs."""
    from auth.server.moderation import Moderation
    from auth.server.store import open_store
    from node.app.moderation import perform

    with open_store(places.folder) as store:
        return perform(Moderation(store), act, asked, moderator())


def check_there_is_one(places: AuthPlaces) -> None:
    """NoAuthServerHere if there is none in this home; Refused if it is another user's."""
    check_owner(places)
    try:
        places.database.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise NoAuthServerHere(
            "There is no auth server here.",
            why=f"{places.database} does not exist.",
            advice="`potluck auth init` makes one. If it has a home of its own, name it: --home "
            "DIRECTORY.",
        ) from None


def check_owner(places: AuthPlaces) -> None:
    """Refused if the folder is another user's: files of ours in it would stop the server."""
    try:
        owner = places.folder.stat().st_uid
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        raise _another_users(places, "another user") from None
    if hasattr(os, "geteuid") and owner != os.geteuid():
        raise _another_users(places, _name_of(owner))


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"#{user}"


def _another_users(places: AuthPlaces, owner: str) -> Refused:
    user = owner if " " not in owner else "USER"
    return Refused(
        f"This auth server's files belong to {owner}.",
        why=f"{places.folder} would get files that the server cannot write.",
        advice=f"Run the command as that user: sudo -u {user} potluck auth …",
    )


def _server_does_not_answer(places: AuthPlaces, holder: AlreadyRunning) -> ServerDoesNotAnswer:
    return ServerDoesNotAnswer(
        "The auth server runs, but cannot be asked: nothing was done.",
        why=f"Nothing answers at {places.socket}, and {holder.why.removeprefix('It holds ')} is "
        f"held. {holder.what}",
        advice="If it is just starting, try again. If it is stuck, stop it (`kill` with that pid): "
        "these commands then work on its database.",
    )


def asked(act: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The typed arguments that the act takes."""
    from node.app.moderation import ACTS

    fields = ACTS[act].__struct_fields__
    return {name: typed[name] for name in fields if typed.get(name) is not None}


def provider_ids(places: AuthPlaces) -> list[str]:
    """The providers that a bare name could belong to; none if the settings cannot be read.

    A moderator who has to exclude somebody must not have to mend auth.toml first.
    """
    from auth.errors import AuthError
    from auth.server.settings import read_settings

    try:
        return [provider.id for provider in read_settings(places.settings_file).providers]
    except AuthError:
        return []
