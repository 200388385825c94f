"""`potluck completion bash|zsh|fish`: a script that teaches the shell our commands and flags.

The scripts are written from the parsers, so they cannot disagree with them, and are static:
completing costs no start of Python. The shell completes anything that depends on the machine
(files, folders).

A flag's value must not be taken for a subcommand (`potluck --home id …`), so each script knows
which flags take a value and skips it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.app.cli.output import Output
from node.app.cli.parser import CommandParser

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for the shell",
        description="Print a script with which the shell completes potluck's commands and flags.",
        example="bash:  source <(potluck completion bash)\n"
        "zsh:   source <(potluck completion zsh)\n"
        "fish:  potluck completion fish > ~/.config/fish/completions/potluck.fish",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.catalogue import build_parser

    script = script_for(arguments.shell, build_parser())
    Output.of(arguments).data({"shell": arguments.shell, "script": script}, script.rstrip("\n"))
    return 0


@dataclass(frozen=True)
class Word:
    """A flag or subcommand, as it is offered. `value` is the kind of a flag's value."""

    text: str
    what: str
    value: str = ""  # "" when nothing follows, otherwise file, folder, choices or other
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """The words that may follow `path`, the commands so far: () for `potluck` itself."""

    path: tuple[str, ...]
    flags: list[Word] = field(default_factory=list)
    subcommands: list[Word] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)  # of a positional argument


def script_for(shell: str, parser: CommandParser) -> str:
    """The script for bash, zsh or fish."""
    levels = list(_levels(parser, ()))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](levels)


def _levels(parser: CommandParser, path: tuple[str, ...]) -> Iterator[Level]:
    level = Level(path)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        if action.option_strings:
            what = (action.help or "").replace("\n", " ")
            choices = tuple(str(choice) for choice in action.choices or ())
            for flag in _offered(action):
                level.flags.append(Word(flag, what, _value_of(action), choices))
        elif action.choices:
            level.choices.extend(str(choice) for choice in action.choices)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            level.subcommands.extend(Word(name, helps.get(name, "")) for name in action.choices)
    yield level
    for subparsers in parser.subcommands():
        for name, subparser in subparsers.items():
            yield from _levels(subparser, (*path, name))


def _offered(action: argparse.Action) -> list[str]:
    """The longest of its names; both for a flag that can also be denied (--qr, --no-qr)."""
    names = [name for name in action.option_strings if name.startswith("--")]
    return names if isinstance(action, argparse.BooleanOptionalAction) else names[-1:]


def _value_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return "choices"
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return {"FILE": "file", "DIRECTORY": "folder"}.get(metavar, "other")


def _bash(levels: list[Level]) -> str:
    flags_with_value = sorted({f.text for level in levels for f in level.flags if f.value})
    path_cases, value_cases = [], []
    for level in levels:
        offered = [w.text for w in level.subcommands] + level.choices
        offered += [flag.text for flag in level.flags]
        path_cases.append(f'        "{" ".join(level.path)}") words="{" ".join(offered)}" ;;')
        for flag in level.flags:
            if flag.value == "choices":
                key = f"{' '.join(level.path)}|{flag.text}"
                value_cases.append(
                    f'        "{key}") COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- '
                    '"$current")); return ;;'
                )
    files = "|".join(sorted({f.text for lv in levels for f in lv.flags if f.value == "file"}))
    folders = "|".join(sorted({f.text for lv in levels for f in lv.flags if f.value == "folder"}))
    nested = " | ".join(
        f'"{" ".join((*level.path, word.text))}"' for level in levels for word in level.subcommands
    )
    newline = "\n"
    return f"""\
# bash completion for potluck; written by `potluck completion bash`
_potluck() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local path="" index word words=""
    for ((index = 1; index < COMP_CWORD; index++)); do
        word="${{COMP_WORDS[index]}}"
        case "$word" in
        {"|".join(flags_with_value)}) ((index++)); continue ;;
        esac
        case "${{path:+$path }}$word" in
        {nested}) path="${{path:+$path }}$word" ;;
        esac
    done
    case "$path|$previous" in
{newline.join(value_cases)}
    esac
    case "$previous" in
        {files}) COMPREPLY=($(compgen -f -- "$current")); return ;;
        {folders}) COMPREPLY=($(compgen -d -- "$current")); return ;;
        {"|".join(flags_with_value)}) COMPREPLY=(); return ;;
    esac
    case "$path" in
{newline.join(path_cases)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o filenames -F _potluck potluck
"""


