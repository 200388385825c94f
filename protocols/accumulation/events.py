"""What happens while a run trains, as typed events: for the log, the screen and the tests.

    async for event in collaboration.events(): ...          # or: collaboration.last_events()

Logs are a rendering of these, never the other way round. Each has the epoch it belongs to; the
samples in them are what an audit adds up: every sample that a peer computed is in exactly one
`StepTaken.own_samples`, `HeldBack`, `GradientsDropped`, or still being accumulated. Of what was
dropped some may be in a step all the same, which others made: `CaughtUp.seen` says what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from protocols.identity import PeerId

# ---- what each peer brought
#
# Who brought what to a committed round: what all members of its group know of one another.
#
# Easy to get wrong: `averaged_bytes` counts a part once for each other member that brought samples.
# `reduced_by` takes that out, and says which part of the vector the plan gave to whom.

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


class StepTaken(msgspec.Struct, frozen=True, tag=True):
    """The run has made a step, with what these members brought; `epoch` is the one that ended."""

    epoch: int
    samples: float
    own_samples: int
    members: tuple[PeerId, ...]
    left_out: tuple[PeerId, ...]
    history: bytes
    accumulating_seconds: float
    averaging_seconds: float
    waiting_seconds: float
    """For how long of the averaging the training thread did nothing else."""
    stepping_seconds: float
    norm: float | None = None
    """Of the averaged gradient before clipping, where something clips."""
    shares: tuple[Share, ...] = ()
    """Who brought what, as far as this peer's group goes; empty for a step that was made alone."""
    over_a_grid: bool = False
    loss: float | None = None
    """The run's: the mean over all samples of this step, averaged with their gradients, and so the
    same at all peers; None where nobody has given one."""


class StepLoss(msgspec.Struct, frozen=True):
    """The run's loss in the step that ended an epoch."""

    epoch: int
    loss: float


class SeenStep(msgspec.Struct, frozen=True):
    """A step of the run that this peer has not made itself, though it was in its round: it holds
    the signed list and knows what was decided, and the way that it has caught up by is proven, link
    by link, to lead through the step that this makes. So it has seen as much as who made it."""

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
    """A round brought no step: the gradients are kept, and it is tried again."""

    epoch: int
    samples: int
    reason: str


class GradientsDropped(msgspec.Struct, frozen=True, tag=True):
    """Samples of this peer that will be in no step: they were computed with parameters that the
    run has left behind."""

    epoch: int
    samples: int
    reason: str


class FellBehind(msgspec.Struct, frozen=True, tag=True):
    """The run is elsewhere (further, or on the larger side of a fork): its state is fetched."""

    epoch: int
    at_least_epoch: int
    reason: str


class CaughtUp(msgspec.Struct, frozen=True, tag=True):
    """The state of `epoch` is taken over: fetched and verified, with so many steps `replayed` that
    the run has made meanwhile; or these alone, where this peer was only some steps behind. These
    lead on from its own state (`leads_on`), so that all steps that it has made are the run's."""

    epoch: int
    history: bytes
    seconds: float
    fetched_bytes: int
    sources: tuple[PeerId, ...]
    liars: dict[PeerId, str]
    replayed: int = 0
    leads_on: bool = False
    seen: tuple[SeenStep, ...] = ()
    """Those of the steps that it came by in whose rounds it was."""
    losses: tuple[StepLoss, ...] = ()
    """Of the steps that were `replayed`."""


class TooSlowToCatchUp(msgspec.Struct, frozen=True, tag=True):
    """The state comes more slowly than the run goes on; `reason` says what would be needed. It is
    tried on: links change, and so do runs."""

    epoch: int
    bytes_per_second: float
    needed_bytes_per_second: float
    reason: str


class NoBatchFits(msgspec.Struct, frozen=True, tag=True):
    """So many steps in a row were made without a batch of this peer: the others are done with a
    step long before it would be with one (batch_plan.py). It is told again after as many."""

    epoch: int
    steps: int
    batch: int
    batch_seconds: float


class NoRunFound(msgspec.Struct, frozen=True, tag=True):
    """This peer begins no run, and has waited for so long for a peer of one to report progress."""

    seconds: float


class PlacesTaken(msgspec.Struct, frozen=True, tag=True):
    """As many peers as fit into a round are in the run. This one follows its steps, and computes
    nothing, until a place is free."""

    epoch: int
    places: int


class PlaceFree(msgspec.Struct, frozen=True, tag=True):
    """This peer, which followed the run, has a place in its rounds now."""

    epoch: int


class FetchingFailed(msgspec.Struct, frozen=True, tag=True):
    """The state could not be fetched yet; it is tried again."""

    epoch: int
    reason: str


class ParametersAveraged(msgspec.Struct, frozen=True, tag=True):
    """What unlike machines had drifted apart was averaged; `drift` is the largest difference
    between what this peer had and the average."""

    epoch: int
    members: tuple[PeerId, ...]
    drift: float


class ScaleChanged(msgspec.Struct, frozen=True, tag=True):
    """The loss scale of fp16 that holds from this epoch on."""

    epoch: int
    scale: float
    overflowed: float


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """The state of `epoch` is on the disk, whole."""

    epoch: int
    path: str
    bytes: int
    seconds: float


class CheckpointMissed(msgspec.Struct, frozen=True, tag=True):
    """The state of `epoch` could not be written; it is tried again when the next one is due."""

    epoch: int
    reason: str


Event = (
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
