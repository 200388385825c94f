"""In a run by cohorts, peers leave as a volunteer does on Ctrl-C: they end their batch, bring what
they have to the round that is near, and are gone after `ROUND_PATIENCE_SECONDS`. Nobody waits for
them, nobody else misses a step, and what they bring counts. Virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from lab.simulate.virtual_run import TICK_SECONDS
from lab.simulate.virtual_trainer import Trainer, longest_gap
from node.training.departure import ROUND_PATIENCE_SECONDS
from protocols.accumulation.known import PATIENCE_SECONDS
from protocols.accumulation.lifecycle import Phase
from protocols.testing.world import SimulatedWorld, run_simulation
from tests.accumulation.test_deaths_by_cohorts import Sweep
from tests.accumulation.test_runs_by_cohorts import (
    begun,
    check_one_line,
    cohort_with,
    furthest,
    heads,
    living,
    stepped,
    until,
)
from tests.dht.members import SETTINGS as WORLD

NEAR_SECONDS = 0.3  # before a round
CALM_STEPS = 2

Leaves = Callable[[Trainer], None]


async def a_member(run: list[Trainer], leaves: Leaves) -> None:
    largest = max(heads(run), key=lambda one: len(cohort_with(run, one)))
    member = next(one for one in cohort_with(run, largest) if one is not largest)
    await until(run, lambda: member.lifecycle.life.phase is Phase.AVERAGING)
    leaves(member)


async def a_head_just_before_its_round(run: list[Trainer], leaves: Leaves) -> None:
    await stepped(run, 1)
    head = heads(run)[0]
    await until(run, lambda: head.tracker.estimate.due_in_seconds < NEAR_SECONDS)
    leaves(head)


async def a_head_at_four_moments_of_its_round(run: list[Trainer], leaves: Leaves) -> None:
    swept = Sweep(run[0].world, run, leaves)
    with pytest.MonkeyPatch.context() as patch:
        swept.patched(patch)
        head = max(heads(run), key=lambda one: len(cohort_with(run, one)))
        messages = await swept.messages_of(head)
        for quarter in range(4):
            head = max(heads(run), key=lambda one: len(cohort_with(run, one)))
            await swept.fall([head], 1 + quarter * messages // 4)
            await stepped(run, 1)


async def all_heads_one_after_the_other(run: list[Trainer], leaves: Leaves) -> None:
    for head in heads(run):
        leaves(head)
        await trio.sleep(ROUND_PATIENCE_SECONDS)


SCENES = (
    pytest.param(a_member, marks=pytest.mark.soak),
    pytest.param(a_head_just_before_its_round, marks=pytest.mark.soak),
    a_head_at_four_moments_of_its_round,
    pytest.param(all_heads_one_after_the_other, marks=pytest.mark.soak),
)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES, ids=lambda one: one.__name__)
def test_a_run_goes_on_without_a_pause_when_peers_leave(
    scene: Callable[[list[Trainer], Leaves], Awaitable[None]],
) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        run = await begun(world)
        await stepped(run, 1)
        first, began = furthest(run), trio.current_time()
        await stepped(run, CALM_STEPS)
        usual = longest_gap(run, began, trio.current_time())
        there, since = list(run), trio.current_time()
        async with trio.open_nursery() as nursery:

            async def leave(one: Trainer) -> None:
                await one.leave(patience=ROUND_PATIENCE_SECONDS)

            await scene(run, lambda one: nursery.start_soon(leave, one))
        await stepped(run, 2)
        check_one_line(run)
        check_nobody_missed_a_step(living(there), first)
        check_samples_count_once(run, first + 1)
        # The others compute what the leavers do not. One that was counted on is waited for.
        shrunk = len(there) / len(living(run))
        gap = longest_gap(living(run), since, trio.current_time())
        assert gap < usual * shrunk + PATIENCE_SECONDS, (gap, usual)

    run_simulation(scenario, seed=0, settings=WORLD, tick_seconds=TICK_SECONDS)


def check_nobody_missed_a_step(stayed: Sequence[Trainer], first: int) -> None:
    for one in stayed:
        made = [step.epoch for step in one.steps if step.epoch >= first]
        assert made == list(range(first, made[-1] + 1)), (one.name, made, one.words[-9:])


def check_samples_count_once(run: Sequence[Trainer], first: int) -> None:
    """Each step has the samples of all that computed for it. Those of a peer that left before the
    round may be missing, but only all of them together."""
    for number, samples in {step.epoch: step.samples for one in run for step in one.steps}.items():
        if number < first:
            continue
        by_peer = {
            one.name: sum(batch.samples for batch in one.batches if batch.epoch == number - 1)
            for one in run
        }
        at = min(step.at for one in run for step in one.steps if step.epoch == number)
        stayed = sum(by_peer[one.name] for one in run if one.died is None or one.died > at)
        left = [by_peer[one.name] for one in run if one.died is not None and one.died <= at]
        assert samples - stayed in {0, *left, sum(left)}, (number, samples, by_peer)
