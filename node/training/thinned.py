"""A curve that reaches back to its first step, in a bounded number of points. Pure.

    points = Thinned(512, together)
    points.add(point)               # its `step` is later than those of the others

Each point is the mean of `width` steps in a row: `together` makes one of two neighbours. When there
are too many, the width doubles and neighbours are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class HasStep(Protocol):
    @property
    def step(self) -> int:
        """The last step that the point is of."""


Kept = TypeVar("Kept", bound=HasStep)


class Thinned(Generic[Kept]):
    """Invariant: the points are in the order of their steps, at most `most` of them, and at most
    one for `width` steps."""

    def __init__(
        self, most: int, together: Callable[[Kept, Kept], Kept], *, width: int = 1
    ) -> None:
        self._most, self._together = most, together
        self.width = width
        self._points: list[Kept] = []

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._points)

    @property
    def last(self) -> Kept | None:
        return self._points[-1] if self._points else None

    def add(self, point: Kept) -> None:
        self._merge(point)
        while len(self._points) > self._most:
            self.width *= 2
            points, self._points = self._points, []
            for one in points:
                self._merge(one)

    def drop_from(self, step: int) -> None:
        """The run went back: this step is made again."""
        while self._points and self._points[-1].step >= step:
            self._points.pop()

    def _merge(self, new: Kept) -> None:
        last = self.last
        if last is None or (last.step - 1) // self.width != (new.step - 1) // self.width:
            self._points.append(new)
        else:
            self._points[-1] = self._together(last, new)
