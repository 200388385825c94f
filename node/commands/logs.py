"""The log, as it appears on a terminal: warnings and errors, one line each, on stderr.

With `--debug` also what is merely interesting, with the logger's name, and tracebacks. The
library under us keeps its own counsel (node/libp2p/quiet_import.py).
"""

from __future__ import annotations

import logging
import sys

from node.commands.output import printable


class HumanFormatter(logging.Formatter):
    """`warning: what happened`. What peers said cannot command the terminal from here."""

    def format(self, record: logging.LogRecord) -> str:
        debugging = logging.getLogger().isEnabledFor(logging.DEBUG)
        where = f" [{record.name}]" if debugging else ""
        text = f"{record.levelname.lower()}{where}: {record.getMessage()}"
        if record.exc_info and debugging:
            text += "\n" + self.formatException(record.exc_info)
        return printable(text)


def log_to_stderr(*, debug: bool) -> None:
    """Send the log to stderr from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HumanFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
