"""LARS follows algorithm 1 of You et al. 2017, step by step, and is safe to resume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from models.errors import NotThisModel, WrongSettings
from models.lars import Lars
from models.registry import parameter_groups
from models.schedules import Schedule, ScheduleSettings
from tests.models.stepping import STEPS, layers, slopes, take_steps


class PlainLars:
    """One layer of algorithm 1 in plain Python floats, which are float64; from the paper.

    gamma(t) = gamma_0 (1 - t / T)^2, which the algorithm has inside.
    """

    def __init__(self, w: Sequence[float], last: int) -> None:
        self.w = list(w)
        self.v = [0.0] * len(w)
        self.t = 0
        self.last = last

    def step(self, g: Sequence[float], lr: float, m: float, beta: float, eta: float) -> None:
        gamma = lr * (1 - self.t / self.last) ** 2
        local = eta * math.hypot(*self.w) / (math.hypot(*g) + beta * math.hypot(*self.w))
        for i, slope in enumerate(g):
            self.v[i] = m * self.v[i] + gamma * local * (slope + beta * self.w[i])
            self.w[i] -= self.v[i]
        self.t += 1


@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.5])
def test_every_step_is_that_of_the_paper_with_its_decay_of_the_rate(decay: float) -> None:
    ours = layers()
    plain = [PlainLars(p.flatten().tolist(), STEPS + 3) for p in ours]
    optimizer = Lars(ours, lr=8.0, momentum=0.8, weight_decay=decay, trust=0.01)
    schedule = Schedule(optimizer, ScheduleSettings(decay="polynomial", steps=STEPS + 3, power=2))
    for step in range(STEPS):
        take_steps(optimizer, ours, [step])
        schedule.step()
        for parameter, reference, slope in zip(ours, plain, slopes(step, ours), strict=True):
            reference.step(slope.flatten().tolist(), 8.0, 0.8, decay, 0.01)
            expected = torch.tensor(reference.w, dtype=torch.float64)
            # the schedule's factor is rounded to twelve digits
            assert torch.allclose(parameter.flatten(), expected, rtol=1e-11, atol=1e-11)


def test_without_adaptation_and_at_a_constant_rate_it_is_sgd_with_momentum() -> None:
    ours, theirs = layers(), layers()
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.01)
    take_steps(Lars(ours, lr=0.1, weight_decay=0.01, adapt=False), ours, range(STEPS))
    take_steps(sgd, theirs, range(STEPS))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_the_first_step_does_not_depend_on_the_size_of_the_gradient() -> None:
    small, large = layers(), layers()
    for parameter, slope in zip(small, slopes(0, small), strict=True):
        parameter.grad = slope
    for parameter, slope in zip(large, slopes(0, large), strict=True):
        parameter.grad = 1000.0 * slope
    Lars(small, weight_decay=0.0).step()
    Lars(large, weight_decay=0.0).step()
    for a, b in zip(small, large, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_zeros_in_a_layer_or_its_gradient_leave_it_finite() -> None:
    zero = torch.nn.Parameter(torch.zeros(3, 3))
    take_steps(Lars([zero]), [zero], [0])
    assert zero.abs().max() > 0
    still = torch.nn.Parameter(torch.ones(3, 3))
    still.grad = torch.zeros(3, 3)
    Lars([still], weight_decay=0.0).step()
    assert torch.equal(still, torch.ones(3, 3))


def test_without_a_gradient_a_layer_decays_by_equation_6() -> None:
    """eta |w| / (0 + beta |w|) times beta w is eta w, whatever beta is."""
    for decay in (5e-4, 0.5):
        layer = torch.nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
        layer.grad = torch.zeros_like(layer)
        Lars([layer], lr=1.0, weight_decay=decay, trust=0.01).step()
        assert torch.allclose(layer, torch.full_like(layer, 0.99), rtol=1e-12)


def test_biases_are_neither_decayed_nor_adapted() -> None:
    network = torch.nn.Linear(3, 4)
    before = network.bias.detach().clone()
    optimizer = Lars(parameter_groups(network.named_parameters()), lr=0.5, weight_decay=0.5)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(network.bias, before - 0.5)


def test_its_state_taken_up_by_another_one_goes_on_with_the_same_bits() -> None:
    straight, resumed = layers(torch.float32), layers(torch.float32)
    take_steps(Lars(straight), straight, range(STEPS))
    first = Lars(resumed)
    take_steps(first, resumed, range(5))
    second = Lars(resumed)
    second.load_state_dict(first.state_dict())
    take_steps(second, resumed, range(5, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_impossible_settings_are_refused_when_it_is_made() -> None:
    for wrong in ({"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"trust": 0.0}):
        with pytest.raises(WrongSettings):
            Lars(layers(), **wrong)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotThisModel, match="sparse"):
        Lars(table.parameters()).step()
