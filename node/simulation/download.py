"""A node's download: everything that arrives passes here, in order of arrival.

Without a limit it costs nothing. With one, a message is delivered slice by slice as its bytes
come in, so that a reader of one byte a second gets one byte each second, and what waits is
bounded by the windows of the streams that send.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from node.simulation.link_model import segment_bytes
from node.simulation.timeline import Timeline

if TYPE_CHECKING:
    from node.simulation.link import LinkEnd, Message


class Download:
    """Invariant: exactly one call on the timeline is pending while anything waits."""

    def __init__(self, timeline: Timeline, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._timeline = timeline
        self._waiting: deque[tuple[LinkEnd, Message]] = deque()

    def take(self, sender: LinkEnd, message: Message) -> None:
        """Let this message in when all its bytes, and all that came before, are through."""
        if self.bytes_per_second is None and not self._waiting:
            sender.deliver(message)
            return
        self._waiting.append((sender, message))
        if len(self._waiting) == 1:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            sender, message = self._waiting[0]
            limit = segment_bytes(self.bytes_per_second)
            if message.size and self.bytes_per_second is not None and limit is not None:
                size = min(limit, message.size)
                done = self._timeline.now() + size / self.bytes_per_second
                self._timeline.at(done, self._served, size)
                return
            self._waiting.popleft()
            sender.deliver(message)

    def _served(self, size: int) -> None:
        sender, message = self._waiting.popleft()
        if size < message.size:
            message, rest = message.split(size)
            self._waiting.appendleft((sender, rest))
        sender.deliver(message)
        self._serve()
