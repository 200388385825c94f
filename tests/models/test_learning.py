"""The default model with the built-in data learns to read within a demonstration's time."""

from __future__ import annotations

import pytest
import torch

from models.data.batches import WindowBatches
from models.data.opening import open_data
from models.initial import seeded
from models.registry import build_model, optimizer_factory, schedule_factory

pytestmark = pytest.mark.slow

UNTRAINED = 5.5  # nats per byte
FREQUENCIES_ALONE = 3.2  # what knowing only how often each byte occurs gives, roughly


def test_the_tiny_gpt_learns_more_than_frequencies_in_sixty_steps() -> None:
    model = build_model({"name": "gpt", "size": "tiny"}, seed=0)
    adamw = {"name": "adamw", "lr": 2e-3, "betas": [0.9, 0.95]}
    optimizer = optimizer_factory(adamw)(model.named_parameters())
    schedule = schedule_factory({"name": "constant", "warmup": 20})(optimizer)
    losses = []
    with open_data(seed=1, window=model.window) as data:
        batches = WindowBatches(data, rows=32, window=model.window)
        for windows, _ in zip(batches, range(60), strict=False):
            optimizer.zero_grad()
            loss = model.loss(model.batch_of(windows, seeded(0)))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    assert float(losses[0]) == pytest.approx(UNTRAINED, abs=0.3)
    assert float(torch.stack(losses[-10:]).mean()) < FREQUENCIES_ALONE - 0.2
