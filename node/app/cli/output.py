"""Output of commands: results on stdout, other text on stderr; with `--json` only JSON on stdout.

With `--json` a command prints one object, or one object per line if it streams; a failure is then
an object too: `{"error": {"what", "why", "advice", "exit_code"}}`.

Much of the text comes from peers (addresses, error texts). `printable` removes the control
characters that could move the cursor, recolour the screen or retitle the window; all text for a
person passes through it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from node.core.failure import CommandFailure

LONGEST_LINE = 2_000  # characters of one printed line; a longer one is a peer's mischief or a bug


@dataclass(frozen=True)
class Output:
    """The output of one command. `json`: the reader is a program. `plain`: lines, no screen."""

    json: bool = False
    debug: bool = False
    plain: bool = False

    @staticmethod
    def for_command_line(argv: Sequence[str]) -> Output:
        """From the words before they are parsed: errors in them need it too."""
        flags = argv[: argv.index("--")] if "--" in argv else argv
        return Output(json="--json" in flags, debug="--debug" in flags or debug_is_wanted())

    @staticmethod
    def of(arguments: argparse.Namespace) -> Output:
        """From the parsed arguments of a command."""
        wanted = debug_is_wanted()
        return Output(
            json=getattr(arguments, "json", False),
            debug=getattr(arguments, "debug", wanted),
            plain=getattr(arguments, "plain", False),
        )

    def data(self, value: Mapping[str, Any], text: str) -> None:
        """One result: the mapping for a program, the text for a person. Both on stdout."""
        print(self.line(value, text), file=sys.stdout, flush=True)

    def line(self, value: Mapping[str, Any], text: str) -> str:
        """One result as it is printed, without the end of the line; it is never cut, because it may
        be an invite or a part of a file."""
        return as_json(value) if self.json else printable(text, longest=None)

    def say(self, text: str) -> None:
        """Text for a person, beside the result. On stderr; a terminal gets whole words."""
        print(folded(printable(text), columns_of(sys.stderr)), file=sys.stderr, flush=True)

    def failure(self, failure: CommandFailure) -> None:
        """Print why the command failed: on stderr for a person, on stdout for a program."""
        if self.json:
            print(as_json({"error": failure.as_mapping()}), flush=True)
            return
        columns = columns_of(sys.stderr)
        for label, text in (
            ("error: ", failure.what),
            ("  why:  ", failure.why),
            ("  next: ", failure.advice),
        ):
            if text:
                self.say(folded(label + text, columns, " " * len(label)))


def as_json(value: Any) -> str:
    """One line that every reader of JSON accepts. JSON has no infinity and no NaN, which a loss may
    be: they become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: _finite(one) for name, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
    return value


def debug_is_wanted() -> bool:
    """Whether POTLUCK_DEBUG asks for tracebacks."""
    return os.environ.get("POTLUCK_DEBUG", "").lower() not in ("", "0", "no", "false", "off")


def folded(text: str, columns: int | None, hanging: str = "") -> str:
    """Lines broken between words where they are longer than that; what has none stays whole, so
    that it can be copied."""
    if columns is None or columns <= 2 * len(hanging):
        return text
    return "\n".join(
        line
        if len(line) <= columns
        else textwrap.fill(
            line,
            columns,
            subsequent_indent=hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal behind it; None if there is none, and the reader breaks lines."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def hung(first: str, text: str, columns: int | None) -> str:
    """Text after `first`, with its other lines indented below its beginning: no line of somebody
    else's text begins where ours do."""
    margin = " " * len(first)
    room = None if columns is None else columns - len(first)
    lines = [line for told in text.split("\n") for line in folded(told, room).split("\n")]
    return first + f"\n{margin}".join(lines)


def one_line(text: str) -> str:
    """Text from others, printable and in one line, whatever it holds."""
    return printable(" ".join(text.split()))


def counted(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun, in the singular or the plural."""
    return f"{count:,} {agreeing(count, one, many or one + 's')}"


def agreeing(count: int, one: str, many: str) -> str:
    """The form that agrees with the count."""
    return one if count == 1 else many


def printable(text: str, longest: int | None = LONGEST_LINE) -> str:
    """The text without characters that control a terminal, each line cut at `longest`."""
    lines = text.split("\n")
    return "\n".join(_printable_line(line, longest) for line in lines)


def _printable_line(line: str, longest: int | None) -> str:
    if not line.isprintable():
        line = "".join(
            c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line
        )
    return line if longest is None or len(line) <= longest else line[: longest - 1] + "…"


def prepare_streams() -> None:
    """Make printing never fail on a character that the terminal does not have, or on no terminal.

    A parent may have closed our standard descriptors. The next file that is opened would take
    their numbers, and our output would end up in it.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            break
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115 - for as long as we live
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def discard_output() -> None:
    """Redirect closed output to nowhere, so that the last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
