"""A collaborative optimizer for loops that call `step()` themselves: Trainer, Lightning.

    shared = CollaborativeOptimizer(model.named_parameters(), factory, bridge)
    Trainer(..., optimizers=(FrameworkOptimizer(shared, model=model), None))    # Hugging Face
    return FrameworkOptimizer(shared, samples=32)          # Lightning, in configure_optimizers

Such a loop knows nothing of samples. With `model` each forward pass of it in training is a batch:
its samples and its loss are noted, as the models of Hugging Face's library return them. Otherwise
each step has as many `samples` as you say, and the loss is that of the closure, if there is one.

The learning rate, clipping and the optimizer's state belong to the run. So this object has groups
of its own: a schedule of the framework changes nothing, and the framework's checkpoints have no
state of the optimizer. Switch the framework's clipping and gradient accumulation off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.trainable import tensors_in
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.errors import ProtocolMisuse


class FrameworkOptimizer(torch.optim.Optimizer):
    """`epoch`: how many steps the run has made."""

    def __init__(
        self,
        shared: CollaborativeOptimizer,
        *,
        samples: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        if (samples > 0) is (model is not None):
            raise ProtocolMisuse(
                "The samples of a step are not known.",
                advice="Give either `samples`, which all batches have, or the `model` to watch.",
            )
        self.shared = shared
        self._samples = samples
        self._loss: Any = None
        own = [{**group, "params": list(group["params"])} for group in shared.param_groups]
        super().__init__(own, {})
        if model is not None:
            model.register_forward_hook(self._note, with_kwargs=True)

    @property
    def epoch(self) -> int:
        return self.shared.epoch

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the gradients in `.grad`, or those that the closure computes."""
        loss = self._loss
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._loss = None
        self.shared.step(samples=self._samples, loss=loss if isinstance(loss, Tensor) else None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.shared.zero_grad(set_to_none)

    def _note(
        self,
        model: nn.Module,
        positional: tuple[Any, ...],
        batch: Mapping[str, Any],
        output: Any,
    ) -> None:
        if model.training:
            given = (one for one in tensors_in((positional, batch)) if one.dim())
            first = next(given, None)
            if first is None:
                raise ProtocolMisuse(
                    "The samples of a step are not known: the model was called without a tensor.",
                    advice="Give the model its batch as tensors, or say `samples` in place of it.",
                )
            self._samples = len(first)
            loss = output.get("loss") if isinstance(output, Mapping) else None
            self._loss = loss.detach() if isinstance(loss, Tensor) else None
