"""Runs with more peers than fit into one group: one line of steps, and all peers in it. Groups of
eight have the same rules as groups of 64. Virtual time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio

from lab.simulate.virtual_trainer import (
    MATCHMAKING_SECONDS,
    RUN,
    Manner,
    StepMade,
    Trainer,
    trainer,
)
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.events import StepTaken
from protocols.accumulation.known import LONGEST_READ_SECONDS, OtherCohorts
from protocols.accumulation.lineage import Lineage, next_history
from protocols.accumulation.progress_slot import SAY_AGAIN_SECONDS, ProgressSlot
from protocols.accumulation.tracker import Tracker
from protocols.identity import PeerId
from protocols.moshpit.cohort_round import CohortAverage, CohortRounds
from protocols.moshpit.cohorts import cohort_of, in_order
from protocols.moshpit.outcome import Outcome
from protocols.testing.world import NodeSettings, SimulatedWorld
from tests.accumulation.test_one_line_of_steps import RUN as LINE
from tests.accumulation.test_one_line_of_steps import batch, lines_of, optimizer_of
from tests.accumulation.training_peers import training_world
from tests.dht.members import simulated
from tests.waiting import PATIENCE_SECONDS

PEERS = 10
MORE_PEERS = 14  # of these no cohort has half
GROUP = 8
AT_ONCE_SECONDS = 2.0  # a head that was only silent would be one for six times as long
STEPS_IN_THREADS = 2
ONE_STEP_SECONDS = 0.5  # from the first peer that makes it to the last
MANNER = Manner(seconds=0.5, samples=4, target=PEERS * 4 * 6, group_size=GROUP)


async def begun(
    world: SimulatedWorld, size: int = PEERS, manner: Manner = MANNER, *, slow: Manner | None = None
) -> list[Trainer]:
    """A run whose peers are all in its steps. Every second one has the manner `slow`, if given."""
    found: list[Trainer] = []
    for number in range(size):
        own = slow if slow is not None and number % 2 else manner
        found.append(trainer(world, f"peer-{number}", own, found))
        await trio.sleep(0.05)
    await until(found, lambda: all(one.steps for one in found) and count_of(found[0]) > 1)
    return found


def count_of(one: Trainer) -> int:
    return one.tracker.mine().cohorts


def living(all_of_them: Sequence[Trainer]) -> list[Trainer]:
    return [one for one in all_of_them if one.alive]


async def until(
    all_of_them: Sequence[Trainer], happens: Callable[[], bool], seconds: float = 120.0
) -> None:
    with trio.move_on_after(seconds):
        while not happens():
            await living(all_of_them)[0].tracker.changed()
        return
    stand = "\n".join(how_it_is(one) for one in living(all_of_them))
    raise AssertionError(f"This has not happened within {seconds:g} seconds. At the end:\n{stand}")


def how_it_is(one: Trainer) -> str:
    life, found = one.lifecycle.life, one.tracker.estimate
    return (
        f"{one.name} {one.network.peer_id[-6:]}: {life.phase.name} at {life.epoch}, "
        f"{life.samples}+{life.in_round} samples, steps to {[it.epoch for it in one.steps[-1:]]}, "
        f"cohort {found.cohort and found.cohort.number} of {count_of(one)}, "
        f"sum {found.sum is not None}, needs {found.needs}, company {found.company}, "
        f"behind {found.behind is not None}, fork {found.fork is not None}, "
        f"ahead {len(life.ahead)}/{len(life.may_be_ahead)}, unproved {len(found.unproved)}, "
        f"passed by {len(life.passed_by)}, ignores {len(found.ignored)}"
    )


def furthest(all_of_them: Sequence[Trainer]) -> int:
    return max(one.steps[-1].epoch for one in living(all_of_them) if one.steps)


async def stepped(all_of_them: Sequence[Trainer], more: int) -> None:
    """Until all living peers are in the last of so many more steps."""
    target = furthest(all_of_them) + more
    await until(
        all_of_them,
        lambda: all(one.steps and one.steps[-1].epoch >= target for one in living(all_of_them)),
    )


def check_one_line(all_of_them: Sequence[Trainer], *, until_before_death: float = 0.0) -> None:
    """`until_before_death`: for so long before a peer's death its steps do not count."""
    made: dict[int, StepMade] = {}
    for one in all_of_them:
        until = math.inf if one.died is None else one.died - until_before_death
        for step in one.steps:
            if step.at <= until:
                first = made.setdefault(step.epoch, step)
                assert (step.history, step.digest) == (first.history, first.digest)


