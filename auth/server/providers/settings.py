"""The settings of a provider: one [[provider]] table of auth.toml.

Three kinds: "oidc" (any OpenID Connect issuer), "github" (its device flow), and "code" (enrolment
codes that moderators make). There may be several of each, with different ids.

An id is part of every account's name (`id:login`) and of the audit log. After a change of the id,
nobody who came in by it is recognized.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from auth.errors import AuthError
from auth.server.providers.errors import words_of_a_stranger
from auth.server.providers.web_addresses import fault_in

LONGEST_ID_CHARACTERS: Final = 32
CODE_ID: Final = "code"  # the names of accounts that codes have made begin with this
LONGEST_TITLE_CHARACTERS: Final = 60
LONGEST_SECRET_BYTES: Final = 4096

_ID: Final = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{LONGEST_ID_CHARACTERS - 1}}}\Z")
_SCOPE: Final = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,200}\Z")  # RFC 6749, 3.3
_CLAIM: Final = re.compile(r"[\x21-\x7e]{1,200}\Z")


class ProviderSettingsError(AuthError):
    """A [[provider]] table that cannot be used."""

    exit_code = 2


class OpenIdSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    issuer: str
    client_id: str
    title: str = ""
    client_secret_file: str = ""
    flows: tuple[Literal["device", "browser"], ...] = ("device", "browser")
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    username_claim: str | None = None
    ca_file: str = ""
    kind: Literal["oidc"] = "oidc"


class GithubSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    client_id: str
    title: str = ""
    scopes: tuple[str, ...] = ()
    login_url: str = "https://github.com"
    api_url: str = "https://api.github.com"
    ca_file: str = ""
    kind: Literal["github"] = "github"


class CodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    title: str = ""
    kind: Literal["code"] = "code"


ProviderSettings = OpenIdSettings | GithubSettings | CodeSettings
KINDS: Final[dict[str, type[ProviderSettings]]] = {
    "oidc": OpenIdSettings,
    "github": GithubSettings,
    "code": CodeSettings,
}


@dataclass(frozen=True, slots=True)
class ProviderKey:
    """One key of a [[provider]] table, for documents and for a first auth.toml."""

    name: str
    kinds: tuple[str, ...]
    what: str
    example: object
    default: object = None
    required: bool = False


_ALL: Final = ("oidc", "github", "code")
_ASKED: Final = ("oidc", "github")
PROVIDER_KEYS: Final[tuple[ProviderKey, ...]] = (
    ProviderKey("id", _ALL, "short name, part of every account's name; never change it", "corp",
                required=True),
    ProviderKey("kind", _ALL, "oidc, github or code", "oidc", required=True),
    ProviderKey("title", ("oidc",), "what people read", "Our Keycloak", default=""),
    ProviderKey("title", ("github",), "what people read", "GitHub", default=""),
    ProviderKey("title", ("code",), "what people read", "Enrolment code", default=""),
    ProviderKey("issuer", ("oidc",), "exactly as its discovery document says it",
                "https://id.example.org/realms/lab", required=True),
    ProviderKey("client_id", _ASKED, "what the provider calls this server", "potluck",
                required=True),
    ProviderKey("client_secret_file", ("oidc",), "a file with the secret, if it gave one",
                "corp.secret", default=""),
    ProviderKey("flows", ("oidc",), "device, browser or both", ["device", "browser"],
                default=["device", "browser"]),
    ProviderKey("scopes", ("oidc",), "what to ask for; openid has to be among it",
                ["openid", "profile", "email"], default=["openid", "profile", "email"]),
    ProviderKey("scopes", ("github",), "what to ask for; who somebody is needs none", ["read:user"],
                default=[]),
    ProviderKey("username_claim", ("oidc",), "the claim that is the login name; without it"
                " preferred_username, else a verified email, else sub", "email"),
    ProviderKey("login_url", ("github",), "GitHub, or your own GitHub Enterprise",
                "https://github.com", default="https://github.com"),
    ProviderKey("api_url", ("github",), "its API (Enterprise: https://HOST/api/v3)",
                "https://api.github.com", default="https://api.github.com"),
    ProviderKey("ca_file", _ASKED, "certificate authorities to trust instead of the system's",
                "company-ca.pem", default=""),
)  # fmt: skip


def provider_settings(table: Mapping[str, object], where: str, folder: Path) -> ProviderSettings:
    """Read and check one table. Files that it names are relative to `folder`."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _wrong(where, f"its kind is {kind!r}", "Write kind = one of: " + ", ".join(KINDS))
    try:
        settings = msgspec.convert(dict(table), KINDS[kind])
    except msgspec.ValidationError as error:
        known = ", ".join(key.name for key in PROVIDER_KEYS if kind in key.kinds)
        raise _wrong(where, str(error), f"A table of kind {kind} has these keys: {known}") from None
    _check_names(settings, where)
    match settings:
        case OpenIdSettings():
            _check_openid(settings, where)
            return msgspec.structs.replace(
                settings,
                client_secret_file=_file(folder, settings.client_secret_file),
                ca_file=_file(folder, settings.ca_file),
            )
        case GithubSettings():
            _check_github(settings, where)
            return msgspec.structs.replace(
                settings,
                ca_file=_file(folder, settings.ca_file),
                login_url=settings.login_url.removesuffix("/"),
                api_url=settings.api_url.removesuffix("/"),
            )
    return settings


