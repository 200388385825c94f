"""The benches of homes behind routers, in their shortest form. The matrix is for the soak."""

from __future__ import annotations

import shutil

import pytest

from lab.bench.nat import MATRIX, measure_nat, planned_seconds, predicted
from lab.bench.nat_experts import measure_nat_experts
from lab.bench.nat_join import measure_nat_join
from lab.bench.nat_relays import TROUBLES, measure_nat_relays
from lab.net import missing_for_lab
from lab.net.router import MAPPING_DAEMON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_for_lab()), reason=missing_for_lab() or "the lab is there"),
]
needs_a_mapping_router = pytest.mark.skipif(
    shutil.which(MAPPING_DAEMON) is None, reason=f"needs {MAPPING_DAEMON}"
)


def talk(_line: str) -> None:
    """These runs are not watched."""


async def test_homes_behind_strict_routers_meet_at_a_relay_and_then_directly() -> None:
    result = await measure_nat(["port-restricted"], 1, talk)
    (cell,) = result["cells"]
    assert cell["why"] == []
    assert (cell["mode"], cell["works"]) == ("punched", 1)
    assert result["met"], result


@needs_a_mapping_router
async def test_a_router_maps_a_port_for_a_node_until_the_node_has_left() -> None:
    result = await measure_nat(["mapped"], 1, talk)
    (cell,) = result["cells"]
    assert cell["why"] == []
    assert (cell["mode"], cell["modes_as_predicted"]) == ("direct", 1)
    assert result["met"], result


@pytest.mark.parametrize(
    "names",
    [
        ("ipv6",),  # no IPv4 at all
        ("dual-symmetric",),  # over IPv4 alone it would be relayed
        pytest.param(("dual-open", "port-restricted"), marks=pytest.mark.soak),
        pytest.param(("dual", "port-restricted"), marks=pytest.mark.soak),
    ],
    ids=" and ".join,
)
async def test_homes_with_ipv6_meet_over_it_and_those_with_ipv4_over_that(
    names: tuple[str, ...],
) -> None:
    result = await measure_nat(names, 1, talk)
    assert [cell["why"] for cell in result["cells"] if cell["why"]] == []
    assert result["met"], result


@pytest.mark.soak
@needs_a_mapping_router
async def test_every_pair_of_routers_meets_as_predicted() -> None:
    result = await measure_nat(tuple(MATRIX), 3, talk)
    assert [cell["why"] for cell in result["cells"] if cell["why"]] == []
    assert result["met"], result


async def test_volunteers_join_from_behind_routers_and_train() -> None:
    result = await measure_nat_join([], [], talk)
    assert result["modes"] == {"cone": "punched", "symmetric": "relayed"}
    assert result["met"], result


async def test_relays_that_die_or_lie_are_replaced() -> None:
    result = await measure_nat_relays(["killed", "lies"], talk, is_short=True)
    assert result["met"], result


@pytest.mark.soak
async def test_relays_die_and_a_run_goes_on_without_its_backbones() -> None:
    result = await measure_nat_relays(TROUBLES, talk)
    assert result["met"], result


def test_what_is_predicted_of_pairs_and_rounds() -> None:
    assert predicted("symmetric", "none") == "direct"
    assert predicted("cone", "symmetric") == "punched"
    assert predicted("double", "symmetric") == "relayed"
    assert predicted("dual-symmetric", "dual-open") == "direct"
    assert predicted("port-restricted", "dual-open") == "relayed"  # over IPv4
    assert predicted("port-restricted", "ipv6") == "relayed"
    # a single reducer sends its sum to five others, and its own values to nobody
    alone = ["none", "cone", "cone", "symmetric", "double", "dial-out"]
    assert planned_seconds(alone, 20e6) == pytest.approx(5.0)


async def test_a_server_of_experts_behind_a_symmetric_router_is_used_over_the_relay() -> None:
    result = await measure_nat_experts(["port-restricted"], talk)
    (one,) = result["trainers"]
    assert (one["server_mode"], one["way"]) == ("relayed", "relayed")
    assert one["round_trip_ms"] > 0.0
    assert result["met"], result
