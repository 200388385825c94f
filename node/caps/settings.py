"""All caps of this node at once, as numbers: what `[limits]` of the configuration says.

    for key in CAP_KEYS: add_setting_flag(parser, key)
    caps = caps_of(configuration)

Promises: whatever was typed is either in here as it was meant, or was refused by name when the
configuration was read. None always means that nothing was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.caps.devices import AUTO
from node.caps.timetable import ALWAYS, Timetable, parse_timetable
from node.caps.units import Measure, amount, in_words

if TYPE_CHECKING:
    from node.configuration import Configuration

CAP_KEYS = (
    "limits.device",
    "limits.threads",
    "limits.max_memory",
    "limits.upload_limit",
    "limits.download_limit",
    "limits.quota",
    "limits.schedule",
    "limits.when_idle",
)


@dataclass(frozen=True)
class PlannerRates:
    """For `CollaborationSettings.up_bytes_per_second` and `down_bytes_per_second`: 0 is no limit,
    so that what the link was measured to carry counts."""

    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0


PLANNED_SHARE = 0.6
"""Of a limit, what a round may count on. Packets, frames, the directory and the state that others
fetch take a tenth. And whoever has no limit is known only by what it carried in earlier rounds: as
much as their slowest member let it. Declared in full, a limit would make everybody look as slow as
this node, and the plan would give it as much to do as them; so its word is below what it shows."""


@dataclass(frozen=True)
class Caps:
    """What the owner allows. `device` is `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; sizes in bytes;
    `quota_bytes` is for one calendar month and both directions together."""

    device: str = AUTO
    threads: int | None = None
    memory_bytes: int | None = None
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    quota_bytes: int | None = None
    schedule: str = ALWAYS
    when_idle: bool = False

    @property
    def timetable(self) -> Timetable:
        return parse_timetable(self.schedule)

    def planner_rates(self) -> PlannerRates:
        """What the plan of a round may count on from this node."""
        return PlannerRates(
            PLANNED_SHARE * (self.upload_bytes_per_second or 0.0),
            PLANNED_SHARE * (self.download_bytes_per_second or 0.0),
        )

    def words(self) -> dict[str, str]:
        """Each cap that was asked for, in words, under the name of its flag."""
        words = {}
        if self.device != AUTO:
            words["device"] = self.device
        if self.threads is not None:
            words["threads"] = f"{self.threads}"
        if self.memory_bytes is not None:
            words["max-memory"] = f"at most {in_words(self.memory_bytes)}"
        if self.upload_bytes_per_second is not None:
            words["upload-limit"] = f"at most {in_words(self.upload_bytes_per_second)}/s"
        if self.download_bytes_per_second is not None:
            words["download-limit"] = f"at most {in_words(self.download_bytes_per_second)}/s"
        if self.quota_bytes is not None:
            words["quota"] = f"at most {in_words(self.quota_bytes)} a month"
        if self.schedule != ALWAYS:
            words["schedule"] = f"only {self.schedule}"
        if self.when_idle:
            words["when-idle"] = "only while nobody else needs this machine"
        return words


def caps_of(configuration: Configuration) -> Caps:
    """The caps that the configuration says."""
    said = {key.removeprefix("limits."): configuration.values[key] for key in CAP_KEYS}
    memory = amount(said["max_memory"], Measure.SIZE)
    quota = amount(said["quota"], Measure.QUOTA)
    return Caps(
        device=said["device"],
        threads=None if said["threads"] == AUTO else int(said["threads"]),
        memory_bytes=None if memory is None else int(memory),
        upload_bytes_per_second=amount(said["upload_limit"], Measure.RATE),
        download_bytes_per_second=amount(said["download_limit"], Measure.RATE),
        quota_bytes=None if quota is None else int(quota),
        schedule=said["schedule"],
        when_idle=said["when_idle"],
    )
