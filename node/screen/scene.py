"""What a picture is made of: the trainer's view, and the last things that happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.trainer.view import TrainerView

EVENTS_KEPT: Final = 24
"""The newest is what matters; some before it say how it came about, where there is room."""


@dataclass(frozen=True)
class SceneEvent:
    """One line of what happened. `clock`: the time of day. `warns`: it came from the log.
    `kind`: of which the newest only is shown."""

    clock: str
    words: str
    warns: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Scene:
    """One moment. `events`: the newest last."""

    view: TrainerView
    events: tuple[SceneEvent, ...] = ()
