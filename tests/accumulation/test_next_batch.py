"""When a peer begins its next batch: `NextBatch`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import trio

from lab.simulate.virtual_trainer import Manner, Trainer, trainer
from protocols.accumulation.driver import EXTRA_SHARE, LONGEST_RETRY_SECONDS, NextBatch
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.lifecycle import Average, Estimated, Life, Lifecycle, Mode, Phase
from protocols.identity import PeerId
from protocols.testing.settings import NodeSettings
from protocols.testing.world import SimulatedWorld, run_simulation

HISTORY = b"h" * 16
BATCH, PART = 16, 160
BEFORE_DUE = Estimate(
    1,
    3,
    HISTORY,
    own_part=PART,
    own_batch=BATCH,
    own_batch_seconds=2.0,
    others_ready_in_seconds=1.5,
    expected=8,
    target_samples=8 * PART,
)


def batches_beyond_the_part(found: Estimate, part: int = PART, *, delayed: bool = True) -> int:
    """How many it begins although it has its part, if the others never come to an end."""
    mode = Mode(found.target_samples, delayed=delayed)
    decides = NextBatch(mode)
    life = Life(Phase.ACCUMULATING, found.epoch, HISTORY, part)
    count = 0
    while decides.waits(life, replace(found, own_part=life.samples), 0.0) <= 0.0:
        count += 1
        life = replace(life, samples=life.samples + found.own_batch)
        assert count < 1000
    return count


def test_one_with_a_part_of_many_batches_computes_another_while_the_others_finish_theirs() -> None:
    assert batches_beyond_the_part(BEFORE_DUE) == 1
    assert batches_beyond_the_part(BEFORE_DUE, delayed=False) == 0


def test_nobody_else_waits_for_that_batch() -> None:
    decides = NextBatch(Mode(BEFORE_DUE.target_samples, delayed=True))
    life = Life(Phase.ACCUMULATING, BEFORE_DUE.epoch, HISTORY, PART - BATCH)
    assert decides.waits(life, BEFORE_DUE, 0.0) == 0.0
    assert not decides.is_extra
    life = replace(life, samples=PART)
    assert decides.waits(life, BEFORE_DUE, 0.0) == 0.0
    assert decides.is_extra
    assert decides.waits(replace(life, phase=Phase.AVERAGING), BEFORE_DUE, 0.0) == 0.0
    assert not decides.is_extra


def test_one_without_samples_begins_none_that_others_do_not_know_of() -> None:
    found = replace(BEFORE_DUE, own_part=0.0)
    life = Life(Phase.ACCUMULATING, found.epoch, HISTORY)
    assert NextBatch(Mode(found.target_samples, delayed=True)).waits(life, found, 0.0) > 0.0


def test_a_round_waits_a_moment_for_it_at_most() -> None:
    found = replace(BEFORE_DUE, own_batch_seconds=60.0)
    assert batches_beyond_the_part(replace(found, others_ready_in_seconds=58.0)) == 0
    assert batches_beyond_the_part(replace(found, others_ready_in_seconds=59.0)) == 1


def test_it_waits_if_another_batch_would_be_done_long_after_the_others() -> None:
    assert batches_beyond_the_part(replace(BEFORE_DUE, others_ready_in_seconds=0.9)) == 0
    assert batches_beyond_the_part(replace(BEFORE_DUE, others_ready_in_seconds=math.inf)) == 0
    assert batches_beyond_the_part(replace(BEFORE_DUE, own_batch_seconds=0.0)) == 0


@pytest.mark.parametrize("batches", [1, 2, 7, 8, 12, 16, 64, 1000])
def test_it_exceeds_its_part_by_an_eighth_of_the_mean_part_at_most(batches: int) -> None:
    found = replace(BEFORE_DUE, target_samples=8 * batches * BATCH)
    for part in (batches - 1, batches, batches + 1):
        extra = batches_beyond_the_part(found, part * BATCH)
        assert extra == math.floor(batches * EXTRA_SHARE), "alike for all that are as fast"


def test_in_the_next_epoch_it_may_again() -> None:
    mode = Mode(BEFORE_DUE.target_samples, delayed=True)
    decides = NextBatch(mode)
    for epoch in range(3, 6):
        life = Life(Phase.ACCUMULATING, epoch, HISTORY, PART)
        found = replace(BEFORE_DUE, epoch=epoch)
        assert decides.waits(life, found, 0.0) == 0.0


def test_one_that_computes_beside_rounds_begins_them_a_moment_before_the_others_are_ready() -> None:
    """It computes for the next epoch meanwhile."""
    early = replace(BEFORE_DUE, early_seconds=2.0, done_by_others=PART)
    assert early.is_due_with(PART)
    assert not replace(early, early_seconds=1.0).is_due_with(PART)
    assert not early.is_due_with(PART - BATCH), "not before it has its own part"


def test_those_that_begin_early_wait_for_the_last_batch_of_one_that_has_not_its_part() -> None:
    begun = replace(BEFORE_DUE, begun=frozenset({PeerId("other")}), others_samples=8 * PART)
    assert begun.is_due_with(PART - BATCH), "too late for another batch"
    assert not replace(begun, early_seconds=2.0).is_due_with(PART - BATCH)
    assert replace(begun, early_seconds=2.0).is_due_with(PART - 2 * BATCH)
    short = replace(begun, own_batch_seconds=0.25, early_seconds=0.25)
    assert not short.is_due_with(PART - 9 * BATCH), "others have longer batches, and begin earlier"


OTHERS = frozenset(map(PeerId, ("one", "two", "three", "four", "five")))
ALL = OTHERS | {PeerId("six"), PeerId("seven")}


@pytest.mark.parametrize("samples", [0, BATCH])
def test_none_begins_beside_a_round_that_most_have_begun_if_it_would_come_too_late(
    samples: int,
) -> None:
    """A slow newcomer missed the round by a moment, and computed a batch of 9 s with parameters
    that were over half a second later. So it was late for the next round, and for all others."""
    begun = replace(BEFORE_DUE, begun=OTHERS, coming=ALL, others_ready_in_seconds=math.inf)
    life = Life(Phase.ACCUMULATING, begun.epoch, HISTORY, samples)
    further = replace(begun, begun=frozenset(), coming=ALL - OTHERS)
    for found in (
        begun,
        replace(further, just_ahead=OTHERS),
        replace(further, may_be_ahead=OTHERS),  # nobody has asked them yet
        replace(begun, begun=frozenset({PeerId("one")}), coming=ALL - OTHERS, just_ahead=OTHERS),
    ):
        assert NextBatch(Mode(begun.target_samples)).waits(life, found, 0.0) > 0.0
    for found in (
        replace(begun, begun=frozenset(sorted(OTHERS)[:4])),  # half of all
        replace(begun, own_batch_seconds=0.5),  # it is done while they wait for others
        replace(begun, own_batch_seconds=0.0),  # nobody knows
        replace(further, ahead=OTHERS),  # any name may say that it is far ahead
    ):
        assert NextBatch(Mode(begun.target_samples)).waits(life, found, 0.0) == 0.0


def test_one_that_its_cohort_waits_for_comes_to_that_round_without_samples() -> None:
    """Over slow links the last one got a step ten seconds after the first. Its cohort waited for it
    in the next round, and it waited for the end of that round."""
    begun = replace(
        BEFORE_DUE,
        number=2,
        begun=OTHERS,
        coming=ALL,
        is_due=True,
        is_waited_for=True,
    )
    mode = Mode(begun.target_samples)

    def comes(found: Estimate) -> bool:
        lifecycle = Lifecycle(mode, epoch=found.epoch, history=HISTORY)
        return [*lifecycle.take(Estimated(found))][:1] == [
            Average(found.epoch, HISTORY, 0, found.expected, coming=ALL)
        ]

    short = replace(begun, own_batch_seconds=begun.patience_seconds)
    for found in (begun, short, replace(begun, spared=8)):
        assert comes(found), found
    for found in (
        replace(begun, is_waited_for=False),
        replace(begun, own_batch_seconds=0.5),  # it computes one while they wait
        replace(short, spared=1),
        replace(begun, is_due=False),
    ):
        assert not comes(found), found
    life = Life(Phase.ACCUMULATING, begun.epoch, HISTORY)
    assert NextBatch(mode).waits(life, short, 0.0) == 0.0
    assert NextBatch(mode).waits(replace(life, samples=BATCH), short, 0.0) > 0.0
    assert NextBatch(mode).waits(life, replace(short, is_waited_for=False), 0.0) > 0.0
    assert NextBatch(mode).waits(life, begun, 0.0) > 0.0


def test_those_that_claim_for_ever_that_they_have_begun_cost_it_a_batch_an_epoch() -> None:
    begun = replace(BEFORE_DUE, begun=OTHERS, coming=ALL, others_ready_in_seconds=0.0)
    decides = NextBatch(Mode(begun.target_samples))
    life = Life(Phase.ACCUMULATING, begun.epoch, HISTORY)
    now = 0.0
    while (seconds := decides.waits(life, begun, now)) > 0.0:
        now += seconds
        assert now < 60.0
    assert now <= LONGEST_RETRY_SECONDS
    assert decides.waits(life, begun, now) == 0.0


def test_one_that_has_waited_for_the_others_batches_waits_also_for_the_round_that_it_missed() -> (
    None
):
    waits = replace(BEFORE_DUE, own_part=0.0, coming=ALL, others_ready_in_seconds=0.0)
    decides = NextBatch(Mode(waits.target_samples))
    life = Life(Phase.ACCUMULATING, waits.epoch, HISTORY)
    assert decides.waits(life, waits, 0.0) > 0.0
    begun = replace(waits, begun=OTHERS, own_part=math.inf)
    assert decides.waits(life, begun, waits.longest_wait_seconds) > 0.0
    assert decides.waits(life, begun, 60.0) == 0.0


STEPS, PEERS, BATCHES = 4, 8, 12
STEPS_SECONDS = 150.0
SECONDS = (2.25, 2.3, 2.4, 2.5, 2.5, 2.6, 2.65, 2.7)


async def busy_shares(world: SimulatedWorld) -> tuple[list[float], list[float]]:
    """The share of its time in which each peer computes, and the size of each step as a multiple of
    the target. An exchange takes a fifth of a step's time."""
    target = PEERS * BATCHES * BATCH
    link = NodeSettings(upload_bytes_per_second=50_000.0, download_bytes_per_second=50_000.0)
    run: list[Trainer] = []
    for number, seconds in enumerate(SECONDS):
        manner = Manner(seconds, samples=BATCH, target=target, parameters=40_000, delayed=True)
        run.append(trainer(world, f"peer-{number}", manner, run, link))
    await trio.sleep(STEPS_SECONDS)
    made = {step.epoch: step for one in run for step in one.steps}
    begun, ended = made[1].at, made[STEPS].at
    shares = []
    for one in run:
        ends = [batch.at for batch in one.batches if begun < batch.at <= ended]
        shares.append((len(ends) - 1) * one.manner.seconds / (ends[-1] - ends[0]))
    ratios = [made[epoch].samples / target for epoch in range(2, STEPS + 1)]
    return shares, ratios


@pytest.mark.slow
def test_peers_of_nearly_the_same_speed_do_not_wait_for_each_other_beside_rounds() -> None:
    """They once computed for 92 to 98 % of the time: some had one batch fewer in their parts, and
    waited for the others; and then for 98.5 %, while they waited for less than another batch."""
    shares, ratios = run_simulation(busy_shares)
    assert min(shares) >= 0.995
    assert max(ratios) <= 1 + EXTRA_SHARE
