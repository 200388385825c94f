"""All settings of potluck: name, kind, default, and purpose.

One table, which the configuration (flags, environment, file), `potluck config show`, the flags of
the commands and docs/cli.md all use. A setting `a.b` is `b` under `[a]` in potluck.toml and
`POTLUCK_A_B` in the environment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.core.caps.devices import AUTO, device_as_written, threads_as_written
from node.core.caps.timetable import ALWAYS, parse_timetable
from node.core.caps.units import NONE, Measure, as_written
from node.core.display_name import as_written as name_as_written
from node.core.peer_address import (
    check_announce_address,
    check_listen_address,
    parse_peer_address,
)
from node.core.places import Places
from node.core.relay_settings import EXAMPLE as RELAY_EXAMPLE
from node.core.relay_settings import MEMBERS, as_admitted
from node.core.relay_settings import as_written as relay_limits_as_written
from node.core.tracker import EXAMPLE as TRACKERS_EXAMPLE
from node.core.tracker import read_tracker
from node.core.wrong_use import WrongUse

Value = tuple[str, ...] | Path | float | int | bool | str


class SettingKind(enum.Enum):
    """The kinds of values. The value is the name of the kind in an error."""

    LISTEN_ADDRESSES = "a list of listen addresses, such as /ip4/0.0.0.0/tcp/4001"
    ANNOUNCE_ADDRESSES = "a list of addresses, such as /dns4/node.example/tcp/4001"
    PEER_ADDRESSES = "a list of peers' addresses, such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…"
    TRACKERS = f"a list of trackers, such as {TRACKERS_EXAMPLE}"
    FILE = "a path"
    NAME = "a name of at most 24 letters"
    SECONDS = "a number of seconds above zero"
    COUNT = "a whole number above zero"
    SWITCH = "true or false"
    OWN_SWITCH = "true, false or auto"
    DEVICE = "auto, cpu, cuda, cuda:1 or mps"
    THREADS = "a number of threads, or auto"
    RATE = Measure.RATE.value
    SIZE = Measure.SIZE.value
    QUOTA = Measure.QUOTA.value
    RELAY_LIMITS = f'limits such as "{RELAY_EXAMPLE}"'
    RELAY_FOR = "members or everybody"
    SCHEDULE = 'times such as "22:00-07:00", or always'


LISTS = (
    SettingKind.LISTEN_ADDRESSES,
    SettingKind.ANNOUNCE_ADDRESSES,
    SettingKind.PEER_ADDRESSES,
    SettingKind.TRACKERS,
)

_SWITCH_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _own_switch_as_written(text: str) -> str:
    word = text.strip().lower()
    if word in ("", AUTO):
        return AUTO
    if word not in _SWITCH_WORDS:
        raise WrongUse(
            f"{text.strip()!r} is not {SettingKind.OWN_SWITCH.value}.",
            advice="Write one of these; with auto it is as the run says.",
        )
    return "true" if _SWITCH_WORDS[word] else "false"


# Kept and shown as their owner wrote them; node/core/caps reads the amounts.
_AS_WRITTEN: dict[SettingKind, Callable[[str], str]] = {
    SettingKind.NAME: name_as_written,
    SettingKind.DEVICE: device_as_written,
    SettingKind.THREADS: threads_as_written,
    SettingKind.RATE: lambda text: as_written(text, Measure.RATE),
    SettingKind.SIZE: lambda text: as_written(text, Measure.SIZE),
    SettingKind.QUOTA: lambda text: as_written(text, Measure.QUOTA),
    SettingKind.RELAY_LIMITS: relay_limits_as_written,
    SettingKind.RELAY_FOR: as_admitted,
    SettingKind.SCHEDULE: lambda text: parse_timetable(text).text,
    SettingKind.OWN_SWITCH: _own_switch_as_written,
}


@dataclass(frozen=True)
class Setting:
    key: str
    kind: SettingKind
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
        SettingKind.FILE,
        "the file that holds this node's key",
        lambda places: places.data_folder / "identity.key",
    ),
    Setting(
        "identity.name",
        SettingKind.NAME,
        "the name that others see beside the end of this node's key; at most 24 letters",
        "",
    ),
    Setting(
        "network.listen",
        SettingKind.LISTEN_ADDRESSES,
        "addresses to listen on for other nodes; port 0 takes any free port",
        ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
    ),
    Setting(
        "network.announce",
        SettingKind.ANNOUNCE_ADDRESSES,
        "further addresses to announce to others, for forwarded ports and DNS names",
        (),
    ),
    Setting(
        "network.map_port",
        SettingKind.SWITCH,
        "ask the router to forward a port to this node (PCP, NAT-PMP or UPnP), so that others can "
        "dial it",
        True,
    ),
    Setting(
        "network.dial_seconds",
        SettingKind.SECONDS,
        "how long to try one address of a peer",
        10.0,
    ),
    Setting(
        "network.inbound_connections",
        SettingKind.COUNT,
        "how many connections others may have open to this node at once",
        1024,
    ),
    Setting(
        "network.inbound_connections_per_address",
        SettingKind.COUNT,
        "how many of those one IPv4 address or IPv6 /64 may have",
        64,
    ),
    Setting(
        "dht.bootstrap",
        SettingKind.PEER_ADDRESSES,
        "nodes of the swarm to join through; one that answers is enough",
        (),
    ),
    Setting(
        "dht.client",
        SettingKind.SWITCH,
        "read and write the directory, but keep nothing for others and be in no routing table: for "
        "a node that others cannot dial",
        False,
    ),
    Setting(
        "dht.keep_slots",
        SettingKind.SWITCH,
        "keep the directory's slots on disk across a restart, as a backbone does",
        False,
    ),
    Setting(
        "dht.save_seconds",
        SettingKind.SECONDS,
        "how often the known peers and the slots are written to disk; a crash loses at most this "
        "much",
        30.0,
    ),
    Setting(
        "relay.serve",
        SettingKind.SWITCH,
        "relay for peers that nobody can dial; `potluck backbone` does it by default",
        False,
    ),
    Setting(
        "relay.for",
        SettingKind.RELAY_FOR,
        "whom to relay for: members (of this node's run; in an open run everybody is one) or "
        "everybody",
        MEMBERS,
    ),
    Setting(
        "relay.limits",
        SettingKind.RELAY_LIMITS,
        "what it relays at most: reservations, reservations-per-site, circuits, "
        "circuits-per-peer, circuit-seconds, circuit-bytes, circuit-rate, rate and month, each "
        "with =, separated by commas",
        "",
    ),
    Setting(
        "limits.device",
        SettingKind.DEVICE,
        "the device that trains: auto (the fastest there is), cpu, cuda, cuda:1, mps",
        AUTO,
    ),
    Setting(
        "limits.threads",
        SettingKind.THREADS,
        "the number of processor cores to use; auto leaves it to torch",
        AUTO,
    ),
    Setting(
        "limits.compile",
        SettingKind.OWN_SWITCH,
        "compile the run's model (true) or do not (false); auto does as the run says",
        AUTO,
    ),
    Setting(
        "limits.max_memory",
        SettingKind.SIZE,
        "the most of the machine's memory that this process may use, such as 8GB",
        NONE,
    ),
    Setting(
        "limits.max_device_memory",
        SettingKind.SIZE,
        "the most of a GPU's own memory that this process may use, such as 8GB",
        NONE,
    ),
    Setting(
        "limits.offload",
        SettingKind.SWITCH,
        "keep the copies that averaging needs in the machine's memory, not in a GPU's: for a model "
        "that just fits",
        False,
    ),
    Setting(
        "limits.upload_limit",
        SettingKind.RATE,
        "the highest rate of sending, over all connections, such as 2MB/s or 16Mbit/s",
        NONE,
    ),
    Setting(
        "limits.download_limit",
        SettingKind.RATE,
        "the highest rate of receiving, over all connections, such as 2MB/s or 16Mbit/s",
        NONE,
    ),
    Setting(
        "limits.quota",
        SettingKind.QUOTA,
        "the most to send and receive in a calendar month, such as 200GB/month",
        NONE,
    ),
    Setting(
        "limits.schedule",
        SettingKind.SCHEDULE,
        'when to train, such as "22:00-07:00" or "Mon-Fri 22:00-07:00, weekends 00:00-24:00"',
        ALWAYS,
    ),
    Setting(
        "limits.when_idle",
        SettingKind.SWITCH,
        "train only while nobody else needs this machine",
        False,
    ),
    Setting(
        "tracking.track",
        SettingKind.TRACKERS,
        "write a row of figures for each step of the run: to jsonl:FILE, tensorboard:DIR, "
        "wandb:PROJECT or mlflow:DIR",
        (),
    ),
)

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}


def value_from_text(setting: Setting, text: str) -> Value:
    """The value from a flag or an environment variable; a list is separated by commas."""
    match setting.kind:
        case (
            SettingKind.LISTEN_ADDRESSES
            | SettingKind.ANNOUNCE_ADDRESSES
            | SettingKind.PEER_ADDRESSES
            | SettingKind.TRACKERS
        ):
            words = [word.strip() for word in text.split(",")]
            return _listed(setting, [word for word in words if word])
        case SettingKind.FILE:
            return _path(setting, text)
        case SettingKind.SECONDS:
            try:
                return _seconds(setting, float(text))
            except ValueError:
                raise _not(setting, text) from None
        case SettingKind.COUNT:
            if not (text.isascii() and text.isdigit()):
                raise _not(setting, text)
            return _count(setting, int(text))
        case SettingKind.SWITCH:
            if text.strip().lower() not in _SWITCH_WORDS:
                raise _not(setting, text)
            return _SWITCH_WORDS[text.strip().lower()]
        case _:
            return _amount(setting, text)


def value_from_toml(setting: Setting, value: object) -> Value:
    """The value from the settings file."""
    match setting.kind, value:
        case kind, list() if kind in LISTS:
            if all(isinstance(item, str) for item in value):
                return _listed(setting, value)
        case kind, str() if kind in LISTS:
            return _listed(setting, [value])
        case SettingKind.FILE, str():
            return _path(setting, value)
        case SettingKind.SECONDS, int() | float():
            if not isinstance(value, bool):
                return _seconds(setting, float(value))
        case SettingKind.COUNT, int():
            if not isinstance(value, bool):
                return _count(setting, value)
        case SettingKind.SWITCH, bool():
            return value
        case SettingKind.OWN_SWITCH, bool():
            return "true" if value else "false"
        case kind, str() if kind in _AS_WRITTEN:
            return _amount(setting, value)
        case SettingKind.THREADS | SettingKind.RATE | SettingKind.SIZE | SettingKind.QUOTA, int():
            if not isinstance(value, bool):  # an amount without unit has its own error
                return _amount(setting, str(value))
        case _:
            pass
    raise _not(setting, value)


def plain(value: Value) -> str | float | int | list[str]:
    """The value as in JSON and TOML."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _listed(setting: Setting, words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_LISTED_CHECKS[setting.kind](word) for word in words))


_LISTED_CHECKS: dict[SettingKind, Callable[[str], str]] = {
    SettingKind.LISTEN_ADDRESSES: check_listen_address,
    SettingKind.ANNOUNCE_ADDRESSES: check_announce_address,
    SettingKind.PEER_ADDRESSES: lambda word: parse_peer_address(word).text,
    SettingKind.TRACKERS: lambda word: str(read_tracker(word).below(Path.cwd())),
}


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


def _amount(setting: Setting, text: str) -> str:
    try:
        return _AS_WRITTEN[setting.kind](text)
    except WrongUse as error:
        raise WrongUse(
            f"{setting.key} cannot be {text!r}. {error.what}", why=error.why, advice=error.advice
        ) from None


def _not(setting: Setting, value: object) -> WrongUse:
    return WrongUse(
        f"{setting.key} cannot be {value!r}.", why=f"It has to be {setting.kind.value}."
    )
