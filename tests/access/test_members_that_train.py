"""Members of a run train together on nodes that run, each loop in a thread, with their passes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
import trio

from models.uncompiled import SGD
from node.core.configuration import read_configuration
from node.core.node import Node
from node.training.guest import NotInThisRun, train_in_thread
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.ended import CollaborationEnded
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.testing.world import SimulatedWorld
from tests.access.impostor import RUN, Impostor, running_impostor
from tests.access.members import log_in, running_node
from tests.waiting import PATIENCE_SECONDS, until

STEPS: Final = 2
# Of a batch: a peer's speed. A step takes longer than hearing of the others, as it does wherever
# it is worth while to train together; else each would go on alone faster than the other follows.
BATCH_SECONDS: Final = 0.1


def settings(run: str = RUN) -> CollaborationSettings:
    return CollaborationSettings(run=run, target_batch=16)


@asynccontextmanager
async def members(folder: Path, *names: str) -> AsyncIterator[list[Node]]:
    impostor = Impostor()
    async with (
        SimulatedWorld(seed=1) as world,
        running_impostor(folder, impostor) as server,
        AsyncExitStack() as stack,
    ):
        nodes: list[Node] = []
        for name in names:
            await log_in(folder / name, world.identity_of(name), impostor, server)
            known = tuple(address for node in nodes for address in node.network.addresses())
            home = read_configuration(
                {"dht.bootstrap": known}, environment={"POTLUCK_HOME": str(folder / name)}
            )
            nodes.append(await stack.enter_async_context(running_node(world, name, home)))
        yield nodes


class Loop:
    """A training loop, and what it has come to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.at: dict[bytes, list[float]] = {}
        """The weights at each history."""
        self.ended = False

    def train(self, bridge: Bridge) -> int:
        """Until the collaboration ends."""
        torch.set_num_threads(1)
        optimizer = CollaborativeOptimizer(
            self.model.named_parameters(), lambda named: SGD(named, lr=0.1), bridge
        )
        try:
            while True:
                time.sleep(BATCH_SECONDS)
                optimizer.zero_grad()
                loss = self.model(torch.randn(4, 4)).square().mean()
                loss.backward()
                if optimizer.step(samples=4, loss=loss):
                    self.at[optimizer.history] = self.model.weight.detach().flatten().tolist()
        finally:
            self.ended = True


@pytest.mark.slow
async def test_members_train_together_and_hold_the_same(tmp_path: Path) -> None:
    loops = [Loop(), Loop()]
    with trio.fail_after(PATIENCE_SECONDS):
        async with members(tmp_path, "alice", "bob") as nodes, trio.open_nursery() as nursery:
            for node, loop in zip(nodes, loops, strict=True):
                nursery.start_soon(train_in_thread, node, settings(), loop.train)

            def shared() -> set[bytes]:  # each may make a step before it has heard of the other
                return set(loops[0].at) & set(loops[1].at)

            await until(lambda: len(shared()) >= STEPS, PATIENCE_SECONDS)
            nursery.cancel_scope.cancel()
    assert all(loop.ended for loop in loops), "a thread was left behind"
    for history in shared():
        assert loops[0].at[history] == loops[1].at[history]


@pytest.mark.slow
async def test_a_pass_for_another_run_is_refused(tmp_path: Path) -> None:
    async with members(tmp_path, "alice") as (alice,):
        with pytest.raises(NotInThisRun) as refused:
            await train_in_thread(alice, settings("another"), Loop().train)
    assert RUN in refused.value.what
    assert refused.value.advice


@pytest.mark.slow
async def test_errors_and_results_of_the_loop_come_out_unchanged(tmp_path: Path) -> None:
    def fail(_bridge: Bridge) -> None:
        raise ZeroDivisionError

    async with members(tmp_path, "alice", "bob") as (alice, bob):
        with pytest.raises(ZeroDivisionError):
            await train_in_thread(alice, settings(), fail)
        assert await train_in_thread(bob, settings(), lambda bridge: bridge.settings.run) == RUN


@pytest.mark.slow
async def test_a_loop_that_goes_on_after_the_end_is_told(tmp_path: Path) -> None:
    async with members(tmp_path, "alice") as (alice,):
        bridge = await train_in_thread(alice, settings(), lambda bridge: bridge)
    with pytest.raises(CollaborationEnded):
        CollaborativeOptimizer(
            torch.nn.Linear(2, 1).named_parameters(),
            lambda named: SGD(named, lr=0.1),
            bridge,
        )
