"""auth.toml: the settings of an auth server. Every key is optional except those without a sensible
default.

The table KEYS is the only list of them: the reader below checks against it, and `potluck auth
init` and the handbook print it.

A misspelt key that is silently ignored would look like a setting that does not work. So an unknown
key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from auth.errors import AuthError
from auth.fields import (
    LONGEST_ADDRESS,
    LONGEST_RUN,
    LONGEST_URL,
    MOST_ADDRESSES,
    PRINTABLE_PATTERN,
    RUN_PATTERN,
)
from auth.server.providers.settings import CodeSettings, ProviderSettings, provider_settings
from auth.server.rate_limits import Network

LARGEST_SETTINGS_BYTES = 1 << 20  # nobody writes a megabyte of settings; /dev/zero has more
MOST_PROVIDERS = 16
LONGEST_LIFE_SECONDS = 7 * 86_400  # a revoked peer goes on for so long while the server is down
SHORTEST_LIFE_SECONDS = 10
LARGEST_COUNT = 1_000_000
USUAL_PORTS = {"https": 443, "http": 80}

Value = str | int | tuple[str, ...]


class SettingsError(AuthError):
    """A settings file with a mistake. Nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class Key:
    """One setting. `name` is `table.key`, or `key` at the top of the file."""

    name: str
    check: Callable[[Any], Value]  # ValueError says what it must be
    default: Value | None
    what: str
    example: str = ""
    required: bool = False


@dataclass(frozen=True)
class ListenAddress:
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Settings:
    """All settings of a server."""

    run: str
    public_url: str
    endpoints: tuple[str, ...]
    listen: tuple[ListenAddress, ...]
    certificate: Path | None
    certificate_key: Path | None
    trusted_proxies: tuple[Network, ...]
    metrics_from: tuple[Network, ...]
    connections: int
    connections_per_address: int
    token_life_seconds: int
    grace_seconds: int
    connections_per_minute_per_address: int
    requests_per_minute_per_address: int
    logins_per_hour_per_address: int
    renewals_per_hour_per_account: int
    providers: tuple[ProviderSettings, ...]


