"""A node's traffic since the start, and its rate in the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from node.core.training_view import TrafficView

RATE_SECONDS: Final = 10.0  # traffic is averaged over this long; limits hold over ten, too


class TrafficMeter:
    """Bytes since the start, and their rate. Takes the totals, about once a second."""

    def __init__(self, upload_limit: float | None, download_limit: float | None) -> None:
        self._limits = upload_limit, download_limit
        self._seen: deque[tuple[float, int, int]] = deque()

    def note(self, now: float, sent: int, received: int) -> None:
        self._seen.append((now, sent, received))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()

    def view(self) -> TrafficView:
        if not self._seen:
            return TrafficView(upload_limit=self._limits[0], download_limit=self._limits[1])
        first, last = self._seen[0], self._seen[-1]
        seconds = max(last[0] - first[0], 1e-9)
        return TrafficView(
            sent_bytes=last[1],
            received_bytes=last[2],
            sent_bytes_per_second=round((last[1] - first[1]) / seconds),
            received_bytes_per_second=round((last[2] - first[2]) / seconds),
            upload_limit=self._limits[0],
            download_limit=self._limits[1],
        )
