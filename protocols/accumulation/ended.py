"""The error that wakes a training loop when its node ends."""

from __future__ import annotations

from protocols.errors import PotluckError


class CollaborationEnded(PotluckError):
    """The collaboration's block has ended, or its node has: nothing is averaged any more.

    The call that the training loop is in (`step`, `assist`, `catch_up`) raises it at once. A loop
    that wants to end cleanly catches it around the whole training.
    """
