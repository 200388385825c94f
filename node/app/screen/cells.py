"""Text in a terminal's cells: made harmless, measured, cut, and wrapped between words.

Much of the text comes from strangers. `clean` removes everything that moves the cursor, turns the
direction of writing, or has a width that depends on the terminal.

A character is not a cell. "漢" takes two, a combining accent none; lines measured with len() would
wrap.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

from node.core.duration import span

LONGEST: Final = 500
LONGEST_PRINTED: Final = 8 << 10  # an invite has at most 6 KiB
"""Characters of one text that are looked at: more than the largest terminal shows."""

MARKS_IN_A_ROW: Final = 2
"""Accents on one letter: as many as any language stacks; more would hide the lines above."""

ELLIPSIS: Final = "…"
UNKNOWN: Final = "?"
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"


def clean(text: str, longest: int = LONGEST) -> str:
    """The text in one line, without anything that controls a terminal or confuses its counting."""
    if text.isascii() and text.isprintable():  # nearly all of it: there is nothing to remove
        return text[:longest].strip()
    kept: list[str] = []
    marks = 0
    for character in unicodedata.normalize("NFC", text[:longest]):
        if character.isspace():
            kept.append(" ")
        elif not character.isprintable() or _is_half_a_flag(character):
            kept.append(_REPLACED)
        elif unicodedata.category(character) in ("Mn", "Me"):
            marks += 1
            if marks <= MARKS_IN_A_ROW and kept and not _changes_width(character):
                kept.append(character)
            continue
        else:
            kept.append(character)
        marks = 0
    return "".join(kept).strip()


def clip(text: str, width: int) -> str:
    """At most this many cells of the text; an ellipsis means that there is more."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + ELLIPSIS


def pad(text: str, width: int) -> str:
    """Exactly this many cells."""
    return set_cell_size(clip(text, width), max(width, 0))


def fit(parts: Sequence[str], width: int, between: str = " · ") -> str:
    """As many of the parts, from the first on, as have room; at least a beginning of the first."""
    line = ""
    for part in parts:
        if not part:
            continue
        longer = f"{line}{between}{part}" if line else part
        if line and cell_len(longer) > width:
            break
        line = longer
    return clip(line, width)


def wrap(text: str, width: int, most: int) -> list[str]:
    """At most this many lines, cut between words; the last one has an ellipsis if more follows."""
    lines: list[str] = []
    left = text.split()
    while left and len(lines) < most:
        if len(lines) == most - 1:
            lines.append(clip(" ".join(left), width))
            break
        line = left.pop(0)
        while left and cell_len(f"{line} {left[0]}") <= width:
            line = f"{line} {left.pop(0)}"
        lines.append(clip(line, width))
    return lines


def time_span(seconds: float | None) -> str:
    """8 s, 3 min 20 s, 2 h 5 min; a question mark if unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    return span(seconds) if seconds >= 60 else f"{int(seconds)} s"


def count(number: float | None, decimals: int = 0) -> str:
    """With commas; a question mark if it is no number."""
    if number is None or not math.isfinite(number):
        return UNKNOWN
    return f"{number:,.{decimals}f}"


def _is_half_a_flag(character: str) -> bool:
    """Two of these are one flag of two cells in some terminals and of four in others."""
    return "\N{REGIONAL INDICATOR SYMBOL LETTER A}" <= character <= "\U0001f1ff"


def _changes_width(mark: str) -> bool:
    """Variation selectors: an emoji that was one cell wide becomes two, or not."""
    return "\ufe00" <= mark <= "\ufe0f" or "\U000e0100" <= mark <= "\U000e01ef"
