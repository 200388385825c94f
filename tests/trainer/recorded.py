"""A `Shown` that keeps what it was shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.core.training_view import TrainerView
from node.training.happenings import Happening


@dataclass
class Recorded:
    happenings: list[Happening] = field(default_factory=list)
    views: list[TrainerView] = field(default_factory=list)

    def happened(self, happening: Happening) -> None:
        self.happenings.append(happening)

    def show(self, view: TrainerView) -> None:
        self.views.append(view)

    def kinds(self) -> list[str]:
        return [type(one).__name__ for one in self.happenings]
