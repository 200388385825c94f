"""A step, as a keeper of checkpoints is told of it."""

from __future__ import annotations

from protocols.accumulation.events import StepTaken
from protocols.identity import PeerId


def step_taken(epoch: int, samples: float = 96.0) -> StepTaken:
    return StepTaken(
        epoch=epoch,
        samples=samples,
        own_samples=0,
        members=(PeerId("ann"), PeerId("ben")),
        left_out=(),
        history=bytes(16),
        accumulating_seconds=1.0,
        averaging_seconds=0.1,
        waiting_seconds=0.1,
        stepping_seconds=0.1,
    )
