"""In a run by cohorts, heads and reducers die or stop at any of their messages of a step.

One run makes one step after another. In each step somebody goes in place of a message, counted from
the beginning of its round: in the first step the first one, in the next step a later one. A new
peer comes for each that has gone. All steps are checked at the end: one line, the same bits. When
all heads die in the moment of their decision, it is lost with them, and the others make the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

from lab.simulate.virtual_run import TICK_SECONDS
from lab.simulate.virtual_trainer import RUN, Manner, Trainer, trainer
from protocols.identity import PeerId
from protocols.moshpit.cohort_round import CohortRounds
from protocols.moshpit.cohorts import cohort_of
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.accumulation.test_runs_by_cohorts import (
    begun,
    check_one_line,
    cohort_with,
    count_of,
    furthest,
    heads,
    living,
    stepped,
    until,
)
from tests.dht.members import SETTINGS as WORLD

BACK_SECONDS = 30.0
SLOWEST_STEP_SECONDS = 60.0  # while somebody is to go in it
LAST_MOMENT_SECONDS = 0.5  # before its death: what a head decides then may reach nobody

Victims = Callable[[Sequence[Trainer]], list[Trainer]]


def one_head(run: Sequence[Trainer]) -> list[Trainer]:
    return heads(run)[:1]


def all_heads(run: Sequence[Trainer]) -> list[Trainer]:
    return heads(run)


def one_reducer(run: Sequence[Trainer]) -> list[Trainer]:
    """A member of the largest cohort, which has a part of the cohort's average."""
    head = max(heads(run), key=lambda one: len(cohort_with(run, one)))
    return [next(one for one in cohort_with(run, head) if one is not head)]


WHO = {"a head": one_head, "all heads": all_heads, "a reducer": one_reducer}


class Sweep:
    """The steps of one run. `back` has, for each strike, the seconds until the run's next step."""

    def __init__(
        self, world: SimulatedWorld, run: list[Trainer], go: Callable[[Trainer], None]
    ) -> None:
        self.world, self.run, self._go = world, run, go
        self.back: list[float] = []
        self._when_begins: dict[PeerId, Callable[[], None]] = {}

    def patched(self, patch: pytest.MonkeyPatch) -> None:
        """Let this sweep know when a peer begins its part in a step."""
        averages = CohortRounds.average
        waiting = self._when_begins

        async def average(rounds: CohortRounds, *arguments: Any) -> Any:
            waiting.pop(rounds._me, lambda: None)()
            return await averages(rounds, *arguments)

        patch.setattr(CohortRounds, "average", average)

    async def messages_of(self, victim: Trainer) -> int:
        """How many messages it sends from the beginning of its round to the end of the step."""
        begins: list[int] = []
        node = victim.network
        self._when_begins[node.peer_id] = lambda: begins.append(node.messages_sent)
        await until(self.run, lambda: bool(begins))
        made = len(victim.steps)
        await until(self.run, lambda: len(victim.steps) > made)
        return node.messages_sent - begins[0]

    async def strike(self, victims: Sequence[Trainer], message: int) -> None:
        """Let all of these go in place of that message of the first one, and others come."""
        count = count_of(living(self.run)[0])
        await self.fall(victims, message)
        for one in victims:
            name = self._name_after(one, count)
            self.run.append(trainer(self.world, name, one.manner, living(self.run)))
        await until(self.run, lambda: all(one.steps for one in living(self.run)))
        await stepped(self.run, 1)

    def _name_after(self, one: Trainer, count: int) -> str:
        """A name for a new peer of the same cohort, of so many. If it were of any, cohorts would
        grow and shrink by chance: each loses a head with each strike of all. After 115 of these
        one had 17 peers and 16 places, and that peer rightly made no step."""
        number = cohort_of(RUN, one.network.peer_id, count)
        names = (f"after {one.name}{attempt or ''}" for attempt in itertools.count())
        return next(
            name
            for name in names
            if cohort_of(RUN, self.world.identity_of(name).peer_id, count) == number
        )

    async def fall(self, victims: Sequence[Trainer], message: int) -> None:
        """The same, but nobody comes."""
        struck = trio.Event()

        def fall() -> None:
            for one in victims:
                self._go(one)
            struck.set()

        first = victims[0].network
        self._when_begins[first.peer_id] = lambda: self.world.at_message(first, message, fall)
        with trio.fail_after(SLOWEST_STEP_SECONDS):
            await struck.wait()
        at, before = trio.current_time(), furthest(self.run)
        await until(self.run, lambda: furthest(self.run) > before, 2 * BACK_SECONDS)
        self.back.append(trio.current_time() - at)


async def sweep(
    world: SimulatedWorld, size: int, group_size: int, who: Victims, every: int, *, silently: bool
) -> None:
    manner = Manner(0.5, 4, target=size * 4 * 6, group_size=group_size)
    run = await begun(world, size, manner)
    await stepped(run, 1)
    swept = Sweep(world, run, lambda one: one.kill(silently=silently))
    with pytest.MonkeyPatch.context() as patch:
        swept.patched(patch)
        messages = await swept.messages_of(who(run)[0])
        for message in range(1, messages + 1, every):
            print(f"message {message} of {messages}")  # shown if it fails
            await swept.strike(who(run), message)
    check_one_line(run, until_before_death=LAST_MOMENT_SECONDS if who is all_heads else 0.0)
    assert max(swept.back) < BACK_SECONDS, swept.back


def check(size: int, group_size: int, who: str, every: int, *, silently: bool) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        await sweep(world, size, group_size, WHO[who], every, silently=silently)

    run_simulation(scenario, seed=0, settings=WORLD, tick_seconds=TICK_SECONDS)


@pytest.mark.slow
def test_a_run_goes_on_when_all_heads_die() -> None:
    """The short form."""
    check(14, 8, "all heads", 120, silently=False)


@pytest.mark.soak
@pytest.mark.parametrize("silently", [False, True], ids=["killed", "powered off"])
@pytest.mark.parametrize("who", WHO)
def test_a_run_of_40_goes_on_at_whichever_message_they_die(who: str, silently: bool) -> None:
    check(40, 16, who, 1, silently=silently)
