"""How the training of this peer is at one moment: for the screen, `potluck status` and `peers`.

A `TrainerView` is plain data that never changes; a new one is made about once a second and at
every event. It is JSON over the control socket, so every field has a default (a newer command has
to be able to show an older node) and fields are only ever added.

Easy to get wrong: rates and shares are measured, never guessed: what is not known yet is None, and
is shown as that.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import msgspec

from node.display_name import Named

LOSSES_KEPT: Final = 512
"""Points of the run's curve: as many as a wide terminal has columns, a few times over."""


class Phase(enum.StrEnum):
    """What the trainer does now. The value is how a person reads it."""

    PREPARING = "preparing"
    CATCHING_UP = "catching up"
    FOLLOWING = "following"
    TRAINING = "training"
    KEEPING = "keeping the run"  # in the place of training, where no samples are brought
    AVERAGING = "averaging"
    PAUSED = "paused"
    NETWORK_LOST = "network lost"
    COMPLETE = "complete"
    LEAVING = "leaving"
    LEFT = "left"
    REFUSED = "refused"
    FAILED = "failed"


TRAINS: Final = frozenset({Phase.TRAINING, Phase.KEEPING, Phase.AVERAGING})
"""Every step leads from one to the other: `phase_seconds` is of both together."""

GOES_ON: Final = TRAINS | {Phase.CATCHING_UP}
"""A run of short steps changes between these all the time, and trains."""

ENDED: Final = frozenset({Phase.LEFT, Phase.REFUSED, Phase.FAILED})
"""Nothing comes after these."""


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """A peer of the run. `name`: its person's, where the run has an auth server, which knows who
    that is; `said_name`: what it says of itself, cleaned, which proves nothing. The rates are by
    which the last round was planned (what its owner allows, or what was measured), and `reduces`
    is the part of the averaging that the plan gave it, from 0 to 1."""

    peer: str = ""
    name: str = ""
    said_name: str = ""
    role: str = ""  # trains or auxiliary; "" where it says nothing
    keeps: bool = False  # the run's checkpoints
    reach: str = "none"  # none, direct or relayed
    epoch: int | None = None
    samples: int | None = None  # of the batch that is being filled
    samples_per_second: float | None = None
    round_trip_ms: float | None = None
    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    reduces: float | None = None
    ignored: str = ""  # why what it says does not count


def named(peers: Iterable[PeerView]) -> list[Named]:
    """These peers, for words about them."""
    return [Named(one.peer, one.name, one.said_name) for one in peers]


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """The swarm's batch, which all fill together."""

    samples: float = 0.0
    target: int = 0
    mine: int = 0
    samples_per_second: float = 0.0
    seconds_to_step: float | None = None  # None: nobody computes, or nobody knows


class ContributionView(msgspec.Struct, frozen=True, kw_only=True):
    """What this peer gave in this session: samples in steps of the run that it was in."""

    samples: int = 0
    steps: int = 0
    of_samples: float = 0.0  # of everybody, in those steps
    alone_samples: int = 0  # in steps of the run that this peer made alone
    alone_steps: int = 0
    lost_samples: int = 0  # computed, and in no step
    samples_per_second: float | None = None

    @property
    def share(self) -> float | None:
        return self.samples / self.of_samples if self.of_samples else None


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    """All of this node's, in this session, and in the last ten seconds."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    upload_limit: float | None = None  # bytes per second
    download_limit: float | None = None


class TrainerView(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. `doing` and `advice` say in words what the phase means and what to do about it
    (empty where nothing is to be done)."""

    run: str = ""
    peer: str = ""
    person: str = ""
    name: str = ""  # that this peer's owner has given it
    phase: Phase = Phase.PREPARING
    phase_seconds: float = 0.0
    doing: str = ""
    advice: str = ""
    closed: tuple[str, ...] = ()  # why the gate is closed, in words
    session_seconds: float = 0.0
    epoch: int = 0
    steps: int = 0  # that the run will have made when it is over; 0 where it has no end
    seconds_left: float | None = None  # until then, at the pace of the last steps
    loss: float | None = None  # the run's, of all peers' samples in the step `loss_step`
    loss_step: int = 0
    losses: tuple[float, ...] = ()  # the run's curve, each the mean of some steps, the newest last
    losses_at: tuple[int, ...] = ()  # the last of those steps
    batch: BatchView = BatchView()
    contribution: ContributionView = ContributionView()
    peers: tuple[PeerView, ...] = ()
    traffic: TrafficView = TrafficView()
    device: str = ""
    threads: int = 0
    micro_batch: int = 0
    memory_bytes: int | None = None
    keeps_only: bool = False  # it brings no samples
    checkpoint: str = ""  # the newest that this peer keeps, if it keeps any
    checkpoint_step: int = 0
    checkpoint_age_seconds: float | None = None  # None before the first one of this session
    troubles: tuple[str, ...] | None = None  # of a backbone peer, as /healthz says; None elsewhere
    last_event: str = ""  # in words
    last_event_at: float = 0.0  # seconds since 1970
