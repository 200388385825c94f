"""The promises of an averaging in which peers die: the long tests.

The short ones are in tests/processes/test_survival.py.
"""

from __future__ import annotations

import pytest

from lab.bench.survival import SurvivalEffort, measure_survival
from lab.bench.survival_churn import ChurnEffort, measure_churn
from tests.soak.lengths import LONG_SECONDS

KILLS = 50
STOPS = 10

pytestmark = pytest.mark.soak


async def test_fifty_kills_at_random_moments_leave_survivors_with_the_same_bits() -> None:
    result = await measure_survival(SurvivalEffort(kills=KILLS))
    assert result["kill"]["failures"] == []
    assert result["met"], result["kill"]


async def test_stopped_peers_hold_nobody_up_and_commit_nothing_of_their_own() -> None:
    result = await measure_survival(SurvivalEffort(stops=STOPS))
    assert result["stop"]["failures"] == []
    assert result["met"], result["stop"]


async def test_ten_minutes_of_churn_hold_no_round_up_and_leak_nothing() -> None:
    result = await measure_churn(ChurnEffort(seconds=LONG_SECONDS))
    assert result["failures"] == []
    assert result["met"], result
