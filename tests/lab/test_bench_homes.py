"""`scripts/bench homes` runs, and its figures are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.homes import HomesEffort, at_full_size
from tests.commands.console import laboratory, laboratory_here, objects
from tests.lab.test_bench_shaped import can_build_labs

SHORT = HomesEffort(
    parameters=8_600_000, scale=2.0, peers=2, fragments=2, seconds=2.0, passes=2, steps=2
)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(not can_build_labs(), reason="needs root, Linux and iproute2")
def test_two_homes_exchange_a_small_model(tmp_path: Path) -> None:
    done = laboratory(
        "bench", "homes", "--params", "8.6e6", "--scale", "2", "--peers", "2", "--seconds", "2",
        "--passes", "2", "--steps", "2", "--up", "2", "--down", "10", "--json", home=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # how busy they are depends on the machine
    (told,) = objects(done.stdout)
    assert told["same_bits"]
    assert not told["failures"]
    assert 0.0 < told["utilisation"] <= told["utilisation_mean"] <= 1.0
    assert told["parameters_here"] == 4_300_000
    # values alone, with two bytes in a hundred for headers at most, would be 113 times fewer
    assert 20.0 < told["times_fewer"] <= told["times_fewer_full_size"] < 115.0
    assert told["bytes_per_hour"]["sent"] > SHORT.value_bytes("sparse-sign") * 3600 / told["step_s"]


def test_a_step_of_the_run_is_an_exchange_of_one_fragment() -> None:
    training = SHORT.training(compressed=True)
    manner = training.manner
    assert manner["pass_seconds"] * manner["local_steps"] == SHORT.seconds * SHORT.fragments
    samples = training.target_batch * manner["local_steps"] // manner["fragments"]
    assert samples == SHORT.peers * SHORT.passes * training.task["batch"]


def test_links_are_slower_by_as_much_as_the_model_is_smaller() -> None:
    effort = HomesEffort(parameters=10**9, scale=50.0, up_mbps=20.0)
    training = effort.training(compressed=True)
    assert training.task["parameters"] == 20_000_000
    assert (training.up_mbps, training.link_mbps) == (0.4, 2.0)
    plain = effort.training(compressed=False)
    assert plain.codec == "none"
    assert plain.up_mbps == plain.link_mbps > 1_000.0, "its links are no limit"


def test_at_the_full_size_there_are_more_values_and_nothing_else_is_more() -> None:
    effort = HomesEffort(parameters=10**9, scale=50.0, fragments=2)
    values = 2 * 4 * 10_000_000 * 7 / 8
    assert effort.value_bytes("none") == values
    told = {"step_s": 36.0, "bytes_per_hour": {"sent": 100 * values + 1e6}}
    assert at_full_size(effort, told, "none") == 50 * 100 * values + 1e6
    assert effort.value_bytes("sparse-sign") < values / 113


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--codec", "morse"), "no codec morse"),
        (("--scale", "0.001"), "of memory, and this machine has"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    flags: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    done = laboratory_here("bench", "homes", *flags, home=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
