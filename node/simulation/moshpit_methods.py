"""How simulated peers average, one round at a time: Moshpit, and what it is compared with.

Each method holds what every peer has (one number each, or a row of numbers) and moves them on by
a round, given which peers fail in it. All of them keep the sum over all peers, so the average
that they approach is the right one whoever fails.

What a failure means is the same for all: the peer is gone for this round and back in the next
with the numbers that it had. What it costs the others is the method's:

- in a group the survivors average without it, which is what potluck's rounds agree on and what
  the authors of the Moshpit paper simulated; or, with `discards`, nobody in its group gets
  anything from the round, as where a group cannot agree;
- an all-reduce begins anew, so nobody gets anything from the round;
- in gossip and PushSum nothing goes to it or comes from it, and what was meant for it stays.

Easy to get wrong: the traffic. A butterfly sends two vectors per peer and round, whatever the
group's size; so gossip gets two neighbours, and PushSum, which sends one, is given that advantage.
"""

from __future__ import annotations

import random as randomness
from collections import defaultdict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocols.moshpit.grid import Grid, Index, coordinates, group_name, next_index

Numbers = NDArray[np.float64]  # [peers]
Failed = NDArray[np.bool_]  # [peers]

ID_BYTES = 32  # of a round's id, which here is drawn


class Method(Protocol):
    """One way of averaging, in the middle of it."""

    def average(self, failed: Failed) -> None:
        """One round, without those who fail."""

    def estimates(self) -> Numbers:
        """What each peer takes for the average now."""


class Moshpit:
    """Algorithm 1: groups by the grid, whose members are scattered over different groups next."""

    def __init__(
        self,
        numbers: Numbers,
        indices: list[Index],
        grid: Grid,
        random: randomness.Random,
        *,
        discards: bool,
    ) -> None:
        self._numbers, self._indices, self._grid = numbers.copy(), indices, grid
        self._random, self._discards = random, discards

    def average(self, failed: Failed) -> None:
        groups: dict[str, list[int]] = defaultdict(list)
        for peer, index in enumerate(self._indices):
            groups[group_name(index)].append(peer)
        for roster in groups.values():
            # The order of a roster is that of hashes: another one for each round's key.
            self._random.shuffle(roster)
            _average_group(self._numbers, roster, failed, discards=self._discards)
            new = coordinates(len(roster), self._grid, self._random.randbytes(ID_BYTES))
            for peer, coordinate in zip(roster, new, strict=True):
                self._indices[peer] = next_index(self._indices[peer], coordinate)

    def estimates(self) -> Numbers:
        return self._numbers


class RandomGroups:
    """In each round everybody is drawn into one of so many groups, as even as can be."""

    def __init__(
        self, numbers: Numbers, groups: int, random: randomness.Random, *, discards: bool
    ) -> None:
        self._numbers, self._groups = numbers.copy(), groups
        self._random, self._discards = random, discards

    def average(self, failed: Failed) -> None:
        peers = list(range(self._numbers.size))
        self._random.shuffle(peers)
        for group in range(self._groups):
            members = peers[group :: self._groups]
            _average_group(self._numbers, members, failed, discards=self._discards)

    def estimates(self) -> Numbers:
        return self._numbers


class AllReduce:
    """Everybody with everybody, in one step; begun anew when anybody fails."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers.copy()

    def average(self, failed: Failed) -> None:
        if not failed.any():
            self._numbers[:] = self._numbers.mean()

    def estimates(self) -> Numbers:
        return self._numbers


class Gossip:
    """On a ring: each peer takes the mean of itself and its two neighbours."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers.copy()

    def average(self, failed: Failed) -> None:
        here = self._numbers
        change = np.zeros_like(here)
        for shift in (1, -1):
            both = ~(failed | np.roll(failed, shift))
            # What one gets of the other is what the other gets of it: the sum stays.
            change += np.where(both, np.roll(here, shift) - here, 0.0) / 3
        self._numbers = here + change

    def estimates(self) -> Numbers:
        return self._numbers


class PushSum:
    """On the exponential graph: half of what I have, weight included, to the peer 2^t places on.

    The estimate is the quotient of both. Without failures and with 2^k peers it is exact after k
    rounds; the weights are what keeps it right when pushes are missing.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._sums, self._weights = numbers.copy(), np.ones_like(numbers)
        self._hops = [2**power for power in range((numbers.size - 1).bit_length())] or [0]
        self._round = 0

    def average(self, failed: Failed) -> None:
        hop = self._hops[self._round % len(self._hops)]
        self._round += 1
        pushes = ~(failed | np.roll(failed, -hop))  # sender and receiver are both there
        for amounts in (self._sums, self._weights):
            pushed = np.where(pushes, amounts / 2, 0.0)
            amounts += np.roll(pushed, hop) - pushed

    def estimates(self) -> Numbers:
        return self._sums / self._weights


def _average_group(numbers: Numbers, members: list[int], failed: Failed, *, discards: bool) -> None:
    """Give the members who are there their mean, or nobody anything."""
    there = [peer for peer in members if not failed[peer]]
    if not there or (discards and len(there) < len(members)):
        return
    numbers[there] = numbers[there].mean()