def listen_address(text: str) -> ListenAddress:
    """`HOST:PORT`; a host with colons is in brackets. ValueError otherwise."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (port.isascii() and port.isdigit() and int(port) < 65_536):
        raise ValueError('must look like "0.0.0.0:8443" or "[::]:8443"')
    return ListenAddress(host, int(port))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("must be a text that is not empty")
    return value


def _run(value: Any) -> str:
    text = _text(value)
    if len(text) > LONGEST_RUN or not re.match(RUN_PATTERN, text):
        raise ValueError(
            f"must be letters, digits, `.`, `_` and `-`, at most {LONGEST_RUN} of them"
        )
    return text


def _url(value: Any) -> str:
    """The address as browsers name it in `Origin`: in lower case, without a port that is usual."""
    text = _text(value).rstrip("/")
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError:
        raise ValueError("must be an address like https://auth.example.org") from None
    plain = not (parts.query or parts.fragment or parts.username or parts.path)
    plain = plain and len(text) <= LONGEST_URL and re.match(PRINTABLE_PATTERN, text) is not None
    if parts.scheme not in ("https", "http") or not parts.hostname or not plain:
        raise ValueError("must be an address like https://auth.example.org, without a path")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError("must begin with https: (http is for this machine alone)")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    is_usual = parts.port in (None, USUAL_PORTS[parts.scheme])
    return f"{parts.scheme}://{host}" + ("" if is_usual else f":{parts.port}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may mean anything tomorrow


def _listed(check: Callable[[str], object]) -> Callable[[Any], tuple[str, ...]]:
    def checked(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError('must be a list of texts, like ["…", "…"]')
        for item in value:
            check(item)
        return tuple(value)

    return checked


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f'must hold addresses or networks like "10.0.0.0/8", not {text!r}'
        ) from None


def _endpoint(text: str) -> str:
    fits = len(text) <= LONGEST_ADDRESS and re.match(PRINTABLE_PATTERN, text)
    if not text.startswith("/") or not fits:
        raise ValueError(
            f"must hold addresses like /dns4/node.example/tcp/4001/p2p/12D3KooW…, not {text[:80]!r}"
        )
    return text


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value <= LARGEST_COUNT:
        raise ValueError(f"must be a whole number from 1 to {LARGEST_COUNT:,}")
    return value


def _seconds(least: int) -> Callable[[Any], int]:
    def checked(value: Any) -> int:
        if type(value) is not int or not least <= value <= LONGEST_LIFE_SECONDS:
            raise ValueError(
                f"must be a whole number of seconds from {least} to {LONGEST_LIFE_SECONDS:,}"
            )
        return value

    return checked


KEYS: tuple[Key, ...] = (
    Key("run", _run, None, "the name of the run that this server lets people into",
        example='"tiny-stories"', required=True),
    Key("public_url", _url, None, "the address under which volunteers reach this server",
        example='"https://auth.example.org"', required=True),
    Key("endpoints", _listed(_endpoint), (), "nodes to join at; they stand in passes and invites",
        example='["/dns4/node.example.org/tcp/4001/p2p/12D3KooW…"]'),
    Key("server.listen", _listed(listen_address), ("0.0.0.0:8443",), "where it listens"),
    Key("server.certificate", _text, None,
        "the certificate and its chain (PEM); read again whenever it changes",
        example='"fullchain.pem"'),
    Key("server.certificate_key", _text, None, "the certificate's private key (PEM)",
        example='"privkey.pem"'),
    Key("server.trusted_proxies", _listed(_network), (),
        "proxies of yours whose X-Forwarded-For is believed", example='["10.0.0.5/32"]'),
    Key("server.metrics_from", _listed(_network), ("127.0.0.0/8", "::1/128"),
        "who may read /metrics"),
    Key("server.connections", _count, 1024, "connections at one time"),
    Key("server.connections_per_address", _count, 64, "of which from one address"),
    Key("tokens.life_seconds", _seconds(SHORTEST_LIFE_SECONDS), 3600, "how long a token lives"),
    Key("tokens.grace_seconds", _seconds(0), 3600,
        "how long nodes go on with an expired token while this server is away"),
    Key("limits.connections_per_minute_per_address", _count, 2400,
        "connections begun; a handshake is what costs this server most"),
    Key("limits.requests_per_minute_per_address", _count, 1200, "requests of any kind"),
    Key("limits.logins_per_hour_per_address", _count, 240, "logins begun, codes tried"),
    Key("limits.renewals_per_hour_per_account", _count, 600,
        "renewals of all machines of one account"),
)  # fmt: skip
BY_NAME = {key.name: key for key in KEYS}
PROVIDER_TABLE = "provider"
USUAL_CODE_PROVIDER = "code"  # of a file without a [[provider]]: there are enrolment codes


def read_settings(path: Path) -> Settings:
    """The settings in a file. SettingsError for any mistake."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_SETTINGS_BYTES + 1)
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        raise SettingsError(
            f"There is no settings file {path}.",
            advice="`potluck auth init` writes one, with a comment on every key.",
        ) from None
    except OSError as error:
        raise SettingsError(
            f"The settings file {path} cannot be read: {error.strerror}.",
            advice="Check what it is and who may read it (ls -l).",
        ) from None
    if status.st_uid not in (0, os.geteuid()):
        raise SettingsError(
            f"{path} belongs to another user.",
            why="Its owner could name an identity provider that lets them in.",
            advice="Run the server as that user; or, if it was you, make the file the server's own "
            "with chown.",
        )
    if status.st_mode & stat.S_IWOTH:
        raise SettingsError(
            f"Every user of this machine may write to {path}.",
            why="A user who changes it can name an identity provider that lets them in.",
            advice=f"If nobody has, run `chmod o-w {path}`.",
        )
    if len(content) > LARGEST_SETTINGS_BYTES:
        raise SettingsError(f"The settings file {path} is larger than a megabyte: that is not one.")
    return settings_in(content, path)


