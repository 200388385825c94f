"""`potluck auth init`: makes an auth server that can be started.

It makes the settings file, the database and the first key, if they are missing. Existing ones are
read, checked and left as they are, so running it again is safe and has the same result.

The text of a new auth.toml has every setting, explained, with defaults commented out. It is written
from the table that the server reads by (`auth.server.settings.KEYS`), so the two have the same
settings.

The settings file and a flag may disagree. Then the file stays as it is, the flag is refused with
the line that would have to be changed, and nothing is made. A quote or a backslash in a flag's
value must not end the text in the file early; values are written as JSON, which is also valid TOML.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from auth.server.providers.settings import PROVIDER_KEYS
from auth.server.settings import KEYS, PROVIDER_TABLE, Key, Value
from node.app.auth_acts import auth_places_for, check_owner, moderator
from node.app.auth_places import AuthPlaces, hold_auth_lock
from node.app.cli.output import Output
from node.core.private_file import replace_private_file
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from auth.server.settings import Settings, Value


DEFAULT_PORT = 8443  # of auth.toml's server.listen; one above 1023 needs no root
# The characters of a run's name that we make: it ends up in file names and on screens.
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class MadeServer:
    """The parts of the server, and which of them are new."""

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
    """The flags as settings; checked before anything is made."""
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


def _make(places: AuthPlaces, given: Mapping[str, Value]) -> MadeServer:
    from auth.server.settings import settings_in

    there = _settings_there(places)
    if there is None:
        text = settings_text({**_guesses(given), **_run_of_database(places), **given})
        settings = settings_in(text.encode(), places.settings_file)
    else:
        _check_agreement(there, given, places)
        settings = there
    # The database first: if the disk is full, the next try finds nothing in its way.
    fingerprint, new_database = _database(places, settings)
    if there is None:
        replace_private_file(places.settings_file, text.encode())
    return MadeServer(settings, fingerprint, there is None, new_database)


def _settings_there(places: AuthPlaces) -> Settings | None:
    from auth.server.settings import read_settings

    return read_settings(places.settings_file) if places.settings_file.exists() else None


def _check_agreement(there: Settings, given: Mapping[str, Value], places: AuthPlaces) -> None:
    for name, value in given.items():
        if getattr(there, name) != value:
            raise WrongUse(
                f"There is an auth.toml already, with another value of {name}.",
                why=f"{places.settings_file} was made earlier, and `auth init` does not change it.",
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
    if parts.port is not None and parts.port != 443:  # with 443 there is a proxy before us
        guesses["server.listen"] = (f"0.0.0.0:{parts.port}",)
    guesses["server.certificate"] = "certificate.pem"
    guesses["server.certificate_key"] = "key.pem"
    return guesses


def _run_of_database(places: AuthPlaces) -> dict[str, Value]:
    there = _database_there(places)
    return {"run": there[0]} if there else {}


def _database_there(places: AuthPlaces) -> tuple[str, str] | None:
    """The run of this home's database, and the fingerprint of the key that signs."""
    from auth.keys import fingerprint
    from auth.server.store import StoreReader, wall_ms

    if not places.database.exists():
        return None
    keys = StoreReader(places.folder).published().keys
    return keys.run, fingerprint(keys.active(wall_ms()).public_key)


def _database(places: AuthPlaces, settings: Settings) -> tuple[str, bool]:
    """The fingerprint of the key that signs, and whether it was made now."""
    from auth.server.store import create_store

    there = _database_there(places)
    if there is not None:
        run, fingerprint = there
        if run != settings.run:
            raise WrongUse(
                f"The database here belongs to the run {run!r}, but the settings name "
                f"{settings.run!r}.",
                why="Tokens contain the name of their run, so a database belongs to one run.",
                advice=f'Set `run = "{run}"` in {places.settings_file}, or give the new run a home '
                "of its own (POTLUCK_HOME or --home).",
            )
        return fingerprint, False
    with hold_auth_lock(places):
        made = create_store(places.folder, settings.run, actor=moderator())
    return made.fingerprint, True


