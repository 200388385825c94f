"""`scripts/bench experts` prints every figure that it explains."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lab.bench.experts import WHAT


@pytest.mark.slow
def test_a_small_run_prints_every_figure() -> None:
    words = [sys.executable, "-m", "lab", "bench", "experts", "--quick", "--trainers", "2"]
    done = subprocess.run(
        [*words, "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert set(WHAT) <= set(result)
    assert list(result["forward_ms_p50"]) == ["1x1024", "64x1024", "2048x1024"]
    assert all(value > 0 for value in result["backward_ms_p50"].values())
    assert result["samples_per_s"] > 0
    assert 0 < result["network_cpu_share"] < 1
    assert result["rows_per_batch"] >= 64
