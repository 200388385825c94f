"""The settings of a node and where they come from: flags, POTLUCK_* variables, the file, defaults.

A flag overrides a variable, a variable the file, and the file a default. A `Configuration` is read
once, checked as a whole, and does not change. It keeps the origin of each value, which `potluck
config show --origin` prints: that is the question behind most support threads.

If a misspelt key were ignored, it would look like a setting that does not work. So an unknown key
in the file is an error that names the nearest known one. An unknown POTLUCK_* variable is only a
warning, because others use the environment too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nat.relay_limits import RelayLimits
from node.core.places import Places, find_places
from node.core.relay_settings import MEMBERS, relay_limits
from node.core.settings import BY_KEY, SETTINGS, Setting, Value, value_from_text, value_from_toml
from node.core.tracker import NamedTracker, read_tracker
from node.core.wrong_use import WrongUse, nearest, why_not_toml

LARGEST_CONFIG_BYTES = 1_048_576  # enough for any settings; /dev/zero has more

_OTHER_VARIABLES = (
    "POTLUCK_HOME",
    "POTLUCK_CONFIG",
    "POTLUCK_DEBUG",
    "POTLUCK_LOGIN_CODE",
    "POTLUCK_INVITE",
)


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    `source` is flag, environment, file or default; `name` says which flag, variable or file. `line`
    is the line in the file, or 0 if it could not be found.
    """

    source: str
    name: str = ""
    line: int = 0

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f"{self.source} {self.name}".strip() + line


DEFAULT = Origin("default")


@dataclass(frozen=True)
class Configuration:
    """Every setting with its value and origin, and the places of this node's files."""

    places: Places
    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...] = ()
    config_file: Path | None = None  # None without a file, which is fine

    @property
    def key_file(self) -> Path:
        value: Path = self.values["identity.key_file"]
        return value

    @property
    def display_name(self) -> str:
        value: str = self.values["identity.name"]
        return value

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        value: tuple[str, ...] = self.values["network.listen"]
        return value

    @property
    def announce_addresses(self) -> tuple[str, ...]:
        value: tuple[str, ...] = self.values["network.announce"]
        return value

    @property
    def maps_ports(self) -> bool:
        value: bool = self.values["network.map_port"]
        return value

    @property
    def dial_seconds(self) -> float:
        value: float = self.values["network.dial_seconds"]
        return value

    @property
    def inbound_connections(self) -> int:
        value: int = self.values["network.inbound_connections"]
        return value

    @property
    def inbound_connections_per_address(self) -> int:
        value: int = self.values["network.inbound_connections_per_address"]
        return value

    @property
    def bootstrap_addresses(self) -> tuple[str, ...]:
        value: tuple[str, ...] = self.values["dht.bootstrap"]
        return value

    @property
    def is_client(self) -> bool:
        value: bool = self.values["dht.client"]
        return value

    @property
    def relay_limits(self) -> RelayLimits | None:
        """None if this node does not relay."""
        if not self.values["relay.serve"]:
            return None
        return relay_limits(str(self.values["relay.limits"]))

    @property
    def relays_for_members(self) -> bool:
        """Only for them, and not for everybody."""
        return bool(self.values["relay.for"] == MEMBERS)

    @property
    def keeps_slots(self) -> bool:
        value: bool = self.values["dht.keep_slots"]
        return value

    @property
    def trackers(self) -> tuple[NamedTracker, ...]:
        return tuple(read_tracker(one).below(Path.cwd()) for one in self.values["tracking.track"])

    @property
    def save_seconds(self) -> float:
        value: float = self.values["dht.save_seconds"]
        return value


def read_configuration(
    flags: Mapping[str, Value] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    home: str | None = None,
    config_file: str | None = None,
    defaults: Mapping[str, Value] | None = None,
) -> Configuration:
    """Read the settings. `flags` maps setting keys to the values of the command line; `defaults`
    are those of a command that has others than most.

    WrongUse if anything is invalid: a node never runs with half of its settings.
    """
    environment = os.environ if environment is None else environment
    places = find_places(environment, home=home, config_file=config_file)
    from_file, lines, file_read = _read_file(places)
    values: dict[str, Value] = {}
    origins: dict[str, Origin] = {}
    for setting in SETTINGS:
        key = setting.key
        if flags is not None and key in flags:
            values[key], origins[key] = flags[key], Origin("flag")
        elif environment.get(setting.variable):
            values[key] = _from_variable(setting, environment[setting.variable])
            origins[key] = Origin("environment", setting.variable)
        elif key in from_file:
            values[key] = from_file[key]
            origins[key] = Origin("file", str(file_read), lines[key])
        else:
            usual = setting.default_in(places)
            values[key], origins[key] = (defaults or {}).get(key, usual), DEFAULT
    return Configuration(places, values, origins, tuple(_warnings(environment)), file_read)


