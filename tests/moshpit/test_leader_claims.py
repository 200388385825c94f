"""Which claims of its leader a gathering believes, and which not."""

from __future__ import annotations

import pytest

from protocols.moshpit.closing_time import FOLLOWER_GRACE_SECONDS
from protocols.moshpit.gathering_effects import (
    Candidate,
    End,
    Follow,
    Lead,
    NotTogether,
    SendOn,
)
from protocols.moshpit.known_peers import NAME_AGAIN_SECONDS, Absence
from tests.moshpit.one_gathering import (
    SECONDS,
    A,
    B,
    C,
    D,
    E,
    gathering,
    joins,
    passes,
    sees,
    ticket,
)


def test_waiting_peers_are_redirected_only_to_a_leader_that_has_answered() -> None:
    one = gathering(B)
    joins(one, C, D)
    assert sees(one, A) == [Follow(A, ())]
    one.leader.answers(A, 0.01, 0.1)
    assert one.effects() == [SendOn(ticket(C), A), SendOn(ticket(D), A)]
    assert joins(one, E) == [SendOn(ticket(E), A)]


def test_a_peer_that_has_passed_over_our_leader_waits_here_instead() -> None:
    one = gathering(B)
    sees(one, A)
    one.leader.answers(A, 0.01, 0.1)
    one.join_came(Candidate(C), 1, (A,), SECONDS, 0.2)
    assert one.effects() == []
    assert one.next_deadline == pytest.approx(0.2 + NAME_AGAIN_SECONDS)
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 0.3)
    assert one.effects() == []
    sees(one, now=0.31)
    assert passes(one, 1.0) == [Lead({C: 1})]


def test_a_peer_that_has_passed_over_our_leader_is_sent_to_it_again_after_a_while() -> None:
    """It may have come a moment too early. Otherwise the leader would wait for it in vain."""
    one = gathering(B)
    sees(one, A)
    one.leader.answers(A, 0.01, 0.1)
    one.join_came(Candidate(C), 1, (A,), SECONDS, 0.2)
    one.tick(0.2 + NAME_AGAIN_SECONDS)
    assert one.effects() == [SendOn(1, A)]
    sent = gathering(C)
    sees(sent, A)
    sent.leader.is_gone(A, Absence.UNREACHABLE, "silent", 0.1)
    sees(sent, B, now=0.2)
    sent.leader.sends_us_on(B, Candidate(A), 0.7)
    assert sent.following == A


def test_a_leader_that_was_not_there_yet_is_not_named_as_passed_over() -> None:
    one = gathering(C)
    sees(one, A)
    one.leader.is_gone(A, Absence.ELSEWHERE, "it looks for no group now", 0.1)
    assert sees(one, B, now=0.2) == [Follow(B, ())]


def test_a_silent_leader_is_passed_over_and_the_next_is_asked() -> None:
    one = gathering(C)
    assert sees(one, B, A) == [Follow(B, ())]
    one.leader.sends_us_on(B, Candidate(A), 0.1)
    assert one.effects() == [Follow(A, ())]
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 1.1)
    assert one.effects() == [Follow(B, (A,))]


def test_a_leader_that_names_an_impossible_one_is_passed_over() -> None:
    for named in (C, D, B):
        one = gathering(C)
        assert sees(one, B) == [Follow(B, ())]
        one.leader.sends_us_on(B, Candidate(named), 0.1)
        assert one.following is None


def test_redirections_back_and_forth_end() -> None:
    one = gathering(C)
    sees(one, B)
    for turn in range(200):
        if one.following == B:
            one.leader.sends_us_on(B, Candidate(A), turn / 100)
        elif one.following == A:
            one.leader.is_gone(A, Absence.ELSEWHERE, "not here", turn / 100)
    assert one.following is None


def test_a_list_shown_by_others_does_not_make_a_waiting_follower_late() -> None:
    """The list that they show may be the one that is on its way."""
    one = gathering(B)
    sees(one, A)
    one.shown(C, (A, B, C), 0.2)
    assert one.effects() == []
    assert one.leader.lists_us(A)


def test_a_leader_that_never_closes_is_given_up() -> None:
    one = gathering(B)
    sees(one, A)
    one.leader.answers(A, 0.0, 0.1)
    assert one.next_deadline == SECONDS + FOLLOWER_GRACE_SECONDS
    one.tick(SECONDS + FOLLOWER_GRACE_SECONDS)
    reasons = ((A, "it did not close its list in time"),)
    assert one.effects() == [End(NotTogether(reasons, unlisted_by=A))]


def test_a_leader_that_never_closes_is_given_up_also_while_somebody_waits_here() -> None:
    one = gathering(B)
    sees(one, A)
    one.leader.answers(A, 0.0, 0.1)
    one.join_came(Candidate(C), 1, (A,), SECONDS, SECONDS + FOLLOWER_GRACE_SECONDS - 0.1)
    one.tick(SECONDS + FOLLOWER_GRACE_SECONDS)
    assert [type(effect) for effect in one.effects()] == [End]


def test_a_group_that_cannot_be_one_is_not_believed() -> None:
    for group in ((Candidate(C), Candidate(D)), (Candidate(B),)):
        one = gathering(B)
        sees(one, A)
        one.leader.makes_a_group(A, group, 1.0)
        assert one.following is None
        assert not one.ended


def test_a_leader_that_divides_a_round_of_one_group_is_passed_over() -> None:
    """It could divide a run into parts that are too small for a step, again and again."""
    one = gathering(B, splits=False)
    sees(one, A)
    one.leader.makes_a_group(A, (Candidate(A), Candidate(B)), 1.0)
    assert one.following is None
    assert not one.ended


def test_a_leader_that_makes_groups_again_and_again_is_passed_over() -> None:
    one = gathering(B)
    sees(one, A, C)
    one.leader.makes_a_group(A, (Candidate(A), Candidate(B)), 1.0)
    assert one.following == A
    one.leader.makes_a_group(A, (Candidate(A), Candidate(B)), 1.1)
    assert one.following is None
    one.effects()
    assert joins(one, C, now=2.0) == []  # and its groups are forgotten
    assert passes(one, SECONDS) == [Lead({C: ticket(C)})]
    assert one.latest == SECONDS


def test_a_group_that_was_split_off_and_has_died_is_not_being_alone() -> None:
    one = gathering(C, group_size=2, reduces=False)
    sees(one, A)
    one.leader.makes_a_group(A, (Candidate(B), Candidate(C, reduces=False)), 1.0)
    assert one.effects() == [Follow(B, (A,))]
    one.leader.is_gone(B, Absence.UNREACHABLE, "gone", 2.0)
    (end,) = passes(one, 6.0)
    assert end == End(NotTogether(((B, "gone"),)))