def heads(all_of_them: Sequence[Trainer]) -> list[Trainer]:
    """The head of each cohort."""
    by_name = {one.network.peer_id: one for one in living(all_of_them)}
    count, first = count_of(living(all_of_them)[0]), dict[int, Trainer]()
    for peer in in_order(RUN, by_name):
        first.setdefault(cohort_of(RUN, peer, count), by_name[peer])
    return list(first.values())


@pytest.mark.slow
@simulated
async def test_all_peers_are_in_every_step_and_newcomers_soon_are(world: SimulatedWorld) -> None:
    run = await begun(world)
    since = furthest(run)
    await stepped(run, 6)  # the mean size of three steps depends on chance
    check_one_line(run)
    for one in run:
        made = [step.epoch for step in one.steps if step.epoch > since + 1]
        assert made[:5] == list(range(since + 2, since + 7))
    samples = [step.samples for step in run[0].steps if step.epoch > since + 1]
    assert all(0.9 < one / MANNER.target < 1.1 for one in samples), samples
    assert sum(samples) / len(samples) / MANNER.target < 1.05, samples

    at = furthest(run)
    newcomer = trainer(world, "newcomer", MANNER, run)
    await until([*run, newcomer], lambda: bool(newcomer.steps))
    assert newcomer.steps[0].epoch <= at + 3
    assert count_of(newcomer) == count_of(run[0])
    check_one_line([*run, newcomer])


@pytest.mark.slow
@simulated
async def test_nobody_waits_for_a_peer_that_is_dead(world: SimulatedWorld) -> None:
    """Nobody can ask one that could only dial out. If only its link was lost, it counts again."""
    run = await begun(world)
    one = trainer(world, "another", MANNER, run, NodeSettings(dialable=False))
    name, everybody = one.network.peer_id, [*run, one]
    await until(everybody, lambda: len(one.steps) > 1)
    mates = [mate for mate in cohort_with(everybody, one) if mate is not one]
    assert mates

    def is_expected() -> list[bool]:
        found = [mate.tracker.estimate for mate in mates]
        return [name in one.coming and name not in one.lost for one in found]

    await until(mates, lambda: all(is_expected()))
    for mate in mates:
        world.break_link(mate.network, one.network)
    await until(mates, lambda: not any(is_expected()), AT_ONCE_SECONDS / 4)
    await until(mates, lambda: all(is_expected()), SAY_AGAIN_SECONDS + 2 * LONGEST_READ_SECONDS)
    await stepped(everybody, 2)
    check_one_line(everybody)

    await until(mates, lambda: all(is_expected()))
    one.kill()
    await until(mates, lambda: not any(is_expected()), AT_ONCE_SECONDS / 4)


@pytest.mark.slow
@simulated
async def test_the_run_goes_on_when_heads_die_and_is_one_group_again_when_few_are_left(
    world: SimulatedWorld,
) -> None:
    run = await begun(world)
    await stepped(run, 1)
    for head in heads(run)[::2]:
        head.kill()
    new = [one for one in heads(run) if one.tracker.estimate.sum is None]
    assert new
    await until(run, lambda: all(one.tracker.estimate.sum for one in new), AT_ONCE_SECONDS)
    await stepped(run, 3)
    check_one_line(run)

    for one in living(run)[3:]:
        one.kill()
    left = living(run)
    await until(run, lambda: all(count_of(one) == 1 for one in left), 240.0)
    await stepped(run, 2)
    check_one_line(run)


@pytest.mark.slow
@simulated
async def test_the_run_goes_on_when_all_that_are_left_are_in_one_cohort(
    world: SimulatedWorld,
) -> None:
    """Their head finds no other one."""
    run = await begun(world)
    await stepped(run, 1)
    cohorts = [cohort_with(run, head) for head in heads(run)]
    left = max(cohorts, key=len)[:2]
    for one in run:
        if one not in left:
            one.kill()
    assert len(left) == 2
    before = furthest(run)
    await until(run, lambda: all(furthest([one]) >= before + 3 for one in left), 240.0)
    assert [count_of(one) for one in left] == [1, 1]
    check_one_line(run)


