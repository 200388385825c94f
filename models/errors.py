"""The root of every error that models raises on purpose, and the two about settings and states.

This package does not import the layers above it, so this is a root of its own, as in auth: the same
three sentences (what happened, why probably, what to do), shown in the same way.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR_ENOUGH = 0.6  # of difflib: `leyers` still means `layers`, `depth` does not


class ModelsError(Exception):
    """Root of the hierarchy of models. `exit_code` is the exit code of the command."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.advice = advice

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.advice) if part)


class WrongSettings(ModelsError, ValueError):
    """An unknown name or key, or a wrong value."""

    exit_code = 2


class NotThisModel(ModelsError, ValueError):
    """Tensors, or a batch, that do not belong to this model."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?` where one of the known words is near enough, else all of them."""
    names = sorted(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=NEAR_ENOUGH)
    return f"Did you mean {matches[0]}?" if matches else f"There are: {', '.join(names)}."
