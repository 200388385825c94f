"""A second node with a key in use refuses to start; one that returns after a kill does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from node.core.configuration import Configuration
from node.core.node import Node
from node.training.happenings import MAKING_SURE, Preparing
from node.training.join.bootstrap import KeyInUse, refuse_if_in_use
from node.training.session import TrainingSession
from protocols.accumulation.progress_slot import (
    PROGRESS,
    SLOT_SECONDS,
    progress_key,
    sums_key,
)
from protocols.dht import DhtSettings
from protocols.identity import Identity
from protocols.moshpit.cohorts import cohort_of
from protocols.network import Network
from protocols.testing.world import SimulatedNetwork, SimulatedWorld
from tests.accumulation.progress_slots import slot
from tests.dht.members import joined, member
from tests.homes import home_in
from tests.trainer.recorded import Recorded

RUN = "poem"


@asynccontextmanager
async def node_in(world: SimulatedWorld, home: Path) -> AsyncIterator[Node]:
    @asynccontextmanager
    async def open_network(_: Identity, __: Configuration) -> AsyncIterator[Network]:
        yield world.add_node("node")

    configuration = home_in(home)
    async with Node(configuration, open_network=open_network) as node:
        yield node


def a_session() -> tuple[TrainingSession, Recorded]:
    shown = Recorded()
    session = TrainingSession(shown)
    session.entered()
    return session, shown


COUNT = 4  # cohorts


async def say_how_far(node: Node, *, by_cohorts: bool = False) -> None:
    """As whoever trains with this node's key."""
    said = slot(samples=8)
    if by_cohorts:
        said = msgspec.structs.replace(said, cohorts=COUNT)
        number = cohort_of(RUN, node.network.peer_id, COUNT)
        key = progress_key(RUN, COUNT, number)
    else:
        key = progress_key(RUN)
    await node.dht.put(key, said, SLOT_SECONDS, keep_up=False)


async def test_without_an_earlier_slot_nobody_waits(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, node_in(world, tmp_path) as node:
        session, shown = a_session()
        await refuse_if_in_use(node, session, RUN)
        assert shown.kinds() == []


async def test_a_key_that_publishes_after_this_node_began_is_in_use(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, node_in(world, tmp_path) as node:
        await say_how_far(node)
        with pytest.raises(KeyInUse) as refused:
            await refuse_if_in_use(node, a_session()[0], RUN)
    assert refused.value.exit_code == 3
    assert str(tmp_path / "identity.key") in refused.value.why


async def test_a_key_that_publishes_in_a_cohort_is_in_use(tmp_path: Path) -> None:
    """Before, only the slots of runs in one group were read."""
    async with SimulatedWorld(seed=1) as world, node_in(world, tmp_path) as node:
        assert isinstance(node.network, SimulatedNetwork)
        settings = DhtSettings(bootstrap=(node.network.address,))
        head = member(world, "head", settings=settings, families=[PROGRESS])
        await joined(head)
        its_sum = msgspec.structs.replace(slot(samples=8), cohorts=COUNT)
        await head.dht.put(sums_key(RUN), its_sum, SLOT_SECONDS)
        await refuse_if_in_use(node, a_session()[0], RUN)
        await say_how_far(node, by_cohorts=True)
        with pytest.raises(KeyInUse):
            await refuse_if_in_use(node, a_session()[0], RUN)


async def test_a_slot_of_an_earlier_session_is_waited_out(tmp_path: Path) -> None:
    async with SimulatedWorld(seed=1) as world, node_in(world, tmp_path) as node:
        assert isinstance(node.network, SimulatedNetwork)
        world.set_clock_skew(node.network, -SLOT_SECONDS / 2)
        await say_how_far(node)
        world.set_clock_skew(node.network, 0.0)
        session, shown = a_session()
        await refuse_if_in_use(node, session, RUN, patience_seconds=node.uptime_seconds + 0.1)
        assert shown.happenings == [Preparing(MAKING_SURE)]
