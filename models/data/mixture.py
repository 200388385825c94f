"""Mixes sources by probability, leaving out those that have nothing to give.

Promises: as long as all sources give, each example comes from source i with probability p_i (the
paper mixes 0.23 of Wikipedia with 0.77 of OSCAR), whatever the sizes of their shards. A source that
ended or broke is left out, the others keep their proportions, and an event says so. A source that
waits for its next attempt with an empty buffer is skipped for the moment. The mixture ends when all
sources have ended; NoDataLeft when none gives and one of them is broken.

A source is left out only when its buffer is empty, so a short outage does not change the mixture.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from models.data.clock import Clock
from models.data.errors import NoDataLeft
from models.data.events import OnEvent, Renormalised
from models.data.examples import Example
from models.data.shuffled import ShuffledSource, ShuffleState

MOST_REASONS = 3  # in one message


class Mixture:
    """An iterator over examples. `drawn` counts them, starting from the position's count."""

    def __init__(
        self,
        sources: Sequence[ShuffledSource],
        probabilities: Sequence[float],
        *,
        seed: int,
        drawn: int,
        clock: Clock,
        on_event: OnEvent,
    ) -> None:
        self._sources = tuple(sources)
        self._probabilities = tuple(probabilities)
        self._random = random.Random(seed)
        self._clock = clock
        self._on_event = on_event
        self._left_out: frozenset[int] = frozenset()
        self.drawn = drawn

    def __iter__(self) -> Mixture:
        return self

    def __next__(self) -> Example:
        without: frozenset[int] = frozenset()  # those that had nothing, this time
        while True:
            number = self._pick(without)
            if number is None:
                self._wait()
                without = frozenset()
                continue
            example = self._sources[number].take()
            if example is None:
                without |= {number}
                self._note_states()
                continue
            if number in self._left_out or self._sources[number].state is not ShuffleState.GIVING:
                self._note_states()
            self.drawn += 1
            return example

    def _pick(self, without: frozenset[int]) -> int | None:
        """A source that may give something, by probability."""
        numbers = [
            number
            for number in range(len(self._sources))
            if number not in without and self._may_give(number)
        ]
        if len(numbers) < 2:
            return numbers[0] if numbers else None
        weights = [self._probabilities[number] for number in numbers]
        return self._random.choices(numbers, weights)[0]

    def _may_give(self, number: int) -> bool:
        source = self._sources[number]
        return source.state is ShuffleState.GIVING or source.back_at <= self._clock.now()

    def _note_states(self) -> None:
        """Send an event if other sources are left out than before."""
        left_out = frozenset(
            number
            for number, source in enumerate(self._sources)
            if source.state in (ShuffleState.RESTING, ShuffleState.ENDED)
        )
        if left_out == self._left_out:
            return
        self._left_out = left_out
        if len(left_out) == len(self._sources) or len(self._sources) == 1:
            return  # there is no mixture any more, and the sources' own events say why
        total = sum(
            probability
            for number, probability in enumerate(self._probabilities)
            if number not in left_out
        )
        self._on_event(
            Renormalised(
                tuple(
                    (source.name, self._probabilities[number] / total)
                    for number, source in enumerate(self._sources)
                    if number not in left_out
                )
            )
        )

    def _wait(self) -> None:
        """Until the first source that waits for its next attempt may give something."""
        waiting = [source for source in self._sources if source.state is ShuffleState.WAITING]
        if waiting:
            self._clock.wait_until(min(source.back_at for source in waiting))
            return
        resting = [source for source in self._sources if source.state is ShuffleState.RESTING]
        if not resting:
            raise StopIteration
        raise NoDataLeft(
            "There is no data left to train on: "
            f"{', '.join(source.name for source in resting)} cannot be read.",
            why=" ".join(f"{one.name}: {one.broken_because}" for one in resting[:MOST_REASONS])
            + " The lines before this name each shard.",
            advice="Mend that, or check this machine's connection and the addresses in the "
            "settings, and begin again: the position in the data is kept.",
        )
