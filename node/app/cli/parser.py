"""argparse with potluck's habits: errors that suggest the nearest word, examples in every help.

A `CommandParser` raises `WrongUse` where argparse would print and exit, so that a wrong command
line ends like any other failure (exit code 2, JSON with `--json`).

argparse complains about *missing* arguments before unknown ones, so `potluck ping --cuont 3` would
be told that ADDRESS is missing. `error` therefore checks the words again and prefers the unknown
flag.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from node.core.wrong_use import WrongUse, nearest

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction["CommandParser"]

_INVALID_CHOICE = re.compile(
    r"(argument (?P<argument>[^:]*): )?"
    r"invalid choice: '?(?P<word>[^']*?)'? \(choose from (?P<known>.*)\)"
)
_WANTS_ONE = re.compile(r"argument [^:]*: expected one argument")


class _ParagraphFormatter(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal, except those with an indented line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = [
            paragraph if is_preformatted(paragraph) else fill(paragraph, width, indent)
            for paragraph in text.split("\n\n")
        ]
        return "\n\n".join(paragraphs)


def is_preformatted(paragraph: str) -> bool:
    """Whether the paragraph's line breaks must stay: it is a list or an example."""
    return any(line.startswith("  ") for line in paragraph.splitlines())


class CommandParser(argparse.ArgumentParser):
    """One command's (or subcommand's) parser. Flags are never abbreviated: scripts would break."""

    def __init__(self, *, example: str = "", **options: Any) -> None:
        options.setdefault("formatter_class", _ParagraphFormatter)
        options.setdefault("allow_abbrev", False)
        options.setdefault("conflict_handler", "resolve")
        if example:
            options["epilog"] = "example:\n" + "\n".join(
                f"  {line}" for line in example.strip().splitlines()
            )
        super().__init__(**options)
        self.example = example
        self._words: list[str] = []

    def add_actions(self, name: str) -> Subparsers:
        """The parsers of its subcommands. One of them must be typed; it is called `name`."""
        return self.add_subparsers(
            dest=name, metavar=name.upper(), required=True, parser_class=CommandParser
        )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._words = list(args or ())
        parsed, extras = super().parse_known_args(args, namespace)
        if extras:
            # Here, in the innermost parser: the outermost one has other flags.
            self.error(f"it takes no {' '.join(extras)}")
        return parsed, extras

    def error(self, message: str) -> NoReturn:
        help_command = f"`{self.prog} --help` shows its commands and flags, with an example."
        unknown = self._unknown_flag()
        if unknown is not None:
            raise WrongUse(
                f"`{self.prog}` has no flag {unknown}.",
                advice=_did_you_mean(unknown, self.flags(), help_command),
            )
        choice = _INVALID_CHOICE.search(message)
        if choice is not None:
            known = [word.strip(" '") for word in choice["known"].split(",")]
            word = choice["word"]
            advice = _did_you_mean(word, known, help_command)
            if _is_command(choice["argument"] or ""):
                raise WrongUse(f"`{self.prog}` has no command {word!r}.", advice=advice)
            raise WrongUse(
                f"`{self.prog}`: {choice['argument']} cannot be {word!r}.",
                why=f"It is one of {', '.join(known)}.",
                advice=advice,
            )
        dashed = _WANTS_ONE.fullmatch(message) and self._dashed_value()
        if dashed:
            raise WrongUse(
                f"`{self.prog}`: {message}.",
                why="Every word that begins with a dash is taken for a flag.",
                advice=f"If you mean a value, type {dashed}; otherwise see `{self.prog} --help`.",
            )
        raise WrongUse(f"`{self.prog}`: {message}.", advice=help_command)

    def flags(self) -> list[str]:
        """Every flag that this parser knows."""
        return list(self._option_string_actions)

    def _unknown_flag(self) -> str | None:
        for word in self._words:
            if word == "--" or self._subcommand_named(word):
                return None
            flag = word.split("=", 1)[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                return flag
        return None

    def _dashed_value(self) -> str:
        """A flag and a value that looks like another flag, written as they have to be typed."""
        for flag, word in zip(self._words, self._words[1:], strict=False):
            takes = self._option_string_actions.get(flag)
            dashed = word.startswith("-") and word not in ("-", "--")
            if takes is not None and takes.nargs is None and dashed and word not in self.flags():
                return f"{flag}={shlex.quote(word)}"
        return ""

    def _subcommand_named(self, word: str) -> bool:
        return any(word in choices for choices in self.subcommands())

    def subcommands(self) -> list[dict[str, CommandParser]]:
        """The parsers of the subcommands, if there are any: at most one mapping."""
        return [
            dict(action.choices)
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
        ]


def _is_command(argument: str) -> bool:
    return "command" in argument.lower()


def _did_you_mean(word: str, known: Sequence[str], otherwise: str) -> str:
    meant = nearest(word, known)
    return f"Did you mean {meant}? {otherwise}" if meant else otherwise


def add_flag(
    parser: argparse.ArgumentParser,
    flag: str,
    takes: Callable[[str], Any] | Sequence[str],
    default: float | str,
    what: str,
    *,
    metavar: str = "N",
) -> None:
    """Add a flag with a value and a default, which its help ends with.

    `takes`: an argparse type, or the words to choose from.
    """
    match default:
        case int():
            told = f"{default}"
        case float():
            told = f"{default:g}"
        case str():
            told = default
    value: dict[str, Any] = (
        {"type": takes, "metavar": metavar} if callable(takes) else {"choices": tuple(takes)}
    )
    parser.add_argument(flag, default=default, help=f"{what} ({told})", **value)


def positive_seconds(text: str) -> float:
    """An argparse type: a duration above zero, in seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return seconds


def add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    """`--timeout`, with this default."""
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=seconds,
        metavar="SECONDS",
        help=f"how long to try ({seconds:g})",
    )


def positive_count(text: str) -> int:
    """An argparse type: a whole number above zero."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def positive_number(text: str) -> float:
    """An argparse type: a number above zero."""
    return _number(text, "above zero", lambda number: number > 0)


def number_or_zero(text: str) -> float:
    """An argparse type: a number that is not below zero."""
    return _number(text, "that is not below zero", lambda number: number >= 0)


def _number(text: str, what: str, is_right: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not (is_right(number) and number < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {what}")
    return number
