"""States to write down."""

from __future__ import annotations

import torch

from protocols.accumulation.training_state import TrainingState, capture


def state_of(epoch: int = 1, *, run: str = "test", seed: int = 0) -> TrainingState:
    """A small state with every kind of tensor in it."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    model[0].bfloat16()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    extra = {"scale": 65536.0, "odd": torch.arange(3, dtype=torch.int8), "empty": torch.empty(0, 4)}
    return capture(
        model.named_parameters(),
        model.named_buffers(),
        optimizer,
        extra=extra,
        run=run,
        epoch=epoch,
        history=bytes([epoch % 256]) * 16,
    )
