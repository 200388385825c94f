"""`scripts/bench auth-server`: a real server on this machine, and figures of what it really did."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
def test_a_quick_run_prints_every_figure_and_has_verified_passes() -> None:
    command = [sys.executable, "-m", "lab", "bench", "auth-server", "--json", "--quick"]
    done = subprocess.run(
        [*command, "--clients", "4"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
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
