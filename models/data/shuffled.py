"""A source with its shuffle buffer, for the mixture to draw from.

Promises: while the source waits for its next attempt, or rests because it is broken, the examples
in the buffer are still given. A broken source is tried again after a rest that grows. Nothing here
waits.

`back_at` distinguishes "nothing now" from "nothing any more".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from math import inf
from typing import NamedTuple

from models.data.errors import SourceBroken
from models.data.events import OnEvent, SourceIsBack, SourceRests
from models.data.examples import Example, Mark, Pause
from models.data.order import derived_seed
from models.data.position import Owed, ReadHead, SourcePosition, owed_places
from models.data.shuffle_buffer import ShuffleBuffer
from models.data.source import Source

FIRST_REST_SECONDS = 300.0  # an outage that outlived the attempts lasts minutes
LONGEST_REST_SECONDS = 3_600.0


class ShuffleState(Enum):
    """Whether a source can give an example now, and if not, why."""

    GIVING = "giving"
    WAITING = "waiting"  # for the next attempt at a shard
    RESTING = "resting"  # because it is broken
    ENDED = "ended"


class SourceSnapshot(NamedTuple):
    """The source's part of a position, taken in microseconds."""

    name: str
    fingerprint: str
    drawn: int
    head: ReadHead
    owed: list[tuple[int, int, Mark, frozenset[tuple[int, int]]]]
    waiting: list[Example]

    def position(self) -> SourcePosition:
        waiting = owed_places(self.waiting)
        for passing, shard, mark, places in self.owed:
            waiting.append(_owed_again(passing, shard, mark, places))
        return SourcePosition(self.name, self.fingerprint, self.drawn, self.head, waiting)


class ShuffledSource:
    def __init__(
        self,
        source: Source,
        *,
        examples: int,
        largest_bytes: int,
        seed: int,
        now: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._source = source
        # other numbers after each return to a position
        self._buffer = ShuffleBuffer(
            examples, largest_bytes, derived_seed(seed, "buffer", source.drawn_before)
        )
        self._now = now
        self._on_event = on_event
        self._coming: Generator[Example | Pause, None, None] = source.examples()
        self._rest_seconds = FIRST_REST_SECONDS
        self._state = ShuffleState.GIVING
        self._drawn = source.drawn_before
        self.back_at = 0.0
        """When to ask again, on the clock; never, if it has ended."""
        self.broken_because = ""

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def state(self) -> ShuffleState:
        """GIVING also as long as there is something in the buffer."""
        return ShuffleState.GIVING if self._buffer else self._state

    def take(self) -> Example | None:
        """The next example, or None if there is none before `back_at`."""
        self._fill()
        if not self._buffer:
            return None
        self._drawn += 1
        return self._buffer.take()

    def snapshot(self) -> SourceSnapshot:
        source = self._source
        return SourceSnapshot(
            source.name,
            source.fingerprint,
            self._drawn,
            source.head,
            source.owed(),
            self._buffer.waiting(),
        )

    def close(self) -> None:
        """Close the files of the shard that is being read."""
        self._coming.close()

    def _fill(self) -> None:
        if self.back_at > self._now():
            return
        for _ in range(self._buffer.lacks):
            if self._buffer.is_full:
                return
            try:
                item = next(self._coming, None)
            except SourceBroken as error:
                self._rest(str(error))
                return
            except BaseException:
                # a caller that continues after a Ctrl-C finds the rest
                self._coming = self._source.examples()
                raise
            if item is None:
                self._state, self.back_at = ShuffleState.ENDED, inf
                return
            if isinstance(item, Pause):
                if self._state is ShuffleState.GIVING:
                    self._state = ShuffleState.WAITING
                self.back_at = item.until
                return
            self._is_giving()
            self._buffer.put(item)

    def _is_giving(self) -> None:
        if self._state is ShuffleState.GIVING:
            return
        if self._rest_seconds != FIRST_REST_SECONDS:
            self._on_event(SourceIsBack(self.name))
        self._rest_seconds = FIRST_REST_SECONDS
        self._state = ShuffleState.GIVING

    def _rest(self, reason: str) -> None:
        self._on_event(SourceRests(self.name, reason, self._rest_seconds))
        self._state = ShuffleState.RESTING
        self.broken_because = reason
        self.back_at = self._now() + self._rest_seconds
        self._rest_seconds = min(2 * self._rest_seconds, LONGEST_REST_SECONDS)
        self._coming = self._source.examples()


def _owed_again(passing: int, shard: int, mark: Mark, places: frozenset[tuple[int, int]]) -> Owed:
    numbers = []
    document = mark.document
    for at, piece in sorted(places):
        numbers += [at - document, piece]
        document = at
    return Owed(passing, shard, mark.document, mark.byte, numbers)
