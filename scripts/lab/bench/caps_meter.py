"""Measures a process from outside: the kernel's figures for it and its children.

    meter = Meter(process_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter.run)
        ...
        meter.readings

CPU time and memory are those of the process and all its descendants. Bytes are those of the
interfaces of its network, without the loopback, as IP packets with their headers; so it has to be
alone in a network of its own.

The meter shares the machine with the process and may be delayed between the clock and the count. A
reading that took long is thrown away.

A reading is the totals of one moment. `worst_window` finds the worst ten seconds of them:

    worst_window(readings, "sent_bytes")        # per second, over any ten seconds

A cap is kept when no window of `WINDOW_SECONDS`, wherever it begins, holds more than the cap allows
for that time. A window begins at every reading: windows that only began at whole seconds, or where
others end, would miss nearly half of the worst one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import trio

WINDOW_SECONDS: Final = 10.0

Total = Literal["processor_seconds", "sent_bytes", "received_bytes"]


@dataclass(frozen=True)
class MeterReading:
    """At one moment (of any steady clock): all but the memory are totals since the beginning."""

    at: float
    processor_seconds: float
    memory_bytes: int
    sent_bytes: int
    received_bytes: int


def worst_window(readings: Sequence[MeterReading], total: Total) -> float:
    """The most of it per second, over any window; 0 where none is whole."""
    worst, end = 0.0, 0
    for first in readings:
        while end < len(readings) and readings[end].at - first.at < WINDOW_SECONDS:
            end += 1
        if end == len(readings):
            break
        last = readings[end]
        used = getattr(last, total) - getattr(first, total)
        worst = max(worst, used / (last.at - first.at))
    return worst


def between(
    readings: Sequence[MeterReading], began: float, ended: float
) -> tuple[MeterReading, ...]:
    """Those of that time."""
    return tuple(one for one in readings if began <= one.at <= ended)


def used_between(
    readings: Sequence[MeterReading], began: float, ended: float, total: Total
) -> float:
    """How much of it was used in that time; 0 where it was not looked at twice."""
    inside = between(readings, began, ended)
    if len(inside) < 2:
        return 0.0
    used: float = getattr(inside[-1], total) - getattr(inside[0], total)
    return used


def most_memory(readings: Sequence[MeterReading]) -> int:
    return max((one.memory_bytes for one in readings), default=0)


def over(worst: float, limit: float) -> float:
    """By which part of it a limit was exceeded; below zero where it was kept."""
    return worst / limit - 1.0


LOOK_SECONDS: Final = 0.2
LONGEST_LOOK_SECONDS: Final = 0.05  # half a hundredth of a window
ETHERNET_BYTES: Final = 14  # of each packet, which the interfaces count and a provider does not
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Of one process, until it ends or `run` is cancelled."""

    def __init__(self, process_id: int) -> None:
        self._process = Path("/proc") / str(process_id)
        self.readings: list[MeterReading] = []

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                reading = self.look(began)
            except (FileNotFoundError, ProcessLookupError):
                return
            if time.monotonic() - began <= LONGEST_LOOK_SECONDS:
                self.readings.append(reading)
            await trio.sleep(LOOK_SECONDS)

    def look(self, now: float) -> MeterReading:
        """Its use until now; FileNotFoundError or ProcessLookupError when it is gone."""
        sent, received = network_bytes((self._process / "net" / "dev").read_text())
        seconds, memory = 0.0, 0
        for process in family(self._process):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            seconds += sum(int(fields[place]) for place in (11, 12)) / TICKS
            # Of those that have ended: they are in their parent's account
            seconds += sum(int(fields[place]) for place in (13, 14)) / TICKS
            memory += int((process / "statm").read_text().split()[1]) * PAGE_BYTES
        return MeterReading(now, seconds, memory, sent, received)


def family(process: Path) -> list[Path]:
    """The process and all that it has started, and those that they did."""
    found, waiting = [], [process]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for task in (one / "task").iterdir():
            try:
                children = (task / "children").read_text().split()
            except OSError:  # a thread that has just ended, or a kernel that does not tell
                continue
            waiting += [one.parent / child for child in children]
    return found


def network_bytes(interfaces: str) -> tuple[int, int]:
    """The bytes sent and received by /proc/net/dev, in IP packets."""
    sent = received = 0
    for line in interfaces.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            continue
        counts = [int(word) for word in numbers.split()]
        received += counts[0] - ETHERNET_BYTES * counts[1]
        sent += counts[8] - ETHERNET_BYTES * counts[9]
    return sent, received
