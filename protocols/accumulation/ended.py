"""The error that wakes a training loop when its node ends."""

from __future__ import annotations

from protocols.errors import PotluckError


class CollaborationEnded(PotluckError):
    """The collaboration's block has ended, or its node has: nothing is averaged any more.

    It comes out of whatever call the training loop was in (`step`, `assist`, `catch_up`), at once.
    A loop that wants to end cleanly catches it around the whole of its training.
    """
