"""Learning rates over the epochs, and the one number that is their state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import WrongSettings
from models.schedules import DECAYS, Decay, Schedule, ScheduleSettings, factor

decays = st.sampled_from(DECAYS)


def settings_of(decay: Decay, **others: float) -> ScheduleSettings:
    return ScheduleSettings(decay=decay, warmup=4, steps=12, **others)  # type: ignore[arg-type]


def optimizer_with(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("decay", DECAYS)
def test_it_warms_up_in_equal_steps_and_never_from_zero(decay: Decay) -> None:
    assert [factor(settings_of(decay), epoch) for epoch in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_constant_stays() -> None:
    assert factor(settings_of("constant"), 10**9) == 1.0


def test_linear_cosine_and_polynomial_decay_by_their_formulas() -> None:
    for epoch in range(4, 13):
        done = (epoch - 4) / 8
        assert factor(settings_of("linear"), epoch) == pytest.approx(1 - done, abs=1e-12)
        cosine = (1 + math.cos(math.pi * done)) / 2
        assert factor(settings_of("cosine"), epoch) == pytest.approx(cosine, abs=1e-12)
        polynomial = (1 - done) ** 3
        assert factor(settings_of("polynomial", power=3.0), epoch) == pytest.approx(
            polynomial, abs=1e-12
        )


@given(decay=decays, epoch=st.integers(0, 1 << 40), floor=st.floats(0.0, 1.0))
def test_it_is_always_between_the_floor_and_one_after_the_warm_up(
    decay: Decay, epoch: int, floor: float
) -> None:
    value = factor(ScheduleSettings(decay=decay, steps=1000, floor=floor), epoch)
    assert floor - 1e-11 <= value <= 1.0
    if epoch >= 1000 and decay != "constant":
        assert value == pytest.approx(floor, abs=1e-11)


@given(decay=decays, epoch=st.integers(4, 200))
def test_after_the_warm_up_it_never_rises(decay: Decay, epoch: int) -> None:
    assert factor(settings_of(decay), epoch + 1) <= factor(settings_of(decay), epoch)


def test_it_has_no_digits_in_which_machines_differ() -> None:
    for epoch in range(4, 13):
        value = factor(settings_of("cosine"), epoch)
        assert value == round(value, 12)


def test_each_groups_rate_is_its_own_times_the_factor() -> None:
    optimizer = optimizer_with(1.0, 0.5)
    schedule = Schedule(optimizer, settings_of("linear"))
    assert rates_of(optimizer) == [0.2, 0.1]
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert rates_of(optimizer) == [1.0, 0.5]
    assert schedule.get_last_lr() == [1.0, 0.5]


def test_its_state_is_one_number_that_another_peer_can_go_on_from() -> None:
    straight = optimizer_with(1.0)
    schedule = Schedule(straight, settings_of("cosine"))
    for _ in range(7):
        straight.step()
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state == {"last_epoch": 7}

    newcomer = optimizer_with(1.0)
    taken_up = Schedule(newcomer, settings_of("cosine"))
    taken_up.load_state_dict(state)
    assert rates_of(newcomer) == rates_of(straight)
    for optimizer, one in ((straight, schedule), (newcomer, taken_up)):
        optimizer.step()
        one.step()
    assert rates_of(newcomer) == rates_of(straight)


@pytest.mark.parametrize(
    "state", [{}, {"last_epoch": -1}, {"last_epoch": "7"}, {"last_epoch": True},
              {"last_epoch": 1 << 63}, {"last_epoch": 1, "base_lrs": [9.0]}],
)  # fmt: skip
def test_a_state_that_is_not_one_number_is_refused_and_changes_nothing(
    state: dict[str, object],
) -> None:
    optimizer = optimizer_with(1.0)
    schedule = Schedule(optimizer, settings_of("linear"))
    with pytest.raises(WrongSettings, match="state of a schedule"):
        schedule.load_state_dict(state)
    assert rates_of(optimizer) == [0.2]


def test_a_decay_that_ends_within_the_warm_up_is_refused() -> None:
    with pytest.raises(WrongSettings, match="cannot end at step 4 after a warm-up of 4"):
        ScheduleSettings(decay="linear", warmup=4, steps=4)
    ScheduleSettings(decay="constant", warmup=4)
