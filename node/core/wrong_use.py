"""The error for invalid input that a person typed or wrote into a file."""

from __future__ import annotations

from collections.abc import Iterable

from protocols.errors import PotluckError


class WrongUse(PotluckError):
    """A command line, a setting or an address is invalid. Nothing was done."""

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if one is near enough."""
    import difflib

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def why_not_toml(error: ValueError | RecursionError) -> str:
    """The mistake in a text that could not be decoded or parsed, in a few words."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1:,} is no text in UTF-8"
    return str(error)
