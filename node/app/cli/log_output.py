"""The log on a terminal: warnings and errors, one line each, on stderr.

Repeated lines are limited (below). With `--debug` nothing is left out; it also shows less important
lines, the logger's name, and tracebacks. The libp2p library's own log is quiet
(node/net/libp2p/quiet_import.py).
"""

from __future__ import annotations

import logging
import sys

from node.app.cli.output import printable


class HumanFormatter(logging.Formatter):
    """`warning: what happened`. Text from peers cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
        where = f" [{record.name}]" if debugging else ""
        text = f"{record.levelname.lower()}{where}: {record.getMessage()}"
        left_out = getattr(record, "left_out", 0)
        if left_out:
            text += f" ({left_out:,} more like this were left out)"
        if record.exc_info and debugging:
            text += "\n" + self.formatException(record.exc_info)
        return printable(text)


def log_to_stderr(*, debug: bool) -> None:
    """Send the log to stderr from now on."""
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    root.handlers[:] = [for_people(logging.StreamHandler(sys.stderr))]


def for_people(handler: logging.Handler) -> logging.Handler:
    """Give a handler the format above. The root logger's level decides about debug output."""
    handler.setFormatter(HumanFormatter())
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        handler.addFilter(LogLimit())
    return handler


# A limit on how often one place in the code may log, so that nobody can fill our disk.
#
# A stranger chooses how often it misbehaves, a new key costs it nothing, and our code logs each
# time. Without a limit, a loop at the stranger's end makes a gigabyte of log a day at ours, and
# important lines are lost in it. So each place may log a few lines at once and then one in a while;
# the next line that passes says how many were left out.
#
# The limit is by place (module and line), not by text: a stranger chooses texts too, and could make
# us remember any number of them. Our code has a fixed number of places.


LINES_AT_ONCE = 10.0  # as many peers may fail at one time, and each be named
SECONDS_PER_LINE = 10.0  # in the long run: under a megabyte a day from one place


class LogLimit(logging.Filter):
    """Decides whether a record passes; the next one that does has `left_out` set."""

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
        passed = max(0.0, now - self._at)  # a clock that was set back adds nothing
        self._lines = min(LINES_AT_ONCE, self._lines + passed / SECONDS_PER_LINE)
        self._at = now
        if self._lines < 1.0:
            self.left_out += 1
            return False
        self._lines -= 1.0
        return True
