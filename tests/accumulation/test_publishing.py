"""When a peer publishes its progress again, and how its rate is measured."""

from __future__ import annotations

import pytest

from protocols.accumulation.estimate import Estimate
from protocols.accumulation.progress_slot import SAY_AGAIN_SECONDS, ProgressSlot
from protocols.accumulation.publishing import SHORTEST_SECONDS, Said, say_again_in
from protocols.accumulation.rate_meter import RateMeter
from tests.accumulation.progress_slots import history, peers, slot

TARGET = 1000
BATCH = 8


def again_in(said: ProgressSlot, mine: ProgressSlot, now: float) -> float:
    found = Estimate(1, 5, history(), target_samples=TARGET, peers=peers(*range(9)))
    return say_again_in(Said(said, 0.0), mine, found, BATCH, now)


def test_nothing_is_said_while_the_others_carry_it_forward_rightly() -> None:
    assert again_in(slot(10, 20.0), slot(50, 20.0), 2.0) == SAY_AGAIN_SECONDS - 2.0


def test_a_batch_under_way_is_no_error_and_two_are() -> None:
    assert again_in(slot(10, 20.0), slot(42, 20.0), 2.0) > 0.0
    assert again_in(slot(10, 20.0), slot(34, 20.0), 2.0) == 0.0


def test_samples_are_said_at_most_so_often() -> None:
    assert again_in(slot(10), slot(80), 0.1) == pytest.approx(SHORTEST_SECONDS - 0.1)


@pytest.mark.parametrize(
    "other", [slot(10, epoch=6), slot(10, at=1), slot(10, averaging=True), slot(9)]
)
def test_whatever_else_has_changed_is_said_at_once(other: ProgressSlot) -> None:
    assert again_in(slot(10), other, 0.01) == 0.0


def test_a_peer_that_has_nothing_new_says_that_it_is_there() -> None:
    assert again_in(slot(10), slot(10), SAY_AGAIN_SECONDS) == 0.0


def test_the_rate_is_that_of_computing_without_the_pauses() -> None:
    meter = RateMeter()
    assert meter.rate(0.0) == 0.0
    meter.began(0.0)
    for second in range(1, 6):
        meter.counted(16, float(second))
    assert meter.rate(5.0) == pytest.approx(16.0)
    meter.paused()
    assert meter.rate(60.0) == pytest.approx(16.0)
    meter.began(100.0)
    meter.counted(16, 101.0)
    assert meter.rate(101.0) == pytest.approx(16.0)


def test_a_peer_that_has_fallen_silent_slows_down() -> None:
    meter = RateMeter()
    meter.began(0.0)
    meter.counted(10, 1.0)
    assert meter.rate(3.0) == pytest.approx(10.0)
    assert meter.rate(21.0) == pytest.approx(1.0)


def test_the_rate_follows_a_machine_that_became_slower() -> None:
    meter = RateMeter()
    meter.began(0.0)
    for second in range(1, 31):
        meter.counted(100, float(second))
    for second in range(31, 71):
        meter.counted(10, float(second))
    assert meter.rate(70.0) < 13.0
