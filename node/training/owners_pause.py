"""The owner's pause: its end, its words, and its file, so that a restart does not end it.

    pause = OwnersPause(places.pause_file)
    pause.load(now)                        # one that is not over yet
    pause.begin(now, 1800.0)
    pause.words(now)                       # "paused by you until 14:30"
    pause.end()

The pause is for the machine and not the process: after a kill, a crash, a service's restart, or
the next `potluck join` it is still on. It ends by its time or by `potluck resume`.

Its end is by the wall clock: two hours with the lid closed are two hours.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from node.core.private_file import UnusableFile, read_private_file, replace_private_file

LARGEST_FILE_BYTES: Final = 1024
LONGEST_SECONDS: Final = 10 * 365 * 86_400.0
LATEST_END: Final = 253_000_000_000.0  # in the year 9987: no clock has shown a later one
LONG_SECONDS: Final = 600.0  # the end of a longer pause needs no seconds


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`until` in seconds since 1970; None is until `potluck resume`."""

    until: float | None = None


class OwnersPause:
    """Invariant: `until` has a meaning only while `is_on`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.is_on = False
        self.until: float | None = None
        self._from_before = False
        self._saving = threading.Lock()  # or a pause could be written after its end

    def load(self, now: float) -> bool:
        """Whether an earlier pause is still on. Waits for the disk.

        An end that is too far away is believed: the clock may be behind until the network sets it,
        and then the pause ends in time."""
        try:
            content = read_private_file(self._file, LARGEST_FILE_BYTES)
            written = None if content is None else msgspec.json.decode(content, type=_Written)
        except (UnusableFile, msgspec.MsgspecError, ValueError, RecursionError):
            written = None  # treated as no pause, without a report
        if written is None:
            return False
        if written.until is not None and not now < written.until <= LATEST_END:
            with contextlib.suppress(OSError):  # the next start finds that it is over, too
                self._file.unlink(missing_ok=True)
            return False
        self.is_on, self.until, self._from_before = True, written.until, True
        return True

    def begin(self, now: float, seconds: float | None) -> None:
        """Pause from now on; replaces an earlier pause."""
        self.is_on, self._from_before = True, False
        self.until = None if seconds is None else now + seconds

    def end(self) -> None:
        self.is_on, self.until = False, None

    def save(self) -> str:
        """Write the pause to the disk, which blocks. Returns the reason for a failure, else ""."""
        with self._saving:
            try:
                if self.is_on:
                    replace_private_file(self._file, msgspec.json.encode(_Written(self.until)))
                else:
                    self._file.unlink(missing_ok=True)
            except OSError as error:
                return error.strerror or str(error)
        return ""

    def words(self, now: float) -> str:
        """The words for a pause that is on."""
        until = "" if self.until is None else f" until {time_of_day(self.until, now)}"
        kept = "; a restart does not end it" if self._from_before else ""
        return f"paused by you{until}{kept}"


def time_of_day(moment: float, now: float) -> str:
    """With seconds if it is soon, and with the day if it is not today."""
    there, here = time.localtime(moment), time.localtime(now)
    if moment - now < LONG_SECONDS:
        return time.strftime("%H:%M:%S", there)
    return time.strftime("%H:%M" if there[:3] == here[:3] else "%Y-%m-%d %H:%M", there)
