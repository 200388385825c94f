"""The shares of a plan: exact, the same bits for all, and as good as appendix B promises."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import ProtocolMisuse
from protocols.moshpit.plan import (
    Members,
    best_shares,
    equal_shares,
    fractions_for,
    predicted_seconds,
    seconds_of,
    shortest_seconds,
)
from protocols.moshpit.plan_strategy import programmed_shares
from tests.moshpit.appendix_b import appendix_b
from tests.moshpit.collaborations import (
    VECTOR_BYTES,
    all_contribute,
    permuted,
    setup,
    some_contribute,
)

few = settings(max_examples=15, deadline=None)
many = settings(max_examples=60, deadline=None)
CLOSE = 1e-6  # relative: the solver's tolerances, not ours


@pytest.mark.parametrize(
    ("name", "all_reduce", "server"),
    [("A", 1.0, 4.0), ("B", 1.0, 8.0), ("C", 23 / 12, 4.6), ("D", 57 / 34, 1.14)],
)
def test_the_papers_setups_gain_what_they_gain_there(
    name: str, all_reduce: float, server: float
) -> None:
    members = setup(name)
    n = len(members.up)
    ours = seconds_of(best_shares(members), members)
    everybody = seconds_of(equal_shares(members.reduces), members)
    single = min(seconds_of([float(i == j) for j in range(n)], members) for i in range(n))
    assert everybody / ours == pytest.approx(all_reduce, rel=1e-9)
    assert single / ours == pytest.approx(server, rel=1e-9)


def test_a_helper_with_a_fat_link_reduces_most_and_the_rest_a_little() -> None:
    shares = best_shares(setup("D"))
    assert shares[:16] == (pytest.approx(14 / 1710, rel=1e-9),) * 16
    assert shares[16] == pytest.approx(1 - 16 * 14 / 1710, rel=1e-9)


def test_equal_peers_reduce_equal_parts() -> None:
    assert best_shares(setup("A")) == (0.125,) * 8


def test_slow_peers_leave_reducing_to_fast_ones() -> None:
    assert best_shares(setup("C")) == (0.125,) * 8 + (0.0,) * 16


def test_one_fat_peer_without_data_becomes_a_parameter_server() -> None:
    members = Members([1.0] * 4 + [100.0], [1.0] * 4 + [100.0], [True] * 4 + [False], [True] * 5)
    assert best_shares(members) == (0.0, 0.0, 0.0, 0.0, 1.0)


def test_fat_peers_without_data_beside_equal_ones_share_the_reducing() -> None:
    """BytePS."""
    speeds = [1.0] * 4 + [10.0] * 2
    shares = best_shares(Members(speeds, speeds, [True] * 4 + [False] * 2, [True] * 6))
    assert shares == (0.0, 0.0, 0.0, 0.0, 0.5, 0.5)


def test_a_peer_that_can_only_dial_out_reduces_nothing() -> None:
    assert best_shares(Members([9.0, 1.0, 1.0], [9.0] * 3, [True] * 3, [False, True, True])) == (
        0.0,
        0.5,
        0.5,
    )


def test_a_peer_alone_keeps_everything() -> None:
    members = Members([1.0], [1.0], [True], [True])
    assert best_shares(members) == (1.0,)
    assert shortest_seconds(members) == 0.0


def test_the_only_peer_with_data_reduces_the_part_that_it_could_not_download_in_time() -> None:
    members = Members([10.0, 100.0], [0.1, 100.0], [True, False], [True, True])
    shares = best_shares(members)
    assert seconds_of(shares, members) == pytest.approx(0.1)
    assert shares[0] >= 0.99


@pytest.mark.slow
@few
@given(all_contribute())
def test_it_is_as_fast_as_appendix_b_where_all_contribute(members: Members) -> None:
    ours = seconds_of(best_shares(members), members)
    assert ours * appendix_b(members, {}).fastest == pytest.approx(1.0, rel=CLOSE)


@pytest.mark.slow
@few
@given(some_contribute())
def test_the_shares_of_appendix_b_are_never_faster(members: Members) -> None:
    ours = seconds_of(best_shares(members), members)
    rates = appendix_b(members, {})
    assert ours * rates.fastest > 1 - CLOSE
    theirs = rates.fractions()
    assert theirs is None or seconds_of(theirs, members) > ours * (1 - CLOSE)


@pytest.mark.slow
def test_with_helpers_appendix_b_promises_what_no_cut_of_a_vector_keeps() -> None:
    """Both helpers would reduce all values, each for one contributor and for itself."""
    members = Members([100.0, 100.0, 1.0, 1.0], [100.0] * 4, [True, True, False, False],
                      [False, False, True, True])  # fmt: skip
    assert 1 / appendix_b(members, {}).fastest == pytest.approx(1.0)
    assert seconds_of(best_shares(members), members) == pytest.approx(1.5)


@pytest.mark.slow
@few
@given(some_contribute())
def test_our_shares_agree_with_the_solver(members: Members) -> None:
    solved = programmed_shares(members, {})
    ours = best_shares(members)
    assert seconds_of(ours, members) == pytest.approx(shortest_seconds(members), rel=1e-9)
    assert seconds_of(solved, members) == pytest.approx(shortest_seconds(members), rel=CLOSE)
    assert solved == pytest.approx(ours, abs=1e-5)


@pytest.mark.slow
@many
@given(some_contribute(most=12))
def test_no_other_shares_are_faster(members: Members) -> None:
    n = len(members.up)
    ours = shortest_seconds(members)
    assert seconds_of(best_shares(members), members) == pytest.approx(ours, rel=1e-9)
    assert seconds_of(equal_shares(members.reduces), members) >= ours * (1 - 1e-12)
    chance = random.Random(n)
    for _ in range(10):
        drawn = [chance.random() ** 3 if one else 0.0 for one in members.reduces]
        shares = [one / sum(drawn) for one in drawn]
        assert seconds_of(shares, members) >= ours * (1 - 1e-12)


@few
@given(some_contribute(most=12), st.randoms(use_true_random=False))
def test_the_order_of_the_list_changes_no_bit_of_it(
    members: Members, chance: random.Random
) -> None:
    order = list(range(len(members.up)))
    chance.shuffle(order)
    shares, elsewhere = best_shares(members), best_shares(permuted(members, order))
    assert shortest_seconds(members) == shortest_seconds(permuted(members, order))
    # The rest from rounding to 2^-40 goes to the first of the largest, and to nobody else.
    moved = [shares[i] for i in order]
    assert sum(one != other for one, other in zip(moved, elsewhere, strict=True)) in (0, 2)
    assert elsewhere == pytest.approx(moved, abs=1e-11)


@pytest.mark.slow
@many
@given(some_contribute(most=12))
def test_shares_add_up_to_one_exactly(members: Members) -> None:
    shares = best_shares(members)
    assert math.fsum(shares) == sum(shares) == 1.0
    assert all(share >= 0 for share in shares)
    assert all(not share or one for share, one in zip(shares, members.reduces, strict=True))


@few
@given(some_contribute(most=12), st.floats(1e-3, 1e3))
def test_faster_links_for_all_change_no_share(members: Members, factor: float) -> None:
    faster = members._replace(
        up=[up * factor for up in members.up], down=[down * factor for down in members.down]
    )
    assert best_shares(faster) == pytest.approx(best_shares(members), abs=1e-9)


def test_an_unknown_speed_counts_as_the_median_of_the_known() -> None:
    yes = [True] * 4
    unknown = fractions_for([5e6, 0.0, 1e6, 3e6], [9e6, 9e6, 0.0, 0.0], yes, yes)
    assert unknown == fractions_for([5e6, 3e6, 1e6, 3e6], [9e6] * 4, yes, yes)


def test_where_no_speed_is_known_all_are_the_same() -> None:
    nothing, yes = [0.0] * 8, [True] * 8
    assert fractions_for(nothing, nothing, yes, yes) == (0.125,) * 8


def test_a_round_takes_as_long_as_its_slowest_member() -> None:
    up, down, contributes, reduces = setup("A")
    seconds = predicted_seconds([1 / 8] * 8, up, down, contributes, VECTOR_BYTES)
    assert seconds == pytest.approx(1.75 * VECTOR_BYTES / up[0])
    assert fractions_for(up, down, contributes, reduces) == (0.125,) * 8


@pytest.mark.parametrize(
    ("up", "contributes", "reduces"),
    [
        ([1.0], [True, True], [True, True]),
        ([], [], []),
        ([1.0, 1.0], [False, False], [True, True]),
        ([1.0, 1.0], [True, True], [False, False]),
        ([1.0, -1.0], [True, True], [True, True]),
        ([1.0, math.nan], [True, True], [True, True]),
        ([1.0, math.inf], [True, True], [True, True]),
    ],
)
def test_a_roster_that_cannot_be_planned_is_misuse(
    up: list[float], contributes: list[bool], reduces: list[bool]
) -> None:
    with pytest.raises(ProtocolMisuse):
        fractions_for(up, up, contributes, reduces)


def test_the_plan_of_a_round_takes_less_than_a_millisecond() -> None:
    chance = random.Random(16)
    speeds = [chance.uniform(1e6, 1e8) for _ in range(16)]
    yes = [True] * 16
    assert _fastest(lambda: fractions_for(speeds, speeds, yes, yes)) < 0.001


def _fastest(action: Callable[[], object]) -> float:
    """The time of twenty, in CPU time: it waits for nothing, so a busy machine does not matter."""
    seconds = []
    for _ in range(20):
        began = time.process_time()
        action()
        seconds.append(time.process_time() - began)
    return min(seconds)
