"""The events of a trainer, in addition to those of the run (protocols/accumulation/events.py).

`Happening` is any of both; words.py turns them into words and objects. `Shown` is told of each:
`--plain` and `--json` print happenings, and the screen draws views. It is called in trio's thread
and must not wait: a slow reader does not stop the training.

The names of the stages before the loop (`LOADING` and so on) are listed in the order of time;
`scripts/bench join` tells the stages apart by them.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from node.core.training_view import TrainerView
from protocols.accumulation.events import TrainingEvent


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """A step of the preparation: `doing` in words."""

    doing: str


class WillUse(msgspec.Struct, frozen=True, tag=True):
    """The limits of this machine's use, and how to stop: three lines, before any download."""

    lines: tuple[str, ...]


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The benchmark is done."""

    device: str
    threads: int
    micro_batch: int
    samples_per_second: float
    batch_seconds: float
    compiled: bool = False


class Began(msgspec.Struct, frozen=True, tag=True):
    """The loop begins, with the state of this epoch."""

    run: str
    epoch: int
    keeps_only: bool = False  # it trains no samples


class FirstSamplesAccepted(msgspec.Struct, frozen=True, tag=True):
    """Others have committed a round with samples of this peer, for the first time in a session."""

    epoch: int
    samples: int
    seconds: float  # since the command was started


class Paused(msgspec.Struct, frozen=True, tag=True):
    reasons: tuple[str, ...]


class Resumed(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class NetworkLost(msgspec.Struct, frozen=True, tag=True):
    reason: str


class NetworkBack(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class PeerCame(msgspec.Struct, frozen=True, tag=True):
    peer: str
    reach: str


class PeerWent(msgspec.Struct, frozen=True, tag=True):
    peer: str


class Notice(msgspec.Struct, frozen=True, tag=True):
    """A line for the owner: 80 % of the quota, memory running short."""

    words: str


class ExpertsMissing(msgspec.Struct, frozen=True, tag=True):
    """Too few experts answer, and no batch has been done for some seconds: this peer tries on."""

    reason: str


class ExpertsBack(msgspec.Struct, frozen=True, tag=True):
    """A batch was done again. `dropped`: the batches that were tried in vain meanwhile."""

    seconds: float
    dropped: int


class RunComplete(msgspec.Struct, frozen=True, tag=True):
    """The run has made all the steps of its definition. `parameters`: the digest of this peer's
    model, which is the same at all peers."""

    epoch: int
    parameters: str = ""


class ServingBegan(msgspec.Struct, frozen=True, tag=True):
    """This peer serves experts of the run from now on, at most so many."""

    run: str
    most: int


class ExpertsTaken(msgspec.Struct, frozen=True, tag=True):
    """This peer serves these experts now. `how` they came: "new", "own copy" or "taken over"."""

    uids: tuple[str, ...]
    how: str


class ExpertsLost(msgspec.Struct, frozen=True, tag=True):
    """This peer serves these experts no more, because another server had them earlier."""

    uids: tuple[str, ...]


class RecordsSummed(msgspec.Struct, frozen=True, tag=True):
    """A keeper has added up its records: everybody's part in the run's first `steps` steps, as the
    records confirm it."""

    steps: int
    samples: int
    averaged_bytes: int
    people: int  # with samples
    helpers: int  # without
    writers: int  # of records
    pages: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error that ended the session for good. `refused`: this node is not let in, or its owner
    does not allow what the run needs."""

    what: str
    why: str
    advice: str
    refused: bool


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """`at_once`: without waiting for the current round."""

    at_once: bool


class Left(msgspec.Struct, frozen=True, tag=True):
    """The end of a session, and its contribution."""

    samples: int
    steps: int
    seconds: float
    lost_samples: int = 0
    alone_samples: int = 0
    alone_steps: int = 0
    expert_rows: int = 0  # that its experts computed, for itself and for others


Own = (
    Preparing
    | WillUse
    | Measured
    | Began
    | FirstSamplesAccepted
    | Paused
    | Resumed
    | NetworkLost
    | NetworkBack
    | PeerCame
    | PeerWent
    | Notice
    | ExpertsMissing
    | ExpertsBack
    | RunComplete
    | ServingBegan
    | ExpertsTaken
    | ExpertsLost
    | RecordsSummed
    | Failed
    | Leaving
    | Left
)
Happening = TrainingEvent | Own


class Shown(Protocol):
    def happened(self, happening: Happening) -> None:
        """Something happened."""

    def show(self, view: TrainerView) -> None:
        """Show the state: about once a second, and after every event."""


LOGGING_IN: Final = "logging in with the enrolment code"
READING: Final = "reading a first batch of the data"  # by an organiser's peer, before its invite
STARTING: Final = "starting this node"
LOOKING: Final = "looking for the others"
ASKING: Final = "asking what the run is"
LOADING: Final = "waiting for torch to be loaded"
WORKING_OUT: Final = "working out what the run takes"
BUILDING: Final = "building the model"
MAKING_SURE: Final = "making sure that no other node uses this one's key"  # after a kill
MEASURING: Final = "measuring how fast this machine is"
COMPILING: Final = "compiling the model, and measuring how fast this machine is"  # instead of that
ENTERING: Final = "entering the run"
