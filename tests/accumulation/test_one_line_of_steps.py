"""No two peers that live make different steps of one epoch, whoever comes when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

import pytest
import torch
import trio
from torch import nn

from node.simulated_network import LinkSettings, WorldSettings
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.events import CaughtUp, FellBehind, StepTaken
from protocols.accumulation.optimizer import CollaborativeOptimizer
from tests.accumulation.training_peers import training_world

LATENCY_SECONDS = 0.2  # a state takes some round trips, and a step alone none
EPOCHS_ALONE = 3
EPOCHS_TOGETHER = 2
RUN = CollaborationSettings(run="line", target_batch=8, grace_seconds=5.0, round_seconds=20.0)


def optimizer_of(bridge: Bridge) -> tuple[nn.Module, CollaborativeOptimizer]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return model, CollaborativeOptimizer(model.named_parameters(), sgd, bridge)


def batch(model: nn.Module, optimizer: CollaborativeOptimizer) -> None:
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step(samples=4)


def lines_of(bridges: Iterable[Bridge]) -> dict[int, set[bytes]]:
    """The histories after each epoch's step, of all who have made one."""
    found: dict[int, set[bytes]] = {}
    for bridge in bridges:
        for event in tuple(bridge.events):
            if isinstance(event, StepTaken):
                found.setdefault(event.epoch, set()).add(event.history)
    return found


@pytest.mark.slow
def test_newcomers_do_not_make_steps_of_their_own_beside_the_one_they_have_the_state_of() -> None:
    """While both fetch its state it makes another step, of which neither it nor they know."""
    bridges: dict[int, Bridge] = {}
    has_begun, enough = threading.Event(), threading.Event()

    def have(kind: type, numbers: Iterable[int] = (1, 2)) -> bool:
        return all(
            number in bridges
            and any(isinstance(one, kind) for one in tuple(bridges[number].events))
            for number in numbers
        )

    def train(bridge: Bridge, number: int) -> None:
        bridges[number] = bridge
        if number:
            has_begun.wait()
        model, optimizer = optimizer_of(bridge)
        if number == 0:
            while optimizer.epoch < EPOCHS_ALONE:
                batch(model, optimizer)
            has_begun.set()
            while not have(FellBehind):
                bridge.wait_for_news(0.05).wait()
            while optimizer.epoch == EPOCHS_ALONE:
                batch(model, optimizer)
            while not have(CaughtUp):
                bridge.wait_for_news(0.05).wait()
        while not enough.is_set():
            batch(model, optimizer)
            time.sleep(0.05 if number else 0.5)
            steps = [one for one in tuple(bridge.events) if isinstance(one, StepTaken)]
            if number == 0 and sum(len(one.members) == 3 for one in steps) >= EPOCHS_TOGETHER:
                enough.set()

    async def main() -> None:
        settings = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))
        async with training_world(settings=settings) as world:
            peers = await world.peers(3, RUN)
            await world.train(peers, train)
            for epoch, histories in lines_of(one.bridge for one in peers).items():
                assert len(histories) == 1, f"two steps of epoch {epoch}"

    trio.run(main)
