"""The benches of homes behind routers, in their shortest form. The matrix is for the soak."""

from __future__ import annotations

import pytest

from lab.bench.nat import KINDS, measure_nat, planned_seconds, predicted
from lab.bench.nat_join import measure_nat_join
from lab.net import missing_for_lab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_for_lab()), reason=missing_for_lab() or "the lab is there"),
]


def talk(_line: str) -> None:
    """These runs are not watched."""


async def test_homes_behind_strict_routers_meet_at_a_relay_and_then_directly() -> None:
    result = await measure_nat(["port-restricted"], 1, talk)
    (cell,) = result["cells"]
    assert cell["why"] == []
    assert (cell["mode"], cell["works"]) == ("punched", 1)
    assert result["met"], result


@pytest.mark.soak
async def test_every_pair_of_routers_meets_as_predicted() -> None:
    result = await measure_nat(tuple(KINDS), 3, talk)
    assert [cell["why"] for cell in result["cells"] if cell["why"]] == []
    assert result["met"], result


async def test_volunteers_join_from_behind_routers_and_train() -> None:
    result = await measure_nat_join([], [], talk)
    assert result["modes"] == {"cone": "punched", "symmetric": "relayed"}
    assert result["met"], result


def test_what_is_predicted_of_pairs_and_rounds() -> None:
    assert predicted("symmetric", "none") == "direct"
    assert predicted("cone", "symmetric") == "punched"
    assert predicted("double", "symmetric") == "relayed"
    # a single reducer sends its sum to five others, and its own values to nobody
    alone = ["none", "cone", "cone", "symmetric", "double", "dial-out"]
    assert planned_seconds(alone, 20e6) == pytest.approx(5.0)
