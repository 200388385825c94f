"""Streams over one uplink that should end together: whoever is ahead lets the others catch up.

    with attempt.pace.values(member, len(chunks)) as stream:
        for number, chunk in enumerate(chunks):
            await stream.turn(number, transfer)
            await transfer.send_chunk(...)

A plan gives each stream its share of a round, and a round is over when its last stream is. But a
full uplink gives each connection the same: the one that carries nine tenths of a vector starves
beside fifteen that carry a hundredth each, and what its reducer could send back meanwhile is sent
too late. So each stream goes on at the speed of the slowest, measured in parts of its own length,
which is what the plan takes for granted. Averages are late rather than early (they wait for
everybody's values), so they wait for our values too, and our values never for them.

Easy to get wrong: whoever waits here leaves the uplink to others, and that is right only as long as
these use it. Where the slowest does not move, it is held up by something else, and nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from protocols.bulk import Transfer
from protocols.moshpit.part_messages import ALIVE_SECONDS

LEAD = 1 / 32
"""How far a stream may be ahead of the slowest, in parts of its length. More is a longer end of the
round, in which only some of its links are used; less makes streams wait for each other's chunks."""


class Pace:
    """How far each stream of one attempt is that goes out from here. Who has ended holds up nobody.

    `members` is how many the attempt has; of streams whose chunks are as long as a good part of
    them, each begins its own a little later than the one before.
    """

    def __init__(self, members: int, expected: Iterable[int]) -> None:
        """`expected`: to which places, counted from ours, our values will go. Those that are quick
        to accept them wait for the others, but not for one that is still to be dialled."""
        self._members = members
        self._values = dict.fromkeys(expected, 0.0)
        self._unopened = set(self._values)
        self._averages: dict[int, float] = {}
        self._stuck: set[tuple[bool, int]] = set()  # whether values, and to which place
        self._slowest_values = 0.0 if self._values else math.inf
        self._slowest_averages = math.inf
        self._moved = trio.Event()
        self._waiting = 0

    @contextmanager
    def values(self, place: int, chunks: int) -> Iterator[PacedStream]:
        """Our values for the member so many places behind us, from the first chunk to the last."""
        self._unopened.discard(place)
        self._values[place] = 0.0
        self._stuck.discard((True, place))
        try:
            yield PacedStream(self, self._values, place, chunks)
        finally:
            del self._values[place]
            self._look()

    @contextmanager
    def averages(self, place: int, chunks: int) -> Iterator[PacedStream]:
        """The averages of our part for the member at this place."""
        self._averages[place] = 0.0
        try:
            yield PacedStream(self, self._averages, place, chunks)
        finally:
            del self._averages[place]
            self._look()

    def slowest(self, streams: dict[int, float]) -> float:
        """How far the one is that is behind all for which these streams wait, from 0 to 1."""
        if streams is self._values:
            return self._slowest_values
        return min(self._slowest_values, self._slowest_averages)

    def offset(self, place: int) -> float:
        """From 0 to 1: when within the time of a chunk the stream to this member begins one."""
        return (place % self._members) / self._members

    def reached(self, streams: dict[int, float], place: int, part: float) -> None:
        was, streams[place] = streams[place], part
        self._stuck.discard((streams is self._values, place))
        if was <= self._slowest_values or was <= self._slowest_averages:
            self._look()

    async def moved(self) -> bool:
        """Wait until the slowest has moved; False if it does not. Then nobody waits for it until
        it does."""
        moved = self._moved
        self._waiting += 1
        try:
            with trio.move_on_after(ALIVE_SECONDS):
                await moved.wait()
        finally:
            self._waiting -= 1
        if not moved.is_set():
            for place in self._unopened:
                del self._values[place]
            self._unopened.clear()
            slowest = min(self._slowest_values, self._slowest_averages)
            for streams in (self._values, self._averages):
                stuck = [place for place, part in streams.items() if part <= slowest]
                self._stuck.update((streams is self._values, place) for place in stuck)
            self._look()
        return moved.is_set()

    def _look(self) -> None:
        before = self._slowest_values, self._slowest_averages
        self._slowest_values = self._slowest_of(self._values)
        self._slowest_averages = self._slowest_of(self._averages)
        if self._waiting and before != (self._slowest_values, self._slowest_averages):
            self._moved.set()
            self._moved = trio.Event()

    def _slowest_of(self, streams: dict[int, float]) -> float:
        values = streams is self._values
        moving = (part for place, part in streams.items() if (values, place) not in self._stuck)
        return min(moving, default=math.inf)


class PacedStream:
    """One stream's place among the others. Made by `Pace`."""

    def __init__(self, pace: Pace, streams: dict[int, float], place: int, chunks: int) -> None:
        self._pace, self._streams, self._place = pace, streams, place
        self._chunks = max(1, chunks)
        self._offset = pace.offset(place)

    async def turn(self, number: int, transfer: Transfer[Any, Any, Any]) -> None:
        """Return when this chunk may go; the other side hears meanwhile that we are there."""
        pace, streams = self._pace, self._streams
        pace.reached(streams, self._place, (number + 1) / self._chunks)
        wanted = (number + self._offset) / self._chunks - LEAD
        while wanted > pace.slowest(streams):
            moves = await pace.moved()
            await transfer.say_alive()
            if not moves:
                return
