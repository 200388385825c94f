"""`potluck bench state` at its smallest: three real donors, one killed and one lying."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.bench.state import StateEffort
from tests.commands.console import objects, potluck


@pytest.mark.slow
def test_a_state_comes_whole_though_one_donor_dies_and_one_lies(tmp_path: Path) -> None:
    ended = potluck(
        "bench",
        "state",
        "--megabytes",
        "12",
        "--megabits",
        "40",
        "--rounds",
        "1",
        "--json",
        home=tmp_path,
    )
    (result,) = objects(ended.stdout)
    assert result["completed"]
    assert result["verified"]
    assert result["liar_named"]
    assert result["liar"] in ended.stderr
    assert result["killed_given_up"]
    assert result["three_donors"]["MiB_per_s_p50"] > 0
    assert 0 < result["training_donor"]["served_MB_per_s"] < 9


def test_the_command_measures_what_the_bar_asks_for() -> None:
    from node.commands import bench_state

    effort = StateEffort()
    assert effort.state_bytes == bench_state.MEGABYTES * 1e6 == 100e6
    assert effort.link_bytes_per_second == bench_state.MEGABITS * 1e6 / 8
    assert effort.rounds == bench_state.ROUNDS
