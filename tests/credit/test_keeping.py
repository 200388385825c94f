"""Three nodes keep their records, the keeper has all of them, and everybody comes to the same."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from msgspec import structs

from node.core.control_client import ask_once
from node.core.node import Node
from node.core.traffic_meter import TrafficMeter
from node.core.training_view import BatchView, RunPeerView, TrafficView
from node.training.credit.service import LEADERBOARD, CreditTerms, open_credit, shelf_folder
from node.training.credit.shelf import Shelf
from node.training.session import TrainingSession
from node.training.watched import WatchedServing
from protocols.accumulation.events import CaughtUp, SeenStep, Share, StepTaken
from protocols.accumulation.progress_slot import ProgressSlot, progress_key, sums_key
from protocols.blocking import in_thread
from protocols.credit.record import Page
from protocols.identity import PeerId
from protocols.testing.world import SimulatedWorld
from tests.access.members import introduce, running_node, write_key
from tests.credit.records import IDENTITIES
from tests.homes import home_in
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from trio_typing import TaskStatus

STEPS = 4
TERMS = CreditTerms("poem/organiser", batch=100, steps=STEPS)


@dataclass
class Company:
    """A trainer's view of the other peers; here the test says which are there."""

    here: tuple[RunPeerView, ...]

    def peers(self) -> tuple[RunPeerView, ...]:
        return self.here

    def batch(self) -> BatchView:
        return BatchView()

    def traffic(self) -> TrafficView:
        return TrafficView()

    def averaging(self) -> bool:
        return False

    def alone(self) -> bool:
        return False

    def samples_per_second(self) -> float | None:
        return None


