"""A limit on how often one place in the code may speak, so that nobody can fill our disk.

A stranger chooses how often it misbehaves, and a new key costs it nothing; each time is news to
the code that notices. Without a limit a loop over there is a gigabyte of log a day over here,
and the line that matters is lost in it. So each place has a few lines at once and then one in a
while; the next line that passes says how many did not.

Easy to get wrong: what is limited is the place (module and line), never the text, for a stranger
chooses texts too and could have them remembered. Places are as many as our code has.
"""

from __future__ import annotations

import logging

LINES_AT_ONCE = 10.0  # as many peers may break at one time, and each be named
SECONDS_PER_LINE = 10.0  # in the long run: under a megabyte a day from one place


class LogLimit(logging.Filter):
    """Lets a record pass or not; one that passes after others did not has `left_out` set."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.pathname, record.lineno
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(record.created)
        if not place.may_speak(record.created):
            return False
        record.left_out, place.left_out = place.left_out, 0
        return True


class _Place:
    """A bucket of lines that fills with time."""

    def __init__(self, now: float) -> None:
        self.left_out = 0
        self._lines = LINES_AT_ONCE
        self._at = now

    def may_speak(self, now: float) -> bool:
        passed = max(0.0, now - self._at)  # a clock that was set back gives nothing
        self._lines = min(LINES_AT_ONCE, self._lines + passed / SECONDS_PER_LINE)
        self._at = now
        if self._lines < 1.0:
            self.left_out += 1
            return False
        self._lines -= 1.0
        return True
