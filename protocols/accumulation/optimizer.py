"""The optimizer that many peers share: a drop-in around any torch optimizer.

    optimizer = CollaborativeOptimizer(
        model.named_parameters(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), bridge
    )
    optimizer.catch_up()                      # take the others' state, if there are others
    for batch in batches:
        optimizer.zero_grad()
        with optimizer.autocast():
            loss = loss_of(model, batch)
        optimizer.scaled(loss).backward()
        optimizer.step(samples=len(batch), loss=loss)

`step` adds the gradients to what this peer has for the epoch. When the peers together have the
target batch it averages, weighted by samples, and steps the inner optimizer: the same step, with
the same bits, at every peer. Otherwise it returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from protocols.accumulation.bridge import Bridge

Factory = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
"""Makes the inner optimizer of (name, parameter) pairs, as torch's own constructors take them. It
is called with shadows of the model's parameters (the same names) when `delayed`."""

Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Precision = Literal["float32", "bf16", "fp16"]


class CollaborativeOptimizer(torch.optim.Optimizer):
    """See the module. One for each bridge."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        factory: Factory,
        bridge: Bridge,
        *,
        scheduler: Scheduler | None = None,
        delayed: bool = False,
        local_steps: int = 1,
        max_norm: float | None = None,
        average_parameters_every: int = 0,
        precision: Precision = "float32",
        auxiliary: bool = False,
        buffers: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """How many steps the run has made, as far as this peer's parameters know."""
        raise NotImplementedError

    @property
    def history(self) -> bytes:
        """Sixteen bytes that are equal at two peers that made the same steps."""
        raise NotImplementedError

    def catch_up(self) -> bool:
        """Fetch the others' state if they are ahead; whether that was done. For the start of a
        run: `step` does it by itself when this peer fell behind."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast for the chosen precision on the parameters' device."""
        raise NotImplementedError

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the agreed scale (fp16), or the loss itself."""
        raise NotImplementedError

    def step(  # type: ignore[override]
        self, closure: None = None, *, samples: int, loss: Tensor | float | None = None
    ) -> bool:
        """Count the gradients in `.grad`, the mean over so many samples; whether the run stepped.

        The gradients may be changed or freed as soon as this returns. Waits for the network when
        the peers together have the target batch (with `delayed`, only if the round before has not
        ended), and when this peer fell behind and fetches the others' state.
        """
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch: forget the gradients of the last batch. What was counted stays."""
        raise NotImplementedError

    def assist(self, *, epochs: int | None = None) -> None:
        """Auxiliary mode: reduce for the others and make their steps, without data, until the
        collaboration ends (then CollaborationEnded) or for so many epochs."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError
