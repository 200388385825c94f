"""What this node answers: the methods of each protocol, with their handlers.

The first frame on a stream that a peer opens decides what the stream is: a REQUEST makes it a
stream of calls, an OPEN a bulk transfer. A protocol may serve both.

Easy to get wrong: the network knows protocols, not methods. A protocol has to be served there
once, however many methods it has here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocols.answering import ServedMethod
from protocols.bulk_serving import ServedBulk
from protocols.errors import ProtocolMisuse
from protocols.wire import CANCEL, OPEN, REQUEST, message_limit


class Service:
    """The methods of one protocol."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.methods: dict[str, ServedMethod] = {}
        self.bulks: dict[str, ServedBulk] = {}
        self.request_limit = 0
        self._first_frame_limits: dict[int, int] = {}

    @property
    def first_frame_limits(self) -> Mapping[int, int]:
        """What may open a conversation, and how long it may be."""
        return self._first_frame_limits

    def add_method(self, served: ServedMethod) -> None:
        method = served.method
        self._check_unused(method.name)
        self.methods[method.name] = served
        self.request_limit = max(self.request_limit, method.request_limit_bytes)
        self._first_frame_limits[REQUEST] = message_limit(self.request_limit)
        self._first_frame_limits[CANCEL] = message_limit(0)

    def add_bulk(self, served: ServedBulk) -> None:
        bulk: Any = served.bulk
        self._check_unused(bulk.name)
        self.bulks[bulk.name] = served
        longest = max(each.bulk.message_limit_bytes for each in self.bulks.values())
        self._first_frame_limits[OPEN] = message_limit(longest)

    def _check_unused(self, name: str) -> None:
        if name in self.methods or name in self.bulks:
            raise ProtocolMisuse(f"{self.protocol} serves {name!r} already.")
