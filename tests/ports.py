"""Ports of this machine that belong to one test.

A number that was read from a socket which was closed again is anybody's: each connection that
other tests make takes one of 28,000, so in the second until a server listens there, or between two
of its lives, some thousandth of all tests find their port taken.

So the port stays bound, by a socket that does not listen. The kernel then gives the number to
nobody who asks for any, and refuses whoever connects; but a server that is told this number, and
may reuse addresses as all servers do that come back, can listen beside it. That is Linux; elsewhere
the number is only one that was free a moment ago.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOOPBACK: Final = "127.0.0.1"


@contextmanager
def held_port() -> Iterator[int]:
    """A port of loopback at which nobody listens, until somebody is told to."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
