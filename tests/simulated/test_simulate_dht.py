"""The bars of the directory in swarms of simulated nodes; the long forms are soak tests."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.simulate.dht_swarm import (
    INVENTED_BITS,
    TIMEOUT_SECONDS,
    EventQueue,
    SimulatedPeer,
    SimulatedSearch,
    SwarmPlan,
    World,
    percentile,
    simulate,
)
from protocols.dht.ids import position_of
from protocols.rpc import encode
from tests.commands.console import laboratory, laboratory_here

SHORT, LONG = 300, 10_000
TWENTY_MINUTES = 1200.0
FOUR_HOURS = 4.0


def figures(nodes: int, **options: Any) -> dict[str, Any]:
    """A run as the command makes it, or a small one with fewer reads."""
    if nodes < LONG and options.get("hours") != FOUR_HOURS:
        options = {"slots": 100, "reads": 500} | options
    return simulate(SwarmPlan(nodes=nodes, seed=7, **options))


SIZES = [
    pytest.param(SHORT, id="short", marks=pytest.mark.slow),
    pytest.param(LONG, id="long", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("nodes", SIZES)
def test_a_read_takes_few_hops_and_finds_every_slot(nodes: int) -> None:
    result = figures(nodes)
    assert result["hops_p99"] <= math.log2(nodes) / 2 + 2
    assert result["messages_per_get_p50"] <= 60  # 20 of the closest have to be asked, and answer
    assert result["found_rate"] == result["success_rate"] == 1.0
    assert result["failed_puts"] == 0
    assert result["wall_seconds"] < 300


@pytest.mark.parametrize("nodes", SIZES)
def test_slots_outlive_the_sudden_death_of_three_nodes_in_ten(nodes: int) -> None:
    result = figures(nodes, kill=0.3)
    assert result["found_rate"] >= 0.999
    assert result["found_rate_after_refresh"] == 1.0
    assert result["hops_p99"] <= math.log2(nodes) / 2 + 2


@pytest.mark.parametrize("nodes", SIZES)
def test_slots_are_found_though_one_node_in_ten_lies(nodes: int) -> None:
    result = figures(nodes, liars=0.1)
    assert result["found_rate"] >= 0.99
    assert result["success_rate"] >= 0.99


@pytest.mark.slow
def test_slots_are_found_while_half_of_the_nodes_go_every_twenty_minutes() -> None:
    result = figures(200, churn_half_life_seconds=TWENTY_MINUTES, hours=1.0, slots=60, reads=350)
    assert result["deaths"] > 300
    assert result["reads"] > 1000
    assert result["success_rate"] >= 0.999


@pytest.mark.soak
def test_four_hours_of_churn() -> None:
    result = figures(500, churn_half_life_seconds=TWENTY_MINUTES, hours=FOUR_HOURS)
    assert result["deaths"] > 7000
    assert result["reads"] > 5000
    assert result["success_rate"] >= 0.999


@pytest.mark.slow
def test_even_a_third_of_liars_hides_little() -> None:
    assert figures(300, liars=0.33, reads=300)["found_rate"] >= 0.98


def run_of_command(*words: str, hash_seed: str) -> dict[str, Any]:
    answer = subprocess.run(
        [sys.executable, "-m", "lab", "simulate", "dht", "--json", *words],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    result: dict[str, Any] = json.loads(answer.stdout)
    assert result.pop("wall_seconds") > 0
    return result


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_in_any_process() -> None:
    words = ["--nodes", "30", "--liars", "0.1", "--seed", "8"]
    first = run_of_command(*words, hash_seed="1")
    assert first == run_of_command(*words, hash_seed="2")
    assert first["nodes"] == 30
    assert first["seed"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"churn_half_life_seconds": 600.0, "hours": 0.2, "slots": 10}, {"kill": 0.2, "slots": 5}],
    ids=["churn", "kill"],
)
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(
    options: dict[str, Any],
) -> None:
    def run(seed: int) -> dict[str, Any]:
        plan = SwarmPlan(40, seed=seed, reads=100, **options)
        return simulate(plan) | {"wall_seconds": 0, "seed": 0}

    assert run(3) == run(3)
    assert run(3) != run(4)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "5"],
        ["--hours", "2"],
        ["--kill", "1"],
        ["--kill", "some"],
        ["--kill", "0.3", "--churn", "60"],
        ["--liars", "0.95"],
        ["--churn", "0"],
    ],
    ids=" ".join,
)
def test_an_impossible_plan_is_refused_before_the_simulation(
    words: list[str], tmp_path: Path
) -> None:
    refused = laboratory_here("simulate", "dht", *words, home=tmp_path)
    assert refused.returncode == 2
    assert "error: " in refused.stderr
    assert "join" not in refused.stderr


@pytest.mark.slow
def test_a_person_gets_a_table_and_is_told_what_goes_on(tmp_path: Path) -> None:
    done = laboratory("simulate", "dht", "--nodes", "30", home=tmp_path)
    assert done.returncode == 0
    assert "found_rate" in done.stdout
    assert "letting 30 nodes join" in done.stderr


# The simulator itself: its figures must be able to come out badly


def grown(number: int, liars: int = 0) -> tuple[World, list[SimulatedPeer]]:
    """A swarm that has joined through its first node, one node after the other."""
    world = World(seed=11)
    peers: list[SimulatedPeer] = []
    for index in range(number):
        peer = world.new_peer()
        peer.is_liar = number - index <= liars
        world.lies.learn_of(peer)
        world.join(peer, [peers[0].contact] if peers else [], lambda _: None)
        world.queue.run_until(world.queue.now + 60)
        peers.append(peer)
    return world, peers


def published(world: World, publisher: SimulatedPeer, key: str) -> int:
    taken: list[int] = []
    slot = publisher.publisher.put(key, encode("x"), 60_000, world.now_ms)
    world.publish(publisher, slot, taken.append)
    world.queue.run_while(lambda: not taken)
    return taken[0]


def found(world: World, reader: SimulatedPeer, key: str) -> SimulatedSearch:
    finished: list[SimulatedSearch] = []
    SimulatedSearch(world, reader, position_of(key), finished.append, key=key)
    world.queue.run_while(lambda: not finished)
    return finished[0]


def test_a_slot_goes_to_the_twenty_nodes_that_are_closest_to_its_key() -> None:
    world, peers = grown(60)
    assert published(world, peers[7], "note/a") == 20
    closest = sorted(peers, key=lambda one: one.contact.node_id ^ position_of("note/a"))
    holders = [one for one in peers if one.storage.get("note/a", world.now_ms)]
    assert set(holders) == set(closest[:20])
    assert found(world, peers[3], "note/a").lookup.hops_to(closest[0].contact) <= 2


def test_a_slot_is_lost_when_all_who_held_it_die() -> None:
    world, peers = grown(60)
    published(world, peers[7], "note/a")
    holders = [one for one in peers if one.storage.get("note/a", world.now_ms)]
    reader = next(one for one in peers if one not in holders)
    assert found(world, reader, "note/a").slots
    for one in holders:
        world.die(one)
    assert not found(world, reader, "note/a").slots


def test_a_question_to_the_dead_is_never_answered_and_given_up_in_time() -> None:
    world, peers = grown(3)
    world.die(peers[1])
    began = world.queue.now
    given_up: list[float] = []
    world.exchange(
        peers[0],
        peers[1].contact,
        lambda _: None,
        lambda _other, _answer: pytest.fail("the dead have answered"),
        lambda: given_up.append(world.queue.now),
    )
    world.queue.run_while(lambda: not given_up)
    assert given_up == [began + TIMEOUT_SECONDS]


def test_liars_name_inventions_and_wrong_addresses_and_keep_nothing() -> None:
    world, peers = grown(40, liars=8)
    target = position_of("note/a")
    contacts, slots = peers[-1].is_asked(peers[0].contact, target, "note/a")
    assert len(contacts) == 20
    assert slots == ()
    invented = [one for one in contacts if one.node_id not in world.peers]
    assert invented
    assert all((one.node_id ^ target).bit_length() <= INVENTED_BITS for one in invented)
    really_there = [one for one in contacts if world.at(one) is not None]
    assert {one.node_id for one in really_there} == {one.contact.node_id for one in peers[-8:]}
    published(world, peers[1], "note/a")
    assert not any(one.storage.get("note/a", world.now_ms) for one in peers[-8:])


def test_nobody_in_a_table_was_only_heard_of() -> None:
    world, peers = grown(40, liars=5)
    for peer in peers:
        assert all(world.at(contact) is not None for contact in peer.table)


def test_events_happen_in_their_order_and_of_one_moment_in_that_of_asking() -> None:
    queue = EventQueue()
    happened: list[str] = []
    queue.after(2, happened.append, "c")
    queue.after(1, happened.append, "a")
    queue.after(1, happened.append, "b")
    queue.after(3, happened.append, "later")
    queue.run_until(2.5)
    assert happened == ["a", "b", "c"]
    assert queue.now == 2.5


def test_a_percentile_is_a_value_that_occurred() -> None:
    assert percentile([], 50) is None
    assert percentile([3, 1, 2], 50) == 2
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 99) == 7
