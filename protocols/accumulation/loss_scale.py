"""The loss scale of fp16, agreed on by all peers without a word about it.

    scale = scale.after(overflowed)      # the fraction of the epoch's samples that overflowed

Small gradients vanish in fp16 unless the loss is multiplied by a scale first; too large a scale
overflows. Each peer counts the samples whose gradients overflowed (they add nothing), and the
fraction rides as one value in the vector that is averaged. So everybody holds the same fraction,
to the bit, and this rule, which knows nothing else, gives everybody the same scale.

The averaged gradient is a mean over all samples, those that overflowed as zeros; divided by
(1 - overflowed) it is the mean over those that did not, which is what is stepped with.

Every peer keeps the scale, also one that computes in another precision and has no use for it: who
computes in fp16 may fetch the state from it.

Easy to get wrong: the epoch advances also when nothing was stepped, for the scale is part of the
state and of the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocols.accumulation.state_manifest import StateRefused

INITIAL_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24  # above it a gradient of 0.004 overflows
SMALLEST_SCALE = 2.0  # a run whose gradients are above 32,752 needs no scale but another model

GROWTH_EPOCHS = 200
"""After so many epochs without an overflow the scale is doubled. An epoch here is a step of a
large batch, of which a run has thousands where a single machine makes hundreds of thousands."""

TOLERATED = 1 / 64
"""An overflow of less of the batch is an accident (one bad batch of one peer), not the scale's
fault; else one broken machine could press everybody's scale down for ever."""

ENOUGH = 0.5
"""A step is made if at least so much of the batch did not overflow: a step of a small rest would
be noise at a large batch's learning rate."""


@dataclass(frozen=True)
class LossScale:
    """The scale of an epoch, and for how many epochs it has not overflowed."""

    scale: float = INITIAL_SCALE
    epochs_without: int = 0

    def after(self, overflowed: float) -> LossScale:
        """The scale of the next epoch, when this fraction of the samples overflowed."""
        if overflowed >= TOLERATED:
            return LossScale(max(self.scale / 2.0, SMALLEST_SCALE), 0)
        if self.epochs_without + 1 >= GROWTH_EPOCHS:
            return LossScale(min(self.scale * 2.0, LARGEST_SCALE), 0)
        return LossScale(self.scale, self.epochs_without + 1)

    @property
    def is_smallest(self) -> bool:
        """What still overflows is not the scale's fault, and is held back by name."""
        return self.scale <= SMALLEST_SCALE

    def as_extra(self) -> dict[str, Any]:
        """As part of a state."""
        return {"scale": self.scale, "epochs_without": self.epochs_without}

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> LossScale:
        """StateRefused for what `as_extra` never says."""
        scale, epochs = extra.get("scale"), extra.get("epochs_without")
        if (
            not isinstance(scale, float)
            or type(epochs) is not int
            or not (SMALLEST_SCALE <= scale <= LARGEST_SCALE and 0 <= epochs < GROWTH_EPOCHS)
        ):
            raise StateRefused(f"The state has no loss scale: {scale!r:.40}, {epochs!r:.40}.")
        return LossScale(scale, epochs)


def is_step_worth_it(overflowed: float) -> bool:
    """Whether enough of the batch is left to step with."""
    return 1.0 - overflowed >= ENOUGH
