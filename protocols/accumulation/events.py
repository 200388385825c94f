"""The events of a run's training, for the log, the screen and the tests.

    collaboration.follow(tell)          # or: collaboration.last_events()

Logs are written from these events, never the other way round. Each event has the epoch to which it
belongs. An audit adds up their samples: every sample that a peer computed is in exactly one
`StepTaken.own_samples`, `HeldBack` or `GradientsDropped`, or is still being accumulated. Some of
the dropped samples may still be in a step that others made: `CaughtUp.seen` lists the known ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from protocols.identity import PeerId

# ---- what each peer brought
#
# The contribution of each member to a committed round, as all members of its group know it.
#
# Easy to get wrong: `averaged_bytes` counts a part once for each other member that brought samples.
# `reduced_by` corrects for that, and returns the share of the vector that the plan gave to each.

MOST_BATCHES: Final = 4
"""Times a round's target: a peer counts for no more samples than this in a round, and gets credit
for no more, however many it has signed, because no other peer sees what it has computed. Rounds
begin when all together have the target, so no peer needs to bring more than that plus a batch,
which is no larger. During a round that fails, as much again may be computed. A peer that has even
more after several failed rounds brings the mean of all of them, and counts as this many."""


class Share(msgspec.Struct, frozen=True):
    """`samples`: the samples that the peer has signed. `averaged_bytes`: how much of the others'
    data it has averaged, as encoded. The rates are those by which the round was planned: the
    owner's limits, or else what was measured; 0 if neither is known. Over a grid, all values are of
    the first group."""

    peer: PeerId
    samples: float
    averaged_bytes: int = 0
    up_bytes_per_second: int = 0
    down_bytes_per_second: int = 0


def reduced_by(shares: Sequence[Share]) -> dict[PeerId, float]:
    """The share of the vector that each peer has reduced, from 0 to 1; 0 if nothing was reduced."""
    senders = {one.peer for one in shares if one.samples > 0}
    parts = {one.peer: one.averaged_bytes / max(1, len(senders - {one.peer})) for one in shares}
    total = sum(parts.values()) or 1.0
    return {peer: part / total for peer, part in parts.items()}


class StepTaken(msgspec.Struct, frozen=True, tag=True):
    """The run has made a step with the samples of these members; by cohorts they are the heads, and
    `peers` is how many there were in all. `epoch` is the one that ended."""

    epoch: int
    samples: float
    own_samples: int
    members: tuple[PeerId, ...]
    left_out: tuple[PeerId, ...]
    history: bytes
    accumulating_seconds: float
    averaging_seconds: float
    waiting_seconds: float
    """How long the training thread did nothing but wait for the averaging."""
    stepping_seconds: float
    norm: float | None = None
    """The norm of the averaged gradient before clipping, if it is clipped."""
    shares: tuple[Share, ...] = ()
    """The contributions of this peer's group; empty for a step that was made alone."""
    over_a_grid: bool = False
    """There were other groups: over a grid, or by cohorts."""
    loss: float | None = None
    """The run's loss: the mean over all samples of this step. It is averaged with their gradients,
    so it is the same at all peers. None if no peer reported a loss."""
    peers: int = 0
    learning_rate: float | None = None
    """Of your optimizer's first group in this step. None if that has none."""


class StepLoss(msgspec.Struct, frozen=True):
    """The run's loss in the step that ended an epoch."""

    epoch: int
    loss: float


class SeenStep(msgspec.Struct, frozen=True):
    """A step of the run that this peer has not made itself, although it was in its round. It has
    the signed list and knows what was decided, and it has caught up through results that are
    proven, one by one, to include this step. So it has seen as much as the peers that made it."""

    epoch: int
    history: bytes
    samples: float
    own_samples: int
    shares: tuple[Share, ...]


class HeldBack(msgspec.Struct, frozen=True, tag=True):
    """A batch of this peer does not count: its loss or a gradient is not finite."""

    epoch: int
    samples: int
    reason: str
    parameter: str = ""


