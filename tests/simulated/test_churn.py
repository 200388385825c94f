"""A storm of every fault at once, in a short form and, marked soak, in a long one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from protocols.testing.world import run_simulation
from tests.simulated.churn import SETTINGS, Tally, churn


def _churn(seed: int, nodes: int = 8, seconds: float = 120.0) -> Tally:
    return run_simulation(churn, nodes, seconds, seed=seed, settings=SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_calls_end_right_and_all_mends_after_two_minutes_of_churn(seed: int) -> None:
    tally = _churn(seed)
    assert tally.faults > 30
    assert tally.answers > 50
    assert tally.chunks > 100
    assert tally.errors.keys() >= {"DeadlineExceeded", "Unreachable"}


@pytest.mark.slow
def test_a_storm_is_the_same_in_every_process() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.simulated.test_churn"],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.strip() == _churn(seed=5).trace


@pytest.mark.slow
def test_calls_end_right_and_all_mends_after_half_a_minute_of_churn() -> None:
    tally = _churn(seed=0, seconds=30.0)
    assert tally.faults > 5
    assert tally.answers > 20


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_calls_end_right_and_all_mends_after_half_an_hour_of_churn(seed: int) -> None:
    tally = _churn(seed, nodes=20, seconds=1800.0)
    assert tally.faults > 500


if __name__ == "__main__":
    print(_churn(seed=5).trace)
