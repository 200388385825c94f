"""Short texts that a command line gives by name: in a file, or on standard input.

    text = text_named("alice.invite", "invite", limit=16_384, advice="…")     # or - for stdin

No more than the limit is read, whatever the file is. Bytes that are no text become replacement
characters, which the parser then refuses.

A person may type anything as a file name: `~nobody/x` raises no OSError.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from node.core.wrong_use import WrongUse

STANDARD_INPUT: Final = "-"
LONGEST_SHOWN: Final = 200  # characters of an unreadable path


def text_named(name: str, what: str, *, limit: int, advice: str) -> str:
    """Up to `limit` characters, and one more to show that a text is longer. Raises WrongUse."""
    if not name.strip():  # a variable of the shell that is not set
        raise WrongUse(f"The {what} is empty.", advice=advice)
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
