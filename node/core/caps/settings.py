"""All caps of this node as numbers: the `[limits]` of the configuration.

    for key in CAP_KEYS: add_setting_flag(parser, key)
    caps = caps_of(configuration)

Every value is either here as it was meant, or was refused by name when the configuration was read.
None always means no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.core.caps.devices import AUTO
from node.core.caps.timetable import ALWAYS, Timetable, parse_timetable
from node.core.caps.units import Measure, amount, in_words

if TYPE_CHECKING:
    from node.core.configuration import Configuration

CAP_KEYS = (
    "limits.device",
    "limits.threads",
    "limits.compile",
    "limits.max_memory",
    "limits.max_device_memory",
    "limits.offload",
    "limits.upload_limit",
    "limits.download_limit",
    "limits.quota",
    "limits.schedule",
    "limits.when_idle",
)


@dataclass(frozen=True)
class PlannerRates:
    """For `CollaborationSettings.up_bytes_per_second` and `down_bytes_per_second`.

    0 is no limit: then the measured rate of the link counts.
    """

    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0


PLANNED_SHARE = 0.6
"""The part of a limit that a round may count on.

Packets, frames, the directory and the state that others fetch take a tenth. A peer without a limit
is known only by its rate in earlier rounds, which their slowest member limited. If a limit were
declared in full, all would look as slow as this node, and the plan would give it as much work as
them. So it declares less than it shows.
"""


@dataclass(frozen=True)
class Caps:
    """The owner's caps.

    `device` is `auto`, `cpu`, `cuda`, `cuda:1` or `mps`; sizes are in bytes; `memory_bytes` is the
    machine's memory, and `device_memory_bytes` that of each GPU; `quota_bytes` is for one calendar
    month and both directions together; `compile` is None to do as the run says. With `offload` the
    copies for averaging stay off the GPU.
    """

    device: str = AUTO
    threads: int | None = None
    memory_bytes: int | None = None
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    quota_bytes: int | None = None
    schedule: str = ALWAYS
    when_idle: bool = False
    compile: bool | None = None
    device_memory_bytes: int | None = None
    offload: bool = False

    @property
    def timetable(self) -> Timetable:
        return parse_timetable(self.schedule)

    def planner_rates(self) -> PlannerRates:
        """The rates of this node that the plan of a round may count on."""
        return PlannerRates(
            PLANNED_SHARE * (self.upload_bytes_per_second or 0.0),
            PLANNED_SHARE * (self.download_bytes_per_second or 0.0),
        )

    def words(self) -> dict[str, str]:
        """Each cap that was set, in words, by the name of its flag."""
        words = {}
        if self.device != AUTO:
            words["device"] = self.device
        if self.threads is not None:
            words["threads"] = f"{self.threads}"
        if self.memory_bytes is not None:
            words["max-memory"] = f"at most {in_words(self.memory_bytes)}"
        if self.device_memory_bytes is not None:
            words["max-device-memory"] = f"at most {in_words(self.device_memory_bytes)}"
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
    """The caps in the configuration."""
    said = {key.removeprefix("limits."): configuration.values[key] for key in CAP_KEYS}
    memory = amount(said["max_memory"], Measure.SIZE)
    device_memory = amount(said["max_device_memory"], Measure.SIZE)
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
        compile=None if said["compile"] == AUTO else said["compile"] == "true",
        device_memory_bytes=None if device_memory is None else int(device_memory),
        offload=said["offload"],
    )
