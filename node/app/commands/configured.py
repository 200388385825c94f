"""From parsed arguments to the configuration: the flags that are settings, and where files are.

A command that uses a setting adds its flag with `add_setting_flag`. A typed value reaches the
configuration under the setting's key, checked by the setting's own rules.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from node.core.configuration import Configuration, read_configuration
from node.core.settings import BY_KEY, LISTS, SettingKind, Value, value_from_text
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.commands.parser import CommandParser

_DESTINATION = "setting "  # with a blank, so that no argument of a command can have that name
_METAVARS = {
    SettingKind.LISTEN_ADDRESSES: "ADDRESS",
    SettingKind.ANNOUNCE_ADDRESSES: "ADDRESS",
    SettingKind.PEER_ADDRESSES: "ADDRESS",
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
}


def add_setting_flag(parser: CommandParser, key: str, flag: str | None = None) -> None:
    """Add the flag of the setting `key`: by default its last part with dashes."""
    setting = BY_KEY[key]
    flag = flag or _flag_of(key)
    again = "; may be given several times" if setting.kind in LISTS else ""
    what = f"{setting.what}{again} ({key}, {setting.variable})"
    destination = _DESTINATION + key
    if setting.kind is SettingKind.SWITCH:
        parser.add_argument(flag, dest=destination, action="append_const", const="true", help=what)
        return
    parser.add_argument(
        flag, dest=destination, action="append", metavar=_METAVARS[setting.kind], help=what
    )


def configuration_for(arguments: argparse.Namespace) -> Configuration:
    """The configuration of this command line; its warnings are printed on stderr."""
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
    )
    for warning in configuration.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return configuration


def _flag_of(key: str) -> str:
    return "--" + key.split(".")[1].replace("_", "-")


def _of_flag(error: WrongUse, key: str) -> WrongUse:
    """Name the flag in the error, and not the setting, if the flag was typed."""
    what = error.what.replace(f"{key} cannot be ", f"{_flag_of(key)} cannot be ", 1)
    return WrongUse(what, why=error.why, advice=error.advice)
