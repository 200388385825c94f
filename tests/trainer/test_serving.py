"""A server of experts obeys its owner: with a simulated node, and the real host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trio
import trio.testing

from node.core.training_view import TrainerPhase
from node.run.definition import read_definition
from node.run.experts import directory_name, grids, maker
from node.training.happenings import ExpertsLost, ExpertsTaken, Notice
from node.training.phases import NETWORK, Facts, told_of
from node.training.serving import (
    LEAVING_SECONDS,
    ServingPlan,
    WatchedExperts,
    open_serving,
    told_together,
)
from node.training.session import TrainingSession
from node.training.words import words_of
from protocols.experts import (
    ExpertDirectory,
    ExpertHost,
    ExpertLost,
    ExpertTaken,
    HostSettings,
    SavingFailed,
    Uid,
)
from protocols.testing.world import SimulatedWorld
from tests.access.members import running_node, write_key
from tests.homes import home_in
from tests.runs.expert_definitions import TEXT
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

ONE, TWO, THREE = (Uid("ffn", (number,)) for number in range(3))


def test_neighbouring_events_of_a_kind_are_told_in_one_line() -> None:
    events = [
        ExpertTaken(ONE, "new", 0),
        ExpertTaken(TWO, "new", 0),
        ExpertTaken(THREE, "taken over", 7),
        ExpertLost(ONE),
        SavingFailed(TWO, "The disk is full."),
    ]
    told = told_together(events)
    assert told[:3] == [
        ExpertsTaken(("ffn.0", "ffn.1"), "new"),
        ExpertsTaken(("ffn.2",), "taken over"),
        ExpertsLost(("ffn.0",)),
    ]
    assert isinstance(told[3], Notice)
    assert "The disk is full." in words_of(told[3])


def test_the_words_name_some_of_the_experts() -> None:
    many = tuple(f"ffn.{number}" for number in range(9))
    words = words_of(ExpertsTaken(many, "taken over"))
    assert words == (
        "serving 9 experts (ffn.0, ffn.1, ffn.2, ffn.3, …): taken over, because their server is "
        "gone"
    )


def test_a_peer_that_only_serves_has_a_phase_of_its_own() -> None:
    assert told_of(Facts(serves_only=True)).phase is TrainerPhase.SERVING
    assert "copies" in told_of(Facts(serves_only=True, leaving=True)).doing


# ---- a server, in a simulated world

DEFINITION = read_definition(TEXT)
WIDTH = 16
CELLS = sum(grid.cells for grid in grids(DEFINITION))


@dataclass
class ServingNode:
    host: ExpertHost
    experts: WatchedExperts
    session: TrainingSession
    shown: Recorded

    async def until_it_serves(self, number: int) -> None:
        await until(lambda: self.experts.view().hosted == number, PATIENCE_SECONDS)

    async def until_told(self, kind: str) -> None:
        await until(lambda: kind in self.shown.kinds(), PATIENCE_SECONDS)


@asynccontextmanager
async def serving_node(
    world: SimulatedWorld, folder: Path, *, most: int = CELLS
) -> AsyncIterator[ServingNode]:
    configuration = home_in(folder / "sam")
    write_key(configuration.key_file, world.identity_of("sam"))
    shown = Recorded()
    session = TrainingSession(shown, serves_only=True)
    session.entered()
    async with running_node(world, "sam", configuration) as node:
        directory = ExpertDirectory(node.network, node.dht, directory_name(DEFINITION))
        experts = WatchedExperts(directory, DEFINITION.name, grids(DEFINITION))
        plan = ServingPlan(
            run=DEFINITION.name,
            grids=grids(DEFINITION),
            make=maker(DEFINITION),
            folder=folder / "experts",
            settings=HostSettings(most),
            memory_bytes=0,
            disk_bytes=0,
        )
        async with open_serving(node.rpc, plan, experts, session) as host:
            yield ServingNode(host, experts, session, shown)


@pytest.mark.slow
async def test_the_owner_sees_which_experts_came(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, serving_node(world, tmp_path, most=3) as sam:
        await sam.until_it_serves(3)
        await sam.until_told("ExpertsTaken")

        async def is_announced() -> bool:
            return [len(one.experts) for one in (await sam.experts.take_census()).servers] == [3]

        await until(is_announced, PATIENCE_SECONDS)
        view = sam.experts.view()
    assert (view.live, view.cells, view.servers, view.most) == (3, CELLS, 1, 3)


async def test_a_server_pauses_while_the_gate_is_closed(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, serving_node(world, tmp_path) as sam:
        await sam.until_it_serves(CELLS)
        sam.session.gate.close("schedule", "outside of the schedule")
        await sam.until_told("Paused")
        assert sam.host.paused
        sam.session.gate.close("pause", "paused by you")
        sam.session.gate.open("schedule")
        await trio.testing.wait_all_tasks_blocked()
        assert sam.host.paused
        sam.session.gate.open("pause")
        await sam.until_told("Resumed")
        assert not sam.host.paused


async def test_a_lost_network_pauses_no_server(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, serving_node(world, tmp_path) as sam:
        await sam.until_it_serves(CELLS)
        sam.session.gate.close(NETWORK, "nobody answers")
        await trio.testing.wait_all_tasks_blocked()
        assert not sam.host.paused


async def test_a_server_that_leaves_saves_its_experts_and_comes_back_with_them(
    tmp_path: Path,
) -> None:
    async with SimulatedWorld(seed=1) as world, serving_node(world, tmp_path, most=3) as sam:
        await sam.until_it_serves(3)
        trained = sam.host.hosted()[0].uid
        rows = torch.ones(2, WIDTH)
        sam.host.runtime.find(str(trained)).backward(rows, rows)
        sam.session.departure.leave()
        with trio.fail_after(2 * LEAVING_SECONDS):
            await until(lambda: not sam.host.hosted(), PATIENCE_SECONDS)
    async with SimulatedWorld(seed=1) as world, serving_node(world, tmp_path, most=3) as sam:
        await sam.until_it_serves(3)
        (again,) = [one for one in sam.host.hosted() if one.uid == trained]
        assert (again.origin, again.steps) == ("own copy", 1)
