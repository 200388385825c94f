"""No two living peers make different steps of one epoch, whenever peers come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import trio
from torch import nn

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import CollaborationSettings
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import CaughtUp, FellBehind, SeenStep, Share, StepTaken
from protocols.accumulation.optimizer import CollaborativeOptimizer
from protocols.identity import PeerId
from protocols.testing.world import LinkSettings, WorldSettings
from tests.accumulation.training_peers import training_world, wait_for_company

LATENCY_SECONDS = 0.1  # a state takes some round trips, and a step alone none
EPOCHS_ALONE = 3
ENOUGH_EPOCHS = EPOCHS_ALONE + 3  # the step while they fetch, and two of the newcomers'
RUN = CollaborationSettings(run="line", target_batch=8, grace_seconds=5.0, round_seconds=20.0)


def optimizer_of(
    bridge: Bridge, *, auxiliary: bool = False
) -> tuple[nn.Module, CollaborativeOptimizer]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    sgd = partial(torch.optim.SGD, lr=0.1)
    named = model.named_parameters()
    return model, CollaborativeOptimizer(named, sgd, bridge, auxiliary=auxiliary)


def batch(model: nn.Module, optimizer: CollaborativeOptimizer) -> None:
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step(samples=4)


def lines_of(bridges: Iterable[Bridge]) -> dict[int, set[bytes]]:
    """The histories after each epoch's step, of all peers that have made it or taken it over."""
    found: dict[int, set[bytes]] = {}
    for bridge in bridges:
        for event in tuple(bridge.events):
            if isinstance(event, StepTaken):
                found.setdefault(event.epoch, set()).add(event.history)
            if isinstance(event, CaughtUp):
                found.setdefault(event.epoch - 1, set()).add(event.history)
    return found


@pytest.mark.slow
def test_newcomers_do_not_make_steps_of_their_own_beside_the_one_they_have_the_state_of() -> None:
    """While both fetch its state, it makes another step, and the newcomers do not know that."""
    bridges: dict[int, Bridge] = {}
    reached = dict.fromkeys(range(3), 0)  # in rounds of three or two, or by catching up
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
            reached[number] = optimizer.epoch
            has_stepped = have(StepTaken, [1]) or have(StepTaken, [2])
            if has_stepped and min(reached.values()) >= ENOUGH_EPOCHS:
                enough.set()

    async def main() -> None:
        settings = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))
        async with training_world(settings=settings) as world:
            peers = await world.peers(3, RUN)
            await world.train(peers, train)
            for epoch, histories in lines_of(one.bridge for one in peers).items():
                assert len(histories) == 1, f"two steps of epoch {epoch}"

    trio.run(main)


DEAD = frozenset(PeerId(f"dead-{number}") for number in range(3))


class NotYetKnown(Bridge):
    """The bridge of a peer that learns only after a step that three others are gone: a round of two
    is too small for it, but not for the other one."""

    @property
    def estimate(self) -> Estimate:
        found = super().estimate
        return found if steps_seen(self) else replace(found, holders=found.holders | DEAD)


def steps_seen(bridge: Bridge) -> list[SeenStep]:
    caught_up = [one for one in tuple(bridge.events) if isinstance(one, CaughtUp)]
    return [step for one in caught_up for step in one.seen]


@pytest.mark.slow
def test_a_member_that_has_not_applied_a_round_reports_its_step_after_catching_up() -> None:
    enough = threading.Event()

    def train(bridge: Bridge, number: int) -> dict[bytes, tuple[Share, ...]]:
        if number:
            bridge.__class__ = NotYetKnown
        model, optimizer = optimizer_of(bridge, auxiliary=number == 1)
        wait_for_company(bridge, 1)
        if number:
            optimizer.assist(epochs=1)
            enough.set()
            return {one.history: one.shares for one in steps_seen(bridge)}
        while not enough.is_set():
            batch(model, optimizer)
            time.sleep(0.05)  # the peer's speed
        steps = [one for one in tuple(bridge.events) if isinstance(one, StepTaken)]
        return {one.history: one.shares for one in steps}

    async def main() -> None:
        async with training_world() as world:
            made, seen = await world.train(await world.peers(2, RUN), train)
            assert seen
            for history, shares in seen.items():
                assert shares == made[history]
                assert [share.samples > 0.0 for share in shares].count(True) == 1

    trio.run(main)
