"""What a backbone peer has seen of its run, and what is wrong with it now. Pure.

    record = BackboneRecord(checkpoint_seconds=300.0, clock=time.monotonic)
    session.follow(record.take)
    record.troubles(node.status())         # {"joined": "..."}; empty where nothing is wrong

A backbone peer is healthy when a volunteer who came now would be served: it listens, it is among
the others, its pass counts, nothing pauses it, and what the run learns is being kept.

Easy to get wrong: no checkpoint is no trouble as long as nobody trains. What has to be kept is a
step that is not on the disk yet.
"""

from __future__ import annotations

from collections.abc import Callable

from node.status import NodeStatus
from node.trainer.happenings import Began, Happening, RecordsSummed
from protocols.accumulation.events import (
    CaughtUp,
    CheckpointMissed,
    CheckpointSaved,
    RoundFailed,
    StepTaken,
)

LATE_SECONDS = 60.0
"""After the moment at which a checkpoint was due; writing a gigabyte takes some seconds."""


class BackboneRecord:
    """Fed with everything that happens, in order."""

    def __init__(self, *, checkpoint_seconds: float, clock: Callable[[], float]) -> None:
        self._checkpoint_seconds, self._clock = checkpoint_seconds, clock
        self.trains = False
        self.epoch = 0
        self.steps = 0
        self.samples = 0.0
        self.failed_rounds = 0
        self.checkpoint_epoch: int | None = None
        self.checkpoint_at: float | None = None
        self.checkpoint_bytes = 0
        self.missed = ""
        self.folder_trouble = ""
        """What is wrong with the run's folder: whoever answers has just looked."""
        self.credit: RecordsSummed | None = None
        self._unkept_since: float | None = None

    def take(self, happening: Happening) -> None:
        match happening:
            case Began(epoch=epoch):
                self.trains, self.epoch = True, epoch
            case StepTaken(epoch=epoch, samples=samples):
                self.epoch = epoch + 1
                self.steps += 1
                self.samples += samples
                self._is_not_kept()
            case CaughtUp(epoch=epoch):
                self.epoch = epoch
                self._is_not_kept()
            case RoundFailed():
                self.failed_rounds += 1
            case CheckpointSaved(epoch=epoch):
                self.checkpoint_epoch, self.checkpoint_at = epoch, self._clock()
                self.checkpoint_bytes, self.missed = happening.bytes, ""
                self._unkept_since = None if epoch >= self.epoch else self._clock()
            case CheckpointMissed(reason=reason):
                self.missed = reason
            case RecordsSummed():
                self.credit = happening
            case _:
                pass

    def checkpoint_age_seconds(self) -> float | None:
        """None before the first one of this session."""
        return None if self.checkpoint_at is None else self._clock() - self.checkpoint_at

    def unkept_seconds(self) -> float:
        """For how long there has been a step that no checkpoint has."""
        return 0.0 if self._unkept_since is None else self._clock() - self._unkept_since

    def troubles(self, status: NodeStatus) -> dict[str, str]:
        """What keeps this peer from being of use, by its name; empty when nothing does."""
        troubles = {}
        if not status.addresses:
            troubles["listening"] = "nobody can dial this node: it has no address"
        if status.directory.joined == "trying":
            failures = "; ".join(status.directory.cannot_join.values())
            troubles["joined"] = f"it has not met the others: {failures or 'no answer yet'}"
        member = status.membership
        if not member.open and member.standing == "over":
            troubles["pass"] = member.trouble or "its pass has expired"
        if not self.trains:
            troubles["run"] = "it has not entered the run yet"
        if status.training is not None and status.training.closed:
            troubles["paused"] = "; ".join(status.training.closed)
        if self.folder_trouble:
            troubles["folder"] = self.folder_trouble
        if self.missed:
            troubles["checkpoints"] = self.missed
        elif self.unkept_seconds() > self._checkpoint_seconds + LATE_SECONDS:
            troubles["checkpoints"] = f"none for {self.unkept_seconds():.0f} seconds, despite steps"
        return troubles

    def _is_not_kept(self) -> None:
        if self._unkept_since is None:
            self._unkept_since = self._clock()
