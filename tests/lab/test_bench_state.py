"""`scripts/bench state` at its smallest: three real donors, one killed and one lying."""

from __future__ import annotations

import pytest
import trio

from lab.bench.state import (
    BAR_SECONDS,
    NewcomersEffort,
    StateEffort,
    is_in_time,
    measure_misfortune,
    measure_newcomers,
)


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


@pytest.mark.parametrize(
    ("in_after_s", "never_in", "bytes_s", "is_met"),
    [
        ([2.0, BAR_SECONDS], 0, 3.0, True),
        ([2.0, 10.1], 0, 3.0, False),
        ([2.0, 10.1], 0, 9.0, True),  # this machine needs as long for the bytes
        ([2.0, 10.9], 0, 9.0, False),
        ([2.0], 1, 9.0, False),
    ],
)
def test_newcomers_are_in_by_the_bar_or_in_little_more_than_their_bytes_need(
    in_after_s: list[float], never_in: int, bytes_s: float, *, is_met: bool
) -> None:
    found = {"in_after_s": in_after_s, "never_in": never_in, "bytes_s": bytes_s}
    assert is_in_time(found) == is_met
