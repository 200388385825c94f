"""A shuffle buffer: examples go in as they come from the shards, and out in random order.

The paper loads S = 10 000 examples, picks at random, and replaces the ones it picked (003, section
3.3). Here picking begins with the first few dozen: until it is full, the buffer takes in `GROWTH`
examples for each one it gives. So training begins at once, and the shuffling is as good as the
paper's after a third of S.

Promises: every example that goes in comes out exactly once, after at most (`LONGEST_WAIT` + 1) x S
draws. (Plain random picking would keep one in fifty longer; the bound makes it cheap to return to a
position.) At most S examples are held, and at most so many bytes and one example.

Picking at once and taking in one for one would never fill the buffer, and shuffle nothing.
"""

from __future__ import annotations

import random
from collections import deque

from models.data.examples import Example

FIRST = 32  # examples that are there before the first is picked
GROWTH = 4  # taken in for each one picked, until the buffer is full
LONGEST_WAIT = 4  # in multiples of S: exp(-4), one in fifty, would wait longer


class ShuffleBuffer:
    """Pure: no clock, no I/O; the seed decides every pick.

    Invariant: `_tickets[slot]` belongs to `_examples[slot]`, and knows its slot; `_in_order` has
    every ticket whose slot is not GONE, and some that are.
    """

    def __init__(self, examples: int, largest_bytes: int, seed: int) -> None:
        self._capacity = examples
        self._largest_bytes = largest_bytes
        self._random = random.Random(seed)
        self._examples: list[Example] = []
        self._tickets: list[_Ticket] = []
        self._in_order: deque[_Ticket] = deque()
        self._bytes = 0
        self._draws = 0

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def is_full(self) -> bool:
        return len(self._examples) >= self._capacity or self._bytes >= self._largest_bytes

    @property
    def lacks(self) -> int:
        """How many examples to put in before the next is taken (fewer if it gets full)."""
        if self.is_full:
            return 0
        held = len(self._examples)
        wanted = FIRST if self._draws == 0 else held + GROWTH
        return max(0, min(wanted, self._capacity) - held)

    def put(self, example: Example) -> None:
        ticket = _Ticket(self._draws, len(self._examples))
        self._examples.append(example)
        self._tickets.append(ticket)
        self._in_order.append(ticket)
        self._bytes += len(example.content)

    def take(self) -> Example:
        """A random example; or the one that has waited longest, if it has waited long enough."""
        slot = int(self._random.random() * len(self._examples))
        overdue = self._overdue()
        if overdue is not None:
            slot = overdue.slot
        example, last = self._examples[slot], self._examples.pop()
        ticket, last_ticket = self._tickets[slot], self._tickets.pop()
        if ticket is not last_ticket:
            self._examples[slot], self._tickets[slot] = last, last_ticket
            last_ticket.slot = slot
        ticket.slot = GONE
        self._bytes -= len(example.content)
        self._draws += 1
        return example

    def waiting(self) -> list[Example]:
        """The examples here now, as a list of the caller's own."""
        return self._examples.copy()

    def _overdue(self) -> _Ticket | None:
        in_order = self._in_order
        while in_order and in_order[0].slot == GONE:
            in_order.popleft()
        if in_order and in_order[0].arrived + LONGEST_WAIT * self._capacity <= self._draws:
            return in_order[0]
        return None


GONE = -1


class _Ticket:
    """An example's place in the buffer: when it came (in draws), and its slot."""

    __slots__ = ("arrived", "slot")

    def __init__(self, arrived: int, slot: int) -> None:
        self.arrived = arrived
        self.slot = slot