@pytest.mark.slow
@simulated
async def test_a_step_reaches_all_at_once_though_a_part_of_the_run_was_just_cut_off(
    world: SimulatedWorld,
) -> None:
    """Each head had first looked at the others, for seconds: some of the peers that keep the slots
    were on the other side. Its cohort gave it up meanwhile, and missed the step."""
    run = await begun(world)
    await stepped(run, 1)
    head = heads(run)[0]
    members = [one for one in run if one not in heads(run)]
    cut_off = [head, *members[: PEERS // 3]]
    rest = [one for one in run if one not in cut_off]
    cuts = world.partition([one.network for one in cut_off], [one.network for one in rest])
    before = furthest(run)
    await until(rest, lambda: furthest(rest) > before + 1)
    world.heal(cuts)
    made = sorted(step.at for one in rest for step in one.steps if step.epoch == before + 1)
    assert len(made) == len(rest)
    assert made[-1] - made[0] < ONE_STEP_SECONDS
    await stepped(run, 1)
    check_one_line(run)


@pytest.mark.slow
@simulated
async def test_at_the_beginning_of_a_step_a_head_knows_how_fast_the_others_compute(
    world: SimulatedWorld,
) -> None:
    """Their sums are still of the end of the last step, when most peers waited for the slow."""
    fast, slow = replace(MANNER, seconds=0.3), replace(MANNER, seconds=3.0)
    run = await begun(world, MORE_PEERS, manner=fast, slow=slow)
    await stepped(run, 3)
    for _ in range(2):
        await stepped(run, 1)
        for one in heads(run):
            others = [other for other in run if other not in cohort_with(run, one)]
            speed = sum(other.manner.samples / other.manner.seconds for other in others)
            rest = one.tracker.estimate.rest
            assert rest is not None
            assert 0.4 < rest.rate / speed < 1.2


@pytest.mark.slow
@simulated
async def test_when_a_head_dies_in_a_step_its_cohort_still_knows_what_the_others_have(
    world: SimulatedWorld,
) -> None:
    """It plans its last batches now."""
    run = await begun(world, manner=replace(MANNER, target=3 * MANNER.target))
    for _ in range(2):
        await stepped(run, 1)
        await trio.sleep(6.0)
        head = heads(run)[0]
        mates = [one for one in cohort_with(run, head) if one is not head]
        assert mates
        before = {one: samples_of_the_others(one) for one in mates}
        assert all(before.values())
        head.kill()
        for _ in range(20):
            await trio.sleep(0.1)
            for one in mates:
                assert samples_of_the_others(one) >= 0.9 * before[one]
    check_one_line(run)


def samples_of_the_others(one: Trainer) -> float:
    rest = one.tracker.estimate.rest
    assert rest is not None
    return rest.samples


@pytest.mark.slow
@simulated
async def test_a_head_that_does_nothing_is_replaced(world: SimulatedWorld) -> None:
    run = await begun(world, MORE_PEERS)
    await stepped(run, 1)
    head = heads(run)[0]
    others = [one for one in run if one is not head]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CohortRounds, "_as_head", idle_at(head.network.peer_id))
        before, began = furthest(others), trio.current_time()
        number = cohort_of(RUN, head.network.peer_id, count_of(head))
        bereft = [
            one for one in others if cohort_of(RUN, one.network.peer_id, count_of(head)) == number
        ]
        assert bereft
        await until(others, lambda: furthest(others) >= before + 4)
        seconds = trio.current_time() - began
        await until(others, lambda: all(furthest([one]) >= before + 4 for one in bereft))
    assert seconds < 4 * 4.0 + 2.5 * MATCHMAKING_SECONDS, "it held up more than two rounds"
    check_one_line(run)


def idle_at(peer: PeerId) -> Callable[..., Awaitable[Outcome]]:
    """A head's part in a round that this peer never plays."""
    plays = CohortRounds._as_head

    async def played(self: CohortRounds, *arguments: Any) -> Outcome:
        if self._me == peer:
            await trio.sleep_forever()
        return await plays(self, *arguments)

    return played


@pytest.mark.slow
@simulated
async def test_a_head_that_tells_of_too_many_samples_of_the_others_is_not_believed_again(
    world: SimulatedWorld,
) -> None:
    run = await begun(world)
    await stepped(run, 1)
    count = count_of(run[0])
    liar = max(heads(run), key=lambda one: len(cohort_with(run, one)))
    members = [one for one in cohort_with(run, liar) if one is not liar]
    usual = Tracker._rest_to_tell

    def boasting(tracker: Tracker, mine: ProgressSlot) -> OtherCohorts | None:
        rest = usual(tracker, mine)
        if rest is None or tracker is not liar.tracker:
            return rest
        return replace(rest, samples=float(MANNER.target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracker, "_rest_to_tell", boasting)
        await until(run, lambda: not any(tells(one) for one in members), 60.0)
        await stepped(run, 1)  # some have begun this one while they believed it
        await stepped(run, 2)
    assert count_of(run[0]) == count
    brought = [step.samples for step in run[0].steps[-2:]]
    assert all(one > 0.9 * MANNER.target for one in brought), brought
    check_one_line(run)


@pytest.mark.slow
@simulated
async def test_a_head_that_keeps_samples_of_its_cohort_back_is_doubted(
    world: SimulatedWorld,
) -> None:
    """What it says that its cohort has counts less and less often: the others compute the step
    without it."""
    run = await begun(world)
    await stepped(run, 1)
    liar = max(heads(run), key=lambda one: len(cohort_with(run, one)))
    usual = CohortRounds._in_cohort

    async def keeping(rounds: CohortRounds, *arguments: Any) -> Any:
        found = await usual(rounds, *arguments)
        if rounds._me != liar.network.peer_id or not isinstance(found, CohortAverage):
            return found
        return replace(found, request=replace(found.request, weight=0.2 * found.request.weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CohortRounds, "_in_cohort", keeping)
        since = furthest(run)
        await stepped(run, 7)
    brought = {step.epoch: step.samples for one in run for step in one.steps}
    shares = [share / MANNER.target for epoch, share in brought.items() if epoch > since + 1]
    missing = 0.8 * len(cohort_with(run, liar)) / len(run)
    assert min(shares) < 1.0 - missing / 2, "it is believed again now and then"
    assert sum(share > 1.0 - missing / 2 for share in shares) >= len(shares) / 2, shares
    check_one_line(run)


def cohort_with(all_of_them: Sequence[Trainer], one: Trainer) -> list[Trainer]:
    count = count_of(one)
    number = cohort_of(RUN, one.network.peer_id, count)
    return [
        other
        for other in living(all_of_them)
        if cohort_of(RUN, other.network.peer_id, count) == number
    ]


def tells(member: Trainer) -> bool:
    """Whether this member believes what its head tells."""
    rest = member.tracker.estimate.rest
    return rest is not None and rest.told_by is not None


@pytest.mark.slow
def test_optimizers_in_threads_of_their_own_hold_the_same_parameters() -> None:
    """Ten peers in groups of at most eight, with real gradients and codecs. Each can show another
    that it has made the last step, by the decision of the heads."""
    settings = replace(LINE, target_batch=10 * 4 * 3, group_size=GROUP, codec="float16")
    enough = threading.Event()
    bridges: dict[int, Bridge] = {}
    parameters: dict[int, dict[int, bytes]] = {number: {} for number in range(10)}

    def train(bridge: Bridge, number: int) -> None:
        bridges[number] = bridge
        model, optimizer = optimizer_of(bridge)
        while not enough.is_set():
            batch(model, optimizer)
            state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            parameters[number][optimizer.epoch] = state
            steps = steps_by_all(bridges)
            if len(steps) >= STEPS_IN_THREADS:
                enough.set()
            time.sleep(0.1)  # the peer's speed

    shown: list[Lineage] = []

    async def main() -> None:
        async with training_world(4 * PATIENCE_SECONDS) as world:  # ten threads, and a minute alone
            peers = await world.peers(10, settings)
            await world.train(peers, train)
            assert peers[0].collaboration is not None
            shows = peers[0].collaboration.tracker.step_shown_by
            histories = {
                event.epoch: event.history
                for event in bridges[0].events
                if isinstance(event, StepTaken)
            }
            last = max(histories)
            for one in peers[1:]:
                digest = await shows(one.peer, last)
                if digest is not None:
                    shown.append(Lineage(last, next_history(histories[last - 1], last, digest)))
            assert {*shown} == {Lineage(last, histories[last])}

    trio.run(main)
    assert len(shown) >= 7, "but one that takes no part any more"
    steps = steps_by_all(bridges)
    assert len(steps) >= STEPS_IN_THREADS
    for histories in lines_of(bridges.values()).values():
        assert len(histories) == 1
    for epoch in steps:
        held = {found[epoch + 1] for found in parameters.values() if epoch + 1 in found}
        assert len(held) == 1, epoch


def steps_by_all(bridges: Mapping[int, Bridge]) -> set[int]:
    """The epochs that ended with a step of all ten, by cohorts."""
    made = [
        {
            event.epoch
            for event in tuple(bridge.events)
            if isinstance(event, StepTaken) and event.peers == 10 > len(event.members)
        }
        for bridge in tuple(bridges.values())
    ]
    return set.intersection(*made) if len(made) == 10 else set()
