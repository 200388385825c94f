"""What a peer trains with, and what becomes of a round: the two ways to make a run's steps.

    gradient_steps.py    gradients are accumulated, averaged, and stepped with (DeDLOC)
    local_steps.py       each peer steps by itself; how far it went is averaged (DiLoCo)

Both hold the *state*: the tensors and statistics that all peers share at an epoch, which others
fetch and which a checkpoint keeps. With delayed steps, and with local ones, it is not what the
model computes with at the moment.

Easy to get wrong: `apply`, `restore` and `load_parameters` change the state; call them with the
lock for changing (state_lock.py).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from protocols.accumulation.accumulator import Contribution
from protocols.accumulation.inner_step import InnerStep, Stepped
from protocols.accumulation.loss_scale import LossScale
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.training_state import LiveState, TrainingState
from protocols.moshpit.layout import Layout


class Steps(Protocol):
    """For one peer and one model."""

    kind: str
    """What is averaged, as a word: part of the topic under which peers meet."""
    layout: Layout
    """Of what is averaged."""
    shared: Parameters
    """The state's tensors."""
    inner: InnerStep
    scale: LossScale
    scales_loss: bool
    """Whether this peer computes in fp16, and multiplies its losses by the scale."""

    @property
    def loss_factor(self) -> float:
        """What the loss of the batch that is being computed is multiplied by."""

    def add(self, samples: int, loss: float | None = None) -> str | None:
        """Count a batch by the parameters' `.grad`; the name of one that is not finite, if so.
        `loss`: its mean, if that is known."""

    def take(self) -> Contribution:
        """What this peer brings to the round that begins. It comes back by one of the next two."""

    def put_back(self, contribution: Contribution) -> None:
        """The round brought nothing: it counts for the next."""

    def done_with(self, contribution: Contribution) -> None:
        """It is in a step, or is dropped."""

    def drop(self) -> None:
        """Forget what was counted and is in no round."""

    def apply(self, averaged: Tensor) -> Stepped:
        """Step with what the round has averaged (its memory may be written to)."""

    def take_over(self) -> None:
        """Let the model compute with the state from now on."""

    def look(self, run: str, epoch: int, history: bytes) -> LiveState:
        """The state as it is, not copied."""

    def restore(self, state: TrainingState) -> None:
        """Take another state, and let the model compute with it."""

    def extra(self) -> dict[str, Any]:
        """What belongs to the state beside the model, its optimizer and its schedule."""
