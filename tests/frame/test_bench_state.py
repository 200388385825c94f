"""`potluck bench state` at its smallest: three real donors, one killed and one lying."""

from __future__ import annotations

import pytest
import trio

from node.bench.newcomers import BAR_SECONDS, NewcomersEffort, measure_newcomers
from node.bench.state import BAR_OF_ALONE, BAR_OF_LINKS, StateEffort, measure_misfortune
from node.commands import bench_state


@pytest.mark.slow
async def test_a_state_comes_whole_though_one_donor_dies_and_one_lies() -> None:
    effort = StateEffort(state_bytes=6_000_000, link_bytes_per_second=2e6)
    with trio.fail_after(120):
        result = await measure_misfortune(effort)
    assert result["completed"]
    assert result["verified"]
    assert result["liar_named"]
    assert result["killed_given_up"]


@pytest.mark.soak
@pytest.mark.parametrize("newcomers", [2, 5])
async def test_newcomers_at_once_all_get_in(newcomers: int) -> None:
    """Real processes. In virtual time: tests/accumulation/test_state_newcomers.py."""
    with trio.fail_after(300):
        result = await measure_newcomers(NewcomersEffort(newcomers, step_seconds=2.0), print)
    assert result["never_in"] == 0


def test_the_command_measures_what_the_bar_asks_for() -> None:
    effort = StateEffort()
    assert effort.state_bytes == bench_state.MEGABYTES * 1e6 == 100e6
    assert effort.link_bytes_per_second == bench_state.MEGABITS * 1e6 / 8
    assert effort.rounds == bench_state.ROUNDS
    assert effort.pairs == bench_state.PAIRS
    assert effort.parts == bench_state.PARTS
    assert (BAR_OF_LINKS, BAR_OF_ALONE) == (bench_state.BAR, bench_state.BAR_OF_ALONE)
    newcomers = effort.newcomers
    assert newcomers.newcomers == bench_state.NEWCOMERS
    assert newcomers.step_seconds == bench_state.STEP_SECONDS
    assert newcomers.state_bytes == bench_state.NEWCOMERS_MEGABYTES * 1e6
    assert BAR_SECONDS == bench_state.BAR_SECONDS
