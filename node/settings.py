"""Every setting that potluck has: its name, what it may be, its default, and what it is for.

One table, read by the configuration (flags, environment, file), by `potluck config show`, by the
flags of the commands and by docs/cli.md. A setting `a.b` is `b` under `[a]` in potluck.toml and
`POTLUCK_A_B` in the environment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.peer_address import check_announce_address, check_listen_address
from node.places import Places
from node.wrong_use import WrongUse

Value = tuple[str, ...] | Path | float | int


class Kind(enum.Enum):
    """What a setting may be. The value is how it is called in an error."""

    LISTEN_ADDRESSES = "a list of listen addresses, such as /ip4/0.0.0.0/tcp/4001"
    ANNOUNCE_ADDRESSES = "a list of addresses, such as /dns4/node.example/tcp/4001"
    FILE = "a path"
    SECONDS = "a number of seconds above zero"
    COUNT = "a whole number above zero"


@dataclass(frozen=True)
class Setting:
    key: str
    kind: Kind
    what: str
    default: Value | Callable[[Places], Value]

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return "POTLUCK_" + self.key.upper().replace(".", "_")

    def default_in(self, places: Places) -> Value:
        return self.default(places) if callable(self.default) else self.default


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "identity.key_file",
        Kind.FILE,
        "the file that holds this node's key",
        lambda places: places.data_folder / "identity.key",
    ),
    Setting(
        "network.listen",
        Kind.LISTEN_ADDRESSES,
        "where to listen for other nodes; port 0 takes any free port",
        ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
    ),
    Setting(
        "network.announce",
        Kind.ANNOUNCE_ADDRESSES,
        "addresses to give out to others besides those found, for forwarded ports and DNS names",
        (),
    ),
    Setting(
        "network.dial_seconds",
        Kind.SECONDS,
        "how long to try one address of a peer",
        10.0,
    ),
    Setting(
        "network.inbound_connections",
        Kind.COUNT,
        "how many connections others may have open to this node at once",
        1024,
    ),
    Setting(
        "network.inbound_connections_per_address",
        Kind.COUNT,
        "how many of those one IPv4 address or IPv6 /64 may have",
        64,
    ),
)

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}


def value_from_text(setting: Setting, text: str) -> Value:
    """The value that a flag or an environment variable gives; lists are separated by commas."""
    match setting.kind:
        case Kind.LISTEN_ADDRESSES | Kind.ANNOUNCE_ADDRESSES:
            words = [word.strip() for word in text.split(",")]
            return _addresses(setting.kind, [word for word in words if word])
        case Kind.FILE:
            return _path(setting, text)
        case Kind.SECONDS:
            try:
                return _seconds(setting, float(text))
            except ValueError:
                raise _not(setting, text) from None
        case Kind.COUNT:
            if not (text.isascii() and text.isdigit()):
                raise _not(setting, text)
            return _count(setting, int(text))


def value_from_toml(setting: Setting, value: object) -> Value:
    """The value that the settings file gives."""
    match setting.kind, value:
        case ((Kind.LISTEN_ADDRESSES | Kind.ANNOUNCE_ADDRESSES), list()):
            if all(isinstance(item, str) for item in value):
                return _addresses(setting.kind, value)
        case ((Kind.LISTEN_ADDRESSES | Kind.ANNOUNCE_ADDRESSES), str()):
            return _addresses(setting.kind, [value])
        case Kind.FILE, str():
            return _path(setting, value)
        case Kind.SECONDS, int() | float():
            if not isinstance(value, bool):
                return _seconds(setting, float(value))
        case Kind.COUNT, int():
            if not isinstance(value, bool):
                return _count(setting, value)
        case _:
            pass
    raise _not(setting, value)


def plain(value: Value) -> str | float | int | list[str]:
    """The value as JSON and TOML write it."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _addresses(kind: Kind, words: Sequence[str]) -> tuple[str, ...]:
    check = check_listen_address if kind is Kind.LISTEN_ADDRESSES else check_announce_address
    return tuple(dict.fromkeys(check(word) for word in words))


def _path(setting: Setting, text: str) -> Path:
    if not text or "\0" in text:
        raise _not(setting, text)
    return Path(text).expanduser().absolute()


def _seconds(setting: Setting, value: float) -> float:
    if not 0 < value < float("inf"):
        raise _not(setting, value)
    return value


def _count(setting: Setting, value: int) -> int:
    if value <= 0:
        raise _not(setting, value)
    return value


def _not(setting: Setting, value: object) -> WrongUse:
    return WrongUse(
        f"{setting.key} cannot be {value!r}.", why=f"It has to be {setting.kind.value}."
    )
