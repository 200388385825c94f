"""`scripts/bench join`: its figures from the newcomer's events and their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench.closed_run import Heard, Size, accepted
from lab.bench.join import PARTS, WHAT, figures_of
from lab.bench.processes import BenchFailed
from node.app.demo.processes import Child
from node.run.costs import costs_of
from node.run.definition import read_definition


def heard(tmp_path: Path, *events: tuple[float, dict[str, object]]) -> Heard:
    child = Child("somebody", ["join"], home=tmp_path, folder=tmp_path)
    return Heard(child, 10.0, list(events))


def step(at: float, samples: int, *members: str) -> tuple[float, dict[str, object]]:
    return at, {"event": "step_taken", "own_samples": samples, "members": members}


def test_the_parts_follow_one_another_without_gaps(tmp_path: Path) -> None:
    told = [
        (11.0 + number, {"event": "preparing", "doing": doing})
        for number, doing in enumerate(PARTS.values())
    ]
    one = heard(
        tmp_path,
        *told,
        (20.5, {"event": "caught_up", "fetched_bytes": 25}),
        (21.0, {"event": "began"}),
        step(22.0, 0, "a", "b"),
        step(23.5, 8, "a", "b"),
    )
    first = accepted(one)
    assert first is not None
    figures = figures_of(one, first[0], heard(tmp_path, step(1.0, 8), step(3.0, 8), step(5.0, 8)))
    assert figures["seconds"] == sum(figures["parts"].values()) == 13.5
    assert tuple(figures["parts"]) == tuple(WHAT)
    assert (figures["step_seconds"], figures["fetched_bytes"]) == (2.0, 25)


def test_a_newcomer_that_skips_a_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="somebody did not tell"):
        figures_of(heard(tmp_path, (11.0, {"event": "began"})), 12.0, heard(tmp_path))


def test_a_step_that_somebody_makes_alone_accepts_nothing(tmp_path: Path) -> None:
    assert accepted(heard(tmp_path, step(12.0, 8, "a"))) is None


def test_the_state_is_as_large_as_the_bar_says() -> None:
    costs = costs_of(read_definition(Size().definition().encode()), {})
    assert costs.state_bytes == pytest.approx(25e6, rel=0.02)