@dataclass
class Member:
    node: Node
    session: TrainingSession
    shown: Recorded
    wants_to_leave: trio.Event = field(default_factory=trio.Event)
    has_left: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def peer(self) -> PeerId:
        return self.node.network.peer_id

    async def takes_part(
        self, keeps: bool, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        try:
            with self.scope:
                async with open_credit(self.node, self.session, TERMS, keeps=keeps):
                    task_status.started()
                    await self.wants_to_leave.wait()
        finally:
            self.has_left.set()

    async def leaves(self) -> None:
        self.wants_to_leave.set()
        await self.has_left.wait()

    def page_of(self, other: Member) -> Page:
        """As it lies on the disk."""
        folder = shelf_folder(self.node.configuration.places.credit_folder, TERMS.run)
        shelf = Shelf(folder, TERMS.run, self.node.network.identity.public_key)
        return dict(shelf.pages())[other.peer]

    async def board(self, **arguments: object) -> dict[str, Any]:
        socket = self.node.configuration.places.control_socket
        found: dict[str, Any] = await trio.to_thread.run_sync(
            lambda: ask_once(socket, LEADERBOARD, arguments)
        )
        return found


@asynccontextmanager
async def a_run(folder: Path, *names: str) -> AsyncIterator[list[Member]]:
    """Nodes that know each other and keep their records; the first one keeps the run."""
    async with SimulatedWorld(seed=5) as world, AsyncExitStack() as running:
        members: list[Member] = []
        for name in names:
            first = members[0].node.network.addresses()[0] if members else ""
            home = home_in(folder / name, POTLUCK_DHT_BOOTSTRAP=first)
            write_key(home.key_file, world.identity_of(name))
            node = await running.enter_async_context(running_node(world, name, home))
            shown = Recorded()
            session = TrainingSession(shown)
            session.entered()
            members.append(Member(node, session, shown))
        introduce(*(one.node for one in members))
        views = [
            RunPeerView(peer=one.peer, role="trains", keeps=not number)
            for number, one in enumerate(members)
        ]
        for one in members:
            one.session.watched = Company(tuple(v for v in views if v.peer != one.peer))
        async with trio.open_nursery() as nursery:
            for one in members:
                await nursery.start(one.takes_part, one is members[0])
            yield members
            nursery.cancel_scope.cancel()


def step(epoch: int, brought: dict[PeerId, int], own: int = 0) -> StepTaken:
    shares = tuple(Share(peer, float(samples), 7) for peer, samples in brought.items())
    samples = float(sum(brought.values()) or own)
    members = tuple(brought)
    times = (0.0, 0.0, 0.0, 0.0)
    return StepTaken(epoch, samples, own, members, (), bytes(16), *times, shares=shares)


def taken_over(made: StepTaken) -> CaughtUp:
    """The event of a peer that was in the round of this step, and has its result from others."""
    seen = SeenStep(made.epoch, made.history, made.samples, 0, made.shares)
    return CaughtUp(made.epoch + 1, made.history, 0.1, 9, (), {}, 1, leads_on=True, seen=(seen,))


async def test_a_person_who_has_left_is_in_the_leaderboard_by_name(tmp_path: Path) -> None:
    async with a_run(tmp_path, "keeper", "ann") as (keeper, ann):
        there = keeper.session.watched
        assert isinstance(there, Company)
        there.here = tuple(structs.replace(one, said_name="Ann") for one in there.here)
        keeper.session.happened(step(0, {keeper.peer: 40, ann.peer: 60}))
        ann.session.happened(step(0, {keeper.peer: 40, ann.peer: 60}))
        await ann.leaves()
        there.here = ()
        board = await keeper.board()
    assert {one["person"]: one["name"] for one in board["people"]}[ann.peer] == "Ann"


async def test_the_last_steps_are_written_in_a_thread_also_by_a_node_that_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads: list[str] = []

    async def noted(function: Callable[..., Any], *arguments: Any) -> Any:
        in_threads.append(function.__name__)
        return await in_thread(function, *arguments)

    async with a_run(tmp_path, "keeper") as (keeper,):
        monkeypatch.setattr("node.training.credit.service.in_thread", noted)
        keeper.session.happened(step(0, {}, own=40))
        keeper.scope.cancel()
        await keeper.has_left.wait()
        assert in_threads[-1] == "write"
        assert [line.epoch for line in keeper.page_of(keeper).lines] == [0]


async def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async with a_run(tmp_path, "keeper", "ann") as (keeper, ann):
        with monkeypatch.context() as patched:
            patched.setattr("node.training.credit.shelf.replace_private_file", full)
            ann.session.happened(step(0, {keeper.peer: 40, ann.peer: 60}))
            assert [one["person"] for one in (await keeper.board())["people"]] == []
        await ann.leaves()
        assert [line.epoch for line in ann.page_of(ann).lines] == [0]
        assert keeper.page_of(ann) == ann.page_of(ann), "it was handed over"


async def test_a_server_of_experts_is_credited_by_the_trainer_that_it_served(
    tmp_path: Path,
) -> None:
    server = IDENTITIES["S"].peer_id
    async with a_run(tmp_path, "keeper", "ann") as (keeper, ann):
        rows = [{server: 30, ann.peer: 10}, {}]
        ann.session.take_served_rows = lambda: rows.pop(0)
        brought = {keeper.peer: 0, ann.peer: 60}
        keeper.session.happened(step(0, brought))
        ann.session.happened(step(0, brought, own=60))
        board = await keeper.board()
        (helper, _) = board["helpers"]
        assert (helper["person"], helper["served_samples"], helper["steps"]) == (server, 45, 1)
        (check,) = (await ann.board(check=True))["checks"]
        assert (check["people"], check["differences"], check["trouble"]) == (3, [], "")
    assert rows == [{}], "only a step with samples of one's own takes the rows"


async def test_a_node_that_only_serves_experts_finds_its_credit_at_the_trainers(
    tmp_path: Path,
) -> None:
    async with a_run(tmp_path, "keeper", "ann", "sam") as (keeper, ann, sam):
        ann.session.take_served_rows = lambda: {sam.peer: 30}
        brought = {keeper.peer: 0, ann.peer: 60}
        for epoch in range(2):
            for one in (keeper, ann):
                one.session.happened(step(epoch, brought, own=60 * (one is ann)))
        # one tells of its cohort, and the other of what nobody reaches
        for one, key, says in (
            (keeper, sums_key("poem"), 2),
            (ann, progress_key("poem"), 1 << 40),
        ):
            await one.node.dht.joined()
            slot = ProgressSlot(says, bytes(16), 0, 0.0, bytes(16))
            await one.node.dht.put(key, slot, 15.0)
        await sam.node.dht.joined()
        watched = WatchedServing(sam.node, "poem", TrafficMeter(None, None))
        sam.session.watched = watched
        sam.session.account.epoch = await watched.look()
        assert {one.peer for one in watched.peers()} == {keeper.peer, ann.peer}
        board = await sam.board()
    assert (board["steps"], board["seen_steps"]) == (2, 0)
    (mine,) = [one for one in board["helpers"] if one["is_me"]]
    assert (mine["served_samples"], mine["steps"]) == (120, 2)


@pytest.mark.slow
async def test_a_short_run_is_credited_whole_and_its_keeper_can_be_checked(tmp_path: Path) -> None:
    async with a_run(tmp_path, "keeper", "ann", "ben") as (keeper, ann, ben):
        brought = {keeper.peer: 0, ann.peer: 60, ben.peer: 50}

        def happens(epoch: int, *members: Member) -> None:
            there = {one.peer: brought[one.peer] for one in members}
            for one in members:
                one.session.happened(step(epoch, there))

        happens(0, keeper, ann, ben)
        await until(lambda: keeper.shown.kinds().count("RecordsSummed") == 1, PATIENCE_SECONDS)
        for epoch in range(1, STEPS - 1):  # of which the keeper would hear in a minute
            happens(epoch, keeper, ann, ben)
        await ann.leaves()
        assert len(keeper.page_of(ann).lines) == STEPS - 1
        made = step(STEPS - 1, {one.peer: brought[one.peer] for one in (keeper, ben)})
        ben.session.happened(made)
        keeper.session.happened(
            taken_over(made)
        )  # it was in the round, and took over what ben made
        await until(lambda: keeper.shown.kinds().count("RecordsSummed") == 2, PATIENCE_SECONDS)

        board = await keeper.board(check=True)
        assert (board["keeps"], board["checks"]) == (True, [])
        assert (board["records"], board["steps"], board["seen_steps"]) == (3, STEPS, STEPS)
        people = {one["person"]: (one["samples"], one["steps"]) for one in board["people"]}
        assert people == {ann.peer: (180, STEPS - 1), ben.peer: (200, STEPS)}
        (helper,) = board["helpers"]
        assert (helper["person"], helper["steps"], helper["averaged_bytes"]) == (keeper.peer, 4, 28)

        found = await ben.board(check=True)  # though the keeper gives out an old page of ben's
        assert found["seen_steps"] == STEPS
        assert not found["keeps"]
        (check,) = found["checks"]
        assert (check["trouble"], check["differences"], check["without"]) == ("", [], 0)
        assert (check["people"], check["steps"]) == (3, STEPS)

        happens(STEPS, keeper, ben)  # the keeper has heard of ben's steps up to the one before
        assert len(keeper.page_of(ben).lines) == STEPS
        ben.session.happened(step(STEPS + 1, {}, own=50))  # which is how a step alone is told
        await keeper.leaves()
        *_, together, alone = keeper.page_of(ben).lines
        assert (together.epoch, len(together.places)) == (STEPS, 2)
        assert (alone.epoch, alone.samples) == (STEPS + 1, (50,))
