"""What can be known of others' use of this machine, without a desktop's libraries.

| | Linux | macOS |
|---|---|---|
| processor | /proc/stat, less our own processes | the last minute's load, less our own threads |
| terminals, also over ssh | when each was last typed into | within the next line |
| keyboard and mouse | a laptop's own (its interrupts) | all (`ioreg`) |

What it cannot know: on Linux, a USB keyboard or a touch screen that makes no program work, since
only the desktop is told; on macOS, others' work of the last seconds, since the load is a minute's;
anywhere, somebody else's work on a GPU, and on other systems anything but the load.

Easy to get wrong: processes of ours that have ended are in the system's total, and no more in the
sum of those that live. So what we used only ever grows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from node.caps.devices import available_cores
from node.caps.idleness import Seen

PLATFORM: str = sys.platform
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
COMMAND_SECONDS = 2.0
MOST_CHILDREN = 256  # loaders of data; more is not looked at

# Of /proc/stat's first line: user, nice, system, interrupts, soft interrupts. Not: idle, waiting
# for disks, and what a virtual machine's host took.
_WORKED = (1, 2, 3, 6, 7)
_KEYBOARD = re.compile(r"^\s*\d+:(?P<counts>[\s\d]+)\S.*\bi8042\b", re.MULTILINE)
_MAC_IDLE = re.compile(rb'"HIDIdleTime" = (\d+)')


class OtherLoad:
    """Looks at this machine. `see` takes milliseconds of a thread (on macOS, tens of them)."""

    def __init__(self) -> None:
        self._total = 0.0
        self._own = 0.0
        self._at = 0.0
        self._touches: int | None = None
        self._touched_at: float | None = None

    def see(self) -> Seen:
        """What others do now; the first look knows nothing of the processor yet."""
        if PLATFORM.startswith("linux"):
            return Seen(self._linux_share(), self._linux_input())
        if PLATFORM == "darwin":
            return Seen(_load_share(), _mac_input())
        return Seen(_load_share())

    def _linux_share(self) -> float | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        total = sum(int(fields[place]) for place in _WORKED if place < len(fields)) / TICKS
        now, own = time.monotonic(), max(self._own, own_seconds())
        before, self._at = self._at, now
        worked = (total - self._total) - (own - self._own)
        is_first, self._total, self._own = not before, total, own
        if is_first or now <= before:
            return None
        cores = os.cpu_count() or available_cores()
        return min(1.0, max(0.0, worked / (now - before) / cores))

    def _linux_input(self) -> float | None:
        ages = [age for age in (_terminal_age(), self._keyboard_age()) if age is not None]
        return min(ages, default=None)

    def _keyboard_age(self) -> float | None:
        """Since the laptop's own keyboard or touch pad last interrupted."""
        try:
            text = Path("/proc/interrupts").read_text()
        except OSError:
            return None
        found = _KEYBOARD.findall(text)
        if not found:
            return None
        touches, now = sum(sum(map(int, counts.split())) for counts in found), time.monotonic()
        if self._touches is not None and touches != self._touches:
            self._touched_at = now
        self._touches = touches
        return None if self._touched_at is None else now - self._touched_at


def own_seconds() -> float:
    """Processor time of this process and of its children that live, and of those that ended."""
    used = sum(os.times()[:4])
    for child in _children():
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / TICKS
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
    return used


def _children() -> list[int]:
    """The processes that this one started, and those that they did."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting and len(found) < MOST_CHILDREN:
        parent = waiting.pop()
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
        except OSError:
            continue
        for task in tasks:
            try:
                children = [int(word) for word in (task / "children").read_text().split()]
            except (OSError, ValueError):
                continue
            found += children
            waiting += children
    return found


def _terminal_age() -> float | None:
    """Since somebody typed into any terminal of this machine, as `w` shows it."""
    now, newest = time.time(), None
    for folder in (Path("/dev/pts"), Path("/dev")):
        try:
            names = list(folder.iterdir() if folder.name == "pts" else folder.glob("tty[0-9]*"))
        except OSError:
            continue
        for name in names:
            try:
                status = name.stat()
            except OSError:
                continue
            # One that nobody has logged in to belongs to the system
            if name.name != "ptmx" and (folder.name == "pts" or status.st_uid != 0):
                newest = max(newest or 0.0, status.st_atime)
    return None if newest is None else max(0.0, now - newest)


def _mac_input() -> float | None:
    try:
        said = subprocess.run(
            ["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"],
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _MAC_IDLE.search(said)
    return None if found is None else int(found[1]) / 1e9


def _load_share() -> float | None:
    if not hasattr(os, "getloadavg"):
        return None
    import threading

    cores = os.cpu_count() or 1
    return min(1.0, max(0.0, (os.getloadavg()[0] - threading.active_count()) / cores))
