"""Looks at a process from outside: what the kernel says that it, and its children, have used.

    meter = Meter(process_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(meter.run)
        ...
        meter.readings

Processor time and memory are those of the process and all that it has started; bytes are those of
the interfaces of its network, less the loopback, as IP packets with their headers. So it has to be
alone in a network of its own.

Easy to get wrong: whoever looks shares the machine with what is looked at, and may be set aside
between the clock and the count. A look that took long is thrown away.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import trio

from node.bench.caps_readings import Reading

LOOK_SECONDS: Final = 0.2
LONGEST_LOOK_SECONDS: Final = 0.05  # half a hundredth of a window
ETHERNET_BYTES: Final = 14  # of each packet, which the interfaces count and a provider does not
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Of one process, until it ends or `run` is cancelled."""

    def __init__(self, process_id: int) -> None:
        self._process = Path("/proc") / str(process_id)
        self.readings: list[Reading] = []

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

    def look(self, now: float) -> Reading:
        """What it has used until now; FileNotFoundError or ProcessLookupError when it is gone."""
        sent, received = network_bytes((self._process / "net" / "dev").read_text())
        seconds, memory = 0.0, 0
        for process in family(self._process):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            seconds += sum(int(fields[place]) for place in (11, 12)) / TICKS
            # Of those that have ended: they are in their parent's account
            seconds += sum(int(fields[place]) for place in (13, 14)) / TICKS
            memory += int((process / "statm").read_text().split()[1]) * PAGE_BYTES
        return Reading(now, seconds, memory, sent, received)


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
    """What /proc/net/dev says was sent and received, in IP packets."""
    sent = received = 0
    for line in interfaces.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            continue
        counts = [int(word) for word in numbers.split()]
        received += counts[0] - ETHERNET_BYTES * counts[1]
        sent += counts[8] - ETHERNET_BYTES * counts[9]
    return sent, received
