"""Write docs/cli.md from the parsers: `python -m node.app.cli.reference`.

A test fails when the page is not current. It is made from the parsers' parts and not from
argparse's own help, whose layout changes between versions of Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from node.app.cli.catalogue import build_parser, flags_of_all
from node.app.cli.exit_codes import MEANINGS
from node.app.cli.parser import CommandParser, is_preformatted
from node.core.settings import SETTINGS, plain

PAGE = Path("docs/cli.md")

_INTRODUCTION = """\
# The command `potluck`

This page is written by `python -m node.app.cli.reference`; change the commands, not the page.

Results go to stdout, everything else to stderr. With `--json` stdout carries one JSON object, or
one per line for a stream; a failure is the object
`{"error": {"what", "why", "advice", "exit_code"}}`. Tracebacks are shown only with `--debug` or
`POTLUCK_DEBUG=1`. `NO_COLOR` is respected.
"""

_SETTINGS = """\
## Settings

A setting comes from its flag, its environment variable, the settings file or its default, in this
order; `potluck config show --origin` shows which. In the environment, commas separate the items of
a list. The file is TOML: `network.listen` is `listen` below `[network]`.
"""

_FILES = """\
## Files

| file | with `POTLUCK_HOME` or `--home` | otherwise, on Linux |
|---|---|---|
| settings | `HOME/potluck.toml` | `~/.config/potluck/potluck.toml` |
| key (mode 0600; anyone who has it can pose as the node) | `HOME/identity.key` \
| `~/.local/share/potluck/identity.key` |
| known peers, for rejoining | `HOME/peers.json` | beside the key |
| bytes sent and received this month, for the quota | `HOME/traffic.json` | beside the key |
| bytes relayed for others this month | `HOME/relayed.json` | beside the key |
| signed records of who gave what to runs | `HOME/credit/` | beside the key |
| the present pause, which survives a restart | `HOME/pause.json` | beside the key |
| slots that a backbone keeps across a restart | `HOME/dht.sqlite` | beside the key |
| access pass of a run, and the newest revocation list | `HOME/access.pass`, \
`HOME/revocations` | beside the key |
| organiser's key (mode 0600; anyone who has it can change the organiser's runs) \
| `HOME/organiser.key` | beside the key |
| for each run of this node: its definition, partly downloaded files, its place in the data, its \
history for the page \
| `HOME/runs/` | beside the key |
| lock and control socket of a running node | `HOME/run/` | `~/.local/state/potluck/run/` |
| auth server: settings | `HOME/auth.toml` | `~/.config/potluck/auth.toml` |
| auth server: database, auth keys (anyone who has them can sign tokens) | `HOME/auth/` \
| `~/.local/share/potluck/auth/` |
| auth server: control socket | `HOME/run/auth.sock` | `~/.local/state/potluck/run/auth.sock` |

On macOS and elsewhere they are in that platform's usual places. A node removes its lock and socket
when it ends; after `kill -9` the next start takes them over.
"""


def reference() -> str:
    """The whole page."""
    parser = build_parser()
    lines = [_INTRODUCTION, "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "## Flags of every command", "", *_flag_table(parser, every_command=True)]
    lines += sections(parser)
    lines += ["", _SETTINGS, *_settings_table(), "", _FILES]
    return "\n".join(lines).rstrip() + "\n"


def sections(parser: CommandParser) -> Iterator[str]:
    """A section for each command of this parser, as Markdown; for itself if it has no commands."""
    if not parser.subcommands():
        yield from _command(parser, "##")
    for subparsers in parser.subcommands():
        for command in subparsers.values():
            yield from _command(command, "##")


def _command(parser: CommandParser, heading: str) -> Iterator[str]:
    yield from ("", f"{heading} {parser.prog}", "")
    for paragraph in (parser.description or "").split("\n\n"):
        fence = ["```"] if is_preformatted(paragraph) else []
        yield from (*fence, paragraph, *fence, "")
    positionals = [a for a in parser._actions if not a.option_strings and _is_plain(a)]
    if positionals:
        yield from ("| argument | |", "|---|---|")
        for action in positionals:
            yield f"| `{action.metavar or action.dest}` | {action.help or ''} |"
        yield ""
    table = list(_flag_table(parser, every_command=False))
    if table:
        yield from (*table, "")
    yield from ("```", *parser.example.strip().splitlines(), "```")
    for subparsers in parser.subcommands():
        for subparser in subparsers.values():
            yield from _command(subparser, heading + "#")


def _is_plain(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._SubParsersAction)


def _flag_table(parser: CommandParser, *, every_command: bool) -> Iterator[str]:
    rows = []
    for action in parser._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if flags and (flags[0] in flags_of_all()) == every_command and flags[0] != "--help":
            value = "" if action.nargs == 0 else f" {_value(action)}"
            rows.append(f"| `{flags[0]}{value}` | {action.help or ''} |")
    if rows:
        yield from ("| flag | |", "|---|---|", *rows)


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return "\\|".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest.upper())


def _settings_table() -> Iterator[str]:
    yield from ("| setting | variable | default | |", "|---|---|---|---|")
    for setting in SETTINGS:
        default = "in the data folder" if callable(setting.default) else plain(setting.default)
        shown = ", ".join(default) or "none" if isinstance(default, list) else default
        if isinstance(default, bool):
            shown = str(default).lower()
        yield f"| `{setting.key}` | `{setting.variable}` | {shown} | {setting.what} |"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
