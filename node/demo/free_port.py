"""A port for a server of this machine's own, which has to be known before it is started."""

from __future__ import annotations

import secrets
import socket

from protocols.errors import PotluckError

LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000  # below those that the system gives to others
PORT_TRIES = 50


class NoFreePort(PotluckError):
    """All that were tried are taken."""


def free_port() -> int:
    """One that nobody listens on now, and that the system gives to nobody by itself."""
    for _ in range(PORT_TRIES):
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoFreePort("There is no free port on this machine.")
