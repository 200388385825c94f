"""From parsed arguments to the configuration: the flags that are settings, and where files are.

A command that is governed by a setting adds its flag with `add_setting_flag`; what was typed
reaches the configuration under the setting's key, checked by the setting's own rules.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from node.configuration import Configuration, read_configuration
from node.settings import BY_KEY, LISTS, Kind, Value, value_from_text
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.commands.parser import CommandParser

_DESTINATION = "setting "  # with a blank, so that no argument of a command can have that name
_METAVARS = {
    Kind.LISTEN_ADDRESSES: "ADDRESS",
    Kind.ANNOUNCE_ADDRESSES: "ADDRESS",
    Kind.PEER_ADDRESSES: "ADDRESS",
    Kind.FILE: "FILE",
    Kind.NAME: "NAME",
    Kind.SECONDS: "SECONDS",
    Kind.COUNT: "COUNT",
    Kind.DEVICE: "DEVICE",
    Kind.THREADS: "COUNT",
    Kind.RATE: "RATE",
    Kind.SIZE: "SIZE",
    Kind.QUOTA: "AMOUNT",
    Kind.SCHEDULE: "TIMES",
}


def add_setting_flag(parser: CommandParser, key: str, flag: str | None = None) -> None:
    """Add the flag of the setting `key`: by default its last part with dashes."""
    setting = BY_KEY[key]
    flag = flag or _flag_of(key)
    again = "; may be given several times" if setting.kind in LISTS else ""
    what = f"{setting.what}{again} ({key}, {setting.variable})"
    destination = _DESTINATION + key
    if setting.kind is Kind.SWITCH:
        parser.add_argument(flag, dest=destination, action="append_const", const="true", help=what)
        return
    parser.add_argument(
        flag, dest=destination, action="append", metavar=_METAVARS[setting.kind], help=what
    )


def configuration_for(arguments: argparse.Namespace) -> Configuration:
    """The configuration of this command line; its warnings have been said on stderr."""
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
    """Who has typed a flag is told of that, and not of a setting."""
    what = error.what.replace(f"{key} cannot be ", f"{_flag_of(key)} cannot be ", 1)
    return WrongUse(what, why=error.why, advice=error.advice)
