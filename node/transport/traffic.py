"""What a node sends and receives on all its TCP connections together, counted and limited.

Counted is what the network carries: the bytes written to and read from sockets (handshakes, frames
and encryption among them), the headers of the segments that carry them, and the acknowledgements
of the other direction. Payload alone would be some percent less than what a provider bills.

Easy to get wrong: the kernel makes segments of its own size, and acknowledges as it sees fit. What
is counted for headers is what its segment size makes of it, with an acknowledgement for every
second segment; what was lost and sent again is told by the kernel once a second (Linux).
"""

from __future__ import annotations

import trio

from node.transport.throttle import Throttle

HEADERS_BYTES = 52
"""Of a segment over IPv4: 20 for IP, 20 for TCP, 12 for its timestamps. IPv6 has 20 more."""

ETHERNET_SEGMENT_BYTES = 1448
"""What is assumed where the kernel does not tell: 1,500 less the headers."""


class Traffic:
    """Made once for a node. `up` and `down` are None where there is no limit."""

    def __init__(
        self,
        up_bytes_per_second: float | None = None,
        down_bytes_per_second: float | None = None,
    ) -> None:
        now = trio.current_time()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.up = Throttle(up_bytes_per_second, now) if up_bytes_per_second else None
        self.down = Throttle(down_bytes_per_second, now) if down_bytes_per_second else None

    def sent(self, size: int, segment_bytes: int = ETHERNET_SEGMENT_BYTES) -> None:
        """So many bytes were handed to a socket with this segment size."""
        carried, acknowledged = _carried(size, segment_bytes)
        self.sent_bytes += carried
        self.received_bytes += acknowledged
        if self.up is not None:
            self.up.charge(carried)
        if self.down is not None and acknowledged:
            self.down.charge(acknowledged)

    def received(self, size: int, segment_bytes: int = ETHERNET_SEGMENT_BYTES) -> None:
        """So many bytes were read from one."""
        carried, acknowledged = _carried(size, segment_bytes)
        self.received_bytes += carried
        self.sent_bytes += acknowledged
        if self.down is not None:
            self.down.charge(carried)
        if self.up is not None and acknowledged:
            self.up.charge(acknowledged)

    async def run(self) -> None:
        """Let those who wait for their turn have it, for ever."""
        async with trio.open_nursery() as nursery:
            for throttle in (self.up, self.down):
                if throttle is not None:
                    nursery.start_soon(throttle.run)


def _carried(size: int, segment_bytes: int) -> tuple[int, int]:
    """Bytes with the headers around them, and those of the acknowledgements that come back."""
    segments = -(-size // segment_bytes)
    return size + HEADERS_BYTES * segments, HEADERS_BYTES * (segments // 2)