class RoundFailed(msgspec.Struct, frozen=True, tag=True):
    """A round led to no step. The gradients are kept for the next try."""

    epoch: int
    samples: int
    reason: str


class GradientsDropped(msgspec.Struct, frozen=True, tag=True):
    """Samples of this peer that will be in no step of this peer: they were computed with parameters
    that the run has left behind."""

    epoch: int
    samples: int
    reason: str


class FellBehind(msgspec.Struct, frozen=True, tag=True):
    """The run is elsewhere (further, or on the larger side of a fork): its state is fetched."""

    epoch: int
    at_least_epoch: int
    reason: str


class CaughtUp(msgspec.Struct, frozen=True, tag=True):
    """The state of `epoch` was fetched and verified, and `replayed` steps that the run made
    meanwhile were made again. If this peer was only some steps behind, it made only these steps,
    from its own state (`leads_on`): then all steps that it has made are the run's."""

    epoch: int
    history: bytes
    seconds: float
    fetched_bytes: int
    sources: tuple[PeerId, ...]
    liars: dict[PeerId, str]
    replayed: int = 0
    leads_on: bool = False
    seen: tuple[SeenStep, ...] = ()
    """The steps on the way in whose rounds this peer was."""
    losses: tuple[StepLoss, ...] = ()
    """The losses of the steps that were `replayed`."""


class TooSlowToCatchUp(msgspec.Struct, frozen=True, tag=True):
    """The state arrives too slowly for this peer to catch up; `reason` says what would be needed.
    The peer keeps trying, because links and runs change."""

    epoch: int
    bytes_per_second: float
    needed_bytes_per_second: float
    reason: str


class NoBatchFits(msgspec.Struct, frozen=True, tag=True):
    """This many steps in a row were made without a batch of this peer: the others finish a step
    long before it would finish a batch (batch_plan.py), or it gets each step too late. Repeated
    after as many more steps."""

    epoch: int
    steps: int
    batch: int
    batch_seconds: float


class NoRunFound(msgspec.Struct, frozen=True, tag=True):
    """This peer begins no run, and has waited for so long for a peer of one to report progress."""

    seconds: float


class PlacesTaken(msgspec.Struct, frozen=True, tag=True):
    """The run has as many peers as fit into a round. Until a place is free, this peer follows the
    run's steps and computes nothing."""

    epoch: int
    places: int


class PlaceFree(msgspec.Struct, frozen=True, tag=True):
    """This peer, which followed the run, has a place in its rounds now."""

    epoch: int


class FetchingFailed(msgspec.Struct, frozen=True, tag=True):
    """The state could not be fetched yet; the peer tries again."""

    epoch: int
    reason: str


class ParametersAveraged(msgspec.Struct, frozen=True, tag=True):
    """The parameters were averaged, because they drift apart on unlike machines. `drift`: the
    largest difference between this peer's parameters and the average."""

    epoch: int
    members: tuple[PeerId, ...]
    drift: float


class ScaleChanged(msgspec.Struct, frozen=True, tag=True):
    """The loss scale of fp16 that holds from this epoch on."""

    epoch: int
    scale: float
    overflowed: float


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """The whole state of `epoch` is on the disk."""

    epoch: int
    path: str
    bytes: int
    seconds: float


class CheckpointMissed(msgspec.Struct, frozen=True, tag=True):
    """The state of `epoch` could not be written. The next try is when the next one is due."""

    epoch: int
    reason: str


TrainingEvent = (
    StepTaken
    | HeldBack
    | RoundFailed
    | GradientsDropped
    | FellBehind
    | CaughtUp
    | TooSlowToCatchUp
    | NoBatchFits
    | NoRunFound
    | PlacesTaken
    | PlaceFree
    | FetchingFailed
    | ParametersAveraged
    | ScaleChanged
    | CheckpointSaved
    | CheckpointMissed
)
