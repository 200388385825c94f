"""The log, as it appears on a terminal: warnings and errors, one line each, on stderr.

What says the same thing all the time is cut short (log_limit.py). With `--debug` nothing is, and
there is also what is merely interesting, with the logger's name, and tracebacks. The library
under us keeps its own counsel (node/libp2p/quiet_import.py).
"""

from __future__ import annotations

import logging
import sys

from node.commands.log_limit import LogLimit
from node.commands.output import printable


class HumanFormatter(logging.Formatter):
    """`warning: what happened`. What peers said cannot command the terminal from here."""

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
    """Make a handler speak as above. The level of the root logger says whether to debug."""
    handler.setFormatter(HumanFormatter())
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        handler.addFilter(LogLimit())
    return handler
