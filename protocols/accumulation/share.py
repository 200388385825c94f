"""Who brought what to a committed round: what all members of its group know of one another.

Easy to get wrong: `averaged_bytes` counts a part once for each other member that brought samples.
`reduced_by` takes that out, and says which part of the vector the plan gave to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from protocols.identity import PeerId

MOST_BATCHES: Final = 4
"""Times a round's target: as so many samples one peer counts in a round, and is credited with,
however many it has signed; nobody sees what it has computed. Rounds begin when all together have
the target, so that nobody needs to bring more than that and a batch, which is no larger; beside a
round that fails, as much again may be computed. Who has yet more after several of those is in the
average with the mean of all of them, and counts as this many."""


class Share(msgspec.Struct, frozen=True):
    """`samples`: what the peer has signed that it brings. `averaged_bytes`: how much of the others'
    data it has averaged, as it travelled. The rates are by which the round was planned: what its
    owner allows, or else what was measured; 0 where neither is known. Over a grid all are of the
    first group."""

    peer: PeerId
    samples: float
    averaged_bytes: int = 0
    up_bytes_per_second: int = 0
    down_bytes_per_second: int = 0


def reduced_by(shares: Sequence[Share]) -> dict[PeerId, float]:
    """Which part of the vector each has reduced, from 0 to 1; 0 for all where nothing was."""
    senders = {one.peer for one in shares if one.samples > 0}
    parts = {one.peer: one.averaged_bytes / max(1, len(senders - {one.peer})) for one in shares}
    total = sum(parts.values()) or 1.0
    return {peer: part / total for peer, part in parts.items()}
