"""`scripts/bench experts-search`: a small swarm, and searches that find the best of all experts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lab.bench.experts_search import GRID
from lab.bench.experts_search_peer import best_of_all
from tests.waiting import PATIENCE_SECONDS

FIGURES = ("cold_ms", "warm_ms", "identical", "requests_per_cold_search")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", "bench", "experts-search", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


@pytest.mark.slow
def test_a_quick_run_prints_every_figure_and_finds_the_best() -> None:
    done = bench("--nodes", "3", "--experts", "90", "--quick", "--json")
    result = json.loads(done.stdout)
    assert all(name in result for name in FIGURES)
    assert (result["identical"], result["wrong_searches"]) == (True, 0)
    assert (result["nodes"], result["experts"]) == (3, 90)
    assert done.returncode == (0 if result["met"] else 1)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--nodes", "1"), ("--experts", "4097")])
def test_a_swarm_that_cannot_be_is_wrong_use(words: tuple[str, str]) -> None:
    assert bench(*words).returncode == 2


@pytest.mark.slow
def test_every_figure_is_explained_in_the_help() -> None:
    explained = bench("--help").stdout
    assert all(figure in explained for figure in FIGURES)


def test_the_look_at_all_sees_what_a_search_may_miss() -> None:
    uids = sorted(GRID.uid(text) for text in ("ffn.0.0", "ffn.1.1", "ffn.63.63"))
    scores = [torch.zeros(1, 64), torch.zeros(1, 64)]
    scores[1][0, 63] = 1.0
    assert best_of_all(scores, uids) == [[uids[2], uids[0], uids[1]]]
