"""`scripts/bench training` and `training-churn` run, and judge the logs correctly."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.time_sheet import (
    ADDING,
    COMPUTING,
    PARTS,
    RECORDING,
    REST,
    TURNING,
    WAITING,
    TimeSheet,
    parts_between,
)
from lab.bench.training import figures_of, have_all_computed
from lab.bench.training_audit import RunAudit
from lab.bench.training_churn import (
    LONGEST_GAP_SECONDS,
    MEMORY_GROWTH_BYTES,
    TrainingChurnEffort,
    compare,
    leaks,
    longest_gap,
    loss_at,
    measure_training_churn,
)
from tests.commands.console import laboratory, objects


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


def test_growth_is_noticed() -> None:
    quiet = {"memory_bytes": 1 << 28, "tasks": 50, "threads": 5, "descriptors": 20}
    grown = quiet | {"memory_bytes": (1 << 28) + 2 * MEMORY_GROWTH_BYTES}
    assert all(one["met"] for one in leaks([quiet] * 10).values())
    told = leaks([quiet] * 5 + [grown] * 5)
    assert not told["memory_MiB"]["met"]
    assert told["tasks"]["met"]
    calls = {"serve": 40, "call": 10}
    more = {"serve": 40, "call": 30}
    told = leaks(
        [quiet | {"tasks_by_name": calls}] * 5 + [quiet | {"tasks": 70, "tasks_by_name": more}] * 5
    )
    assert told["tasks"]["grew"] == {"call": (10, 30)}


def sheet(at: float, batches: int, **seconds: float) -> dict[str, float]:
    parts = dict.fromkeys((COMPUTING, ADDING, TURNING, WAITING, RECORDING), 0.0) | seconds
    return {"at": at, "batches": batches, "samples": 32 * batches, **parts}


def test_recording_does_not_count_as_time_of_the_loop() -> None:
    parts = parts_between(sheet(10.0, 0), sheet(20.0, 4, computing=7.0, recording=2.0))
    assert parts[COMPUTING] == 7.0
    assert parts[REST] == 1.0
    assert sum(parts.values()) == 8.0


def test_a_time_sheet_tells_of_whole_batches() -> None:
    loop = TimeSheet()
    loop.add(COMPUTING, 1.0)
    assert loop.told()[COMPUTING] == 0.0
    loop.batch_ended(32)
    assert (loop.told()[COMPUTING], loop.told()["samples"]) == (1.0, 32)


def test_the_peer_that_computes_least_of_its_time_counts() -> None:
    start = {"seconds": 0.0, "now": 0.0, "late": 0.5, "epoch": 2, "sheet": sheet(0.0, 0)}
    busy = {
        "seconds": 5.0,
        "now": 10.0,
        "late": 0.75,
        "epoch": 4,
        "sheet": sheet(10.0, 40, computing=9.0),
    }
    idle = busy | {"sheet": sheet(10.0, 20, computing=6.0, waiting=4.0)}
    told = figures_of({1: start, 2: start}, {1: busy, 2: idle}, RunAudit(), [], 2)
    assert told["utilisation"] == 0.6
    assert told["utilisation_mean"] == 0.75
    assert told["waiting"] == 0.4
    assert set(told["where"]) == set(PARTS)
    assert sum(told["where"].values()) == pytest.approx(1.0)
    assert told["samples_per_s"] == 192.0
    assert told["cores_used"] == 1.0
    assert told["computing_s_per_step"] == 3.75


def test_the_second_look_waits_for_a_batch_of_each_peer() -> None:
    """A peer that waited for the others through the whole step has no batch to divide by."""
    before = {1: {"sheet": sheet(10.0, 3)}, 2: {"sheet": sheet(10.0, 3)}}
    assert not have_all_computed(before, {1: {"sheet": sheet(11.0, 4)}, 2: before[2]})
    assert have_all_computed(before, {1: {"sheet": sheet(11.0, 4)}, 2: {"sheet": sheet(11.0, 4)}})


@pytest.mark.slow
def test_a_small_run_prints_every_figure(tmp_path: Path) -> None:
    flags = ("--peers", "2", "--steps", "1", "--warm-up-steps", "1", "--target-batch", "64")
    more = ("--up-mbps", "0", "--manner", "waiting", "--batch", "8", "--width", "32")
    more += ("--idle-ms", "0")
    result = laboratory("bench", "training", "--json", *flags, *more, home=tmp_path)
    (told,) = objects(result.stdout)
    assert "error" not in told, told
    assert told["waiting"]["samples_per_s"] > 0
    assert told["waiting"]["digests_equal"]
    assert told["waiting"]["failures"] == []


@pytest.mark.slow
@pytest.mark.soak
async def test_the_churn_bench_runs_with_killed_and_new_volunteers() -> None:
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
