"""Raises the limit of file descriptors, so that a node has one for each connection it allows.

Systems start a process with 1,024 descriptors, macOS with 256; a process may ask for more. A node
that runs out can neither accept, dial, write its files nor answer its owner. Strangers decide how
many connections there are, up to `inbound_connections` (libp2p/settings.py).

macOS reports "unlimited" and then refuses more than 10,240. So a number is asked for, not the
maximum.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

# 512 inbound connections, as many outbound, and those of disk, loop and library.
WANTED_DESCRIPTORS = 4096


def raise_descriptor_limit() -> None:
    """Take up to WANTED_DESCRIPTORS, if the system gives them. Never fails, never lowers."""
    try:
        import resource
    except ImportError:  # not a Unix: there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.info("the limit of %d file descriptors stays: %s", soft, error)
