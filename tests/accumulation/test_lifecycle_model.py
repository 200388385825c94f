"""Explores all events of a run's peers, in every order.

First all worlds near the beginning, up to a number; then long random stories. Wherever a story
ends, once nothing more goes wrong, all peers that are left go on training together.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocols.accumulation.lifecycle import Mode
from tests.accumulation.lifecycle_model import (
    Rules,
    World,
    following,
    forked,
    what_is_wrong,
)

MODES = {
    "sync": Mode(target_samples=3),
    "delayed": Mode(target_samples=2, delayed=True),
    "parameters": Mode(target_samples=2, parameters_every=1),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())

RARE = ("dies", "gets no state", "expires", "is alone", "discard")
RARELY = 0.15  # relative to the probability of other events


def explore(rules: Rules, start: World, most_worlds: int) -> int:
    """Visit all reachable worlds, nearest first, up to a number. Returns how many there were."""
    came_from: dict[World, tuple[World | None, str]] = {start: (None, "the beginning")}
    waiting = deque([start])
    while waiting and len(came_from) < most_worlds:
        world = waiting.popleft()
        for action in following(rules, world):
            if action.world in came_from:
                continue
            came_from[action.world] = (world, str(action))
            wrong = what_is_wrong(rules, action.world)
            assert wrong is None, f"{wrong}:\n{story(came_from, action.world)}"
            waiting.append(action.world)
    return len(came_from)


def story(came_from: dict[World, tuple[World | None, str]], world: World) -> str:
    lines = []
    at: World | None = world
    while at is not None:
        before, name = came_from[at]
        lines.append(name)
        at = before
    return "\n".join(reversed(lines))


def wander(
    rules: Rules, seed: int, steps: int, *, chosen_evenly: bool = False, together: float = 1.0
) -> World:
    """One random story, in which faults are rarer than other events. With `chosen_evenly` they are
    not, and no peer may make another step than the others. `together`: an event is so many times
    as likely with each further peer that it happens to."""
    chance = random.Random(seed)
    world = rules.beginning()
    told: list[str] = []
    for _ in range(steps):
        actions = list(following(rules, world))
        rarely = 1.0 if chosen_evenly else RARELY
        weights = [
            (rarely if one.name in RARE else 1.0) * together ** len(one.who) for one in actions
        ]
        (action,) = chance.choices(actions, weights)
        told.append(str(action))
        world = action.world
        wrong = what_is_wrong(rules, world)
        if chosen_evenly:
            wrong = wrong or forked(world)
        assert wrong is None, f"{wrong}:\n" + "\n".join(told)
    return world


WHAT_COMES_NEXT = (
    "expires",
    "has stepped",
    "has a state",
    "gets no state",
    "commit",
    "average parameters",
    "is alone",
    "discard",
    "says how it is",
    "looks",
    "computes",
)
"""In a calm run no peer dies, all members of a group count, and possible events come first."""


def calm(rules: Rules, world: World, turns: int) -> World:
    """Nothing more goes wrong: each peer in turn takes its next step, and groups are complete."""
    for turn in range(turns):
        number = turn % rules.size
        for name in WHAT_COMES_NEXT:
            now = [one for one in following(rules, world) if one.name == name and number in one.who]
            if now:
                world = max(now, key=lambda one: len(one.who)).world
                break
        wrong = what_is_wrong(rules, world)
        assert wrong is None, wrong
    return world


@pytest.mark.slow
@every_mode
@pytest.mark.parametrize("size", [2, 3])
def test_every_world_near_the_beginning_keeps_the_promises(mode: Mode, size: int) -> None:
    rules = Rules(mode, size, batches=3, stale_slots=False)
    explore(rules, rules.beginning(), 600)


@pytest.mark.slow
@every_mode
def test_every_world_near_a_calm_run_keeps_the_promises(mode: Mode) -> None:
    rules = Rules(mode, 3, batches=4, deaths=0, stale_slots=False)
    world = rules.beginning()
    for _ in range(6):
        world = calm(rules, world, 4)
        explore(rules, world, 200)


@pytest.mark.soak
@every_mode
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stale_slots", [False, True])
def test_every_world_far_from_the_beginning(mode: Mode, size: int, stale_slots: bool) -> None:
    rules = Rules(mode, size, batches=3, stale_slots=stale_slots)
    explore(rules, rules.beginning(), 20_000)


@pytest.mark.soak
@every_mode
def test_every_world_far_from_a_calm_run(mode: Mode) -> None:
    rules = Rules(mode, 3, batches=8, stale_slots=False)
    world = rules.beginning()
    for _ in range(15):
        world = calm(rules, world, 4)
        explore(rules, world, 4_000)


def one_line(seeds: Iterable[int], mode: Mode, size: int, *, doubts: bool, deaths: int) -> None:
    """Groups of any members end in any way at any time, and all read the present slots."""
    rules = Rules(mode, size, batches=30, deaths=deaths, stale_slots=False, doubts=doubts)
    for seed in seeds:
        wander(rules, seed, 100, chosen_evenly=True)


LINES = ((False, 0), (True, 0), (False, 1))
"""Whether rounds end in doubt, and how many peers may die."""


@every_mode
@pytest.mark.parametrize("size", [3, 4])
def test_no_two_peers_make_different_steps_of_one_epoch(mode: Mode, size: int) -> None:
    two = replace(mode, target_samples=2)  # so that any two can make a step
    one_line([0], two, size, doubts=False, deaths=0)


@pytest.mark.soak
@every_mode
@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize(("doubts", "deaths"), LINES)
def test_in_many_stories_no_two_peers_make_different_steps(
    mode: Mode, size: int, doubts: bool, deaths: int
) -> None:
    one_line(range(1, 60), replace(mode, target_samples=2), size, doubts=doubts, deaths=deaths)


@pytest.mark.slow
@every_mode
def test_long_stories_keep_the_promises(mode: Mode) -> None:
    for seed in range(3):
        wander(Rules(mode, 3, batches=100), seed, 150)


@pytest.mark.slow
@every_mode
def test_when_nothing_goes_wrong_any_more_all_train_on_together(mode: Mode) -> None:
    for seed in range(2):
        train_on(mode, seed)


@pytest.mark.soak
@every_mode
def test_many_long_stories_end_well(mode: Mode) -> None:
    for seed in range(2, 40):
        train_on(mode, seed)


def train_on(mode: Mode, seed: int) -> None:
    rules = Rules(mode, 3, batches=1000)
    before = wander(rules, seed, 60)
    after = calm(rules, before, 90)
    alive = [one for one in after.peers if one.alive]
    assert len({(one.life.epoch, one.life.history) for one in alive}) == 1
    assert len({one.parameters for one in alive}) == 1
    assert alive[0].life.epoch > max(one.life.epoch for one in before.peers)


class Run(RuleBasedStateMachine):
    """The same, in an order that gives the shortest story for a failure."""

    @initialize(mode=st.sampled_from(sorted(MODES)))
    def begins(self, mode: str) -> None:
        self.rules = Rules(MODES[mode], 3, batches=100)
        self.world = self.rules.beginning()

    @rule(choice=st.integers(0, 10_000))
    def something_happens(self, choice: int) -> None:
        actions = list(following(self.rules, self.world))
        self.world = actions[choice % len(actions)].world

    @invariant()
    def keeps_the_promises(self) -> None:
        wrong = what_is_wrong(self.rules, self.world)
        assert wrong is None, wrong


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
