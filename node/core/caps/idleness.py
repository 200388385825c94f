"""Whether somebody else needs this machine: the visible signs, and a stable decision.

    idleness.look(now, SignsOfUse(others_share=0.4, input_age=None))
    idleness.is_needed, idleness.why

The machine is needed as soon as other programs use a good part of the processor twice in a row, or
somebody touches a keyboard. It is free when neither has happened for a while. In between nothing
changes, so light use of a machine does not start and stop training again and again.

| | Linux | macOS |
|---|---|---|
| processor | /proc/stat, less our own processes | the last minute's load, less our own threads |
| terminals, also over ssh | when each was last typed into | within the next line |
| keyboard and mouse | a laptop's own (its interrupts) | all (`ioreg`) |

Some things cannot be known. On Linux: a USB keyboard or a touch screen that causes no work in a
program, since only the desktop is told. On macOS: the work of others in the last seconds, since the
load is of a minute. Anywhere: the work of others on a GPU. On other systems: anything but the load.

Only other programs count. Otherwise this node's own work would pause itself, become quiet, and
begin again, for ever. And our ended processes are in the system's total, but not in the sum of the
living ones, so our own use is counted as a figure that only grows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from node.core.caps.devices import available_cores

NEEDED_SHARE = 0.25
"""Of all processor cores. A video call takes that much of a laptop; an open page takes less."""

FREE_SHARE = 0.10

NEEDED_LOOKS = 2
"""In a row: one look may have hit a moment's work of the system."""

FREE_SECONDS = 60.0
INPUT_SECONDS = 120.0
"""After so long without input, the person is reading something long, or gone."""

LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class SignsOfUse:
    """The signs at one moment; None means not known.

    `others_share` is the part of all processor cores that others use, from 0 to 1. `input_age` is
    the seconds since the last typing or mouse movement.
    """

    others_share: float | None = None
    input_age: float | None = None


class Idleness:
    """Invariant: `why` has a text exactly while the machine is needed."""

    def __init__(self) -> None:
        self.why = ""
        self._busy_looks = 0
        self._quiet_since: float | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.why)

    def look(self, now: float, seen: SignsOfUse) -> None:
        touched = seen.input_age is not None and seen.input_age < INPUT_SECONDS
        share = seen.others_share or 0.0
        self._busy_looks = self._busy_looks + 1 if share >= NEEDED_SHARE else 0
        if touched:
            self.why = "somebody uses its keyboard or mouse"
        elif self._busy_looks >= NEEDED_LOOKS:
            self.why = f"other programs use {share:.0%} of its processor"
        if touched or share >= FREE_SHARE:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if self._quiet_since is not None and now - self._quiet_since >= FREE_SECONDS:
            self.why = ""


PLATFORM: str = sys.platform
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
COMMAND_SECONDS = 2.0
MOST_CHILDREN = 256  # loaders of data; further ones are ignored

# In /proc/stat's first line: user, nice, system, interrupts, soft interrupts. Not: idle, waiting
# for disks, and time taken by a virtual machine's host.
_WORKED = (1, 2, 3, 6, 7)
_KEYBOARD = re.compile(r"^\s*\d+:(?P<counts>[\s\d]+)\S.*\bi8042\b", re.MULTILINE)
_MAC_IDLE = re.compile(rb'"HIDIdleTime" = (\d+)')


class OtherLoad:
    """Looks at this machine. `see` takes milliseconds in a thread (on macOS, tens of them)."""

    def __init__(self) -> None:
        self._total = 0.0
        self._own = 0.0
        self._at = 0.0
        self._touches: int | None = None
        self._touched_at: float | None = None

    def see(self) -> SignsOfUse:
        """The machine's present use by others. The first look has no figure of the processor."""
        if PLATFORM.startswith("linux"):
            return SignsOfUse(self._linux_share(), self._linux_input())
        if PLATFORM == "darwin":
            return SignsOfUse(_load_share(), _mac_input())
        return SignsOfUse(_load_share())

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
        """The time since the last interrupt of the laptop's own keyboard or touch pad."""
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
    """Processor time of this process and of its children, living and ended."""
    used = sum(os.times()[:4])
    for child in _children():
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / TICKS
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
    return used


def _children() -> list[int]:
    """The children of this process, and theirs."""
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
    """The time since somebody typed into any terminal of this machine, as `w` shows it."""
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
            # A terminal without a login belongs to the system.
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
