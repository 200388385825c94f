"""Import the library without letting it configure logging.

Importing `libp2p` configures logging for the whole process (libp2p/__init__.py:141 and
libp2p/utils/logging.py:74). It removes the handlers of the logger "libp2p", sets its level and cuts
it off from the root logger. With LIBP2P_DEBUG set it also writes a log file and starts a thread.
And `libp2p/network/connection/swarm_connection.py` logs through `logging.debug` and similar
functions, which install a handler on the *root* logger at their first call (they call
`basicConfig`). The application should decide all of that.

The package imports this module before anything of the library.
"""

from __future__ import annotations

import logging
import os
import sys

# The library logs ordinary events of a public node (a stranger that disconnects) as warnings and
# errors with tracebacks. We log the important ones ourselves, in one line each.
LIBRARY_LEVEL = logging.CRITICAL

_DEBUG_VARIABLE = "LIBP2P_DEBUG"


def import_quietly() -> None:
    """Import the library, and restore the logging of the process."""
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
    else:  # it was imported before us, with its logging setup
        logger.propagate = True
        level = logging.NOTSET
    # A level that the application set before stays.
    logger.setLevel(LIBRARY_LEVEL if level == logging.NOTSET else level)
    swarm_connection.logging = logging.getLogger(swarm_connection.__name__)


import_quietly()