def _zsh(levels: list[Level]) -> str:
    functions = "\n".join(_zsh_function(level) for level in levels)
    return f"""\
#compdef potluck
# zsh completion for potluck; written by `potluck completion zsh`
{functions}
if [ "$funcstack[1]" = "_potluck" ]; then
    _potluck "$@"
else
    compdef _potluck potluck
fi
"""


def _zsh_function(level: Level) -> str:
    arguments = [_zsh_flag(flag) for flag in level.flags]
    if not level.subcommands:
        if level.choices:
            arguments.append(shlex.quote(f"1:choice:({' '.join(level.choices)})"))
        body = " \\\n        ".join(["_arguments", *arguments])
        return f"{_zsh_name(level.path)}() {{\n    {body}\n}}"
    commands = "\n        ".join(
        shlex.quote(f"{word.text}:{_zsh_text(word.what)}") for word in level.subcommands
    )
    cases = "\n            ".join(
        f"{word.text}) {_zsh_name((*level.path, word.text))} ;;" for word in level.subcommands
    )
    body = " \\\n        ".join(
        ["_arguments -C", *arguments, "'1:command:->command'", "'*::argument:->argument'"]
    )
    return f"""\
{_zsh_name(level.path)}() {{
    local state line
    local -a commands=(
        {commands}
    )
    {body}
    case $state in
        command) _describe command commands ;;
        argument)
            case $line[1] in
            {cases}
            esac ;;
    esac
}}"""


def _zsh_name(path: tuple[str, ...]) -> str:
    return "_".join(["_potluck", *path])


def _zsh_flag(flag: Word) -> str:
    actions = {
        "": "",
        "file": ":file:_files",
        "folder": ":folder:_files -/",
        "choices": f":choice:({' '.join(flag.choices)})",
        "other": ":value: ",
    }
    return shlex.quote(f"*{flag.text}[{_zsh_text(flag.what)}]{actions[flag.value]}")


def _zsh_text(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


def _fish(levels: list[Level]) -> str:
    lines = ["# fish completion for potluck; written by `potluck completion fish`"]
    lines.append("complete -c potluck -f")
    for level in levels:
        condition = _fish_condition(level)
        for word in level.subcommands:
            lines.append(f"complete -c potluck {condition} -a {word.text} -d {_quoted(word.what)}")
        if level.choices:
            lines.append(f"complete -c potluck {condition} -a {_quoted(' '.join(level.choices))}")
        for flag in level.flags:
            value = {
                "": "",
                "file": " -r -F",
                "folder": " -x -a '(__fish_complete_directories)'",
                "choices": f" -x -a {_quoted(' '.join(flag.choices))}",
                "other": " -x",
            }[flag.value]
            lines.append(
                f"complete -c potluck {condition} -l {flag.text[2:]}{value} -d {_quoted(flag.what)}"
            )
    return "\n".join(lines) + "\n"


def _fish_condition(level: Level) -> str:
    if not level.path:
        return "-n __fish_use_subcommand"
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in level.path)
    if level.subcommands:
        names = " ".join(word.text for word in level.subcommands)
        seen += f"; and not __fish_seen_subcommand_from {names}"
    return f"-n {_quoted(seen)}"


def _quoted(text: str) -> str:
    """For fish: in single quotes only backslash and the quote itself are special."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
