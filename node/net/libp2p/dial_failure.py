"""Why an address did not lead to the peer, with advice for a person.

Each kind of failure has its own sentence and advice, because the remedies differ. A refused
connection means that the machine is up and the node is not. Silence means a firewall, or a machine
that is off. Another peer at the address means that the address is stale.
"""

from __future__ import annotations

import enum
import errno
import socket
from dataclasses import dataclass

from protocols.errors import Unreachable
from protocols.identity import PeerId

# A peer has at most 16 addresses; the advice is given once per kind of failure.
LONGEST_DETAIL = 160


class DialReason(enum.Enum):
    """How an attempt failed. The value is the advice."""

    REFUSED = "The machine answers, but nothing listens there: is the node running, on that port?"
    TIMED_OUT = "Nothing answers: a firewall or a router may block it, or the machine may be off."
    WRONG_PEER = "Another node answers there: ask for the peer's current address."
    NAME_NOT_FOUND = "Check the spelling of the name, and whether this machine has DNS."
    NO_ROUTE = "This machine has no route there: is it online, and does it have IPv6 if that is?"
    NOT_LIBP2P = "Something else listens there, or the node refused us: check the port."
    RELAY = "The peer is behind a router; it looks for other relays by itself: try again."
    OTHER_KIND = "This version dials TCP over IPv4, IPv6 and DNS names only."
    FAILED = "Try again; `potluck ping ADDRESS`, there and from here, shows where it fails."

    @property
    def advice(self) -> str:
        return self.value


@dataclass(eq=False)  # an exception must stay hashable, and be free to take its traceback
class DialFailure(Exception):
    """One address, and the reason of its failure."""

    address: str
    reason: DialReason
    detail: str

    def __str__(self) -> str:
        return f"{self.address}: {self.detail}"


def of_os_error(address: str, error: OSError) -> DialFailure:
    """Turn an error of the operating system into one of our reasons."""
    if isinstance(error, socket.gaierror):
        return DialFailure(address, DialReason.NAME_NOT_FOUND, "the name does not resolve")
    number = error.errno
    if number == errno.ECONNREFUSED:
        return DialFailure(address, DialReason.REFUSED, "connection refused")
    if number == errno.ETIMEDOUT:
        return DialFailure(address, DialReason.TIMED_OUT, "timed out")
    if number in (
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.EADDRNOTAVAIL,
        errno.EAFNOSUPPORT,
        errno.ENETDOWN,
    ):
        return DialFailure(address, DialReason.NO_ROUTE, "no route to that address")
    detail = (error.strerror or str(error) or type(error).__name__)[:LONGEST_DETAIL]
    return DialFailure(address, DialReason.FAILED, detail)


def unreachable(peer: PeerId, failures: list[DialFailure]) -> Unreachable:
    """The error of `connect` and `open` if no address has worked."""
    if not failures:
        return Unreachable(
            f"There is no known address for {peer}.",
            why="This node knows no address of that peer.",
            advice="Give a whole address, ending in /p2p/<peer id>; `potluck status` prints them "
            "there.",
        )
    # in a fixed order, so that the same failures always give the same message
    failures = sorted(failures, key=lambda failure: failure.address)
    tried = "; ".join(str(failure) for failure in failures)
    advice = " ".join(dict.fromkeys(failure.reason.advice for failure in failures))
    plural = "its address" if len(failures) == 1 else f"any of its {len(failures)} addresses"
    return Unreachable(f"{peer} cannot be reached at {plural}.", why=f"{tried}.", advice=advice)
