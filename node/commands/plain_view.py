"""What happens while a node trains, as lines: for a pipe, for `--plain`, and as JSON for `--json`.

A line has the time of day before it. The three lines of what will be used have not: a person reads
them as one.
"""

from __future__ import annotations

import time

from node.commands.line_queue import LineQueue
from node.display_name import with_names
from node.trainer.happenings import Happening, WillUse
from node.trainer.view import TrainerView, named
from node.trainer.words import object_of, words_of


class PlainView:
    """`Shown` (node/trainer/shown.py) on a queue of lines."""

    def __init__(self, lines: LineQueue) -> None:
        self._lines = lines
        self._view = TrainerView()

    def happened(self, happening: Happening) -> None:
        words = with_names(words_of(happening), named(self._view.peers))
        if not isinstance(happening, WillUse):
            words = f"{time.strftime('%H:%M:%S')} {words}"
        self._lines.data({**object_of(happening), "time": round(time.time(), 3)}, words)

    def show(self, view: TrainerView) -> None:
        """A line is for what happens; how it is, `potluck status` tells. It names the peers."""
        self._view = view
