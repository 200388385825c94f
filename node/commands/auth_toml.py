"""The text of a new auth.toml: every setting there is, explained, those at their default commented.

It is written from the table that the server reads by (`auth.server.settings.KEYS`), so a setting
cannot be missing from it, nor one be in it that the server does not know.

Easy to get wrong: what is written between quotes may come from a flag. A quote or a backslash in
it must not end the text early; JSON's way of writing texts is also TOML's.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby

from auth.server.providers.settings import PROVIDER_KEYS
from auth.server.settings import KEYS, PROVIDER_TABLE, Key, Value

_WIDTH = 100

_HEADING = """\
# The settings of an auth server, written by `potluck auth init`.
# A key behind a # shows its default, or an example: take the # away to say something else.
# The server reads this file when it starts. docs/moderators.md goes through it.
"""

# What a provider is told at its least; everything else has a default.
_PROVIDERS = {
    "code": ("Enrolment codes, for whom there is no provider: `potluck auth codes new`.", {}),
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
    """The whole file. `given` says what is known: settings by their names."""
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
        "Identity providers: how people prove who they are. Several at once are fine; the id is "
        "the first half of their names, as in github:alice."
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
    # JSON escapes what TOML does, but for DEL, which TOML does not take as it is
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
