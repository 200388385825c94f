"""A short text that a command line names instead of having it in it: a file's, or standard input's.

    text = text_named("alice.invite", "invite", limit=16_384, advice="…")     # or - for stdin

Promises: no more is read than its limit, whatever the file is; what is no text comes out with
replacement characters, for whoever parses it to refuse.

Easy to get wrong: what a person types as a file may be anything. `~nobody/x` is no OSError.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from node.wrong_use import WrongUse

STANDARD_INPUT: Final = "-"
LONGEST_SHOWN: Final = 200  # characters of a path that cannot be read


def text_named(name: str, what: str, *, limit: int, advice: str) -> str:
    """Up to `limit` characters and one more, so that a longer text shows as one. WrongUse."""
    content = _standard_input(4 * limit + 4) if name == STANDARD_INPUT else None
    if content is None:
        try:
            with Path(name).expanduser().open("rb") as file:
                content = file.read(4 * limit + 4)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise WrongUse(
                f"The {what} cannot be read from {name[:LONGEST_SHOWN]}.",
                why=f"{reason}.",
                advice=advice,
            ) from None
    return content.decode("utf-8-sig", "replace")[: limit + 1]


def _standard_input(most_bytes: int) -> bytes:
    if sys.stdin is None:
        raise WrongUse(
            "Nothing can be read from standard input.",
            why="It is closed.",
            advice="Name a file instead of -.",
        )
    return sys.stdin.buffer.read(most_bytes)
