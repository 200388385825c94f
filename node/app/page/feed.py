"""The newest state of the page as JSON, for all viewers at once. Pure.

    feed = Feed()
    feed.update(sections_of(source), history.curve.points)      # every second, if anybody looks
    feed.whole()                                                # bytes: everything
    feed.since(mark)                                            # bytes, and the next mark

Each section is encoded once for each change, however many viewers there are, and a viewer that was
away for some seconds gets the newest of each section that has changed meanwhile. There is no queue
for a viewer: one that is slow misses states, and costs nothing.

The curve only grows, as a rule: a viewer gets the new points, and all of them if the run went back,
or if it was away for too long.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from node.training.history import Point

NEWS_KEPT: Final = 128  # changes of the curve: some minutes of short steps


class Feed:
    """Invariant: `_sections` has the encoded value of each section, and the version in which it
    became that."""

    def __init__(self) -> None:
        self.boot = secrets.token_hex(4)
        """So that a viewer of an earlier process gets everything."""
        self.version = 0
        self._sections: dict[str, tuple[bytes, int]] = {}
        self._points: tuple[Point, ...] = ()
        self._news: deque[tuple[int, bytes]] = deque(maxlen=NEWS_KEPT)
        self._all_points_since = 0
        """Viewers of an earlier version get all points."""
        self._made: dict[int, bytes] = {}

    @property
    def mark(self) -> str:
        return f"{self.boot}-{self.version}"

    def update(self, sections: Mapping[str, Any], points: Sequence[Point]) -> None:
        """The state is now this one."""
        self.version += 1
        self._made.clear()
        for name, value in sections.items():
            data = msgspec.json.encode(value)
            if self._sections.get(name, (b"", 0))[0] != data:
                self._sections[name] = data, self.version
        self._update_points(tuple(points))

    def _update_points(self, points: tuple[Point, ...]) -> None:
        before, self._points = self._points, points
        last = before[-1].step if before else 0
        if before and (
            not points or points[-1].step < last or before[-1] not in points[-NEWS_KEPT:]
        ):
            self._news.clear()
            self._all_points_since = self.version
            return
        new = [row(one) for one in points if one.step > last]
        if new:
            if len(self._news) == NEWS_KEPT:
                self._all_points_since = self._news[0][0]
            self._news.append((self.version, msgspec.json.encode(new)))

    def whole(self) -> bytes:
        """Everything, as one JSON object."""
        return self._of_version(0)

    def since(self, mark: str) -> bytes:
        """What has changed since a viewer's mark; empty if nothing has."""
        boot, _, number = mark.rpartition("-")
        known = int(number) if boot == self.boot and number.isdecimal() and len(number) < 12 else 0
        return self._of_version(min(known, self.version))

    def _of_version(self, known: int) -> bytes:
        if known == self.version and self.version:
            return b""
        made = self._made.get(known)
        if made is None:
            made = self._made[known] = self._encoded(known)
        return made

    def _encoded(self, known: int) -> bytes:
        parts = [b'"mark":"%s"' % self.mark.encode()]
        parts += [
            b'"%s":%s' % (name.encode(), data)
            for name, (data, version) in self._sections.items()
            if version > known
        ]
        if not known or known < self._all_points_since:
            parts.append(b'"points":' + msgspec.json.encode([row(one) for one in self._points]))
        else:
            news = [data[1:-1] for version, data in self._news if version > known]
            if news:
                parts.append(b'"more":[%s]' % b",".join(news))
        return b"{%s}" % b",".join(parts)


def row(point: Point) -> list[float | None]:
    """A point as the page gets it: step, loss, samples in all, seconds, samples per second, peers,
    steps."""
    busy = point.busy_seconds
    return [
        point.step,
        None if point.loss is None else float(f"{point.loss:.6g}"),
        round(point.total),
        round(point.seconds),
        float(f"{point.samples / busy:.5g}") if busy > 0 else None,
        point.peers,
        point.steps,
    ]
