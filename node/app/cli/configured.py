"""From parsed arguments to the configuration: the flags that are settings, and where files are.

A command that uses a setting adds its flag with `add_setting_flag`. A typed value reaches the
configuration under the setting's key, checked by the setting's own rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from node.core.configuration import Configuration, read_configuration
from node.core.settings import BY_KEY, LISTS, SettingKind, Value, value_from_text
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import CommandParser

_DESTINATION = "setting "  # with a blank, so that no argument of a command can have that name
_METAVARS = {
    SettingKind.LISTEN_ADDRESSES: "ADDRESS",
    SettingKind.ANNOUNCE_ADDRESSES: "ADDRESS",
    SettingKind.PEER_ADDRESSES: "ADDRESS",
    SettingKind.TRACKERS: "TRACKER",
    SettingKind.FILE: "FILE",
    SettingKind.NAME: "NAME",
    SettingKind.SECONDS: "SECONDS",
    SettingKind.COUNT: "COUNT",
    SettingKind.DEVICE: "DEVICE",
    SettingKind.THREADS: "COUNT",
    SettingKind.RATE: "RATE",
    SettingKind.SIZE: "SIZE",
    SettingKind.QUOTA: "AMOUNT",
    SettingKind.SCHEDULE: "TIMES",
    SettingKind.RELAY_LIMITS: "LIMITS",
    SettingKind.RELAY_FOR: "WHOM",
}


def add_setting_flag(parser: CommandParser, key: str) -> None:
    """Add the flag of the setting `key`."""
    setting = BY_KEY[key]
    flag = _flag_of(key)
    again = "; may be given several times" if setting.kind in LISTS else ""
    what = f"{setting.what}{again} ({key}, {setting.variable})"
    destination = _DESTINATION + key
    if setting.kind is SettingKind.SWITCH:
        parser.add_argument(flag, dest=destination, action="append_const", const="true", help=what)
        return
    if setting.kind is SettingKind.OWN_SWITCH:
        parser.add_argument(flag, dest=destination, action="append_const", const="true", help=what)
        add_off_flag(parser, key, _no(flag), f"the opposite of {flag}")
        return
    parser.add_argument(
        flag, dest=destination, action="append", metavar=_METAVARS[setting.kind], help=what
    )


def add_off_flag(parser: CommandParser, key: str, flag: str, what: str) -> None:
    """Add a flag that switches the setting `key` off, for a command that has it on by default."""
    what = f"{what} ({key}, {BY_KEY[key].variable})"
    parser.add_argument(
        flag, dest=_DESTINATION + key, action="append_const", const="false", help=what
    )


def typed_settings(arguments: argparse.Namespace, configuration: Configuration) -> list[str]:
    """The flags of this command line that are settings, for another one; paths are absolute."""
    typed = []
    for destination, words in vars(arguments).items():
        if not destination.startswith(_DESTINATION) or words is None:
            continue
        key = destination.removeprefix(_DESTINATION)
        value = configuration.values[key]
        if BY_KEY[key].kind is SettingKind.SWITCH:
            typed.append(_flag_of(key) if value else _off_flag_of(key))
            continue
        if BY_KEY[key].kind is SettingKind.OWN_SWITCH:
            typed.append(_flag_of(key) if value == "true" else _no(_flag_of(key)))
            continue
        for word in value if isinstance(value, tuple) else (value,):
            typed += [_flag_of(key), str(word)]
    return typed


def configuration_for(
    arguments: argparse.Namespace, defaults: Mapping[str, Value] | None = None
) -> Configuration:
    """The configuration of this command line; its warnings are printed on stderr. `defaults`: those
    that this command has instead of the usual ones."""
    flags: dict[str, Value] = {}
    for destination, words in vars(arguments).items():
        if destination.startswith(_DESTINATION) and words is not None:
            key = destination.removeprefix(_DESTINATION)
            setting = BY_KEY[key]
            text = ",".join(words) if setting.kind in LISTS else words[-1]
            try:
                flags[key] = value_from_text(setting, text)
            except WrongUse as error:
                raise _of_flag(error, key) from None
    configuration = read_configuration(
        flags,
        home=getattr(arguments, "home", None),
        config_file=getattr(arguments, "config", None),
        defaults=defaults,
    )
    for warning in configuration.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return configuration


def _flag_of(key: str) -> str:
    """Its last part with dashes; those of the relay have its name in front."""
    table, name = key.split(".")
    return "--" + (f"{table}_{name}" if table == "relay" else name).replace("_", "-")


def _off_flag_of(key: str) -> str:
    return f"--no-{key.split('.')[0]}"


def _no(flag: str) -> str:
    return flag.replace("--", "--no-", 1)


def _of_flag(error: WrongUse, key: str) -> WrongUse:
    """Name the flag in the error, and not the setting, if the flag was typed."""
    what = error.what.replace(f"{key} cannot be ", f"{_flag_of(key)} cannot be ", 1)
    return WrongUse(what, why=error.why, advice=error.advice)
