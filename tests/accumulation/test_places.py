"""More peers than fit into a round: which of them are in it, and the others follow without holding
up any peer. Runs with few places have the same rules as runs with 256. Virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import trio

from lab.simulate.virtual_trainer import Manner, StepMade, Trainer, forks, trainer
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.claims import Credit
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.events import CaughtUp, PlaceFree, PlacesTaken, StepTaken, TrainingEvent
from protocols.accumulation.known import Known, ProgressSettings, Seen
from protocols.accumulation.progress import estimate
from protocols.accumulation.progress_slot import CARRIED_SECONDS, SLOT_SECONDS, ProgressSlot
from protocols.identity import PeerId
from protocols.testing.world import SimulatedWorld
from tests.accumulation.progress_slots import peers, slot
from tests.accumulation.test_one_line_of_steps import RUN, batch, optimizer_of
from tests.accumulation.training_peers import training_world
from tests.dht.members import simulated

PLACES = 4
SETTINGS = ProgressSettings(target_samples=100, places=PLACES)
FEW = Manner(seconds=0.5, group_size=PLACES)
CARRIED = CARRIED_SECONDS + 0.1


def views(
    slots: Mapping[PeerId, ProgressSlot], silent: tuple[PeerId, ...] = ()
) -> dict[PeerId, Estimate]:
    """Each peer's own estimate of the same slots."""
    return {
        me: estimate(
            {
                one: Seen(said, 0.0 if one in silent else CARRIED)
                for one, said in slots.items()
                if one != me
            },
            mine,
            SETTINGS,
            CARRIED,
            Known(Credit(), me=me),
        )
        for me, mine in slots.items()
        if me not in silent
    }


def placed(found: Mapping[PeerId, Estimate]) -> set[PeerId]:
    return {peer for peer, one in found.items() if one.has_place}


def test_all_peers_deal_the_places_out_in_the_same_way() -> None:
    found = views(dict.fromkeys(peers(*range(9)), slot(20, epoch=0)))
    inside = placed(found)
    assert len(inside) == PLACES
    for me, one in found.items():
        assert one.without_place == found.keys() - inside - {me}


def test_samples_without_a_place_make_no_round_due_and_nobody_expects_them() -> None:
    found = views(dict.fromkeys(peers(*range(9)), slot(20, epoch=0)))
    one = found[min(placed(found))]
    assert (one.samples, one.expected, one.is_due) == (80, PLACES, False)
    assert one.awaited <= placed(found)
    assert one.holders == placed(found)


def test_peers_that_made_the_steps_keep_their_places_whoever_comes() -> None:
    made = dict.fromkeys(peers(0, 1, 2, 3), slot(20))
    have_the_state = dict.fromkeys(peers(4, 5), slot(0, follows=True))
    fresh = dict.fromkeys(peers(*range(6, 20)), slot(0, epoch=0))
    assert placed(views(made | have_the_state | fresh)) == made.keys()


def test_a_free_place_goes_to_a_peer_that_has_the_state() -> None:
    made = dict.fromkeys(peers(0, 1, 2), slot(20))
    have_the_state = dict.fromkeys(peers(4), slot(0, follows=True))
    fresh = dict.fromkeys(peers(*range(6, 20)), slot(0, epoch=0))
    assert placed(views(made | have_the_state | fresh)) == made.keys() | have_the_state.keys()


def test_the_dead_take_no_place_from_their_replacements() -> None:
    made = dict.fromkeys(peers(0, 1, 2, 3), slot(20))
    replacement = dict.fromkeys(peers(4), slot(0, follows=True))
    found = views(made | replacement, silent=peers(0))
    assert placed(found) == set(peers(1, 2, 3, 4))


async def grown(world: SimulatedWorld, size: int, manner: Manner) -> list[Trainer]:
    found: list[Trainer] = []
    for number in range(size):
        found.append(trainer(world, f"peer-{number}", manner, found))
        await trio.sleep(0.2)
    return found


