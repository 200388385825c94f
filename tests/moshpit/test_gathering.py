"""The decisions of one gathering: which peer leads, which one to ask, and when to close a list."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.identity import PeerId
from protocols.moshpit.closing_time import (
    COMPANY_SECONDS,
    FOLLOWER_GRACE_SECONDS,
    FOR_MORE_SECONDS,
    LONGEST_QUIET_SECONDS,
    QUIET_SECONDS,
    SHARE_WAITED_FOR_MISSING,
)
from protocols.moshpit.gathering import Gathering, split
from protocols.moshpit.gathering_effects import (
    Candidate,
    End,
    Follow,
    Lead,
    Nobody,
    NotTogether,
    Probe,
    Regroup,
    Reply,
    SendAway,
    SendInvite,
    StartedWithoutUs,
)
from protocols.moshpit.known_peers import DIALLING_SECONDS, MOST_KNOWN, Absence
from tests.moshpit.gathering_model import Model, explore, model
from tests.moshpit.one_gathering import (
    SECONDS,
    A,
    B,
    C,
    D,
    E,
    gathering,
    joins,
    led,
    passes,
    sees,
    ticket,
)


def test_a_peer_asks_the_first_that_it_knows() -> None:
    one = gathering(D)
    assert sees(one, B) == [Follow(B, ())]
    assert sees(one, A, C) == []  # whoever leads is told by them, and sends us on


def test_a_peer_that_knows_nobody_earlier_invites_everybody_it_sees() -> None:
    assert sees(gathering(A), B, C) == [SendInvite(B, True), SendInvite(C, True)]


def test_a_peer_that_can_only_dial_out_never_leads_and_is_never_asked() -> None:
    one = gathering(A, reduces=False)
    assert sees(one, C) == [Follow(C, ())]
    other = gathering(B)
    other.saw_slot(Candidate(A, reduces=False), 1, 0.0)
    assert other.effects() == [SendInvite(A, False)]


def test_the_list_waits_while_a_peer_that_can_only_dial_out_is_dialling() -> None:
    """At home it dials through a relay; and perhaps another one first, which sends it on."""
    for comes in (True, False):
        one = gathering(A, expected=3)
        one.saw_slot(Candidate(C, reduces=False), 1, 0.0)
        sees(one, B)
        one.cannot_be_invited(C, 0.1)
        assert joins(one, B) == []
        assert passes(one, DIALLING_SECONDS - 0.01) == []
        if comes:
            assert joins(one, C) == [led(B, C)]
        else:
            assert passes(one, DIALLING_SECONDS) == [led(B)]


def test_the_list_is_closed_when_all_expected_have_joined() -> None:
    one = gathering(A, expected=3)
    assert joins(one, B) == []
    assert joins(one, C) == [Lead({B: ticket(B), C: ticket(C)})]


def test_a_newcomer_takes_nobodys_place() -> None:
    one = gathering(A, expected=3, awaited=(B, C))
    sees(one, B, C)
    assert joins(one, B, D) == []
    assert joins(one, C) == [led(B, D, C)]


def test_an_awaited_peer_that_asks_for_time_is_waited_for_until_the_deadline() -> None:
    one = gathering(A, expected=3, awaited=(B, C))
    sees(one, B, C)
    joins(one, B)
    one.invitation_answered(C, Reply.NOT_HERE, None, 0.01, 0.1)
    sees(one, now=0.2)
    assert passes(one, SECONDS - 0.01) == []
    assert passes(one, SECONDS) == [led(B)]


def test_the_list_is_closed_when_the_link_to_the_last_awaited_peer_is_lost() -> None:
    one = gathering(A, expected=3, awaited=(B, C))
    sees(one, B, C)
    joins(one, B)
    one.invitation_answered(C, Reply.NOT_HERE, None, 0.01, 0.1)
    one.link_lost(C, 0.3)
    assert one.effects() == [led(B)]


@pytest.mark.parametrize("awaited", [(), (B,), (B, C)])
def test_the_list_is_closed_when_the_last_that_has_not_come_is_lost(
    awaited: tuple[PeerId, ...],
) -> None:
    """Whether it is awaited or not, as a peer without samples is not. If nothing is known of it, it
    is asked whether it is there."""
    one = gathering(A, expected=4, awaited=awaited, coming=(B, C, D))
    assert joins(one, B) == [Probe(C), Probe(D)]
    assert joins(one, C) == []
    one.not_met(D, Absence.UNREACHABLE, "it is gone", 0.1)
    assert one.effects() == [led(B, C)]


@pytest.mark.parametrize("awaited", [(B,), (B, C)])
def test_nobody_waits_for_one_that_was_lost_before_unless_it_answers(
    awaited: tuple[PeerId, ...],
) -> None:
    """Its link was lost a few seconds ago. It is asked whether it is there."""
    for answers in (False, True):
        one = gathering(A, expected=4, awaited=awaited, coming=(B, C, D), lost=(C,))
        assert joins(one, B) == [Probe(C), Probe(D)]
        if answers:
            one.is_there(C)
        assert joins(one, D, now=0.1) == ([] if answers else [led(B, D)])
        if answers:
            assert led(B, D, C) in joins(one, C, now=0.2)


def test_a_peer_is_not_alone_before_all_that_were_lost_could_answer() -> None:
    """Its own network may have been away: then it has lost all its links."""
    quiet = SHARE_WAITED_FOR_MISSING * SECONDS
    one = gathering(A, expected=3, awaited=(B, C), coming=(B, C), lost=(B, C))
    one.slots_were_read(0.1)
    passes(one, quiet)
    assert not one.ended
    passes(one, quiet + 0.1)
    assert one.ended
    one = gathering(A, expected=3, awaited=(B, C), coming=(B, C), lost=(B, C))
    one.slots_were_read(0.1)
    for peer in (B, C):
        one.not_met(peer, Absence.UNREACHABLE, "it is gone", 0.2)
    one.slots_were_read(0.3)
    assert one.ended
    one = gathering(A, expected=3, awaited=(B, C), coming=(B, C), lost=(B, C))
    one.slots_were_read(0.1)
    one.is_there(C)
    passes(one, quiet + 0.1)
    assert not one.ended


def test_one_that_is_there_without_being_awaited_is_waited_for_as_without_a_name() -> None:
    for coming in ((), (B, C)):
        one = gathering(A, expected=3, awaited=(B,), coming=coming)
        joins(one, B)
        one.slots_were_read(0.1)
        one.is_there(C)
        quiet = SHARE_WAITED_FOR_MISSING * SECONDS
        assert led(B) not in passes(one, quiet - 0.1)
        assert led(B) in passes(one, quiet + 0.1)


def test_a_peer_is_alone_when_all_that_were_expected_are_lost() -> None:
    one = gathering(A, expected=3, coming=(B, C))
    one.link_lost(B, 0.1)
    one.slots_were_read(0.2)
    assert not one.ended
    one.link_lost(C, 0.3)
    one.slots_were_read(0.4)
    assert one.ended


def test_another_may_come_in_place_of_an_awaited_peer_that_is_lost() -> None:
    """As a cohort sends another head."""
    for comes in (False, True):
        one = gathering(A, expected=3, awaited=(B, C), replaces=True)
        sees(one, B, C)
        joins(one, B)
        one.invitation_answered(C, Reply.NOT_HERE, None, 0.01, 0.1)
        one.link_lost(C, 0.3)
        assert one.effects() == []
        if comes:
            assert joins(one, D, now=0.5) == [led(B, D)]
        else:
            sees(one, now=0.4)
            assert passes(one, SHARE_WAITED_FOR_MISSING * SECONDS - 0.01) == []
            assert passes(one, SHARE_WAITED_FOR_MISSING * SECONDS) == [led(B)]


MORE_SECONDS = 100.0


def with_more_time(*awaited: PeerId, missing: int = 0) -> Gathering:
    """A head: others may come in place of those that are lost."""
    one = gathering(
        A, expected=3, awaited=awaited, replaces=True, missing=missing, more_seconds=MORE_SECONDS
    )
    sees(one, *awaited)
    for peer in awaited:
        one.invitation_answered(peer, Reply.NOT_HERE, None, 0.01, 0.1)
    one.effects()
    return one


def test_a_later_deadline_is_for_awaited_peers_that_are_there() -> None:
    one = with_more_time(B, C)
    one.join_came(Candidate(B), ticket(B), (), 2 * MORE_SECONDS, 0.0)
    assert passes(one, SECONDS + MORE_SECONDS - 0.01) == []
    assert passes(one, SECONDS + MORE_SECONDS) == [led(B)]


def test_with_a_later_deadline_the_next_in_place_of_a_lost_peer_has_more_time() -> None:
    """Its cohort may be one with slow links."""
    one = with_more_time(B, C)
    one.join_came(Candidate(B), ticket(B), (), 2 * MORE_SECONDS, 0.0)
    one.link_lost(C, 0.3)
    sees(one, now=0.4)
    share = SHARE_WAITED_FOR_MISSING * (SECONDS + MORE_SECONDS)
    assert passes(one, share - 0.01) == []
    assert passes(one, share) == [led(B)]


def test_a_later_deadline_is_for_more_peers_that_are_needed_unless_all_are_lost() -> None:
    for comes in (True, False):
        one = with_more_time(B, C, missing=9)
        one.link_lost(C, 0.3)
        if comes:
            one.join_came(Candidate(B), ticket(B), (), 2 * MORE_SECONDS, 0.4)
        else:
            one.link_lost(B, 0.4)
        sees(one, now=0.5)
        assert passes(one, SECONDS - 0.01) == []
        assert not one.ended
        passes(one, SECONDS)
        assert one.ended != comes
        if comes:
            assert passes(one, SECONDS + MORE_SECONDS - 0.01) == []
            assert passes(one, SECONDS + MORE_SECONDS) == [led(B)]


def test_a_list_of_too_few_peers_waits_for_more_until_the_deadline() -> None:
    for come_for in (2, 3):
        one = gathering(A, expected=2, awaited=(B,), missing=4)
        sees(one, B)
        assert joins(one, B) == []
        assert passes(one, 3.0) == []
        one.join_came(Candidate(C, peers=come_for), ticket(C), (), SECONDS, 3.0)
        enough = 1 + come_for >= 4
        assert one.effects() == ([led(B, C)] if enough else [])
        if not enough:
            assert passes(one, SECONDS - 0.01) == []
            assert passes(one, SECONDS) == [led(B, C)]


def again(expected: int, *awaited: PeerId, me: PeerId = A, missing: int = 3) -> Gathering:
    """A round of this step has come to nothing."""
    return gathering(
        me, expected=expected, awaited=awaited, missing=missing, for_more_seconds=FOR_MORE_SECONDS
    )


def test_after_a_round_that_came_to_nothing_a_list_of_too_few_waits_for_more() -> None:
    for patience in (SECONDS, SECONDS + FOR_MORE_SECONDS):
        one = again(2, B)
        one.join_came(Candidate(B), ticket(B), (), patience, 0.0)
        assert led(B) not in passes(one, patience - 0.01)
        assert passes(one, patience) == [led(B)], "before one that joined gives its leader up"


def test_it_is_closed_soon_after_enough_have_come_and_takes_those_that_come_with_them() -> None:
    late = SECONDS + 5.0
    one = again(5, B, C)
    one.is_there(C)
    one.join_came(Candidate(B), ticket(B), (), SECONDS + FOR_MORE_SECONDS, 0.0)
    assert led(B) not in passes(one, late)
    for peer, come_for, at in ((D, 2, late), (E, 1, late + 0.5)):
        one.join_came(Candidate(peer, peers=come_for), ticket(peer), (), SECONDS, at)
        assert one.effects() == []
    one.slots_were_read(late + 0.5)
    soon = late + 0.5 + SHARE_WAITED_FOR_MISSING * SECONDS
    assert passes(one, soon - 0.01) == []
    assert passes(one, soon) == [led(B, D, E)], "it does not wait for C"


def test_those_that_come_one_by_one_then_keep_it_open_for_a_moment_only() -> None:
    late = SECONDS + 5.0
    one = again(9, B)
    one.join_came(Candidate(B), ticket(B), (), SECONDS + FOR_MORE_SECONDS, 0.0)
    passes(one, late)
    one.join_came(Candidate(C, peers=3), ticket(C), (), SECONDS, late)
    for number in range(1, 4):
        assert not one.ended
        one.saw_slot(Candidate(PeerId(f"stranger {number}")), 1, late + 0.9 * number)
        one.slots_were_read(late + 0.9 * number)
    assert led(B, C) in passes(one, late + COMPANY_SECONDS)


def test_if_the_leader_of_such_a_list_is_lost_those_that_follow_it_have_time_to_meet() -> None:
    one, lost = again(3, A, C, me=B), SECONDS + 8.0
    one.saw_slot(Candidate(A), 1, 0.0)
    one.leader.answers(A, 0.01, 0.1)
    assert one.following == A
    passes(one, lost)
    assert not one.ended
    one.leader.is_gone(A, Absence.UNREACHABLE, "lost", lost)
    passes(one, lost + COMPANY_SECONDS - 0.5)
    assert not one.ended
    one.join_came(Candidate(C, peers=3), ticket(C), (), SECONDS, lost + COMPANY_SECONDS - 0.5)
    assert led(C) in passes(one, lost + COMPANY_SECONDS + SHARE_WAITED_FOR_MISSING * SECONDS)


def test_nobody_is_alone_before_the_deadline_where_more_are_needed() -> None:
    one = gathering(A, expected=2, awaited=(B,), missing=4)
    one.link_lost(B, 0.0)
    sees(one)
    assert passes(one, SECONDS - 0.01) == []
    assert not one.ended


def test_an_awaited_peer_that_refuses_or_is_in_another_group_is_not_waited_for() -> None:
    for refuses in (True, False):
        one = gathering(A, expected=4, awaited=(B, C, D))
        sees(one, B, C, D)
        joins(one, B, D)
        if refuses:
            one.not_met(C, Absence.AT_ODDS, "another epoch", 0.1)
        else:
            one.shown(C, (C,), 0.1)
        assert one.effects() == [led(B, D)]


def test_an_awaited_peer_that_is_not_heard_of_is_asked_once_and_costs_no_more_than_now() -> None:
    for awaited in ((), (B, C)):
        one = gathering(A, expected=3, awaited=awaited)
        sees(one, B)
        assert joins(one, B) == [Probe(C) for _ in awaited[1:]]
        sees(one, now=0.2)
        assert passes(one, SHARE_WAITED_FOR_MISSING * SECONDS - 0.01) == []
        assert passes(one, SHARE_WAITED_FOR_MISSING * SECONDS) == [led(B)]


def test_in_a_full_group_awaited_peers_go_first() -> None:
    one = gathering(A, group_size=3, awaited=(C, E))
    sees(one, B, C, D, E)
    effects = joins(one, B, D, C)
    assert effects == []
    rest = (Candidate(B), Candidate(D))
    assert joins(one, E) == [Regroup(ticket(B), rest), Regroup(ticket(D), rest), led(C, E)]


def test_with_a_single_group_the_peers_beyond_its_size_are_in_none() -> None:
    one = gathering(A, group_size=3, awaited=(C, E), splits=False)
    sees(one, B, C, D, E)
    joins(one, B, D, C)
    assert joins(one, E) == [led(C, E)]  # group_search.py shows the list to B and D, who wait


def test_the_list_is_closed_when_the_group_is_full_and_nobody_known_is_missing() -> None:
    one = gathering(A, group_size=3)
    sees(one, B, C)
    assert joins(one, B) == []
    assert joins(one, C) == [Lead({B: ticket(B), C: ticket(C)})]


def test_the_list_is_closed_when_nobody_came_for_a_while() -> None:
    one = gathering(A)
    sees(one, B)
    joins(one, B, now=0.01)
    sees(one, B, now=0.05)
    assert one.next_deadline == pytest.approx(QUIET_SECONDS)
    assert passes(one, 0.02 + QUIET_SECONDS) == [Lead({B: ticket(B)})]


def test_a_list_is_not_closed_before_somebody_has_looked_again() -> None:
    one = gathering(A)
    joins(one, B, now=0.01)
    one.tick(0.4)
    assert one.effects() == []
    assert sees(one, now=0.41) == [Lead({B: ticket(B)})]


def test_gaps_between_arrivals_make_it_wait_longer_but_not_for_ever() -> None:
    one = gathering(A)
    sees(one)
    joins(one, B, now=0.1)
    joins(one, C, now=0.4)
    sees(one, now=0.5)
    assert one.next_deadline == pytest.approx(0.4 + 2 * 0.3)
    joins(one, D, now=0.9)
    joins(one, E, now=1.5)
    sees(one, now=1.6)
    assert one.next_deadline == pytest.approx(1.5 + LONGEST_QUIET_SECONDS)


def test_a_peer_with_a_slot_is_waited_for_until_it_is_known_to_be_gone() -> None:
    one = gathering(A)
    sees(one, B, C)
    joins(one, B)
    assert sees(one, now=0.4) == []
    one.not_met(C, Absence.UNREACHABLE, "no answer", 0.4)
    assert one.effects() == [Lead({B: ticket(B)})]


def test_at_the_deadline_the_list_is_closed_whoever_is_missing() -> None:
    one = gathering(A, expected=5)
    sees(one, B, C)
    joins(one, B)
    assert Lead({B: ticket(B)}) in passes(one, SECONDS)


def test_a_peer_that_waits_less_long_brings_its_deadline_along_within_bounds() -> None:
    one = gathering(A)
    sees(one, C)
    one.join_came(Candidate(B), 1, (), 0.0, 0.5)
    assert passes(one, 1.49) == []
    assert passes(one, 1.5) == [Lead({B: 1})]


def test_no_list_is_closed_for_fewer_than_half_of_those_that_are_expected() -> None:
    """One liar that never waited had the lists of a whole run closed after a second."""
    one = gathering(A, expected=5)
    one.join_came(Candidate(B), ticket(B), (), 0.0, 0.5)
    assert passes(one, 2.5) == []
    one.join_gone(B, ticket(B), 2.5)
    assert not any(isinstance(it, Lead | End) for it in passes(one, 3.5)), "nor as it has left"
    one = gathering(A, expected=5)
    for at, peer in ((0.5, B), (1.0, C)):
        one.join_came(Candidate(peer), ticket(peer), (), 0.0, at)
    assert passes(one, 1.99) == []
    assert passes(one, 2.0) == [led(B, C)], (
        "more than half of five, of which one would soon be gone"
    )


def test_a_leader_that_began_later_is_not_blamed_by_one_that_gives_it_up() -> None:
    for followed, is_blamed in ((0.0, True), (4.0, False)):
        one = gathering(B, expected=5)
        one.saw_slot(Candidate(A), 1, followed)
        one.slots_were_read(followed)
        one.leader.answers(A, 0.0, followed + 0.1)
        one.tick(SECONDS + FOLLOWER_GRACE_SECONDS)
        (end,) = (effect for effect in one.effects() if isinstance(effect, End))
        assert isinstance(end.ending, NotTogether)
        assert end.ending.unlisted_by == (A if is_blamed else None)


def test_one_that_has_waited_long_does_not_close_its_list_while_the_others_come() -> None:
    """A head that began ten seconds before the others closed it with half of them."""
    one = gathering(A, expected=4, awaited=(B, C, D))
    sees(one, B, C, D)
    late = SECONDS - 0.1
    one.join_came(Candidate(B), ticket(B), (), SECONDS, late)
    assert passes(one, SECONDS) == []
    one.join_came(Candidate(C), ticket(C), (), SECONDS, late + 0.5)
    assert passes(one, late + 1.0) == []
    one.join_came(Candidate(D), ticket(D), (), SECONDS, late + 1.5)
    assert one.effects() == [led(B, C, D)]


def test_only_the_first_join_puts_the_deadline_off_and_only_once() -> None:
    one = gathering(A, expected=4, awaited=(B, C, D))
    sees(one, B, C, D)
    late = SECONDS - 0.1
    one.join_came(Candidate(B), ticket(B), (), SECONDS, late)
    one.join_gone(B, ticket(B), late + 1.0)
    one.join_came(Candidate(C), ticket(C), (), SECONDS, late + 2.0)
    assert led(C) not in passes(one, late + COMPANY_SECONDS - 0.01)
    assert passes(one, late + COMPANY_SECONDS) == [led(C)]


def test_one_whose_list_stays_open_waits_as_long_for_a_leader_as_it_has_said() -> None:
    """It told a leader that came late three seconds, and gave up after two."""
    one = gathering(B, expected=4, awaited=(A, C, D))
    sees(one, C, D)
    late = SECONDS - 0.1
    passes(one, late)
    one.join_came(Candidate(C), ticket(C), (), SECONDS, late)
    one.saw_slot(Candidate(A), 1, late + 0.1)
    told = one.latest - (late + 0.1)
    assert any(isinstance(effect, Follow) for effect in one.effects())
    assert passes(one, late + 0.1 + told) == []


def test_a_leader_that_is_there_ends_the_waiting_for_one_that_is_silent() -> None:
    one = gathering(C)
    sees(one, A)
    one.effects()
    assert one.invited(B, 0.1) == (Reply.WITH_ANOTHER, A)
    one.tick(one.next_deadline)
    assert one.invited(B, 0.4) == (Reply.COMING, None)


def test_many_dead_peers_at_the_head_of_the_order_cost_one_timeout() -> None:
    one = gathering(E)
    one.saw_slot(Candidate(A), 1, 0.0)
    one.saw_slot(Candidate(B), 1, 0.0)
    one.saw_slot(Candidate(C), 1, 0.0)
    assert one.effects() == [Follow(A, ())]
    one.tick(one.next_deadline)
    assert one.effects() == [Probe(B), Probe(C)]
    one.not_met(B, Absence.UNREACHABLE, "gone", 1.2)
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 1.2)
    assert one.effects() == [Follow(C, (A, B))]
    one.not_met(C, Absence.UNREACHABLE, "gone", 1.25)  # the probe of before
    assert one.following is None


def test_a_peer_counts_again_with_a_newer_slot_or_a_word_of_its_own() -> None:
    one = gathering(B)
    sees(one, A)
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 1.0)
    assert one.effects() == []
    assert sees(one, A, now=1.1) == []  # the same slot: a ghost
    one.saw_slot(Candidate(A), 2, 1.2)
    assert one.effects() == [Follow(A, ())]
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 2.2)
    assert one.invited(A, 2.3) == (Reply.COMING, None)


def test_an_invited_peer_says_with_whom_it_is() -> None:
    one = gathering(C)
    assert one.invited(B, 0.0) == (Reply.COMING, None)
    assert one.invited(A, 0.1) == (Reply.WITH_ANOTHER, B)
    leader = gathering(A)
    assert leader.invited(B, 0.0) == (Reply.WITH_ANOTHER, A)


def test_a_peer_alone_waits_until_the_deadline_or_until_it_is_sure() -> None:
    one = gathering()
    sees(one)
    assert passes(one, SECONDS - 0.01) == []
    assert passes(one, SECONDS) == [End(Nobody(()))]
    sure = gathering(expected=1)
    assert sees(sure) == [End(Nobody(()))]


def test_the_dead_do_not_make_company() -> None:
    one = gathering(A)
    sees(one, B)
    one.not_met(B, Absence.UNREACHABLE, "no answer", 1.0)
    assert passes(one, SECONDS) == [End(Nobody((B,)))]


def test_others_who_would_not_come_are_named() -> None:
    one = gathering(A)
    sees(one, B)
    one.saw_other_layout(C, "another layout", 0.1)
    assert passes(one, SECONDS) == [
        End(NotTogether(((B, "it did not join in time"), (C, "another layout"))))
    ]


def test_a_straggler_is_late_when_it_is_shown_a_larger_group() -> None:
    one = gathering(C)
    sees(one, B)
    one.shown(B, (A, B), 0.2)
    assert one.effects() == [End(StartedWithoutUs(B))]


@pytest.mark.parametrize(
    ("peers", "splits", "ends"), [(3, False, False), (4, False, True), (3, True, True)]
)
def test_a_list_with_too_few_peers_to_be_of_use_makes_nobody_late(
    peers: int, splits: bool, ends: bool
) -> None:
    """In rounds of a grid each group has only a part of the peers."""
    one = gathering(C, missing=3, splits=splits)
    sees(one, A, B)
    one.leader.answers(A, 0.05, 0.1)
    one.effects()
    one.shown(A, (A, D), 0.2, peers=peers)
    assert (End(StartedWithoutUs(A)) in one.effects()) == ends
    assert ends or one.following == B


def test_a_group_of_stragglers_that_is_not_smaller_goes_on() -> None:
    one = gathering(A)
    joins(one, B, C)
    one.shown(D, (D, E), 0.1)
    assert one.effects() == []
    assert sees(one, now=0.2) == [Lead({B: ticket(B), C: ticket(C)})]


def test_after_the_process_was_stopped_the_list_is_not_closed_at_once() -> None:
    """The peers whose joins it still holds may be elsewhere: first it takes their messages."""
    one = gathering(A)
    sees(one, B)
    joins(one, B, now=0.01)
    one.tick(60.0)
    assert one.effects() == []
    one.join_gone(B, ticket(B), 60.01)
    one.tick(62.0)
    assert not any(isinstance(effect, Lead) for effect in one.effects())


def test_after_a_stop_a_leader_is_not_blamed_whatever_is_heard_first() -> None:
    """Its list came and went meanwhile, and so did the time until which it was waited for."""
    one = gathering(B)
    sees(one, A)
    one.leader.answers(A, 0.05, 0.1)
    one.tick(0.2)
    one.saw_slot(Candidate(C), 1, 60.0)  # before the tick that is long due
    assert not any(isinstance(effect, End) for effect in one.effects())
    one.leader.is_gone(A, Absence.UNREACHABLE, "the link was lost", 60.1)
    (end,) = [each for each in passes(one, 60.0 + SECONDS) if isinstance(each, End)]
    assert getattr(end.ending, "unlisted_by", None) is None


def test_a_peer_that_shows_the_list_of_an_earlier_attempt_may_still_come() -> None:
    """It has not noticed yet that the attempt failed, or is about to begin anew itself."""
    one = gathering(A, expected=2, awaited=(B,))
    sees(one, B)
    one.shown(B, (A, B), 0.1, earlier=True)
    assert passes(one, 1.9) == []
    assert not one.ended
    assert joins(one, B, now=2.0) == [Lead({B: ticket(B)})]


def test_a_process_that_is_always_late_ends_all_the_same() -> None:
    one = gathering(A, expected=2)
    now = 0.0
    while not one.ended:
        now = one.next_deadline + 0.6
        one.tick(now)
        assert now < 2 * SECONDS


def test_too_many_become_several_groups_by_order() -> None:
    one = gathering(A, group_size=3, expected=5)
    effects = joins(one, B, C, D, E)
    group = (Candidate(D), Candidate(E))
    assert effects == [
        Regroup(ticket(D), group),
        Regroup(ticket(E), group),
        Lead({B: ticket(B), C: ticket(C)}),
    ]
    other = gathering(D, group_size=3)
    sees(other, A)
    other.leader.makes_a_group(A, group, 1.0)
    assert other.effects() == [SendInvite(E, True)]
    assert joins(other, E, now=1.1) == [Lead({E: ticket(E)})]


def test_a_second_join_of_one_peer_replaces_the_first() -> None:
    one = gathering(A)
    joins(one, B)
    one.join_came(Candidate(B), 7, (), SECONDS, 0.1)
    assert one.effects() == [SendAway(ticket(B))]
    one.join_gone(B, ticket(B), 0.2)  # of the first: too late to matter
    assert passes(one, SECONDS) == [Lead({B: 7})]


def test_the_number_of_peers_that_are_known_is_bounded() -> None:
    one = gathering(PeerId(""))
    for number in range(MOST_KNOWN + 10):
        one.saw_other_layout(PeerId(f"p{number}"), "another layout", 0.0)
    one.join_came(Candidate(PeerId("one more")), 1, (), SECONDS, 0.0)
    assert SendAway(1) in one.effects()


def test_a_peer_of_the_last_round_is_asked_at_once_and_never_waited_for() -> None:
    follower = gathering(C)
    assert follower.remembers([Candidate(A), Candidate(B)], 0.0)
    assert follower.effects() == [Follow(A, ())]
    leader = gathering(A)
    assert not leader.remembers([Candidate(B), Candidate(C)], 0.0)
    assert leader.effects() == [SendInvite(B, True), SendInvite(C, True)]
    joins(leader, B, now=0.01)
    sees(leader, now=0.02)
    assert passes(leader, 0.02 + QUIET_SECONDS) == [Lead({B: ticket(B)})]


def test_the_next_of_the_last_round_is_asked_if_the_first_is_gone() -> None:
    """Without waiting for slots: where a network is cut, many directories answer nothing."""
    one = gathering(C)
    one.remembers([Candidate(A), Candidate(B), Candidate(D)], 0.0)
    assert one.effects() == [Follow(A, ())]
    one.leader.is_gone(A, Absence.UNREACHABLE, "gone", 1.0)
    assert one.effects() == [Follow(B, (A,))]
    one.leader.is_gone(B, Absence.UNREACHABLE, "gone", 1.1)
    assert one.effects() == [SendInvite(D, True)]


def test_of_several_with_one_seat_the_one_that_comes_for_most_is_listed() -> None:
    one = gathering(A, expected=3, missing=6, seat_of={A: 1, B: 2, C: 2, D: 1, E: 3}.__getitem__)
    for peer, peers in ((B, 3), (C, 4), (D, 9)):
        one.join_came(Candidate(peer, peers=peers), ticket(peer), (), SECONDS, 0.0)
    assert passes(one, SECONDS / 2) == []  # two of three seats, and four of six peers
    one.join_came(Candidate(E, peers=2), ticket(E), (), SECONDS, SECONDS / 2)
    assert one.effects() == [led(C, E)]


def test_many_of_one_cohort_that_wait_for_no_time_do_not_close_the_list() -> None:
    """Two of a cohort could close each list of heads after a second, and no round had enough."""
    seats = {A: 1, B: 2, C: 3, D: 3, E: 3}
    one = gathering(A, expected=4, missing=6, seat_of=seats.__getitem__)
    one.join_came(Candidate(B, peers=2), ticket(B), (), SECONDS, 0.0)
    for peer in (C, D, E):
        one.join_came(Candidate(peer), ticket(peer), (), 0.0, 0.0)
    one.effects()
    assert passes(one, SECONDS / 2) == []


def test_a_peer_in_whose_place_another_one_comes_is_waited_for_as_if_nothing_were_known() -> None:
    """Slots may tell of the head of the last step, when its cohort has another one by now. All
    heads had come and waited up to the deadline for it: it was there, and did not come."""
    one = gathering(A, expected=3, awaited=(B, C), seat_of={A: 1, B: 2, C: 3, D: 3}.__getitem__)
    one.is_there(B)
    one.is_there(C)
    one.join_came(Candidate(D, peers=2), ticket(D), (), SECONDS, 0.0)
    sees(one, now=0.1)
    assert passes(one, SECONDS / 2) == [], "nobody has the seat of B"
    joins(one, B, now=SECONDS / 2)
    sees(one, now=SECONDS / 2)
    quiet = SHARE_WAITED_FOR_MISSING * SECONDS
    assert passes(one, SECONDS / 2 + quiet - 0.1) == []
    assert passes(one, SECONDS / 2 + quiet) == [led(D, B)]


def test_a_leader_does_not_wait_for_long_with_only_those_that_have_its_own_seat() -> None:
    """It cannot list them. It went on for as long as one of them stayed, without a pause."""
    one = gathering(A, seat_of={A: 1, D: 1}.__getitem__)
    one.join_came(Candidate(D, peers=9), ticket(D), (), 9 * SECONDS, 0.0)
    for tenths in range(1, 10 * round(SECONDS)):
        one.tick(tenths / 10)
        assert not one.ended
    one.tick(SECONDS)
    assert one.ended
    (end,) = one.effects()
    assert isinstance(end, End)
    assert isinstance(end.ending, NotTogether)


def test_those_without_a_seat_do_not_count_beside_a_list_that_has_started() -> None:
    one = gathering(A, seat_of={A: 1, D: 1, B: 2, C: 3}.__getitem__)
    one.join_came(Candidate(D), ticket(D), (), SECONDS, 0.0)
    one.shown(B, [B, C], 1.0)
    assert one.effects() == [End(StartedWithoutUs(B))]


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 16))
def test_a_split_places_as_many_peers_as_possible(
    reducers: int, clients: int, largest: int
) -> None:
    able = [f"r{number}" for number in range(reducers)]
    others = [f"c{number}" for number in range(clients)]
    groups = split(able, others, largest)
    placed = [member for group in groups for member in group]
    assert len(placed) == len(set(placed))
    for group in groups:
        assert 2 <= len(group) <= largest
        assert group[0].startswith("r")
    if groups and len(able) * largest >= reducers + clients:
        assert reducers + clients - len(placed) <= 1
    assert [one for one in placed if one[0] == "r"] == able[: sum(o[0] == "r" for o in placed)]


# -- every order, and every moment of a death


def all_in_one_list_each(end: Model) -> None:
    assert set(end.accepted) == set(end.machines)
    assert sorted(peer for members in end.lists.values() for peer in members) == sorted(
        end.machines
    )


def survivors_are_together_or_know_why(end: Model) -> None:
    """A listed peer was listed by its leader; any other peer is alone, or was shown a list."""
    for member, leader in end.accepted.items():
        assert member in end.lists[leader]
    for peer in end.alive:
        if peer not in end.accepted and len(end.alive) > 1:
            assert isinstance(end.endings[peer], StartedWithoutUs)


@pytest.mark.parametrize("expected", [None, 2])
@pytest.mark.parametrize("clients", ["", "a", "b"])
def test_two_peers_meet_in_every_order_of_events(clients: str, expected: int | None) -> None:
    assert explore(model("ab", clients=clients, expected=expected), all_in_one_list_each) > 10


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b"])
def test_one_of_two_may_die_at_any_moment(victim: str) -> None:
    start = model("ab", expected=2, may_die=victim)
    assert explore(start, survivors_are_together_or_know_why) > 200


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["", "a"])
def test_three_peers_meet_in_every_order_of_events(clients: str) -> None:
    start = model("abc", clients=clients, expected=3)
    assert explore(start, all_in_one_list_each) > 1000


@pytest.mark.soak
@pytest.mark.parametrize("clients", ["", "a", "c"])
@pytest.mark.parametrize("expected", [None, 3])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_one_of_three_may_die_at_any_moment(
    victim: str, expected: int | None, clients: str
) -> None:
    start = model("abc", clients=clients, expected=expected, may_die=victim)
    assert explore(start, survivors_are_together_or_know_why) > 5000


@pytest.mark.slow
@pytest.mark.parametrize("names", ["abc", "abcd", "abcdef"])
def test_one_of_many_may_die_in_any_of_many_random_orders(names: str) -> None:
    for seed in range(60):
        chance = random.Random(f"{names} {seed}")
        victim = chance.choice(names)
        clients = "".join(chance.sample(names, chance.randrange(len(names) - 1)))
        one = model(names, clients=clients, expected=len(names), may_die=victim)
        while not one.is_over:
            steps = one.steps()
            kill = [step for step in steps if step[:3] in ("kil", "cut")]
            if kill and chance.random() < 0.9:
                steps = [step for step in steps if step not in kill]
            one.take(chance.choice(steps))
        if any(peer not in one.clients for peer in one.alive):
            survivors_are_together_or_know_why(one)
