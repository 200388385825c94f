"""What stays on the terminal when the picture is gone: a few lines, which fit. Pure."""

from __future__ import annotations

from typing import Final

from node.caps.units import in_words
from node.screen.cells import clean, count, wrap
from node.screen.scene import Scene
from node.trainer.happenings import Left
from node.trainer.words import words_of

WARNINGS_KEPT: Final = 3
LINES_OF_ONE: Final = 4


def summary(scene: Scene, left: Left | None, columns: int) -> list[str]:
    """What was given, and where the run stands; nothing of a session that gave nothing, unless
    something was warned of."""
    view, lines = (
        scene.view,
        [f"{one.clock} {clean(one.words)}" for one in scene.events if one.warns][-WARNINGS_KEPT:],
    )
    if view.contribution.steps or (left is not None and view.epoch):
        loss = "" if view.loss is None else f", loss {count(view.loss, 4)}"
        began = f" ({count(view.losses[0], 4)} at first)" if loss and view.losses else ""
        lines.append(f"{clean(view.run)}: step {count(view.epoch)}{loss}{began}")
        traffic = view.traffic
        if traffic.sent_bytes or traffic.received_bytes:
            lines.append(
                f"{in_words(traffic.sent_bytes)} sent, {in_words(traffic.received_bytes)} received"
            )
    if left is not None:
        lines.append(words_of(left))
    elif view.contribution.steps:
        given = view.contribution
        lines.append(f"{count(given.samples)} samples of yours are in {count(given.steps)} steps")
    return [part for line in lines for part in wrap(line, columns, LINES_OF_ONE)]
