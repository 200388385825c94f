"""LAMB follows algorithm 2 of You et al. 2020, step by step, and is safe to resume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.errors import NotThisModel, WrongSettings
from models.initial import seeded
from models.lamb import Lamb
from models.registry import parameter_groups
from tests.models.stepping import STEPS, layers, slopes, take_steps


class PlainLamb:
    """One layer of algorithm 2 in plain Python floats, which are float64; from the paper."""

    def __init__(self, x: Sequence[float], bounds: tuple[float, float] = (0.0, math.inf)) -> None:
        self.x = list(x)
        self.m = [0.0] * len(x)
        self.v = [0.0] * len(x)
        self.t = 0
        self.bounds = bounds

    def step(self, g: Sequence[float], lr: float, decay: float, b1: float, b2: float) -> None:
        self.t += 1
        r = []
        for i, slope in enumerate(g):
            self.m[i] = b1 * self.m[i] + (1 - b1) * slope
            self.v[i] = b2 * self.v[i] + (1 - b2) * slope**2
            m_hat = self.m[i] / (1 - b1**self.t)
            v_hat = self.v[i] / (1 - b2**self.t)
            r.append(m_hat / (math.sqrt(v_hat) + 1e-6))
        whole = [ri + decay * xi for ri, xi in zip(r, self.x, strict=True)]
        low, high = self.bounds
        phi = min(max(math.hypot(*self.x), low), high)
        ratio = phi / math.hypot(*whole)
        self.x = [xi - lr * ratio * wi for xi, wi in zip(self.x, whole, strict=True)]


@pytest.mark.parametrize("bounds", [(0.0, math.inf), (0.0, 1.5), (6.0, 10.0)])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5])
def test_every_step_is_that_of_the_paper(decay: float, bounds: tuple[float, float]) -> None:
    ours = layers()
    plain = [PlainLamb(p.flatten().tolist(), bounds) for p in ours]
    optimizer = Lamb(ours, lr=0.02, betas=(0.8, 0.99), weight_decay=decay, norm_bounds=bounds)
    for step in range(STEPS):
        take_steps(optimizer, ours, [step])
        for parameter, reference, slope in zip(ours, plain, slopes(step, ours), strict=True):
            reference.step(slope.flatten().tolist(), 0.02, decay, 0.8, 0.99)
            expected = torch.tensor(reference.x, dtype=torch.float64)
            assert torch.allclose(parameter.flatten(), expected, rtol=1e-12, atol=1e-13)


def test_in_float32_it_stays_within_rounding_of_the_paper() -> None:
    ours, exact = layers(torch.float32), layers(torch.float32)
    plain = [PlainLamb(p.flatten().tolist()) for p in exact]
    optimizer = Lamb(ours, lr=0.02, weight_decay=0.01)
    for step in range(STEPS):
        take_steps(optimizer, ours, [step])
        for reference, slope in zip(plain, slopes(step, ours), strict=True):
            reference.step(slope.flatten().tolist(), 0.02, 0.01, 0.9, 0.999)
    for parameter, reference in zip(ours, plain, strict=True):
        assert torch.allclose(
            parameter.flatten().double(), torch.tensor(reference.x).double(), 1e-5
        )


def test_without_adaptation_it_is_adam_with_decoupled_decay() -> None:
    ours, theirs = layers(), layers()
    adam = torch.optim.AdamW(theirs, lr=0.02, eps=1e-6, weight_decay=0.0)
    take_steps(Lamb(ours, lr=0.02, weight_decay=0.0, adapt=False), ours, range(STEPS))
    take_steps(adam, theirs, range(STEPS))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_each_layer_moves_by_the_same_fraction_of_its_norm() -> None:
    parameters = layers()
    before = [p.detach().clone() for p in parameters]
    take_steps(Lamb(parameters, lr=0.02), parameters, [0])
    for old, new in zip(before, parameters, strict=True):
        moved = (new.detach() - old).norm() / old.norm()
        assert float(moved) == pytest.approx(0.02, rel=1e-12)


def test_a_layer_of_zeros_moves_all_the_same() -> None:
    zero = torch.nn.Parameter(torch.zeros(4, 4))
    take_steps(Lamb([zero], lr=0.1), [zero], [0])
    assert torch.isfinite(zero).all()
    assert zero.abs().max() > 0


def test_a_layer_without_slope_is_only_decayed_and_stays_finite() -> None:
    layer = torch.nn.Parameter(torch.ones(3, 3))
    layer.grad = torch.zeros(3, 3)
    Lamb([layer], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(layer, torch.ones(3, 3))
    Lamb([layer], lr=0.1, weight_decay=0.01).step()
    assert torch.allclose(layer, torch.full((3, 3), 0.9))


def test_biases_and_norms_are_neither_decayed_nor_adapted() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = parameter_groups(network.named_parameters())
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]
    before = network[1].weight.detach().clone()
    optimizer = Lamb(groups, lr=0.1, weight_decay=0.5)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # Adam's first step is the rate, in the direction of the sign
    assert torch.allclose(network[1].weight, before - 0.1, atol=1e-5)


def test_groups_have_rates_of_their_own() -> None:
    first, second, _ = layers()
    before = second.detach().clone()
    optimizer = Lamb([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=0.1)
    take_steps(optimizer, [first, second], [0])
    assert torch.equal(second, before)


def test_its_state_taken_up_by_another_one_goes_on_with_the_same_bits() -> None:
    straight, resumed = layers(torch.float32), layers(torch.float32)
    take_steps(Lamb(straight, lr=0.02), straight, range(STEPS))

    first = Lamb(resumed, lr=0.02)
    take_steps(first, resumed, range(5))
    second = Lamb(resumed, lr=0.5)  # the state brings the groups' settings with it
    second.load_state_dict(first.state_dict())
    take_steps(second, resumed, range(5, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_its_bits_do_not_depend_on_the_number_of_threads() -> None:
    def stepped(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        layer = torch.nn.Parameter(torch.randn(700, 301, generator=seeded(1)))
        optimizer = Lamb([layer], lr=0.02)
        take_steps(optimizer, [layer], range(3))
        return layer.detach()

    threads = torch.get_num_threads()
    try:
        alone, together = stepped(1), stepped(4)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)


def test_impossible_settings_are_refused_when_it_is_made() -> None:
    for wrong in (
        {"lr": -1.0},
        {"lr": math.nan},
        {"betas": (1.0, 0.9)},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"norm_bounds": (2.0, 1.0)},
    ):
        with pytest.raises(WrongSettings):
            Lamb(layers(), **wrong)  # type: ignore[arg-type]


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotThisModel, match="sparse"):
        Lamb(table.parameters()).step()
