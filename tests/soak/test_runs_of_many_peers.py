"""The promises of a run of any size: one line of steps, the same bits, newcomers let in."""

from __future__ import annotations

from typing import Any

import pytest

from lab.simulate.virtual_run import RunPlan, broken_promises, simulate

STEPS = 20
SEED = 7
CHURN_SHARE = 0.9  # of the steps a minute that the same peers make while nobody dies
MOST_SECONDS_WITHOUT_A_STEP = 30.0
SMALL_RUN_SHARE = 0.9  # of the steps a minute that 16 peers make


def kept(plan: RunPlan) -> dict[str, Any]:
    """The figures of a run that has kept its promises."""
    figures = simulate(plan)
    assert not broken_promises(figures), figures
    return figures


@pytest.mark.slow
def test_twelve_peers_of_whom_some_die_go_on_as_if_nothing_had_happened() -> None:
    """The short form of the ones below."""
    plan = RunPlan(
        peers=12, steps=3, seed=SEED, step_seconds=5.0, mean_life_seconds=80.0, batch_seconds=0.5
    )
    figures = kept(plan)
    assert figures["deaths"] > 0
    assert figures["newcomers_never_in"] == 0
    assert figures["newcomers_in_within_two_steps"] == figures["newcomers_judged"] > 0


@pytest.mark.slow
def test_of_a_run_that_is_cut_in_two_for_a_minute_one_side_goes_on_and_the_other_waits() -> None:
    figures = kept(RunPlan(peers=16, steps=7, seed=SEED, step_seconds=10.0, partition=0.4))
    assert figures["longest_gap_s"] < MOST_SECONDS_WITHOUT_A_STEP
    assert figures["back_s"] < MOST_SECONDS_WITHOUT_A_STEP


@pytest.mark.soak
@pytest.mark.parametrize("trouble", [{"partition": 0.4}, {"deaths": 24}], ids=str)
def test_80_peers_in_cohorts_of_which_many_are_gone_at_once_are_back_soon(
    trouble: dict[str, Any],
) -> None:
    figures = kept(RunPlan(peers=80, steps=9, seed=SEED, group_size=32, **trouble))
    assert figures["longest_gap_s"] < MOST_SECONDS_WITHOUT_A_STEP
    assert figures["back_s"] < MOST_SECONDS_WITHOUT_A_STEP


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_64_peers_in_eight_cohorts_are_all_back_within_half_a_minute_of_a_cut(seed: int) -> None:
    """Those that came back had become heads at once, and for some steps cohorts had two."""
    figures = kept(RunPlan(peers=64, steps=9, seed=seed, group_size=16, partition=0.4))
    assert figures["back_s"] < MOST_SECONDS_WITHOUT_A_STEP


@pytest.mark.soak
def test_64_peers_with_a_mean_life_of_ten_minutes_lose_no_time_and_let_everybody_in() -> None:
    figures = kept(RunPlan(peers=64, steps=STEPS, seed=SEED, mean_life_seconds=600.0))
    assert figures["steps_per_minute"] >= CHURN_SHARE * figures["calm_steps_per_minute"]
    assert figures["newcomers_never_in"] == 0
    assert figures["newcomers_in_within_two_steps"] == figures["newcomers_judged"] > 0


@pytest.mark.soak
def test_200_peers_make_their_steps_as_16_do() -> None:
    small = kept(RunPlan(peers=16, steps=5, seed=SEED))
    figures = kept(RunPlan(peers=200, steps=STEPS, seed=SEED))
    assert figures["steps_per_minute"] >= SMALL_RUN_SHARE * small["steps_per_minute"]


@pytest.mark.soak
def test_64_peers_behind_uplinks_of_a_megabit_make_steps() -> None:
    kept(RunPlan(peers=64, steps=STEPS, seed=SEED, upload_bytes_per_second=125_000.0))
