"""Batch norm's averages are each peer's own: fetched with a state, and never averaged."""

from __future__ import annotations

from functools import partial

import torch

from protocols.accumulation.parameters import Parameters
from protocols.accumulation.steps import GradientSteps


def peer(seed: int) -> tuple[torch.nn.BatchNorm1d, GradientSteps]:
    """A peer that has seen data of its own."""
    model = torch.nn.BatchNorm1d(3)
    see(model, seed)
    steps = GradientSteps(
        Parameters(model.named_parameters()),
        partial(torch.optim.Adam, lr=0.1),
        None,
        delayed=False,
        max_norm=None,
        codec="none",
        scales_loss=False,
        buffers=dict(model.named_buffers()),
    )
    return model, steps


def see(model: torch.nn.BatchNorm1d, seed: int) -> None:
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)))


def means(model: torch.nn.BatchNorm1d) -> list[float]:
    assert model.running_mean is not None
    found: list[float] = model.running_mean.tolist()
    return found


def test_buffers_are_fetched_with_a_state_and_averaged_by_nothing() -> None:
    (there, donor), (here, newcomer) = peer(1), peer(2)
    averaged = torch.ones(donor.layouts[0].values)
    averaged[-1] = 0.0  # nothing overflowed
    assert {one.name.partition(" ")[0] for one in donor.layouts[0].segments} >= {"weight", "bias"}
    assert not any("running" in one.name for one in donor.layouts[0].segments)
    assert not any("running" in one.name for one in donor.shared.segments("none"))
    donor.apply(averaged.clone())

    newcomer.restore(donor.look("test", 1, b"h" * 16).copy())
    assert means(here) == means(there)

    see(there, 3)
    see(here, 4)
    own = means(here)
    for steps in (donor, newcomer):
        steps.apply(averaged.clone())
    assert means(here) == own != means(there)
    assert torch.equal(here.weight, there.weight)
    digests = {one.look("test", 2, b"i" * 16).copy().digest for one in (donor, newcomer)}
    assert len(digests) == 2  # so a state is taken whole from one peer
