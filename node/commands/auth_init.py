"""`potluck auth init`: from nothing to an auth server that can be started.

It makes what is missing of three things: the settings file, the database and the first key. What
is there is read, checked and left as it is, so typing it again is safe and ends the same.

Easy to get wrong: the settings file can say one thing and a flag another. Whatever was written
down stays; the flag is refused with the line that would have to be changed, and nothing is made.
"""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from node.auth_places import AuthPlaces, hold_auth_lock
from node.commands.auth_acting import auth_places_for, check_owner, moderator
from node.commands.output import Output
from node.private_file import replace_private_file
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from auth.server.settings import Settings, Value

DEFAULT_PORT = 8443  # of auth.toml's server.listen; one above 1023 needs no root
# What a run's name may be made of when we make it: it ends up in file names and on screens.
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Made:
    """What there is now, and which of it was not there before."""

    settings: Settings
    fingerprint: str
    new_settings: bool
    new_database: bool


def run(arguments: argparse.Namespace) -> int:
    output = Output.of(arguments)
    places = auth_places_for(arguments)
    if places.folder.exists():
        check_owner(places)
    made = _make(places, _given(arguments))
    output.data(_data(places, made), _text(places, made))
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Value]:
    """What the flags say, as settings; checked here, before anything is made."""
    from auth.server.settings import BY_NAME

    given: dict[str, Value] = {}
    for name, value in (
        ("run", arguments.run),
        ("public_url", arguments.public_url),
        ("endpoints", arguments.endpoint),
    ):
        if value is not None:
            try:
                given[name] = BY_NAME[name].check(value)
            except ValueError as error:
                flag = "--" + name.replace("_", "-").removesuffix("s")
                raise WrongUse(f"{flag} {error}.", why=f"It is {value!r}.") from None
    return given


def _make(places: AuthPlaces, given: Mapping[str, Value]) -> Made:
    from auth.server.settings import settings_in
    from node.commands.auth_toml import settings_text

    there = _settings_there(places)
    if there is None:
        text = settings_text({**_guesses(given), **_run_of_database(places), **given})
        settings = settings_in(text.encode(), places.settings_file)
    else:
        _check_agreement(there, given, places)
        settings = there
    # The database first: should the disk be full, nothing stands in the way of the next try.
    fingerprint, new_database = _database(places, settings)
    if there is None:
        replace_private_file(places.settings_file, text.encode())
    return Made(settings, fingerprint, there is None, new_database)


def _settings_there(places: AuthPlaces) -> Settings | None:
    from auth.server.settings import read_settings

    return read_settings(places.settings_file) if places.settings_file.exists() else None


def _check_agreement(there: Settings, given: Mapping[str, Value], places: AuthPlaces) -> None:
    for name, value in given.items():
        if getattr(there, name) != value:
            from node.commands.auth_toml import toml

            raise WrongUse(
                f"There is an auth.toml already, and it says something else about {name}.",
                why=f"{places.settings_file} was made earlier, and is not changed by `auth init`.",
                advice=f"Change the line there to `{name} = {toml(value)}`, or leave the flag out.",
            )


def _guesses(given: Mapping[str, Value]) -> dict[str, Value]:
    host = socket.gethostname().lower()
    name = _NOT_IN_A_NAME.sub("-", host.partition(".")[0]).strip("-") or "this-machine"
    url = str(given.get("public_url", f"https://{host}:{DEFAULT_PORT}"))
    parts = urlsplit(url)
    guesses: dict[str, Value] = {"run": f"run-at-{name}", "public_url": url}
    if parts.scheme == "http":  # for this machine alone: `auth serve --insecure-http`
        guesses["server.listen"] = (f"127.0.0.1:{parts.port or 80}",)
        return guesses
    if parts.port is not None and parts.port != 443:  # with 443 something stands before us
        guesses["server.listen"] = (f"0.0.0.0:{parts.port}",)
    guesses["server.certificate"] = "certificate.pem"
    guesses["server.certificate_key"] = "key.pem"
    return guesses


def _run_of_database(places: AuthPlaces) -> dict[str, Value]:
    there = _database_there(places)
    return {"run": there[0]} if there else {}


def _database_there(places: AuthPlaces) -> tuple[str, str] | None:
    """The run that the database here is of, and the fingerprint of the key that signs."""
    from auth.keys import fingerprint
    from auth.server.store import Reader, wall_ms

    if not places.database.exists():
        return None
    keys = Reader(places.folder).published().keys
    return keys.run, fingerprint(keys.active(wall_ms()).public_key)


def _database(places: AuthPlaces, settings: Settings) -> tuple[str, bool]:
    """The fingerprint of the key that signs, and whether it was made now."""
    from auth.server.store import create_store

    there = _database_there(places)
    if there is not None:
        run, fingerprint = there
        if run != settings.run:
            raise WrongUse(
                f"The database here is of the run {run!r}, and the settings name {settings.run!r}.",
                why="Tokens carry the name of their run: a database belongs to one.",
                advice=f'Set `run = "{run}"` in {places.settings_file}, or give the new run a home '
                "of its own (POTLUCK_HOME or --home).",
            )
        return fingerprint, False
    with hold_auth_lock(places):
        made = create_store(places.folder, settings.run, actor=moderator())
    return made.fingerprint, True


def _data(places: AuthPlaces, made: Made) -> dict[str, Any]:
    return {
        "run": made.settings.run,
        "public_url": made.settings.public_url,
        "fingerprint": made.fingerprint,
        "settings_file": str(places.settings_file),
        "folder": str(places.folder),
        "settings_made": made.new_settings,
        "database_made": made.new_database,
    }


def _text(places: AuthPlaces, made: Made) -> str:
    settings = made.settings

    def state(new: bool) -> str:
        return "made" if new else "was there, and is as it was"

    return "\n".join(
        [
            f"{'settings':<12}{places.settings_file} ({state(made.new_settings)})",
            f"{'database':<12}{places.database} ({state(made.new_database)})",
            f"{'run':<12}{settings.run}",
            f"{'address':<12}{settings.public_url}",
            f"{'fingerprint':<12}{made.fingerprint}",
            "",
            *_next_steps(places, settings),
        ]
    )


def _next_steps(places: AuthPlaces, settings: Settings) -> list[str]:
    steps = []
    if settings.certificate is not None and not settings.certificate.exists():
        steps.append(
            f"put the certificate of {settings.public_url} into {settings.certificate} and its key "
            f"into {settings.certificate_key}"
        )
    if all(provider.id == "code" for provider in settings.providers):
        steps.append(
            f"name an identity provider in {places.settings_file.name}, or do without: "
            "`potluck auth codes new`"
        )
    if not settings.endpoints:
        steps.append(
            f"name nodes to join at (`endpoints` in {places.settings_file.name}), as `potluck "
            "listen` prints them"
        )
    steps += [
        "`potluck auth serve"
        + (" --insecure-http" if settings.public_url.startswith("http:") else "")
        + "` starts it",
        "`potluck auth allow NAME` lets somebody in, `potluck auth invite` prints what to send",
        f"keep a copy of {places.folder} (`potluck auth backup`): the keys in it are the run",
    ]
    return ["next:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))]
