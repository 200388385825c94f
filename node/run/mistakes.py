"""Finds every mistake in a run's file and describes it in a sentence that names its place.

    document = parse(text)                               # WrongDefinition: not TOML, too large
    mistakes = mistakes_in_table(document, RunDefinition)

Promises: `parse` takes no more than some tenths of a second and a few times the text's memory,
whatever the text. All mistakes are found, not only the first. An unknown key is reported with the
nearest known one.

TOML can be short and deep. `a.a.a.…` on one line of 64 KiB keeps Python's parser busy for 40
seconds, so the dots of a line are counted first.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from auth.fields import RUN_PATTERN
from node.core.wrong_use import why_not_toml
from protocols.errors import PotluckError

LARGEST_TEXT_BYTES = 64 << 10  # of run.toml: some hundred shards by name, and room for comments
MOST_DOTS_IN_A_LINE = 100  # dots make tables deep; an address in quotes has a handful
DEEPEST = 8  # nested tables and lists: data.source[0].paths has four
LONGEST_NUMBER_BITS = 256  # 77 digits of an integer; 0x… can have 60,000, more than Python prints
TOO_LONG_A_NUMBER = "it has a whole number of more than 77 digits"
LONGEST_SHOWN = 60  # characters of a wrong value
MOST_TOLD = 20  # mistakes in one error; a longer list would not be read
NEAR_ENOUGH = 0.6  # of difflib: `bacth` still means `batch`

# The text is shown on volunteers' screens. These characters move the cursor, change the direction
# of the text around them, or cannot be seen.
LINE_PATTERN = (
    r"^[^\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]*\Z"
)
VERSION_PATTERN = r"^[0-9]{1,9}(\.[0-9]{1,9}){0,3}\Z"

_PLACE = re.compile(r" - at `\$\.?(.*?)`$")
_EXPECTED = re.compile(r"^Expected `([^`]*)`(?:, got `[^`]*`)?(.*)$")
_FORMS = {
    RUN_PATTERN: "of letters, digits, dots, dashes and underscores, without spaces",
    LINE_PATTERN: "of one line, without control characters",
    VERSION_PATTERN: "of numbers and dots, such as 0.1.0",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}


ADVICE = (
    "It is in run.toml; `potluck run check` lists every mistake, and docs/organisers.md explains "
    "each table."
)


class WrongDefinition(PotluckError):
    """The run.toml has mistakes. `mistakes`: each of them, in a sentence."""

    exit_code = 2
    mistakes: tuple[str, ...] = ()

    @staticmethod
    def of(mistakes: Iterable[str]) -> WrongDefinition:
        found = tuple(mistakes)
        what, why = "There is a mistake in the run's definition.", found[0]
        if len(found) > 1:
            what = f"There are {len(found):,} mistakes in the run's definition."
            why = "".join(f"\n    - {one}" for one in found[:MOST_TOLD])
            if len(found) > MOST_TOLD:
                why += f"\n    - and {len(found) - MOST_TOLD:,} more."
        error = WrongDefinition(what, why=why, advice=ADVICE)
        error.mistakes = found
        return error


def parse(text: bytes) -> dict[str, Any]:
    """The tables of the text; WrongDefinition unless it is TOML within the limits."""
    import tomllib

    if len(text) > LARGEST_TEXT_BYTES:
        raise WrongDefinition.of(
            [f"It has {len(text):,} bytes, but a run has at most {LARGEST_TEXT_BYTES:,}."]
        )
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.count(b".") > MOST_DOTS_IN_A_LINE:
            raise WrongDefinition.of(
                [f"Line {number} has more than {MOST_DOTS_IN_A_LINE} dots: break it into several."]
            )
    try:
        document = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # TOML's own error is a ValueError, too
        reason = why_not_toml(error)
        if "integer string conversion" in reason:
            reason = TOO_LONG_A_NUMBER
        raise WrongDefinition.of([f"It is not TOML: {reason[:200].rstrip('.')}."]) from None
    _check_values(document)
    return document


def mistakes_in_table(
    table: Mapping[str, Any], kind: type[msgspec.Struct], where: str = ""
) -> list[str]:
    """Everything that keeps the table from being a `kind`; empty if it is one."""
    return list(_mistakes(table, kind, where))


def _mistakes(table: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    types = get_type_hints(kind, include_extras=True)
    inside = f" below [{where}]" if where else ""
    for key in table:
        if key not in fields:
            what = "table" if isinstance(table[key], Mapping) and not where else "key"
            yield f"There is no {what} {_short(key)}{inside}. {_nearest(key, fields)}"
    for name, field in fields.items():
        place = f"{name}{inside}" if where else f"[{name}]"
        if name not in table:
            if field.required:
                yield f"{place} is missing."
            continue
        section = _section_in(types[name])
        if section is not None:
            if isinstance(table[name], Mapping):
                yield from _mistakes(table[name], section, name)
            else:
                yield f"{place} must be a table."
            continue
        try:
            msgspec.convert(table[name], types[name])
        except (msgspec.ValidationError, OverflowError) as error:
            words = _in_words(str(error), _choices(types[name]))
            yield f"{place} cannot be {_short(table[name])}: {words}."


def _section_in(type_: Any) -> type[msgspec.Struct] | None:
    """The struct that a field holds, also if it may be left out."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return type_
    if NoneType not in get_args(type_):
        return None
    return next(filter(None, map(_section_in, get_args(type_))), None)


def _in_words(message: str, choices: Sequence[str]) -> str:
    """msgspec's "Expected `int` >= 1 - at `$.x`" in plain words."""
    place = _PLACE.search(message)
    message = _PLACE.sub("", message)
    expected = _EXPECTED.match(message)
    if expected is not None:
        kinds = [_KINDS.get(word.strip(), word.strip()) for word in expected[1].split("|")]
        kinds = [kind for kind in kinds if kind != "null"]
        message = f"it must be {' or '.join(kinds)} {_form(expected[2])}".rstrip()
    elif message.startswith("Invalid enum value"):
        message = f"it is one of {', '.join(dict.fromkeys(choices))}"
    else:
        message = message[:1].lower() + message[1:]
    return f"{message} (at {place[1]})" if place and place[1] else message


def _form(rest: str) -> str:
    """The part after the type in msgspec's sentence, without patterns."""
    for pattern, words in _FORMS.items():
        if repr(pattern) in rest:
            return words
    return rest.strip()


def _choices(type_: Any) -> list[str]:
    """The allowed words, if there are few enough to list."""
    if get_origin(type_) is Literal:
        return [str(word) for word in get_args(type_)]
    return [word for inner in get_args(type_) for word in _choices(inner)]


def _check_values(document: Mapping[str, Any]) -> None:
    """WrongDefinition if the document is deeper than the limit, or has a number that Python itself
    would not print. Without recursion."""
    layer: list[Any] = [document]
    for _ in range(DEEPEST):
        layer = [inner for outer in layer for inner in _inside(outer)]
        if any(isinstance(one, int) and one.bit_length() > LONGEST_NUMBER_BITS for one in layer):
            raise WrongDefinition.of([f"{TOO_LONG_A_NUMBER.capitalize()}."])
    if layer:
        raise WrongDefinition.of([f"Tables and lists in it are nested more than {DEEPEST} deep."])


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word[:100], names, n=1, cutoff=NEAR_ENOUGH)
    return f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names)}."


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST_SHOWN else shown[: LONGEST_SHOWN - 1] + "…"
