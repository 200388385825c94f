"""The two clocks of a machine: one that people can set, and one that only goes forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """The two clocks of a machine, in seconds."""

    wall: Callable[[], float]
    """Seconds since 1970. May be wrong, and may be set at any moment, in either direction."""

    elapsed: Callable[[], float]
    """Seconds since some moment. Cannot be set, and never goes back."""

    counts_sleep: bool = True
    """Whether `elapsed` goes on while the machine is suspended."""


def machine_clocks() -> Clocks:
    """The clocks of this machine."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    if boot_time is None:
        return Clocks(time.time, time.monotonic, counts_sleep=False)
    return Clocks(time.time, lambda: time.clock_gettime(boot_time))
