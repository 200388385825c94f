"""Which state is the run's: a peer may be behind, outvoted, left alone, or none of these."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.accumulation.lineage import (
    FORK_SECONDS,
    START_SECONDS,
    FindingPatience,
    Lineage,
    Voter,
    behind,
    fork,
    left_alone,
    needed,
)
from protocols.identity import PeerId
from tests.accumulation.progress_slots import history, peers


def at(epoch: int, name: int = 0) -> Lineage:
    return Lineage(epoch, history(name))


def voters(*lineages: Lineage, following: Sequence[int] = ()) -> list[Voter]:
    return [
        Voter(PeerId(f"peer-{number}"), one, number in following)
        for number, one in enumerate(lineages)
    ]


@pytest.mark.parametrize(("others", "enough"), [(1, 1), (2, 2), (5, 2), (8, 2), (9, 3), (16, 4)])
def test_how_many_peers_have_to_be_ahead(others: int, enough: int) -> None:
    assert needed(others) == enough


def test_the_only_other_peer_is_followed() -> None:
    found = behind(at(4), voters(at(7)))
    assert found is not None
    assert (found.epoch, found.history, found.peers) == (7, None, peers(0))
    assert found.reason == "the only other is ahead, at epoch 7 and this peer at 4."


def test_one_liar_among_several_drags_nobody_along() -> None:
    assert behind(at(4), voters(at(10**9), at(4))) is None


def test_the_latest_epoch_with_enough_backing_is_followed() -> None:
    found = behind(at(4), voters(at(10**9), at(6), at(6), at(5)))
    assert found is not None
    assert found.epoch == 6
    assert found.history is None
    assert "4 of 4" in found.reason


def test_of_two_histories_ahead_the_one_with_more_peers_is_followed() -> None:
    found = behind(at(4), voters(at(5, 1), at(5, 2), at(5, 2), at(4)))
    assert found is not None
    assert (found.history, found.peers) == (history(2), peers(1, 2))


def test_a_run_goes_on_from_the_one_peer_that_has_a_state() -> None:
    found = behind(at(0), voters(at(500), at(0), at(0)))
    assert found is not None
    assert found.peers == peers(0)
    assert left_alone(at(500), voters(at(0), at(0), at(0))) is None


def test_the_smaller_side_of_a_fork_gives_way() -> None:
    found = fork(at(5, 1), voters(at(5, 1), at(5, 2), at(5, 2), at(5, 2)))
    assert found is not None
    assert (found.history, found.peers, found.seconds) == (history(2), peers(1, 2, 3), FORK_SECONDS)
    assert fork(at(5, 2), voters(at(5, 1), at(5, 2))) is None


def test_of_equal_sides_the_larger_history_gives_way() -> None:
    assert fork(at(5, 1), voters(at(5, 2))) is None
    assert fork(at(5, 2), voters(at(5, 1))) is not None


def test_peers_that_begin_with_parameters_of_their_own_agree_quickly() -> None:
    found = fork(at(0, 2), voters(at(0, 1), at(0, 3)))
    assert found is not None
    assert (found.history, found.seconds) == (history(1), START_SECONDS)


def test_newcomers_do_not_outvote_the_one_whose_state_they_have() -> None:
    """They have it one step late, and each sees the other and the peer that is further."""
    first, newcomer = at(40, 1), at(39)
    found = behind(newcomer, voters(first, newcomer, following=[1]))
    assert found is not None
    assert (found.epoch, found.peers) == (40, peers(0))
    assert left_alone(first, voters(newcomer, newcomer, following=[0, 1])) is None
    assert fork(first, voters(at(40, 0), at(40, 0), following=[0, 1])) is None
    assert fork(at(40, 0), voters(first, at(40, 0), following=[1]), follows=True) is not None


def test_where_there_are_only_followers_the_latest_goes_on() -> None:
    """The peer that gave them their state is gone."""
    found = behind(at(39), voters(at(40), following=[0]))
    assert found is not None
    assert left_alone(at(40), voters(at(39), following=[0]), follows=True) is None
    assert fork(at(40, 2), voters(at(40, 1), following=[0]), follows=True) is not None
    assert fork(at(40, 1), voters(at(40, 2), following=[0]), follows=True) is None
    assert behind(at(39), voters(at(45), following=[0])) is not None, "also by one who does not"
    assert left_alone(at(45), voters(at(39)), follows=True) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=2, max_size=9)
)
def test_peers_that_see_the_same_slots_agree_on_the_winner(
    where: list[tuple[int, int, bool]],
) -> None:
    lineages = [at(epoch, name) for epoch, name, _ in where]
    following = [number for number, one in enumerate(where) if one[0] and one[2]]
    everybody = voters(*lineages, following=following)
    stays = []
    for one in everybody:
        others = [other for other in everybody if other != one]
        if not (behind(one.at, others) or fork(one.at, others, follows=one.follows)):
            stays.append(one.at)
    for epoch in {one.epoch for one in stays}:
        assert len({one.history for one in stays if one.epoch == epoch}) == 1
    assert stays, "somebody has the state that the others take"


def test_a_peer_ahead_of_a_run_that_goes_on_without_it_goes_back() -> None:
    found = left_alone(at(9, 3), voters(at(7), at(7), at(6)))
    assert found is not None
    assert (found.epoch, found.history, found.peers) == (7, history(), peers(0, 1))
    assert left_alone(at(9, 3), voters(at(9, 3), at(7), at(7))) is None
    assert left_alone(at(9, 3), voters(at(7))) is None, "it will follow"


def test_a_fork_counts_when_it_has_lasted() -> None:
    patience = FindingPatience()
    lost = fork(at(5, 2), voters(at(5, 1)))
    assert patience.settled(lost, 0.0, 0.5) is None
    assert patience.settled(lost, FORK_SECONDS, 0.5) is None
    assert patience.settled(lost, 1.5 * FORK_SECONDS, 0.5) == lost


def test_a_gap_begins_the_time_again() -> None:
    patience = FindingPatience()
    lost = fork(at(5, 2), voters(at(5, 1)))
    patience.settled(lost, 0.0, 0.0)
    patience.settled(None, 1.0, 0.0)
    assert patience.settled(lost, FORK_SECONDS, 0.0) is None
    assert patience.settled(lost, 2 * FORK_SECONDS, 0.0) == lost


def test_a_fork_that_goes_on_through_epochs_is_one() -> None:
    patience = FindingPatience()
    patience.settled(fork(at(5, 2), voters(at(5, 1))), 0.0, 0.0)
    later = fork(at(6, 4), voters(at(6, 3)))
    assert patience.settled(later, FORK_SECONDS, 0.0) == later
