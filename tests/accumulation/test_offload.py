"""A peer that keeps its copies off the device makes the same steps, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from protocols.accumulation.accumulator import STAGED_VALUES
from protocols.accumulation.parameters import Parameters
from protocols.accumulation.steps import GradientSteps
from tests.accumulation.device_double import DOUBLE, OnDouble, device_double
from tests.devices import NO_GPU

SHAPES = [(3, 5), (7,), (2, 2)]
BATCHES = 3


MEBIBYTE = 1 << 20


@pytest.fixture
def _double() -> Iterator[None]:
    with device_double():
        yield


def gradient_steps(model: list[nn.Parameter], *, delayed: bool, offload: bool) -> GradientSteps:
    return GradientSteps(
        Parameters((f"p{number}", one) for number, one in enumerate(model)),
        partial(torch.optim.AdamW, lr=0.1),
        None,
        delayed=delayed,
        max_norm=0.5,
        codec="none",
        scales_loss=False,
        buffers={},
        offload=offload,
    )


def stepped(*, delayed: bool, offload: bool) -> tuple[list[nn.Parameter], GradientSteps]:
    """After three steps of three batches each, of which the first gradient is once missing."""
    model = [nn.Parameter(torch.ones(shape).to(DOUBLE)) for shape in SHAPES]
    steps = gradient_steps(model, delayed=delayed, offload=offload)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for batch in range(BATCHES):
            for one in model:
                one.grad = torch.randn(one.shape, generator=generator).to(DOUBLE)
            if batch == 1:
                model[0].grad = None
            assert steps.add(4 + batch, loss=1.0) is None
        contribution = steps.take()
        steps.put_back(contribution)  # as after a round that failed
        contribution = steps.take()
        assert not isinstance(contribution.values, OnDouble)
        steps.apply(contribution.values.clone())
        steps.done_with(contribution)
        steps.take_over()
    return model, steps


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("delayed", [False, True])
def test_it_steps_as_one_that_keeps_them_there(delayed: bool) -> None:
    there, _ = stepped(delayed=delayed, offload=False)
    here, steps = stepped(delayed=delayed, offload=True)
    assert all(isinstance(one, OnDouble) for one in here)
    assert all(bits(one) == bits(other) for one, other in zip(here, there, strict=True))
    statistics = [one["exp_avg"] for one in steps.inner.optimizer.state.values()]
    assert [isinstance(one, OnDouble) for one in statistics] == [not delayed] * len(SHAPES)


@pytest.mark.usefixtures("_double")
def test_a_step_drops_the_gradients_whose_place_it_takes() -> None:
    """Otherwise there were two sets of gradients on the device for a moment."""
    there, _ = stepped(delayed=False, offload=False)
    here, _ = stepped(delayed=False, offload=True)
    assert all(one.grad is not None for one in there)
    assert all(one.grad is None for one in here)


@pytest.mark.usefixtures("_double")
def test_a_gradient_larger_than_the_staging_memory_is_added_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert STAGED_VALUES > 15
    there, _ = stepped(delayed=False, offload=False)
    monkeypatch.setattr("protocols.accumulation.accumulator.STAGED_VALUES", 4)
    here, _ = stepped(delayed=False, offload=True)
    assert all(bits(one) == bits(other) for one, other in zip(here, there, strict=True))


@NO_GPU
@pytest.mark.parametrize(("delayed", "copies"), [(False, 3), (True, 1)])
def test_between_two_batches_a_gpu_holds_parameters_and_statistics(
    delayed: bool, copies: int
) -> None:
    """Delayed, the statistics are on the host as well."""
    before = torch.cuda.memory_allocated()
    own = nn.Parameter(torch.ones(4 * MEBIBYTE, device="cuda"))
    steps = gradient_steps([own], delayed=delayed, offload=True)
    for _ in range(3):
        own.grad = torch.ones_like(own)
        assert steps.add(4) is None
        contribution = steps.take()
        assert contribution.values.is_pinned()
        steps.apply(contribution.values.clone())
        steps.done_with(contribution)
        steps.take_over()
        own.grad = None
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(copies * 16 * MEBIBYTE, abs=MEBIBYTE)


def bits(tensor: Tensor) -> list[float]:
    values: list[float] = tensor.detach().to("cpu").flatten().tolist()
    return values
