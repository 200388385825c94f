"""`potluck bench training` and `training-churn`: what they make of what they see, and that they
run."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.bench.training_churn import (
    LONGEST_GAP_SECONDS,
    MEMORY_GROWTH_BYTES,
    TrainingChurnEffort,
    compare,
    leaks,
    longest_gap,
    loss_at,
    measure_training_churn,
)
from tests.commands.console import objects, potluck


def curve(*losses: float, samples: float = 100.0) -> list[tuple[float, float]]:
    return [(samples * (number + 1), loss) for number, loss in enumerate(losses)]


def test_losses_are_compared_after_as_many_samples() -> None:
    calm = curve(5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.25)
    told = compare(calm, calm[:3])
    assert told["samples"] == 300.0
    assert told["ratio"] == 1.0
    assert told["met"]


def test_a_loss_that_falls_less_is_noticed_and_one_that_falls_more_is_not() -> None:
    calm = curve(4.0, 4.0, 4.0)
    assert not compare(calm, curve(4.3, 4.3, 4.3))["met"]
    assert compare(calm, curve(3.0, 3.0, 3.0))["met"]
    assert not compare(calm, [])["met"]


def test_a_loss_is_the_mean_of_the_last_few() -> None:
    assert loss_at(curve(9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0), 650.0) == 3.0


def test_the_longest_time_without_a_step() -> None:
    assert longest_gap([1.0, 2.0, 5.0, 6.0], 0.5, 7.0) == 3.0
    assert longest_gap([1.0], 0.0, 9.0) == 8.0
    assert longest_gap([0.5, 20.0], 1.0, 9.0) == 8.0


def test_what_grows_is_noticed() -> None:
    quiet = {"memory_bytes": 1 << 28, "tasks": 50, "threads": 5, "descriptors": 20}
    grown = quiet | {"memory_bytes": (1 << 28) + 2 * MEMORY_GROWTH_BYTES}
    assert all(one["met"] for one in leaks([quiet] * 10).values())
    told = leaks([quiet] * 5 + [grown] * 5)
    assert not told["memory_MiB"]["met"]
    assert told["tasks"]["met"]


@pytest.mark.slow
def test_a_small_run_prints_every_figure(tmp_path: Path) -> None:
    flags = ("--peers", "2", "--steps", "1", "--warm-up-steps", "1", "--target-batch", "64")
    more = ("--up-mbps", "0", "--manner", "waiting", "--batch", "8", "--width", "32")
    result = potluck("bench", "training", "--json", *flags, *more, home=tmp_path)
    (told,) = objects(result.stdout)
    assert told["waiting"]["samples_per_s"] > 0, result.stderr
    assert told["waiting"]["digests_equal"]
    assert told["waiting"]["failures"] == []


@pytest.mark.slow
@pytest.mark.soak
async def test_volunteers_that_are_killed_and_come_anew() -> None:
    effort = TrainingChurnEffort(
        seconds=60.0,
        calm_seconds=45.0,
        volunteers=3,
        mean_life_seconds=20.0,
        mean_absence_seconds=5.0,
        target_batch=128,
    )
    told = await measure_training_churn(effort)
    assert told["failures"] == []
    assert told["churn"]["went_on"]
    assert told["churn"]["longest_gap_s"] <= LONGEST_GAP_SECONDS
    assert told["loss"]["met"]
