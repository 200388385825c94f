"""The end of a run that has one: its last step is on the keeper's disk, whoever made it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from node.checkpoints import Checkpoints
from node.configuration import read_configuration
from node.node import Node
from node.run.building import build_task
from node.run.definition import read_definition
from node.simulated_network import SimulatedNetwork, SimulatedWorld
from node.trainer.happenings import RunComplete
from node.trainer.options import TrainerOptions
from node.trainer.session import Session
from node.trainer.trainer import train_run
from protocols.accumulation.events import StepTaken
from tests.access.members import running_node, write_key
from tests.runs.definitions import with_line
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until

STEPS: Final = 6
STOPPED_AT: Final = 3
DEFINITION: Final = read_definition(
    with_line(f"steps = {STEPS}\ndelayed = true")
    + b"[averaging]\ngrace_seconds = 1.0\nround_seconds = 20.0\n"
)


@dataclass
class Peer:
    node: Node
    session: Session
    shown: Recorded
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def steps(self) -> int:
        return sum(isinstance(one, StepTaken) for one in self.shown.happenings)

    @property
    def complete(self) -> RunComplete | None:
        found = [one for one in self.shown.happenings if isinstance(one, RunComplete)]
        return found[0] if found else None


@asynccontextmanager
async def training(
    world: SimulatedWorld, name: str, home: Path, options: TrainerOptions, *bootstrap: str
) -> AsyncIterator[Peer]:
    variables = {"POTLUCK_HOME": str(home), "POTLUCK_DHT_BOOTSTRAP": ",".join(bootstrap)}
    configuration = read_configuration(environment=variables)
    write_key(configuration.key_file, world.identity_of(name))
    async with running_node(world, name, configuration) as node, trio.open_nursery() as nursery:
        shown = Recorded()
        session = Session(shown)
        peer = Peer(node, session, shown)
        session.entered()

        async def train() -> None:
            task = build_task(DEFINITION, peer=name)
            await train_run(node, DEFINITION, task, options, session)
            peer.ended.set()

        nursery.start_soon(train)
        yield peer
        session.departure.leave(at_once=True)
        session.gate.end()


@pytest.mark.slow
async def test_volunteers_do_not_leave_with_a_last_step_that_the_keeper_is_without(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    checkpoints = DEFINITION.checkpoint_settings(tmp_path / "checkpoints", {})
    keeps = TrainerOptions(begins=True, keeps_only=True, checkpoints=checkpoints)
    volunteer = TrainerOptions(micro_batch=4)
    with trio.fail_after(PATIENCE_SECONDS):
        async with (
            SimulatedWorld(seed=1) as world,
            training(world, "keeper", tmp_path / "keeper", keeps) as keeper,
        ):
            network = keeper.node.network
            assert isinstance(network, SimulatedNetwork)
            (address, *_) = network.addresses()
            async with (
                training(world, "ann", tmp_path / "ann", volunteer, address) as ann,
                training(world, "ben", tmp_path / "ben", volunteer, address) as ben,
            ):
                await until(lambda: ann.steps >= STOPPED_AT, PATIENCE_SECONDS)
                world.stop(network)
                await until(lambda: bool(ann.complete and ben.complete), PATIENCE_SECONDS)
                assert not ann.ended.is_set()
                assert not ben.ended.is_set()
                world.resume(network)
                for one in (ann, ben):
                    await one.ended.wait()
                await until(lambda: keeper.complete is not None, PATIENCE_SECONDS)
                assert keeper.complete == ann.complete == ben.complete
                await until(lambda: newest(tmp_path) == STEPS, PATIENCE_SECONDS)


def newest(folder: Path) -> int:
    found = Checkpoints(folder / "checkpoints").newest()
    return 0 if found is None else found.state.epoch
