"""How a run is divided into cohorts."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.identity import PeerId
from protocols.moshpit.cohorts import (
    FEWEST_COHORTS,
    LARGEST_UPLINK,
    MOST_COHORTS,
    SLOWEST_UPLINK,
    SMALLEST_GROUP,
    UPLINK_FACTOR,
    cohort_of,
    in_order,
    next_count,
    turn_of,
    uplink_of,
)

PEERS = [PeerId(f"peer-{number}") for number in range(1000)]
GROUP = 64


def settled(peers: int, count: int = 1) -> int:
    """How many cohorts there are after many steps of this many peers."""
    for _ in range(10):
        count = next_count(count, peers, GROUP)
    return count


def test_up_to_a_group_there_are_no_cohorts() -> None:
    assert {next_count(1, peers, GROUP) for peers in range(1, GROUP)} == {1}


@pytest.mark.parametrize(("peers", "count"), [(64, 4), (128, 4), (256, 8), (512, 16), (1000, 32)])
def test_a_cohort_has_between_a_quarter_and_half_of_a_group_on_average(
    peers: int, count: int
) -> None:
    assert settled(peers) == count
    assert GROUP / 4 <= peers / count <= GROUP / 2


def test_all_peers_of_a_run_of_a_thousand_fit_into_their_cohorts() -> None:
    sizes = Counter(cohort_of("poem", peer, 32) for peer in PEERS)
    assert len(sizes) == 32
    assert max(sizes.values()) < GROUP


@given(st.integers(1, 5000), st.integers(2, 256))
def test_the_number_of_cohorts_comes_to_rest(peers: int, group_size: int) -> None:
    count = 1
    for _ in range(12):
        count = next_count(count, peers, group_size)
    assert next_count(count, peers, group_size) == count
    assert count == 1 or FEWEST_COHORTS <= count <= min(MOST_COHORTS, group_size)


@given(st.integers(SMALLEST_GROUP, 256), st.floats(0.9, 1.1))
def test_a_few_peers_more_or_fewer_change_no_number_back_and_forth(
    group_size: int, change: float
) -> None:
    """At every threshold, a tenth of the peers may come and go."""
    for peers in range(group_size, 40 * group_size, group_size // 4):
        count = 1
        for _ in range(12):
            count = next_count(count, peers, group_size)
        seen = [count]
        for step in range(8):
            now = round(peers * change) if step % 2 else peers
            count = next_count(count, now, group_size)
            seen.append(count)
        changes = sum(one != other for one, other in pairwise(seen))
        assert changes <= 1, (peers, seen)


def test_twice_as_many_cohorts_divide_each_and_mix_none() -> None:
    for peer in PEERS:
        assert cohort_of("poem", peer, 8) % 4 == cohort_of("poem", peer, 4)


def test_the_order_of_heads_depends_on_the_run_and_on_nothing_else() -> None:
    some = PEERS[:20]
    assert in_order("poem", some) == in_order("poem", reversed(some))
    assert in_order("poem", some) != in_order("prose", some)
    without_first = in_order("poem", some)[1:]
    assert in_order("poem", without_first) == without_first


def test_peers_become_heads_by_their_turns_and_of_equal_ones_by_the_hash() -> None:
    some = in_order("poem", PEERS[:20])
    turns = dict.fromkeys(some[:3], 2) | {some[9]: -1}
    assert in_order("poem", some, turns) == [some[9], *some[3:9], *some[10:], *some[:3]]


def test_the_fastest_links_come_first_and_those_that_were_in_no_step_last() -> None:
    turns = [
        turn_of(follows=follows, uplink=uplink)
        for follows in (False, True)
        for uplink in range(LARGEST_UPLINK, -1, -1)
    ]
    assert turns == sorted(set(turns))
    assert 0 <= turns[0] < turns[-1] <= 255, "it has a byte in an entry"


@pytest.mark.parametrize(
    ("bytes_per_second", "uplink"),
    [
        (0.0, 0), (5e-324, 1), (1.0, 1), (31e3, 1), (125e3, 2), (2.5e6, 4), (12.5e6, 5), (50e6, 6),
        (1e12, 6), (math.inf, 6),
    ],
)  # fmt: skip
def test_links_have_classes(bytes_per_second: float, uplink: int) -> None:
    """A measurement of a week ago counts for hardly more than nothing, and is no error."""
    assert uplink_of(bytes_per_second) == uplink


@pytest.mark.parametrize("megabits", [0.5, 1, 2, 5, 10, 20, 25, 40, 50, 100, 200])
def test_a_usual_uplink_has_one_class_however_it_is_measured(megabits: float) -> None:
    """To within some percent, as in a run of eight equal ones: 57 to 65 where all had 62.5."""
    uplink = megabits * 125_000.0
    assert uplink_of(0.91 * uplink) == uplink_of(uplink) == uplink_of(1.06 * uplink)


def test_a_link_stays_in_its_class_while_it_is_near_it() -> None:
    edge = SLOWEST_UPLINK * UPLINK_FACTOR**2.5  # between classes 3 and 4
    assert uplink_of(0.9 * edge, before=4) == 4
    assert uplink_of(1.1 * edge, before=3) == 3
    assert uplink_of(0.9 * edge) == 3
    assert uplink_of(1.1 * edge) == 4
    assert uplink_of(0.6 * edge, before=4) == 3
    assert uplink_of(0.0, before=4) == 0
