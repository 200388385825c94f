"""Many gradients are checked in one pass, and a wrong one is named."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

from protocols.accumulation import accumulator
from protocols.accumulation.accumulator import Averageable
from protocols.accumulation.parameters import Parameters
from tests.devices import DEVICES

SIZES = (3, 0, 5, 40, 1, 8, 30, 2, 9, 10)  # with a scratch of 10 values: alone, together, and full
LARGEST = 1000.0


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "SCRATCH_VALUES", 10)


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Parameters:
    return Parameters(
        (f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype, device=device)))
        for number, size in enumerate(SIZES)
    )


def gradients(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor | None]:
    return [torch.full((size,), -1.0, dtype=dtype, device=device) for size in SIZES]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1001.0, -1001.0])
def test_the_wrong_gradient_is_named_wherever_it_is(bad: float, device: str) -> None:
    check = Averageable(parameters(device=device), [LARGEST] * len(SIZES))
    assert check.first_wrong(gradients(device=device)) is None
    for number, size in enumerate(SIZES):
        if size:
            given = gradients(device=device)
            wrong = given[number]
            assert wrong is not None
            wrong[-1] = bad
            assert check.first_wrong(given) == f"p{number}"
    assert check.first_wrong(gradients(device=device)) is None


def test_an_earlier_error_is_not_found_in_a_parameter_without_a_gradient() -> None:
    check = Averageable(parameters(), [LARGEST] * len(SIZES))
    for number in range(len(SIZES)):
        given = gradients()
        given[number] = torch.full((SIZES[number],), math.nan)
        check.first_wrong(given)
        given[number] = None
        assert check.first_wrong(given) is None
    assert check.first_wrong([None] * len(SIZES)) is None


def test_each_is_held_to_its_own_bound_times_the_scale() -> None:
    largest = [LARGEST] * len(SIZES)
    largest[2] = 0.5
    check = Averageable(parameters(), largest)
    given = gradients()
    assert check.first_wrong(given) == "p2"
    assert check.first_wrong(given, scale=2.0) is None
    given[2] = None
    assert check.first_wrong(given) is None


def test_infinity_is_beyond_any_bound() -> None:
    check = Averageable(parameters(torch.float64), [sys.float_info.max] * len(SIZES))
    given = gradients(torch.float64)
    given[4] = torch.tensor([math.inf], dtype=torch.float64)
    assert check.first_wrong(given, scale=65536.0) == "p4"


def test_transposed_gradients_are_looked_at_as_well() -> None:
    own = Parameters([("weight", nn.Parameter(torch.zeros(2, 3)))])
    gradient = torch.zeros(3, 2).t()
    gradient[1, 2] = math.nan
    assert Averageable(own, [LARGEST]).first_wrong([gradient]) == "weight"
