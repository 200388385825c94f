"""The adjustable numbers of a muxed connection.

Each limits something: memory that a peer can make us hold, time that we wait for it, or how many
things it may have open. The defaults suit a node that moves hundreds of megabytes over home links
and talks to strangers.

The window numbers are limits on *memory*. A reader that stops holds at most one stream window; a
whole connection holds at most the budget, however many streams it has; and all connections of a
node together hold at most the node's limit.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

# The Yamux specification fixes what both sides may assume before the first window update.
INITIAL_WINDOW_BYTES = 256 * KIB


@dataclass(frozen=True)
class YamuxSettings:
    """Limits and times of one muxed connection.

    `stream_window_limit_bytes`: the largest receive window of one stream, and so the most unread
    data of one stream. 16 MiB fill 1 Gbit/s at 100 ms. It must be at least the 256 KiB that Yamux
    starts with.

    `connection_window_budget_bytes`: windows grow only while all windows of the connection together
    stay within it. Unread data beyond it resets the stream that brings it (which takes a peer that
    fills hundreds of unread streams).

    `node_unread_limit_bytes`: unread data of all connections of a node together. Beyond it, those
    that hold most lose streams (window.py). The windows of all together grow by half of it, which
    is what 10 Gbit/s at 50 ms need.

    `inbound_stream_limit`: streams that the peer may have open; more are refused by a reset.
    `outbound_stream_limit`: streams that we may have open; more are a fault of ours.
    `accept_backlog`: streams that the peer opened and that were not accepted here yet.

    `stream_send_limit_bytes`, `connection_send_limit_bytes`: bytes queued for sending, per stream
    and in all, before `send_all` waits. Half a megabyte is one batch of the writer, so a megabyte
    lets one stream alone keep it busy.

    `keep_alive_seconds`: after this much silence the side that opened the connection pings the
    other. The other side pings two beats (of a second at most) later if nothing has come by then.
    `keep_alive_deadline_seconds`: after this much further silence (or four times the slowest recent
    round trip, if that is longer) the connection is given up. It is given up sooner if the other
    side's kernel acknowledges nothing (keep_alive.py).

    `close_flush_seconds`: how long `close` waits for queued bytes to leave.
    `half_closed_seconds`: how long a stream that was closed by py-libp2p's `close` (a half-close)
    waits for the peer to close its half, before it is reset.
    """

    stream_window_limit_bytes: int = 16 * MIB
    connection_window_budget_bytes: int = 64 * MIB
    node_unread_limit_bytes: int = 256 * MIB
    inbound_stream_limit: int = 1024
    outbound_stream_limit: int = 16 * 1024
    accept_backlog: int = 256
    stream_send_limit_bytes: int = 1 * MIB
    connection_send_limit_bytes: int = 4 * MIB
    keep_alive_seconds: float = 5.0
    keep_alive_deadline_seconds: float = 5.0
    close_flush_seconds: float = 0.5
    half_closed_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.stream_window_limit_bytes < INITIAL_WINDOW_BYTES:
            raise ValueError("a stream window cannot be smaller than the 256 KiB of Yamux")
        if self.connection_window_budget_bytes < self.stream_window_limit_bytes:
            raise ValueError("the budget of a connection holds at least one stream window")
        if min(self.keep_alive_seconds, self.keep_alive_deadline_seconds) <= 0:
            raise ValueError("keep-alive times are above zero")
