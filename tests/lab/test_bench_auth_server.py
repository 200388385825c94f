"""`scripts/bench auth-server`: a real server on this machine, and figures of what it really did."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from lab.bench.auth_server import AuthServerEffort, measure_auth_server
from tests.waiting import PATIENCE_SECONDS

FIGURES = (
    "passes_per_s",
    "saturated_ms_p50",
    "saturated_ms_p99",
    "paced_ms_p50",
    "paced_ms_p99",
    "cpu_ms_per_pass",
    "synced_write_ms",
)


@pytest.mark.slow
async def test_a_small_run_has_every_figure_and_verified_passes() -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        result = await measure_auth_server(AuthServerEffort(clients=4, seconds=0.5))
    assert all(result[name] > 0 for name in FIGURES)
    assert result["passes_verified"] >= 8
    assert result["settings"]["clients"] == 4


@pytest.mark.slow
def test_the_meaning_of_the_figures_is_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab", "bench", "auth-server", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in ("passes_per_s", "saturated_ms_p99", "paced_ms_p99", "cpu_ms_per_pass"):
        assert name in done.stdout
