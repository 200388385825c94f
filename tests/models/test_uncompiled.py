"""A process that trains never loads torch's compiler, and its optimizers step as torch's do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from models.uncompiled import SGD, AdamW

TRAINS = """
import sys
from models.registry import build_model, optimizer_factory
model = build_model({"name": "gpt", "size": "tiny"}, seed=0)
for name in ("sgd", "adamw", "lamb", "lars"):
    optimizer = optimizer_factory({"name": name, "lr": 0.1})(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print(*{"torch._dynamo", "sympy"} & sys.modules.keys())
"""


@pytest.mark.slow
def test_building_a_model_and_stepping_it_loads_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_it_steps_bit_for_bit_as_torchs_own(
    ours: type[Optimizer], torchs: type[Optimizer], options: dict[str, float]
) -> None:
    assert ours.__name__ == torchs.__name__  # states are told apart by it
    parameters = [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)]
    pair = [
        kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]
        for kind, parameter in zip((ours, torchs), parameters, strict=True)
    ]
    for step in range(3):
        for optimizer, parameter in zip(pair, parameters, strict=True):
            parameter.grad = torch.sin(parameter.detach() * step)
            optimizer.step()
    assert torch.equal(parameters[0], parameters[1])
    states = [optimizer.state_dict() for optimizer in pair]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    pair[1].load_state_dict(states[0])
    pair[0].zero_grad()
    assert parameters[0].grad is None


def test_a_closure_is_called_with_gradients_enabled() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    assert parameter.grad is not None
