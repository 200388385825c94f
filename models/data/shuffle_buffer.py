"""A shuffle buffer: examples go in as they come from the shards, and out in random order.

The paper loads S = 10 000 examples, picks at random, and replaces what it picked (003, section
3.3). Here picking begins with the first few dozen: until it is full, the buffer takes in
`GROWTH` examples for each one it gives, so that training begins at once and the shuffling becomes
as good as the paper's after a third of S.

Promises: every example that goes in comes out exactly once; it comes out after at most
`LONGEST_WAIT` x S draws (plain random picking would keep one in fifty longer; the bound is what
keeps a position small and cheap to return to); at most S examples are held, and at most so many
bytes and one example.

Easy to get wrong: picking as soon as there is anything, and taking in one for one, never fills the
buffer, and shuffles nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from models.data.examples import Example

FIRST = 32  # examples that are there before the first is picked
GROWTH = 4  # taken in for each one picked, until the buffer is full
LONGEST_WAIT = 4  # in multiples of S: exp(-4), one in fifty, would wait longer


class ShuffleBuffer:
    """Pure: no clock, no I/O; the seed decides every pick.

    Invariant: `_held` has exactly those of `_in_order` that are still here, and `held.slot` is
    where each stands.
    """

    def __init__(self, examples: int, largest_bytes: int, seed: int) -> None:
        self._capacity = examples
        self._largest_bytes = largest_bytes
        self._random = random.Random(seed)
        self._held: list[_Held] = []
        self._in_order: deque[_Held] = deque()
        self._bytes = 0
        self._draws = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def draws(self) -> int:
        """How many examples have been taken."""
        return self._draws

    @property
    def is_full(self) -> bool:
        return len(self._held) >= self._capacity or self._bytes >= self._largest_bytes

    @property
    def lacks(self) -> int:
        """How many examples to put in before the next is taken (fewer if it gets full)."""
        if self.is_full:
            return 0
        wanted = FIRST if self._draws == 0 else len(self._held) + GROWTH
        return max(0, min(wanted, self._capacity) - len(self._held))

    def put(self, example: Example) -> None:
        held = _Held(example, self._draws, len(self._held))
        self._held.append(held)
        self._in_order.append(held)
        self._bytes += len(example.content)

    def take(self) -> Example:
        """A random one; or the one that has waited longest, if it has waited long enough."""
        slot = int(self._random.random() * len(self._held))
        held = self._overdue() or self._held[slot]
        last = self._held.pop()
        if last is not held:
            self._held[held.slot] = last
            last.slot = held.slot
        example = held.example
        assert example is not None  # noqa: S101 - the invariant; for the type checker
        held.example = None
        self._bytes -= len(example.content)
        self._draws += 1
        return example

    def waiting(self) -> Iterator[Example]:
        """What is here, in no particular order."""
        return (held.example for held in self._held if held.example is not None)

    def _overdue(self) -> _Held | None:
        while self._in_order and self._in_order[0].example is None:
            self._in_order.popleft()
        if self._in_order and self._in_order[0].arrived + self._longest_wait <= self._draws:
            return self._in_order[0]
        return None

    @property
    def _longest_wait(self) -> int:
        return LONGEST_WAIT * self._capacity


class _Held:
    """An example in the buffer. `arrived` counts draws; `example` is None once it is taken."""

    __slots__ = ("arrived", "example", "slot")

    def __init__(self, example: Example, arrived: int, slot: int) -> None:
        self.example: Example | None = example
        self.arrived = arrived
        self.slot = slot
