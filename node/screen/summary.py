"""What stays on the terminal when the picture is gone: how it ended, and what was given. Pure.

    summary(scene, clock, width, height)      # lines of rich's Text, which fit

It is a last picture: the state and what can be done now, where the run stood, and the last
warnings. Nothing is left of a session that gave nothing and failed at nothing.

Easy to get wrong: a second Ctrl-C ends everything in the middle of leaving, and then nobody has
told what the session gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace
from rich.text import Text

from node.screen.cells import time_span
from node.screen.layout import Block, arrange
from node.screen.numbers import carried_block, given_block, loss_block
from node.screen.picture import (
    LEAST_CURVE_ROWS,
    event_lines,
    events_with_names,
    placed,
    room_of,
    state_lines,
    title,
)
from node.screen.scene import Scene, SceneEvent
from node.trainer.view import ENDED, Phase, TrainerView

WARNINGS_KEPT: Final = 3
LINES_OF_ONE: Final = 3
LINES_TO_BE_READ: Final = 12
"""Of what happened and of what to do: all of it, as long as it is bearable."""

CURVE_FROM: Final = 16
"""Rows of a terminal that has room for a curve of several."""


def summary(scene: Scene, clock: str, width: int, height: int) -> list[Text]:
    """None wider than `width` cells, and at most `height` lines, but for how it ended: that is said
    in full. `clock`: when it ended."""
    view = _as_ended(scene.view)
    warnings = [one for one in events_with_names(scene) if one.warns][-WARNINGS_KEPT:]
    given = view.contribution
    gave = bool(given.steps or given.alone_steps or given.lost_samples)
    failed = view.phase in (Phase.REFUSED, Phase.FAILED)
    if not (gave or failed or warnings or (view.phase is Phase.LEFT and view.epoch)):
        return []
    room = room_of(width)
    says, to_do = state_lines(view, room, LINES_TO_BE_READ, LINES_TO_BE_READ)
    state = [*says, *to_do]
    since = (f"at {clock}, after {time_span(view.session_seconds)}", f"at {clock}")
    blocks = [
        Block(1, [[title(view, room, since)]]),
        Block(2, [state] if state else []),
    ]
    if gave or view.epoch:
        loss = loss_block(view, room, most_rows=LEAST_CURVE_ROWS)
        blocks.append(loss if height >= CURVE_FROM else Block(loss.priority, loss.variants[:1]))
        if view.phase is not Phase.LEFT or not view.doing:  # else it has been said
            blocks.append(given_block(view, room))
        blocks.append(carried_block(view, room))
    blocks.append(Block(6, _variants(warnings, room), apart=True))
    return [placed(line, width) for line in arrange(blocks, max(height, 1 + len(state)))]


def _as_ended(view: TrainerView) -> TrainerView:
    view = replace(view, contribution=replace(view.contribution, samples_per_second=None))
    if view.phase in ENDED:
        return view
    return replace(view, phase=Phase.LEFT, doing="", advice="")


def _variants(warnings: Sequence[SceneEvent], room: int) -> list[list[Text]]:
    """The newest ones, more of them where there is room."""
    lines = [event_lines(one, room, LINES_OF_ONE) for one in warnings]
    return [
        [line for one in lines[first:] for line in one] for first in reversed(range(len(lines)))
    ]
