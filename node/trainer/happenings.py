"""What happens to a trainer, beside what happens in the run (protocols/accumulation/events.py).

`Happening` is all of both. Words and objects for them are in words.py.
"""

from __future__ import annotations

import msgspec

from protocols.accumulation.events import Event


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """A step of getting ready: `doing` in words."""

    doing: str


class WillUse(msgspec.Struct, frozen=True, tag=True):
    """What this machine will give, and how to stop: three lines, before anything is downloaded."""

    lines: tuple[str, ...]


class Measured(msgspec.Struct, frozen=True, tag=True):
    """The benchmark is done."""

    device: str
    threads: int
    micro_batch: int
    samples_per_second: float
    batch_seconds: float


class Began(msgspec.Struct, frozen=True, tag=True):
    """The loop begins, with the state of this epoch."""

    run: str
    epoch: int


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


class RunComplete(msgspec.Struct, frozen=True, tag=True):
    """The run has made all the steps that its definition asks for. `parameters`: the digest of the
    model as this peer has it now, which is everybody's."""

    epoch: int
    parameters: str = ""


class RecordsSummed(msgspec.Struct, frozen=True, tag=True):
    """A keeper has added up the records that it has: what all gave to the run's first `steps`
    steps, as their records confirm it."""

    steps: int
    samples: int
    averaged_bytes: int
    people: int  # with samples
    helpers: int  # without
    writers: int  # of records
    pages: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What ended the session, and no waiting mends. `refused`: this node is not let in, or its
    owner does not allow what the run needs."""

    what: str
    why: str
    advice: str
    refused: bool


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """`at_once`: without waiting for the round that is under way."""

    at_once: bool


class Left(msgspec.Struct, frozen=True, tag=True):
    """The end of a session, and what it gave."""

    samples: int
    steps: int
    seconds: float
    lost_samples: int = 0
    alone_samples: int = 0
    alone_steps: int = 0


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
    | RunComplete
    | RecordsSummed
    | Failed
    | Leaving
    | Left
)
Happening = Event | Own