async def stepped(all_of_them: list[Trainer], more: int) -> None:
    """Wait until the living peers have made this many more steps."""
    until = max(one.epoch for one in all_of_them) + more
    with trio.fail_after(300):
        while min(one.epoch for one in all_of_them if one.alive) < until:
            await next(one for one in all_of_them if one.alive).tracker.changed()


def assert_one_variant(all_of_them: list[Trainer]) -> None:
    made: dict[int, StepMade] = {}
    for step in (step for one in all_of_them for step in one.steps):
        first = made.setdefault(step.epoch, step)
        assert (step.history, step.digest) == (first.history, first.digest)


def in_last_step(all_of_them: list[Trainer]) -> set[Trainer]:
    last = max(step.epoch for one in all_of_them for step in one.steps)
    return {one for one in all_of_them if one.steps and one.steps[-1].epoch >= last - 1}


@pytest.mark.slow
@simulated
async def test_peers_beyond_the_places_follow_and_take_a_place_when_one_is_free(
    world: SimulatedWorld,
) -> None:
    all_of_them = await grown(world, PLACES + 2, FEW)
    await stepped(all_of_them, 4)
    inside = in_last_step(all_of_them)
    assert len(inside) == PLACES
    assert all(step.members <= PLACES for one in inside for step in one.steps)
    dead = min(inside, key=lambda one: one.network.name)
    dead.kill()
    await trio.sleep(SLOT_SECONDS)  # until its slot has expired
    await stepped(all_of_them, 4)
    now_inside = in_last_step(all_of_them) - {dead}
    assert len(now_inside) == PLACES
    assert inside - {dead} < now_inside
    assert_one_variant(all_of_them)
    assert not forks(all_of_them)


@pytest.mark.slow
@simulated
async def test_more_peers_than_places_that_begin_at_once_make_the_first_step(
    world: SimulatedWorld,
) -> None:
    all_of_them: list[Trainer] = []
    for number in range(2 * PLACES + 1):
        all_of_them.append(trainer(world, f"peer-{number}", FEW, all_of_them))
    await trio.sleep(1.0)  # until all have begun
    await stepped(all_of_them, 3)
    assert len(in_last_step(all_of_them)) == PLACES
    assert_one_variant(all_of_them)
    assert not forks(all_of_them)


@pytest.mark.slow
def test_a_peer_without_a_place_waits_and_follows_and_trains_when_one_is_free() -> None:
    """With the optimizer, in threads of their own."""
    bridges: dict[int, Bridge] = {}
    has_begun, enough = threading.Event(), threading.Event()

    def events(number: int) -> list[TrainingEvent]:
        return list(bridges[number].events) if number in bridges else []

    def has_followed() -> bool:
        """Whether it has taken over a step since it learned that it has no place."""
        told = [type(one) for one in events(2)]
        return PlacesTaken in told and CaughtUp in told[told.index(PlacesTaken) :]

    def train(bridge: Bridge, number: int) -> None:
        bridges[number] = bridge
        if number == 2:
            has_begun.wait()
        model, optimizer = optimizer_of(bridge)
        while not enough.is_set():
            batch(model, optimizer)
            if optimizer.epoch >= 2:
                has_begun.set()
            if number == 0 and has_followed():
                optimizer.finish()
                bridge.set_away(is_away=True)
                return
            if any(isinstance(one, StepTaken) for one in events(2)):
                enough.set()
            time.sleep(0.05)  # the peer's speed

    async def main() -> None:
        async with training_world() as world:
            await world.train(await world.peers(3, replace(RUN, group_size=2)), train)

    trio.run(main)
    told = [type(one) for one in events(2)]
    assert told.index(PlacesTaken) < told.index(PlaceFree) < told.index(StepTaken)
    for number in range(3):
        steps = [one for one in events(number) if isinstance(one, StepTaken)]
        assert all(len(one.members) <= 2 for one in steps)
