"""`scripts/bench shaped`: its setups, its predictions, and, as root, a lab of three peers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from lab.bench import shaped as bench_shaped
from lab.bench.cables import host_of
from lab.bench.own_network import NoOwnNetwork, check_own_networks
from lab.bench.shaped import (
    BYTES_PER_MEGABIT,
    MBPS_PER_GIGABIT,
    SETUPS,
    WAYS,
    MeasuredWay,
    Setup,
    figures_of,
    open_lab,
    ratios,
    setup_of,
)
from protocols.moshpit.plan import Members, fractions_for
from tests.commands.console import laboratory_here, objects

NOBODY = 65_534


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("way", WAYS)
def test_a_round_is_cut_as_the_way_asks_by_what_the_peers_declare(name: str, way: str) -> None:
    setup = setup_of(name, seconds=15.0)
    declared = setup.declared(way)
    cut = fractions_for(
        [float(int(one.up)) for one in declared],
        [float(int(one.down)) for one in declared],
        [one.weight > 0 for one in declared],
        setup.members.reduces,
    )
    assert cut == pytest.approx(setup.fractions(way), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "all_reduce", "server"),
    [("A", 1.0, 4.0), ("B", 1.0, 8.0), ("C", 1.92, 4.6), ("D", 1.68, 1.14)],
)
def test_the_prediction_has_the_ratios_of_the_plan(
    name: str, all_reduce: float, server: float
) -> None:
    setup = setup_of(name, seconds=15.0)
    predicted = [setup.predicted_seconds(way, 0.98) for way in WAYS]
    assert predicted[0] == pytest.approx(15.0 / 0.98, rel=0.02)  # parts are whole blocks
    assert ratios(predicted) == pytest.approx((all_reduce, server), rel=0.02)


def test_each_setup_is_explained() -> None:
    assert tuple(bench_shaped.SETUPS_IN_WORDS) == tuple(SETUPS)


def test_half_the_scale_takes_twice_as_long_for_the_same_values() -> None:
    usual, slow = setup_of("C", 15.0), setup_of("C", 30.0, MBPS_PER_GIGABIT / 2)
    assert slow.values == usual.values
    assert slow.predicted_seconds("plan", 1.0) == pytest.approx(
        2 * usual.predicted_seconds("plan", 1.0)
    )


def test_every_peer_has_an_address_of_its_own() -> None:
    assert len({host_of(peer) for peer in range(1000)}) == 1000


def test_a_caller_without_root_is_told_so() -> None:
    if os.geteuid() != 0:
        with pytest.raises(NoOwnNetwork) as raised:
            check_own_networks()
        error = raised.value
        assert error.what
        assert error.why
        assert error.advice
        return
    script = (
        "import os\n"
        "from lab.bench.own_network import NoOwnNetwork, check_own_networks\n"
        f"os.setuid({NOBODY})\n"
        "try: check_own_networks()\n"
        "except NoOwnNetwork as error: print([error.what, error.why, error.advice])"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert told.count(".'") == 3
    assert "by root" in told


def test_a_setup_has_to_be_named(tmp_path: Path) -> None:
    result = laboratory_here("bench", "shaped", "--json", home=tmp_path)
    assert result.returncode == 2
    (answer,) = objects(result.stdout)
    assert "--setup" in json.dumps(answer)


def can_build_labs() -> bool:
    return (
        sys.platform == "linux"
        and os.geteuid() == 0
        and all(shutil.which(program) for program in ("ip", "tc"))
    )


def processes_of_labs() -> list[str]:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if "lab.bench.shaped_peer" in line]


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(not can_build_labs(), reason="needs root, Linux and iproute2")
async def test_three_peers_average_over_shaped_links_and_leave_nothing_behind() -> None:
    before = processes_of_labs()
    speeds = [40 * BYTES_PER_MEGABIT, 40 * BYTES_PER_MEGABIT, 80 * BYTES_PER_MEGABIT]
    members = Members(speeds, speeds, [True, True, False], [True] * 3)
    setup = Setup("three", members, values=1 << 18)
    with trio.fail_after(120):
        async with open_lab(setup, MBPS_PER_GIGABIT) as lab:
            efficiency = await lab.efficiency()
            await lab.join("plan")
            answers = await lab.round(0)
    assert 0.5 < efficiency < 1.0
    assert {one["verdict"] for one in answers} == {"committed"}
    assert len({one["digest"] for one in answers}) == 1
    assert all(one["relative_error"] < 1e-6 for one in answers)
    began = min(one["exchange_began"] for one in answers)
    ended = max(one["exchange_ended"] for one in answers)
    assert ended - began > 0.9 * setup.predicted_seconds("plan", 1.0)
    measured = MeasuredWay()
    measured.add(answers)
    figures = figures_of(setup, "plan", measured, efficiency)
    assert figures["exchange_seconds"] == [round(ended - began, 3)]
    assert figures["cpu_seconds_p50"] > 0.0
    assert processes_of_labs() == before
