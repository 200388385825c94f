"""When the next step is due, by what the peers of a run say of themselves. Pure.

    found = estimate(seen, mine, settings, now)
    if found.is_due: ...                     # the samples of all together reach the target
    await trio.sleep(found.read_again_in_seconds)

Everybody adds up the samples of those who are in its own epoch and history, each carried forward
by its own rate since its slot was seen. So all peers come to the same conclusion at nearly the
same time without a message, and look more often the nearer the step is.

Easy to get wrong: time is that of this machine's clock that cannot be set, from the moment when a
slot was first seen here; what is carried forward ends after `CARRIED_SECONDS`, because a peer that
says nothing for that long may be gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from protocols.accumulation.progress_slot import ProgressSlot
from protocols.identity import PeerId


@dataclass(frozen=True)
class ProgressSettings:
    """What all peers of a run agree on.

    - `target_samples`: of one round: the target batch, times the local steps.
    - `carries_forward`: False counts only what peers have said, so that no step comes early by an
      estimate that was too high; it comes later by what a slot takes to travel.
    """

    target_samples: int
    carries_forward: bool = True


@dataclass(frozen=True)
class Seen:
    """A slot of another peer, and when this version of it was first seen here (monotonic)."""

    slot: ProgressSlot
    at: float


@dataclass(frozen=True)
class Ignored:
    """A peer whose slot does not count, and why, in words."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """A state that this peer should take instead of its own: that of `peers`, who are at this
    epoch or later. `history` is None where they differ in it, because some are further still."""

    epoch: int
    history: bytes | None
    peers: tuple[PeerId, ...]
    reason: str


@dataclass(frozen=True)
class Estimate:
    """What is believed of the run at one moment.

    - `number`: grows with every reading of the directory; 0 is before the first.
    - `epoch`, `history`: of this peer, when the estimate was made.
    - `samples`: of all in this epoch and history, own ones included, carried forward.
    - `others_samples`: the same without this peer's own.
    - `rate`: of all of these together, in samples per second.
    - `is_due`: the round that ends this epoch should begin now.
    - `due_in_seconds`: until it is, by these rates; infinite where nobody computes.
    - `expected`: how many will come to the round, this peer included.
    - `company`: others in this epoch and history who compute or help: while there are any, nobody
      makes a step alone.
    - `behind`: others are ahead, and enough of them say so.
    - `fork`: others have another history, and this peer is on the side that gives way.
    - `peers`: all others that are known to live and fit, wherever they are.
    - `ignored`: whose slots do not count, and why.
    """

    number: int
    epoch: int
    history: bytes
    samples: float = 0.0
    others_samples: float = 0.0
    target_samples: int = 1
    rate: float = 0.0
    is_due: bool = False
    due_in_seconds: float = math.inf
    read_again_in_seconds: float = 1.0
    expected: int = 1
    company: int = 0
    behind: Elsewhere | None = None
    fork: Elsewhere | None = None
    peers: tuple[PeerId, ...] = ()
    ignored: tuple[Ignored, ...] = ()

    def is_due_with(self, own_samples: int) -> bool:
        """Whether the round is due now that this peer has so many: for the training thread, which
        has just added a batch and has no newer estimate."""
        return self.is_due or self.others_samples + own_samples >= self.target_samples


def estimate(
    seen: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    settings: ProgressSettings,
    now: float,
    *,
    number: int = 1,
) -> Estimate:
    """See the module. Stub."""
    raise NotImplementedError(seen, settings, now, mine, number)
