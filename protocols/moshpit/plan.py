"""The plan of a round, from what its roster says: which member reduces which share of the vector.

Every member computes it alone from the same signed list and gets the same bits (plan_shares.py
says why), so a plan is never sent to be believed: what the leader announces is compared. It takes
well under a millisecond for 16 members and needs neither torch nor scipy. Whoever plans a whole
collaboration, and also who should compute, looks into plan_strategy.py.

Easy to get wrong: an unknown speed is 0 in a roster, and is not slow. It counts as the median of
those that are known, each direction for itself; where nobody's is known all are taken to be equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from protocols.errors import ProtocolMisuse
from protocols.moshpit.plan_shares import Members, best_shares, link_seconds_of, seconds_of

UNKNOWN = 0.0  # bytes per second: not measured yet
SUPPOSED_BYTES_PER_SECOND = 12.5e6  # 100 Mb/s for all, where nothing is known of anybody


def fractions_for(
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    reduces: Sequence[bool],
) -> tuple[float, ...]:
    """The share of the vector that each member reduces, so that the round is shortest.

    One entry per member in each argument; speeds in bytes per second, 0 for unknown. A member
    that does not contribute (weight 0) sends no values, but gets the result like all others; one
    that does not reduce gets the share 0. The shares add up to 1 exactly.
    """
    return best_shares(_members(up, down, contributes, reduces))


def predicted_seconds(
    fractions: Sequence[float],
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    total_bytes: float,
) -> float:
    """How long a round takes in which member i reduces fractions[i] of `total_bytes`."""
    members = _members(up, down, contributes, [fraction > 0 for fraction in fractions])
    return total_bytes * seconds_of(fractions, members)


def predicted_link_seconds(
    fractions: Sequence[float],
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    total_bytes: float,
) -> list[tuple[float, float]]:
    """The same for each member's uplink and its downlink, of which the longest is the round."""
    members = _members(up, down, contributes, [fraction > 0 for fraction in fractions])
    return [
        (total_bytes * sending, total_bytes * receiving)
        for sending, receiving in link_seconds_of(fractions, members)
    ]


def _members(
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    reduces: Sequence[bool],
) -> Members:
    if not len(up) == len(down) == len(contributes) == len(reduces) > 0:
        raise ProtocolMisuse("A plan needs the same number of entries for everything, at least 1.")
    if not any(contributes):
        raise ProtocolMisuse("A round in which nobody contributes has nothing to average.")
    if not any(reduces):
        raise ProtocolMisuse("A round in which nobody reduces cannot be planned.")
    return Members(_known(up), _known(down), contributes, reduces)


def _known(speeds: Sequence[float]) -> list[float]:
    if not all(math.isfinite(speed) and speed >= 0 for speed in speeds):
        raise ProtocolMisuse("A speed is a finite number of bytes per second, or 0 for unknown.")
    known = [speed for speed in speeds if speed != UNKNOWN]
    supposed = statistics.median(known) if known else SUPPOSED_BYTES_PER_SECOND
    return [speed if speed != UNKNOWN else supposed for speed in speeds]