def settings_in(content: bytes, path: Path) -> Settings:
    """The settings in the bytes of a file that is, or would be, at `path`."""
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise SettingsError(
            f"The settings file {path} is not valid TOML: {error}.",
            advice='A line looks like `run = "tiny-stories"`; a table begins with `[server]`.',
        ) from None
    providers = _providers(document.pop(PROVIDER_TABLE, []), path)
    values: dict[str, Value] = {key.name: key.default for key in KEYS if key.default is not None}
    for name, value in _flattened(document):
        values[name] = _checked(name, value, path)
    for key in KEYS:
        if key.required and key.name not in values:
            raise SettingsError(
                f"The settings file {path} does not say `{key.name}`.",
                why=f"It is {key.what}, and has no default.",
                advice=f"Add a line `{key.name} = {key.example}` at its top.",
            )
    return _settings(values, providers, path)


def _settings(
    values: Mapping[str, Any], providers: tuple[ProviderSettings, ...], path: Path
) -> Settings:
    def file(name: str) -> Path | None:
        return path.parent / Path(values[name]).expanduser() if name in values else None

    def networks(name: str) -> tuple[Network, ...]:
        return tuple(_network(text) for text in values[name])

    if len(values["endpoints"]) > MOST_ADDRESSES:
        raise _wrong("endpoints", f"must hold at most {MOST_ADDRESSES} addresses", path)
    if not values["server.listen"]:
        raise _wrong("server.listen", "must hold at least one address", path)
    return Settings(
        run=values["run"],
        public_url=values["public_url"],
        endpoints=values["endpoints"],
        listen=tuple(listen_address(text) for text in values["server.listen"]),
        certificate=file("server.certificate"),
        certificate_key=file("server.certificate_key"),
        trusted_proxies=networks("server.trusted_proxies"),
        metrics_from=networks("server.metrics_from"),
        connections=values["server.connections"],
        connections_per_address=values["server.connections_per_address"],
        token_life_seconds=values["tokens.life_seconds"],
        grace_seconds=values["tokens.grace_seconds"],
        connections_per_minute_per_address=values["limits.connections_per_minute_per_address"],
        requests_per_minute_per_address=values["limits.requests_per_minute_per_address"],
        logins_per_hour_per_address=values["limits.logins_per_hour_per_address"],
        renewals_per_hour_per_account=values["limits.renewals_per_hour_per_account"],
        providers=providers,
    )


def _providers(tables: object, path: Path) -> tuple[ProviderSettings, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _wrong(PROVIDER_TABLE, "must be written as a table each: [[provider]]", path)
    if len(tables) > MOST_PROVIDERS:
        raise _wrong(PROVIDER_TABLE, f"must be at most {MOST_PROVIDERS}", path)
    providers = tuple(
        provider_settings(table, f"[[provider]] number {number} in {path}", path.parent)
        for number, table in enumerate(tables, start=1)
    )
    if not providers:
        return (CodeSettings(id=USUAL_CODE_PROVIDER),)
    names = [provider.id for provider in providers]
    for name in names:
        if names.count(name) > 1:
            raise _wrong(PROVIDER_TABLE, f"must have an id each; two are called {name!r}", path)
    return providers


def _flattened(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, content in document.items():
        if isinstance(content, dict):
            for key, value in content.items():
                yield f"{name}.{key}", value
        else:
            yield name, content


def _checked(name: str, value: Any, path: Path) -> Value:
    key = BY_NAME.get(name)
    if key is None:
        raise _unknown(name, path)
    try:
        return key.check(value)
    except ValueError as error:
        raise _wrong(name, str(error), path) from None


def _wrong(name: str, must: str, path: Path) -> SettingsError:
    return SettingsError(f"The setting `{name}` {must}.", why=f"The file {path} says otherwise.")


def _unknown(name: str, path: Path) -> SettingsError:
    meant = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.6)
    if not meant:
        ends = {key.rpartition(".")[2]: key for key in BY_NAME}
        last = difflib.get_close_matches(name.rpartition(".")[2], ends, n=1, cutoff=0.6)
        meant = [ends[word] for word in last]
    if meant:
        table, _, key = meant[0].rpartition(".")
        where = f"below `[{table}]`" if table else "at the top of the file"
        advice = f"Did you mean `{key}`, {where}?"
    else:
        advice = "`potluck auth init` in an empty home writes a file that shows every key."
    return SettingsError(f"There is no setting `{name}` (in {path}).", advice=advice)
