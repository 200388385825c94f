"""`scripts/bench newcomer` runs, and its bars are those of the page."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lab.bench.newcomer import NewcomerEffort, samples_per_second
from tests.commands.console import laboratory, objects
from tests.lab.test_bench_shaped import can_build_labs

OWN_NETWORKS = (
    pytest.mark.root,
    pytest.mark.skipif(not can_build_labs(), reason="needs root, Linux and iproute2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("link", [(), pytest.param(("--newcomer-mbps", "50"), marks=OWN_NETWORKS)])
def test_a_newcomer_is_in_and_its_donors_are_measured(
    link: tuple[str, ...], tmp_path: Path
) -> None:
    done = laboratory(
        "bench", "newcomer", "--megabytes", "6", "--step-seconds", "0.4", "--donors", "2",
        "--json", *link, home=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # how fast it is depends on the machine
    (told,) = objects(done.stdout)
    assert told["first_sample_s"] > 0.0
    assert told["step_s"] >= 0.4
    whole, *_ = told["caught_up"]
    assert whole["whole_state"]
    assert whole["fetched_MB"] >= 6.0
    before, meanwhile = told["donors_samples_per_s"]
    assert told["donors_share"] == pytest.approx(meanwhile / before, rel=0.01)
    alone = 6.0 * 8 / 50 if link else 0.0
    assert told["link_s"] >= alone + told["step_s"] - 0.06, "it is rounded to a tenth"


def test_the_time_that_a_link_takes_counts_the_results_of_the_steps_made_meanwhile() -> None:
    effort = NewcomerEffort(state_bytes=100_000_000, newcomer_mbps=100.0)
    assert effort.link_seconds(0.0, 2.0) == 8.0 + 2.0
    assert effort.link_seconds(10e6, 2.0) == 100 / 7.5 + 2.0
    assert effort.link_seconds(25e6, 2.0) == math.inf


def test_the_bars_are_those_that_were_asked_for_and_between_them_in_proportion() -> None:
    assert NewcomerEffort(state_bytes=1_000).bar_seconds == 15.0
    assert NewcomerEffort(state_bytes=130_000_000).bar_seconds == 15.0
    assert NewcomerEffort(state_bytes=1_500_000_000).bar_seconds == 60.0
    assert NewcomerEffort(state_bytes=815_000_000).bar_seconds == 37.5


def test_samples_are_counted_over_whole_steps() -> None:
    batches = [{"at": 0.5 * number, "count": 4} for number in range(1, 20)]
    assert samples_per_second(batches, 1.0, 5.0) == 4 / 0.5
