"""To whom the trainer tells what it does: the seam between it and whatever shows it.

`--plain` and `--json` print happenings; the screen draws views. All are called in trio's thread,
and none of them may wait: a reader who pauses does not stop the training.
"""

from __future__ import annotations

from typing import Protocol

from node.trainer.happenings import Happening
from node.trainer.view import TrainerView


class Shown(Protocol):
    def happened(self, happening: Happening) -> None:
        """Something happened."""

    def show(self, view: TrainerView) -> None:
        """How it is now: about once a second, and after everything that happened."""


class Nobody:
    """Shows nothing: for tests, and a run that is watched through the control socket only."""

    def happened(self, happening: Happening) -> None: ...

    def show(self, view: TrainerView) -> None: ...
