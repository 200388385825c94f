"""Divides a run with more peers than fit into one group into cohorts. Pure.

    count = next_count(count, peers, group_size)       # after each step, from its result
    cohort_of("poem", peer, count)                     # the number of a peer's cohort
    in_order("poem", peers)                            # the first of them is the head

Each cohort averages by itself. Its *head* brings the average to a round of all heads, with the
weight of the whole cohort, and hands the result of that round down to the cohort (cohort_round.py).
So every value is summed once, in one place, and the whole run has the same bits.

A peer's cohort follows from its name and the number of cohorts alone, so nobody assigns it. The
number of cohorts is a power of two and changes by a factor of two: a cohort is divided into two, or
two become one, and the others' members stay together. It follows from how many peers were in the
last step, which all who made that step know from its result.

Easy to get wrong: with very few cohorts, two dead heads are a majority. So there is one group or at
least `FEWEST_COHORTS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from blake3 import blake3

from protocols.identity import PeerId

FEWEST_COHORTS: Final = 4
MOST_COHORTS: Final = 64

SMALLEST_GROUP: Final = 2 * FEWEST_COHORTS
"""A run with smaller groups has no cohorts; peers beyond its group only follow it."""

FULL_SHARE: Final = 0.5
"""The share of a group that a cohort fills on average, at most. Names decide who is in a cohort, so
some are half as large again."""
SLOWEST_UPLINK: Final = 44_000.0
"""Bytes per second, in the middle of class 1. So the edges between classes are at 0.7, 2.8, 11, 45
and 180 Mb/s. Usual uplinks are a tenth away from them; in an exchange without pauses, a measurement
varies by less."""
UPLINK_FACTOR: Final = 4.0
LARGEST_UPLINK: Final = 6  # 180 Mb/s and more
KEPT_WITHIN: Final = 0.75  # classes; a new one is the nearest

DECISIONS_SHOWN: Final = 2
"""A peer shows the heads' decisions of its last steps, so many: one that is two steps further than
another one shows the first of them."""

EMPTY_SHARE: Final = 0.125  # below it, there are half as many cohorts
ONE_GROUP_SHARE: Final = 0.5  # below it, all fit into one group again


@dataclass(frozen=True)
class Cohort:
    """A peer's cohort, by its number of `count`. `heads`: the other cohorts' heads that are
    expected in the round of all heads. `doubted`: those that are expected as well, and not waited
    for as long, because they have broken a promise."""

    number: int
    count: int
    heads: frozenset[PeerId] = frozenset()
    doubted: frozenset[PeerId] = frozenset()


def cohort_of(run: str, peer: PeerId, count: int) -> int:
    """The number of this peer's cohort. Twice as many cohorts divide each into two."""
    return int.from_bytes(_lot(run, peer)[:8], "big") % count


def in_order(
    run: str, peers: Iterable[PeerId], turns: Mapping[PeerId, int] | None = None
) -> list[PeerId]:
    """The peers of one cohort in the order in which they become its head: by these turns (0 if
    there is none), then by a hash."""
    turns = turns or {}
    return sorted(peers, key=lambda peer: (turns.get(peer, 0), _lot(run, peer)[8:]))


def turn_of(*, follows: bool, uplink: int) -> int:
    """The smaller, the earlier a peer becomes head of its cohort. A head sends a model two or three
    times as often as others, and all wait for it: so those with the fastest links come first. Those
    that `follow` (they took their state from others and were in no step since) come after all
    others, or heads would change whenever many peers come, or come back."""
    return (LARGEST_UPLINK + 1) * follows + LARGEST_UPLINK - uplink


def slowness_of(turn: int) -> int:
    """The smaller, the faster the link of a peer with this turn, whether it follows or not."""
    return turn % (LARGEST_UPLINK + 1)


def uplink_of(bytes_per_second: float, before: int = 0) -> int:
    """A class of links: each sends four times as fast as the one below. 0: not known. `before`: the
    class so far, which stays near its edges: a measurement varies, and heads should not."""
    if bytes_per_second <= 0.0:
        return 0
    exact = 1.0 + math.log(max(1.0, bytes_per_second) / SLOWEST_UPLINK, UPLINK_FACTOR)
    if before and abs(exact - before) <= KEPT_WITHIN:
        return before
    return round(min(max(1.0, exact), LARGEST_UPLINK))


def next_count(count: int, peers: int, group_size: int) -> int:
    """How many cohorts there are after a step that this many peers made."""
    if group_size < SMALLEST_GROUP:
        return 1
    if count == 1:
        return FEWEST_COHORTS if peers >= group_size else 1
    if peers < ONE_GROUP_SHARE * group_size:
        return 1
    if peers > FULL_SHARE * group_size * count:
        return min(2 * count, MOST_COHORTS) if 2 * count <= group_size else count
    if peers < EMPTY_SHARE * group_size * count:
        return max(count // 2, FEWEST_COHORTS)
    return count


def settled_count(peers: int, group_size: int) -> int:
    """How many cohorts a run has after some steps, if it began as one group of so many peers."""
    before, count = 0, 1
    while count != before:
        before, count = count, next_count(count, peers, group_size)
    return count


@lru_cache(maxsize=4096)  # each estimate asks some seventy times
def _lot(run: str, peer: PeerId) -> bytes:
    return blake3(f"cohort {run}/{peer}".encode()).digest(16)
