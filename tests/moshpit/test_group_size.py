"""Appendix C: groups as large as their members are reliable."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import ProtocolMisuse
from protocols.moshpit.group_size import (
    best_group_size,
    failure_rate,
    rounds_needed,
)

rates = st.floats(0.0, 0.9)


def expected_attempts(peers: int, group_size: int, rate: float) -> float:
    """The mean number of rounds that a peer needs to get the average of all."""
    return rounds_needed(peers, group_size) / (1.0 - rate) ** group_size


@settings(deadline=None)
@given(st.integers(2, 200), rates, st.integers(2, 250))
def test_no_other_size_takes_fewer_attempts(peers: int, rate: float, most: int) -> None:
    best = best_group_size(peers, rate, most)
    assert 2 <= best <= most
    ours = expected_attempts(peers, best, rate)
    for size in range(2, min(most, peers) + 1):
        assert ours <= expected_attempts(peers, size, rate) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(2, 10_000), rates, rates)
def test_less_reliable_peers_never_make_larger_groups(peers: int, one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assert best_group_size(peers, high, peers) <= best_group_size(peers, low, peers)


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(2, 100))
def test_the_computed_number_of_rounds_reaches_everybody_and_one_less_does_not(
    peers: int, size: int
) -> None:
    rounds = rounds_needed(peers, size)
    assert size**rounds >= peers
    assert rounds == 0 or size ** (rounds - 1) < peers


def test_rounds_are_counted_in_whole_numbers() -> None:
    assert [rounds_needed(10**k, 10) for k in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert math.log(1000, 10) != 3


def test_reliable_peers_average_in_one_group() -> None:
    """As in all experiments of the paper."""
    assert best_group_size(24, 0.005, 64) == 24


def test_very_unreliable_peers_average_in_twos() -> None:
    assert best_group_size(1024, 0.4, 64) == 2


def test_a_thousand_peers_of_which_one_in_200_fails_make_a_grid_of_32() -> None:
    """The setting of Moshpit's experiments."""
    assert best_group_size(1024, 0.005, 1024) == 32
    assert expected_attempts(1024, 32, 0.005) == pytest.approx(2 / 0.995**32)


def test_a_group_is_no_larger_than_allowed() -> None:
    assert best_group_size(1000, 0.0, 64) == 32
    assert best_group_size(10_000, 0.0, 64) == 22


def test_a_peer_alone_is_a_group_of_one() -> None:
    assert best_group_size(1, 0.1, 64) == 1


@pytest.mark.parametrize("size", [2, 1_000_000])
def test_hopeless_peers_are_no_overflow(size: int) -> None:
    assert best_group_size(1_000_000, 0.999, size) == 2


def test_the_rate_begins_at_one_in_200_and_comes_to_what_was_observed() -> None:
    assert failure_rate(0, 0) == 0.005
    assert failure_rate(100, 1000) == pytest.approx(0.1, rel=0.2)
    assert failure_rate(10_000, 100_000) == pytest.approx(0.1, rel=0.01)
    assert 0 < failure_rate(0, 10**9) < failure_rate(10**9, 10**9) < 1


@pytest.mark.parametrize("wrong", [(-1, 5), (6, 5)])
def test_impossible_observations_are_misuse(wrong: tuple[int, int]) -> None:
    with pytest.raises(ProtocolMisuse):
        failure_rate(*wrong)


@pytest.mark.parametrize(("peers", "rate", "most"), [(0, 0.1, 4), (4, 0.1, 1), (4, 1.0, 4),
                                                     (4, -0.1, 4), (4, math.nan, 4)])  # fmt: skip
def test_impossible_arguments_are_misuse(peers: int, rate: float, most: int) -> None:
    with pytest.raises(ProtocolMisuse):
        best_group_size(peers, rate, most)