def _from_variable(setting: Setting, text: str) -> Value:
    try:
        return value_from_text(setting, text)
    except WrongUse as error:
        why = f"The environment variable {setting.variable} sets it. {error.why}".strip()
        raise WrongUse(error.what, why=why, advice=error.advice) from None


def _warnings(environment: Mapping[str, str]) -> Iterator[str]:
    known = [setting.variable for setting in SETTINGS] + list(_OTHER_VARIABLES)
    for name in sorted(environment):
        if name.startswith("POTLUCK_") and name not in known:
            meant = nearest(name, known)
            hint = f"; did you mean {meant}?" if meant else ""
            yield f"potluck does not know the environment variable {name}{hint}"


def _read_file(places: Places) -> tuple[dict[str, Value], dict[str, int], Path | None]:
    """The file's values, the line of each, and the path of the file."""
    path = places.config_file
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if places.config_file_origin == "default":
            return {}, {}, None
        raise WrongUse(
            f"There is no settings file {path}.", why=f"{places.config_file_origin} names it."
        ) from None
    except OSError as error:
        raise WrongUse(
            f"The settings file {path} cannot be read: {error.strerror}.",
            advice="Check its type and permissions (ls -l).",
        ) from None
    if len(content) > LARGEST_CONFIG_BYTES:
        raise WrongUse(f"{path} is larger than a megabyte: it cannot be a settings file.")
    document = _parse_toml(path, content)
    lines = {key: line_of(key, content.decode()) for key, _ in _flattened(document)}
    return dict(_settings_in(document, path, lines)), lines, path


def _parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WrongUse(
            f"The settings file {path} is not valid TOML: {why_not_toml(error)}.",
            advice='A line looks like `announce = ["/dns4/node.example/tcp/4001"]`, below '
            "`[network]`.",
        ) from None


def line_of(key: str, text: str) -> int:
    """The line of a TOML text that sets `key` (with its table); 0 if it is unclear.

    Python's parser gives no positions. A value on several lines, or an inline one, counts at its
    beginning. A similar text inside a string of several lines may mislead this.
    """
    table, _, name = key.rpartition(".")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        said = line.strip().replace('"', "").replace("'", "")
        if said.startswith("["):
            current = said.split("]")[0].strip("[ \t")
            continue
        word = said.partition("=")[0].replace(" ", "").replace("\t", "")
        if "=" in said and (word == key or (word == name and current == table)):
            return number
        if "=" in said and word == table and not current:
            return number
    return 0


def _settings_in(
    document: Mapping[str, Any], path: Path, lines: Mapping[str, int]
) -> Iterator[tuple[str, Value]]:
    for key, value in _flattened(document):
        setting = BY_KEY.get(key)
        if setting is None:
            raise _unknown_key(key, path)
        try:
            yield key, value_from_toml(setting, value)
        except WrongUse as error:
            where = f" on line {lines[key]}" if lines[key] else ""
            why = f"The file {path} sets it{where}. {error.why}".strip()
            raise WrongUse(error.what, why=why, advice=error.advice) from None


def _flattened(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for table, content in document.items():
        if isinstance(content, dict):
            for key, value in content.items():
                yield f"{table}.{key}", value
        else:
            yield table, content


def _unknown_key(key: str, path: Path) -> WrongUse:
    meant = nearest(key, BY_KEY) or nearest(key, [known.split(".")[1] for known in BY_KEY])
    if meant and "." not in meant:
        meant = next(known for known in BY_KEY if known.endswith(f".{meant}"))
    if meant:
        table, name = meant.split(".")
        advice = f"Did you mean {meant}, which is `{name}` below `[{table}]`?"
    else:
        advice = "`potluck config show` lists every setting."
    return WrongUse(f"There is no setting {key} (in {path}).", advice=advice)
