"""The trace of a run: a hash over all events.

Two runs of one seed are the same run exactly if their hashes agree. An event has what an observer
of the wires would see: virtual time, the two nodes, the kind, the number of bytes. Contents are
left out. If they differ, sizes or times soon differ as well; and signatures of real keys would make
every trace unique.
"""

from __future__ import annotations

import enum
import hashlib
import struct

_RECORD = struct.Struct("<diiBq")
NOBODY = -1


class TraceKind(enum.IntEnum):
    """The kinds of events: on a wire, or done to the world."""

    DATA = 1
    END = 2
    RESET = 3
    CREDIT = 4
    OPEN = 5
    OPENED = 6
    NOT_SERVED = 7
    PING = 8
    PONG = 9
    GOODBYE = 10
    CONNECTED = 20
    DIAL_FAILED = 21
    BROKEN = 22
    NODE_ADDED = 30
    NODE_CRASHED = 31
    NODE_RESTARTED = 32
    NODE_STOPPED = 33
    NODE_CONTINUED = 34
    PARTITIONED = 35
    HEALED = 36


class Trace:
    """A running hash over events, and their number."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.events = 0

    def record(
        self, time: float, kind: TraceKind, source: int, target: int = NOBODY, size: int = 0
    ) -> None:
        self.events += 1
        self._hash.update(_RECORD.pack(time, source, target, kind, size))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
