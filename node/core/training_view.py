"""The training of this peer at one moment: for the screen, `potluck status` and `peers`.

A `TrainerView` is plain data that never changes; a new one is made about once a second and at every
event. It is sent as JSON over the control socket. So every field has a default (a newer command
must be able to show an older node), and fields are only ever added.

Rates and shares are measured, never guessed. An unknown value is None, and is shown as unknown.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

LOSSES_KEPT: Final = 512
"""Points of the run's curve: several times the columns of a wide terminal."""


class TrainerPhase(enum.StrEnum):
    """The trainer's present activity. The value is the text for a person."""

    PREPARING = "preparing"
    CATCHING_UP = "catching up"
    FOLLOWING = "following"
    TRAINING = "training"
    KEEPING = "keeping the run"  # instead of training, if it brings no samples
    SERVING = "serving experts"  # instead of training, if it only serves
    RELAYING = "relaying"  # in no run: `potluck backbone --relay-only`
    AVERAGING = "averaging"
    PAUSED = "paused"
    NETWORK_LOST = "network lost"
    COMPLETE = "complete"
    LEAVING = "leaving"
    LEFT = "left"
    REFUSED = "refused"
    FAILED = "failed"


TRAINS: Final = frozenset(
    {TrainerPhase.TRAINING, TrainerPhase.KEEPING, TrainerPhase.SERVING, TrainerPhase.AVERAGING}
)
"""Every step goes through these phases: `phase_seconds` covers them together."""

GOES_ON: Final = TRAINS | {TrainerPhase.CATCHING_UP}
"""A run of short steps alternates between these all the time, and is training."""

ENDED: Final = frozenset({TrainerPhase.LEFT, TrainerPhase.REFUSED, TrainerPhase.FAILED})
"""No phase follows these."""


class RunPeerView(msgspec.Struct, frozen=True, kw_only=True):
    """A peer of the run.

    `name` is the person's name if the run has an auth server, which knows it. `said_name` is the
    peer's own name, cleaned, which proves nothing. The rates are those in the plan of the last
    round (its owner's limits, or measurements). `reduces` is its part of the averaging in that
    plan, from 0 to 1.
    """

    peer: str = ""
    name: str = ""
    said_name: str = ""
    role: str = ""  # trains or auxiliary; "" if it does not say
    device: str = ""  # what computes its samples, as it says: cpu, cuda, mps; cleaned
    keeps: bool = False  # whether it keeps the run's checkpoints
    reach: str = "none"  # none, direct, punched or relayed
    epoch: int | None = None
    samples: int | None = None  # in the batch that is being filled
    samples_per_second: float | None = None
    round_trip_ms: float | None = None
    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    reduces: float | None = None
    ignored: str = ""  # why its reports do not count


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm's batch, which all peers fill together."""

    samples: float = 0.0
    target: int = 0
    mine: int = 0
    samples_per_second: float = 0.0
    seconds_to_step: float | None = None  # None: no peer computes, or it is unknown


class ContributionView(msgspec.Struct, frozen=True, kw_only=True):
    """This peer's contribution in this session: its samples in steps of the run."""

    samples: int = 0
    steps: int = 0
    of_samples: float = 0.0  # of all peers, in those steps
    alone_samples: int = 0  # in steps of the run that this peer made alone
    alone_steps: int = 0
    lost_samples: int = 0  # computed, but in no step
    samples_per_second: float | None = None

    @property
    def share(self) -> float | None:
        return self.samples / self.of_samples if self.of_samples else None


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """This node's whole traffic in this session, and in the last ten seconds."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    upload_limit: float | None = None  # bytes per second
    download_limit: float | None = None


class GridView(msgspec.Struct, frozen=True, kw_only=True):
    """A grid of the run's experts, as the directory says."""

    name: str = ""
    cells: int = 0
    live: int = 0  # cells with an expert that somebody serves


class ExpertsView(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a run that has some: all of them, and those that this peer serves."""

    grids: tuple[GridView, ...] = ()
    servers: int = 0  # peers with experts, this one included
    most: int = 0  # the most that this peer serves; 0 if it is no server
    hosted: int = 0
    load_seconds: float = 0.0  # of work that waits at this peer
    rows: int = 0  # computed here in this session, forward and backward
    rows_per_second: float | None = None
    steps: int = 0  # of the hosted experts, since they were made
    taken_over: int = 0  # from servers that are gone
    lost: int = 0  # to servers that had them earlier
    oldest_copy_seconds: float | None = None  # None if not all hosted experts are saved yet

    @property
    def live(self) -> int:
        return sum(one.live for one in self.grids)

    @property
    def cells(self) -> int:
        return sum(one.cells for one in self.grids)


class TrainerView(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the training.

    `doing` and `advice` say in words what the phase means and what to do about it (empty if
    nothing).
    """

    run: str = ""
    peer: str = ""
    person: str = ""
    name: str = ""  # the name that its owner has given to this peer
    phase: TrainerPhase = TrainerPhase.PREPARING
    phase_seconds: float = 0.0
    doing: str = ""
    advice: str = ""
    closed: tuple[str, ...] = ()  # why the gate is closed, in words
    session_seconds: float = 0.0
    epoch: int = 0
    steps: int = 0  # the number of steps at the end of the run; 0 without an end
    seconds_left: float | None = None  # until then, at the speed of the last steps
    loss: float | None = None  # the run's loss, over all peers' samples in the step `loss_step`
    loss_step: int = 0
    losses: tuple[float, ...] = ()  # the run's curve, each the mean of some steps, oldest first
    losses_at: tuple[int, ...] = ()  # the last step of each
    batch: BatchView = BatchView()
    contribution: ContributionView = ContributionView()
    peers: tuple[RunPeerView, ...] = ()
    traffic: TrafficView = TrafficView()
    device: str = ""
    threads: int = 0
    micro_batch: int = 0
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None  # of a GPU's own; None if none computes
    keeps_only: bool = False  # it brings no samples
    serves_only: bool = False  # it serves experts, and does not train
    relays_only: bool = False  # it is in no run; `peers` are all that it has links with
    experts: ExpertsView | None = None  # None if the run has none, or before that is known
    checkpoint: str = ""  # the newest that this peer keeps, if any
    checkpoint_step: int = 0
    checkpoint_age_seconds: float | None = None  # None before the first one of this session
    troubles: tuple[str, ...] | None = None  # of a backbone peer, as in /healthz; None for others
    writes: str = ""  # a text by the model, for a screen; untrusted, as the data of the run is
    last_event: str = ""  # in words
    last_event_at: float = 0.0  # seconds since 1970
