"""The swarm's time is that of most peers, whatever the others say. A wrong clock is told once."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.dht.swarm_time import (
    FAR_OFF_MS,
    PEERS_SAMPLED,
    RIGHT_WITHIN_MS,
    SAMPLE_LIFE_MS,
    FarOff,
    SwarmTime,
    offset_from,
)
from protocols.identity import PeerId
from tests.dht.publishers import HOUR, NOW, SECOND


def peer(number: int) -> PeerId:
    return PeerId(f"peer-{number}")


def hear(time: SwarmTime, number: int, offset: int, local: int = NOW) -> FarOff | None:
    """A peer answers at once, with a time that is so far from our clock."""
    return time.sample(peer(number), local + offset, local, local, local)


def after(*offsets: int) -> SwarmTime:
    time = SwarmTime()
    for number, offset in enumerate(offsets):
        hear(time, number, offset)
    return time


def test_alone_a_node_goes_by_its_own_clock() -> None:
    assert SwarmTime().now_ms(NOW) == NOW


def test_a_clock_that_is_hours_off_is_corrected() -> None:
    assert after(2 * HOUR, 2 * HOUR + 20, 2 * HOUR - 30).now_ms(NOW) == NOW + 2 * HOUR
    assert after(-5 * HOUR, -5 * HOUR, -5 * HOUR).now_ms(NOW) == NOW - 5 * HOUR


def test_a_peer_spoke_half_way_between_asking_and_hearing() -> None:
    time = SwarmTime()
    time.sample(peer(1), NOW + HOUR + 100, NOW, NOW + 200, NOW)
    assert time.offset_ms == HOUR


honest = some.lists(some.integers(-HOUR - 200, -HOUR + 200), min_size=2, max_size=30)
lies = some.lists(some.integers(-NOW, 2**52), max_size=30)


@pytest.mark.slow
@given(honest, lies, some.randoms())
def test_fewer_than_half_of_liars_cannot_move_it_out_of_what_the_honest_say(
    said: list[int], lied: list[int], order: object
) -> None:
    lied = lied[: len(said) - 1]
    everything = said + lied
    order.shuffle(everything)  # type: ignore[attr-defined]
    assert min(said) <= after(*everything).offset_ms <= max(said)


@given(some.lists(some.integers(-(2**50), 2**50), min_size=3, max_size=60))
def test_it_is_the_median(offsets: list[int]) -> None:
    median = statistics.median(offsets)
    wanted = 0 if abs(median) <= RIGHT_WITHIN_MS else median
    assert offset_from(offsets) == pytest.approx(wanted, abs=0.5) or abs(median) < 1002


def test_a_clock_that_is_nearly_right_is_used_as_it_is() -> None:
    assert after(300, 400, 500).offset_ms == 0, "or the swarm's time would wander with each round"
    assert after(1100, 1200, 1300).offset_ms == 1200


def test_a_swarm_of_right_clocks_does_not_wander_however_biased_its_measurements_are() -> None:
    nodes = [SwarmTime() for _ in range(8)]
    for minute in range(500):
        local = NOW + minute * 60 * SECOND
        for node in nodes:
            for number, other in enumerate(nodes):
                if other is not node:
                    node.sample(peer(number), other.now_ms(local) + 90, local, local + 20, local)
    assert [node.offset_ms for node in nodes] == [0] * 8


def test_one_peer_is_believed_as_long_as_nobody_contradicts_it() -> None:
    assert after(HOUR).offset_ms == HOUR
    assert after(HOUR, HOUR + 100).offset_ms == HOUR + 50


def test_of_two_peers_that_contradict_each_other_our_own_clock_decides() -> None:
    assert after(HOUR, 100).offset_ms == 0
    assert after(HOUR, 5 * HOUR).offset_ms == HOUR


def test_a_pair_whose_clocks_differ_agrees_after_one_question() -> None:
    early, late = SwarmTime(), SwarmTime()
    clocks = {early: NOW, late: NOW + 2 * HOUR}
    for one, other in ((early, late), (late, early)):
        local = clocks[one]
        one.sample(peer(1), other.now_ms(clocks[other]), local, local, local)
    assert early.now_ms(clocks[early]) == late.now_ms(clocks[late])


def test_a_peer_has_one_voice_however_often_it_speaks() -> None:
    time = after(HOUR, HOUR + 10, HOUR - 10)
    for _ in range(10):
        hear(time, 99, -HOUR)
    assert time.peers == 4
    assert time.offset_ms == HOUR - 5


def test_only_the_most_recent_peers_are_remembered() -> None:
    time = after(*[-HOUR] * PEERS_SAMPLED, *[HOUR] * PEERS_SAMPLED)
    assert time.peers == PEERS_SAMPLED
    assert time.offset_ms == HOUR


def test_a_peer_that_spoke_recently_is_not_forgotten() -> None:
    majority = PEERS_SAMPLED // 2 + 1
    time = after(*[-HOUR] * majority, *[HOUR] * (PEERS_SAMPLED - majority))
    for number in range(majority):
        hear(time, number, -HOUR)
    for number in range(100, 110):
        hear(time, number, HOUR)
    assert time.peers == PEERS_SAMPLED
    assert time.offset_ms == -HOUR


@pytest.mark.parametrize(
    ("said", "asked", "heard"),
    [
        (NOW + HOUR, NOW, NOW + 10 * SECOND + 1),
        (NOW + HOUR, NOW, NOW - 1),
        (-1, NOW, NOW),
        (2**53 + 1, NOW, NOW),
        (10**400, NOW, NOW),
    ],
    ids=["took too long", "clock put back meanwhile", "before 1970", "no time", "giant"],
)
def test_invalid_measurements_are_left_out(said: int, asked: int, heard: int) -> None:
    time = SwarmTime()
    assert time.sample(peer(1), said, asked, heard, heard) is None
    assert (time.peers, time.offset_ms) == (0, 0)


def test_old_samples_are_forgotten() -> None:
    time = after(HOUR, HOUR, HOUR, HOUR)
    hear(time, 9, 5, NOW + SAMPLE_LIFE_MS + 1)
    assert time.peers == 1
    assert time.offset_ms == 0


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR, 5 * SECOND])
def test_samples_by_a_clock_that_was_set_are_forgotten_however_many_they_are(step: int) -> None:
    """Sixty-four peers, each heard once in a quarter of an hour, outvoted the first right ones."""
    time = after(*[step] * 40)
    assert time.offset_ms == step
    set_to = NOW + step + 10 * SECOND
    time.sample(peer(41), set_to, set_to, set_to, NOW + 10 * SECOND)
    assert time.offset_ms == 0


def test_a_clock_that_is_set_slowly_forgets_nothing() -> None:
    time = SwarmTime()
    for number in range(40):
        slewed = NOW + number * (60 * SECOND + 30)
        time.sample(peer(number), slewed, slewed, slewed, NOW + number * 60 * SECOND)
    assert time.peers == 40


def test_a_wrong_clock_is_said_once() -> None:
    time = SwarmTime()
    told = [hear(time, number, 2 * HOUR + number) for number in range(10)]
    first, *later = told
    assert first == FarOff(2 * HOUR, 1)
    assert later == [None] * 9
    assert "2.0 hours behind the swarm's, according to 1 peer." in str(first)


def test_it_is_said_again_only_after_the_clock_was_right_in_between() -> None:
    time = SwarmTime()
    assert hear(time, 1, 3 * SECOND) is not None
    assert hear(time, 1, FAR_OFF_MS - 1) is None
    assert hear(time, 1, 3 * SECOND) is None, "it only went back and forth"
    assert hear(time, 1, 0) is None
    told = hear(time, 1, -3 * SECOND)
    assert told is not None
    assert "3.0 seconds ahead of the swarm's" in str(told)


def test_a_clock_that_is_a_little_off_is_not_reported() -> None:
    assert hear(SwarmTime(), 1, FAR_OFF_MS) is None