def _data(places: AuthPlaces, made: MadeServer) -> dict[str, Any]:
    return {
        "run": made.settings.run,
        "public_url": made.settings.public_url,
        "fingerprint": made.fingerprint,
        "settings_file": str(places.settings_file),
        "folder": str(places.folder),
        "settings_made": made.new_settings,
        "database_made": made.new_database,
    }


def _text(places: AuthPlaces, made: MadeServer) -> str:
    settings = made.settings

    def state(new: bool) -> str:
        return "made" if new else "was there, unchanged"

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
            f"name an identity provider in {places.settings_file.name}, or use codes instead: "
            "`potluck auth codes new`"
        )
    if not settings.endpoints:
        steps.append(
            f"name nodes to join through (`endpoints` in {places.settings_file.name}), as `potluck "
            "listen` prints them"
        )
    steps += [
        "`potluck auth serve"
        + (" --insecure-http" if settings.public_url.startswith("http:") else "")
        + "` starts it",
        "`potluck auth allow NAME` lets a person in, `potluck auth invite` prints the invite to "
        "send",
        f"keep a copy of {places.folder} (`potluck auth backup`): the run depends on the keys in "
        "it",
    ]
    return ["next:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))]


_WIDTH = 100

_HEADING = """\
# The settings of an auth server, written by `potluck auth init`.
# A key behind a # shows its default or an example: remove the # to set it.
# The server reads this file when it starts. docs/moderators.md goes through it.
"""

# The settings that a provider needs; all others have a default.
_PROVIDERS = {
    "code": ("Enrolment codes, for people without a provider: `potluck auth codes new`.", {}),
    "github": (
        "GitHub, by its device flow: make an OAuth app there (Settings, Developer settings), "
        "enable its device flow, and copy its client id. No secret is needed.",
        {"client_id": "Iv1.0123456789abcdef"},
    ),
    "oidc": (
        "Any OpenID Connect provider (Keycloak, GitLab, Google, …): register this server there, "
        "with PUBLIC_URL/login/callback as its redirect address where the browser flow is used.",
        {
            "title": "our Keycloak",
            "issuer": "https://id.example.org/realms/ours",
            "client_id": "potluck",
            "client_secret_file": "oidc.secret",
        },
    ),
}
_IN_USE = ("code",)


def settings_text(given: Mapping[str, Value]) -> str:
    """The whole file. `given` has the known settings by name."""
    lines = [_HEADING]
    for table, keys in groupby(KEYS, key=lambda key: key.name.rpartition(".")[0]):
        if table:
            lines += [f"[{table}]", ""]
        for key in keys:
            lines += _setting(key, given)
    lines += _providers()
    return "\n".join(lines).rstrip() + "\n"


def _setting(key: Key, given: Mapping[str, Value]) -> Iterator[str]:
    yield from _comment(key.what)
    name = key.name.rpartition(".")[2]
    if key.name in given:
        yield f"{name} = {toml(given[key.name])}"
    elif key.default is not None and not (key.default == () and key.example):
        yield f"#{name} = {toml(key.default)}"
    else:
        yield f"#{name} = {key.example}"
    yield ""


def _providers() -> Iterator[str]:
    yield from _comment(
        "Identity providers: how people prove who they are. There may be several; the id is the "
        "first half of people's names, as in github:alice."
    )
    yield ""
    for kind, (what, told) in _PROVIDERS.items():
        mark = "" if kind in _IN_USE else "#"
        yield from _comment(what)
        yield f"{mark}[[{PROVIDER_TABLE}]]"
        for name, value in {"id": kind, "kind": kind, **told}.items():
            yield f"{mark}{name} = {toml(value)}"
        for key in PROVIDER_KEYS:
            if kind in key.kinds and key.name not in {"id", "kind", *told}:
                yield from _comment(key.what)
                yield f"#{key.name} = {toml(key.example)}"
        yield ""


def _comment(text: str) -> Iterator[str]:
    for line in _wrapped(text):
        yield f"# {line}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    # JSON escapes what TOML does, except DEL, which TOML does not allow unescaped
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
