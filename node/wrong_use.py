"""The error for what a person typed, or wrote into a file, that cannot be right."""

from __future__ import annotations

from collections.abc import Iterable

from protocols.errors import PotluckError


class WrongUse(PotluckError):
    """A command line, a setting or an address that cannot be right. Nothing was tried."""

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if one is near enough to be worth naming."""
    import difflib

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
