"""`potluck config show`: this node's settings, and with `--origin` where each comes from."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "config",
        help="show the settings",
        description="Settings come from flags, then POTLUCK_* variables, then the settings file, "
        "then defaults.",
        example="potluck config show --origin",
    )
    actions = parser.add_actions("action")
    show = actions.add_parser(
        "show",
        help="print every setting in the form of the settings file",
        description="Print every setting and its value, in the form of the settings file.",
        example="potluck config show --origin\npotluck config show --json",
    )
    show.add_argument("--origin", action="store_true", help="show where each value comes from")


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.core.settings import SETTINGS, plain

    configuration = configuration_for(arguments)
    path = configuration.config_file
    lines = [f"# {path}" if path else f"# no file {configuration.places.config_file}"]
    settings = {}
    table = None
    for setting in SETTINGS:
        value = plain(configuration.values[setting.key])
        origin = str(configuration.origins[setting.key])
        settings[setting.key] = {"value": value, "origin": origin, "what": setting.what}
        table_of_setting, name = setting.key.split(".")
        if table_of_setting != table:
            table = table_of_setting
            lines += ["", f"[{table}]"]
        # JSON's strings, numbers and lists of them are valid TOML as well
        line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line}  # {origin}" if arguments.origin else line)
    Output.of(arguments).data(
        {"config_file": str(path) if path else None, "settings": settings}, "\n".join(lines)
    )
    return 0
