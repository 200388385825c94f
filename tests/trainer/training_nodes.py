"""A node in a simulated world that trains in a session of its own, told as a `potluck join` is.

    async with training_node(world, "ann", home, train) as ann:
        await ann.until("Began")
    async with training_in(world, definition, "ben", home, TrainerOptions(), address) as ben:
        ...                                              # told to leave at the end of the block

Easy to get wrong: the training thread may wait for what only the test would give it. Before the
block is left, its departure has to be wanted, and its gate ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from node.core.node import Node
from node.run.building import build_task
from node.run.definition import RunDefinition
from node.training.session import TrainingSession
from node.training.trainer import TrainerOptions, train_run
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.access.members import running_node, write_key
from tests.homes import home_in
from tests.trainer.recorded import Recorded
from tests.waiting import PATIENCE_SECONDS, until


@dataclass
class TrainingNode:
    """`ended`: it trains no more. `scope`: cancelled as if its pass were revoked."""

    node: Node
    session: TrainingSession
    shown: Recorded
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def network(self) -> SimulatedNetwork:
        assert isinstance(self.node.network, SimulatedNetwork)
        return self.node.network

    async def until(self, kind: str) -> None:
        await until(lambda: kind in self.shown.kinds(), PATIENCE_SECONDS)


@asynccontextmanager
async def training_node(
    world: SimulatedWorld,
    name: str,
    home: Path,
    train: Callable[[TrainingNode], Awaitable[None]],
    *bootstrap: str,
) -> AsyncIterator[TrainingNode]:
    configuration = home_in(home, POTLUCK_DHT_BOOTSTRAP=",".join(bootstrap))
    write_key(configuration.key_file, world.identity_of(name))
    async with running_node(world, name, configuration) as node, trio.open_nursery() as nursery:
        shown = Recorded()
        one = TrainingNode(node, TrainingSession(shown), shown)
        one.session.entered()

        async def to_the_end() -> None:
            with one.scope:
                await train(one)
            one.ended.set()

        nursery.start_soon(to_the_end)
        yield one


@asynccontextmanager
async def training_in(
    world: SimulatedWorld,
    definition: RunDefinition,
    name: str,
    home: Path,
    options: TrainerOptions,
    *bootstrap: str,
) -> AsyncIterator[TrainingNode]:
    """A node that trains what is defined, and leaves at once when the block is left."""

    async def train(one: TrainingNode) -> None:
        task = build_task(definition, peer=name)
        await train_run(one.node, definition, task, options, one.session)

    async with training_node(world, name, home, train, *bootstrap) as one:
        yield one
        one.session.departure.leave(at_once=True)
        one.session.gate.end()