def read_secret(file: Path) -> str:
    """The client secret in a file that only its owner can read; AuthError otherwise."""
    advice = "Write the secret that the provider gave you into it, and chmod 600 it."
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(LONGEST_SECRET_BYTES + 1)
    except OSError as error:
        what = f"The client secret in {file} cannot be read: {error.strerror}."
        raise ProviderSettingsError(what, advice=advice) from None
    if mode & 0o077:
        raise ProviderSettingsError(
            f"{file} can be read by other users.",
            why="With a client secret, others can pose as this server at the provider.",
            advice=f"chmod 600 {file}",
        )
    text = content.decode("ascii", errors="replace").strip()
    if (
        not text
        or len(content) > LONGEST_SECRET_BYTES
        or not (text.isascii() and text.isprintable())
    ):
        raise ProviderSettingsError(f"{file} holds no client secret.", advice=advice)
    return text


def _check_names(settings: ProviderSettings, where: str) -> None:
    if not _ID.match(settings.id):
        raise _wrong(
            where,
            f"its id is {settings.id!r}",
            f"An id is at most {LONGEST_ID_CHARACTERS} lower-case letters, digits and hyphens",
        )
    if settings.id == CODE_ID and not isinstance(settings, CodeSettings):
        raise _wrong(
            where,
            f"its id is {CODE_ID!r}, which is reserved for the accounts that enrolment codes make",
            "Give it another id: otherwise it could log in as any of them",
        )
    if len(settings.title) > LONGEST_TITLE_CHARACTERS or not settings.title.isprintable():
        raise _wrong(
            where, "its title is too long or not printable", "Write a short name for people"
        )


def _check_openid(settings: OpenIdSettings, where: str) -> None:
    fault = fault_in(settings.issuer, loopback_http=True)
    if fault or "?" in settings.issuer:
        raise _wrong(
            where,
            f"its issuer {fault or 'has a query (?...)'}",
            "Copy it from the provider's page, such as https://accounts.example.org",
        )
    _check_client(settings.client_id, where)
    _check_scopes(settings.scopes, where)
    if "openid" not in settings.scopes:
        raise _wrong(where, "its scopes lack openid", "Add openid: without it nobody is named")
    if not settings.flows or len(set(settings.flows)) != len(settings.flows):
        raise _wrong(where, "its flows are none, or one twice", 'Write flows = ["device"]')
    if settings.username_claim is not None and not _CLAIM.match(settings.username_claim):
        raise _wrong(where, "its username_claim is no claim", 'Write such as "email", or leave it')


def _check_github(settings: GithubSettings, where: str) -> None:
    for name, address in (("login_url", settings.login_url), ("api_url", settings.api_url)):
        fault = fault_in(address, loopback_http=True)
        if fault or "?" in address:
            raise _wrong(where, f"its {name} {fault or 'has a query'}", "Leave it for github.com")
    _check_client(settings.client_id, where)
    _check_scopes(settings.scopes, where)


def _check_client(client_id: str, where: str) -> None:
    if not 0 < len(client_id) <= 255 or not (client_id.isascii() and client_id.isprintable()):
        raise _wrong(where, "its client_id is no client id", "Copy it from the provider's page")


def _check_scopes(scopes: tuple[str, ...], where: str) -> None:
    if len(scopes) > 32 or not all(_SCOPE.match(scope) for scope in scopes):
        raise _wrong(where, "its scopes are not scopes", 'Write such as scopes = ["openid"]')


def _file(folder: Path, name: str) -> str:
    return str(folder / Path(name).expanduser()) if name else ""


def _wrong(where: str, why: str, advice: str) -> ProviderSettingsError:
    return ProviderSettingsError(
        f"The settings of a provider cannot be used ({where}).",
        why=f"{words_of_a_stranger(why)}.",
        advice=f"{advice}.",
    )
