"""How a session ends where there is no round to see out: its thread is woken wherever it waits."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import trio

from node.caps.memory import MemoryUsedUp
from node.configuration import read_configuration
from node.run.building import RunTask, build_task
from node.run.definition import read_definition
from node.simulated_network import SimulatedWorld
from node.trainer.happenings import Notice, Preparing
from node.trainer.options import TrainerOptions
from node.trainer.session import Session
from node.trainer.stages import ENTERING, MEASURING
from node.trainer.trainer import train_run
from tests.access.members import running_node, write_key
from tests.runs.definitions import TEXT
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

ENDING_SECONDS: Final = 30.0  # it takes milliseconds; without an end of its own it is for ever


@dataclass(frozen=True)
class Crowded(RunTask):
    """On a machine whose memory others use as well, and which computes when it may."""

    room: int
    may_compute: threading.Event

    def loss(self, batch: Any) -> torch.Tensor:
        self.may_compute.wait()
        if self.samples_in(batch) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(batch)


@dataclass
class Training:
    """A lone node's."""

    session: Session
    shown: Recorded
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    is_out_of_memory: bool = False

    async def until(self, kind: str) -> None:
        await until(lambda: kind in self.shown.kinds(), PATIENCE_SECONDS)

    async def ends(self) -> bool:
        with trio.move_on_after(ENDING_SECONDS):
            await self.ended.wait()
        has_ended = self.ended.is_set()
        self.session.gate.end()  # or a thread that waits would keep the test from ending
        return has_ended

    def stages(self) -> list[str]:
        return [one.doing for one in self.shown.happenings if isinstance(one, Preparing)]


@asynccontextmanager
async def training(
    folder: Path, *, closed: bool = False, room: int = 1 << 20, measures: bool = False
) -> AsyncIterator[Training]:
    """`closed`: it begins in a pause. `room`: for so many samples at once, in memory that others
    have taken since it was measured. `measures`: and does not come to an end with it."""
    torch.set_num_threads(1)
    definition = read_definition(TEXT)
    may_compute = threading.Event()
    if not measures:
        may_compute.set()
    task = Crowded(**vars(build_task(definition)), room=room, may_compute=may_compute)
    home = read_configuration(environment={"POTLUCK_HOME": str(folder)})
    shown = Recorded()
    async with SimulatedWorld(seed=1) as world:
        write_key(home.key_file, world.identity_of("ann"))
        async with running_node(world, "ann", home) as node, trio.open_nursery() as nursery:
            one = Training(Session(shown), shown)
            one.session.entered()
            if closed:
                one.session.gate.close("pause", "paused by you")

            async def train() -> None:
                options = TrainerOptions(begins=True, micro_batch=0 if measures else 4)
                try:
                    with one.scope:
                        await train_run(node, definition, task, options, one.session)
                except* MemoryUsedUp:
                    one.is_out_of_memory = True
                one.ended.set()

            nursery.start_soon(train)
            try:
                yield one
            finally:
                may_compute.set()


async def test_a_node_that_ends_in_a_pause_does_not_wait_for_it_to_be_over(tmp_path: Path) -> None:
    async with training(tmp_path) as one:
        await one.until("Began")
        one.session.gate.close("pause", "paused by you")
        await one.until("Paused")
        one.scope.cancel()  # as a pass does that is taken back
        assert await one.ends()


async def test_who_leaves_before_the_loop_has_begun_begins_nothing(tmp_path: Path) -> None:
    async with training(tmp_path, closed=True) as one:
        await one.until("Paused")
        assert not one.session.trains, "there is no round to see out"
        one.session.departure.leave()
        assert await one.ends()
    assert not {MEASURING, ENTERING} & set(one.stages())
    assert one.shown.kinds()[-1] == "Left"


async def test_who_leaves_while_it_measures_does_not_wait_for_that(tmp_path: Path) -> None:
    async with training(tmp_path, measures=True) as one:
        await until(lambda: MEASURING in one.stages(), PATIENCE_SECONDS)
        one.session.departure.leave()
        assert await one.ends()
    assert ENTERING not in one.stages()


async def test_memory_that_others_take_makes_batches_smaller_and_ends_nothing(
    tmp_path: Path,
) -> None:
    async with training(tmp_path, room=1) as one:
        await one.until("StepTaken")
        one.scope.cancel()
        assert await one.ends()
    said = [each.words for each in one.shown.happenings if isinstance(each, Notice)]
    assert said == [
        "4 samples at once do not fit into memory now: 2 from now on",
        "2 samples at once do not fit into memory now: 1 from now on",
    ]


async def test_without_room_for_one_sample_it_ends_in_words(tmp_path: Path) -> None:
    async with training(tmp_path, room=0) as one:
        assert await one.ends()
        assert one.is_out_of_memory
