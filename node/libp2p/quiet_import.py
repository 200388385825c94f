"""Import the library without letting it configure logging.

Importing `libp2p` configures logging for the whole process (libp2p/__init__.py:141 and
libp2p/utils/logging.py:74): it removes the handlers of the logger "libp2p", sets its level and
cuts it off from the root logger; with LIBP2P_DEBUG set it also writes a log file of its own
choosing and starts a thread. And `libp2p/network/connection/swarm_connection.py` logs through the
functions `logging.debug` and so on, which install a handler on the *root* logger at their first
call (they call `basicConfig`). All of that is an application's to decide, and ours has decided
otherwise.

The package imports this module before anything of the library's.
"""

from __future__ import annotations

import logging
import os
import sys

# The library reports ordinary events of a public node (a stranger who hangs up) as warnings and
# errors with tracebacks. What matters of them we log ourselves, in one line each.
LIBRARY_LEVEL = logging.CRITICAL

_DEBUG_VARIABLE = "LIBP2P_DEBUG"


def import_quietly() -> None:
    """Import the library and put the logging of the process back as it was."""
    logger = logging.getLogger("libp2p")
    untouched = "libp2p" not in sys.modules
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    debug = os.environ.pop(_DEBUG_VARIABLE, None)
    try:
        import libp2p  # noqa: F401
        from libp2p.network.connection import swarm_connection
    finally:
        if debug is not None:
            os.environ[_DEBUG_VARIABLE] = debug
    if untouched:
        logger.handlers[:] = handlers
        logger.propagate = propagate
    else:  # somebody imported it the loud way before us
        logger.propagate = True
        level = logging.NOTSET
    # A level that the application chose beforehand stands.
    logger.setLevel(LIBRARY_LEVEL if level == logging.NOTSET else level)
    swarm_connection.logging = logging.getLogger(swarm_connection.__name__)


import_quietly()
