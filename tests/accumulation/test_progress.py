"""Estimates from a run's slots: when a step is due, which peers come, and which do not count."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.accumulation.claims import REFUSED_SECONDS, Credit
from protocols.accumulation.estimate import EARLY_PATIENCES, Estimate
from protocols.accumulation.known import LONGEST_READ_SECONDS, Known, ProgressSettings, Seen
from protocols.accumulation.progress import KNOWN_SECONDS, SHORTEST_READ_SECONDS, estimate
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    PROGRESS,
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
)
from protocols.dht import SlotRefused
from protocols.identity import PeerId
from tests.accumulation.progress_slots import MODEL, OTHER_MODEL, history, peers, seen, slot

TARGET = 100
SETTINGS = ProgressSettings(TARGET)


def estimated(
    others: Mapping[PeerId, Seen],
    mine: ProgressSlot,
    now: float = 0.0,
    *,
    credit: Credit | None = None,
    members: frozenset[PeerId] = frozenset(),
    settings: ProgressSettings = SETTINGS,
) -> Estimate:
    return estimate(others, mine, settings, now, Known(credit or Credit(), members))


def test_a_step_is_due_when_the_samples_of_all_reach_the_target() -> None:
    assert not estimated(seen(slot(40)), slot(59)).is_due
    found = estimated(seen(slot(40)), slot(60))
    assert found.is_due
    assert found.due_in_seconds == 0.0
    assert (found.samples, found.others_samples, found.expected) == (100, 40, 2)


def test_a_peer_that_nobody_knows_yet_begins_no_batch_that_might_be_too_many() -> None:
    """Each of the others may begin a batch before it knows of this one."""
    come = msgspec.structs.replace(slot(), batch=20, batch_seconds=2.0, came_seconds=0.0)
    new, known = Known(Credit(), known_for=0.1), Known(Credit(), known_for=KNOWN_SECONDS)
    for others in (1, 2, 3, 4):
        assert estimate(seen(*[come] * others), come, SETTINGS, 0.0, new).wants_batch_after(0)
    waits = estimate(seen(*[come] * 5), come, SETTINGS, 0.0, new)
    assert not waits.wants_batch_after(0)
    assert not waits.is_due
    begun = msgspec.structs.replace(come, under_way=0.0)
    found = estimate(seen(*[begun] * 3, *[come] * 2), come, SETTINGS, 0.0, known)
    assert found.own_part in (0, 20)  # by its name: two of the three that wait begin one
    assert found.wants_batch_after(0) == (found.own_part == 20)


def test_a_peer_that_has_not_begun_is_not_thought_to_be_done() -> None:
    come = msgspec.structs.replace(slot(), batch=20, batch_seconds=2.0, came_seconds=0.0)
    later = 10.0
    found = estimate(seen(come), come, SETTINGS, later, Known(Credit()))
    assert found.done_by_others == 0
    begun = msgspec.structs.replace(come, under_way=0.0)
    assert estimate(seen(begun), come, SETTINGS, later, Known(Credit())).done_by_others > 0


def test_a_keeper_has_a_step_when_it_says_to_be_where_the_step_led() -> None:
    def keeper(epoch: int, at: int = 0) -> ProgressSlot:
        return msgspec.structs.replace(slot(epoch=epoch, at=at), keeps=True)

    found = estimated(seen(keeper(4), keeper(5), keeper(5, at=1), slot(epoch=5)), slot(epoch=5))
    assert found.keepers == peers(0, 1, 2)
    assert found.keepers_here == peers(1)


def test_a_batch_that_the_estimate_does_not_know_yet_brings_the_step_nearer() -> None:
    found = estimated(seen(slot(40, 2.0)), slot(0))
    assert found.due_in_seconds == 30.0
    assert found.due_in_seconds_with(20) == 20.0
    assert found.due_in_seconds_with(60) == 0.0


def test_peers_that_bring_samples_or_help_are_awaited_by_name() -> None:
    slots = (slot(40), slot(0, 5.0), slot(0, role="auxiliary"), slot(30, averaging=True))
    found = estimated(seen(*slots), slot(60))
    assert found.expected == 5
    assert found.awaited == frozenset(peers(0, 2, 3))
    assert found.averaging == frozenset(peers(3))


@pytest.mark.parametrize("others_here", [0, 1])
@pytest.mark.parametrize("epochs_behind", [0, 1, 2, 3])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("may_wait", [False, True])
def test_one_that_follows_close_behind_is_expected_now_and_then_but_not_awaited(
    others_here: int, epochs_behind: int, *, follows: bool, may_wait: bool
) -> None:
    newcomer = msgspec.structs.replace(slot(epoch=9 - epochs_behind), follows=follows)
    slots = [*[slot(40, epoch=9)] * others_here, *([newcomer] if epochs_behind else [])]
    known = Known(Credit(), may_wait_for_follower=may_wait)
    let_in = Known(Credit(), may_wait_for_follower=may_wait, let_in=frozenset(peers(others_here)))
    found = estimate(seen(*slots), slot(60, epoch=9), SETTINGS, 0.0, known)
    waits = bool(epochs_behind in (1, 2) and follows and may_wait)
    assert found.followers == frozenset(peers(others_here) if waits else ())
    assert found.holds_back == (waits and not others_here), "alone it has no list to keep open"
    assert found.expected == 1 + others_here + (waits and others_here > 0)
    assert found.awaited == frozenset(peers(*range(others_here)))
    again = estimate(seen(*slots), slot(60, epoch=9), SETTINGS, 0.0, let_in)
    assert not again.followers, "it came when it was waited for"


def test_a_lone_peer_begins_neither_a_round_nor_a_batch_while_it_waits_for_a_follower() -> None:
    newcomer = msgspec.structs.replace(slot(epoch=8), follows=True)
    mine = msgspec.structs.replace(slot(TARGET, epoch=9), batch=TARGET, batch_seconds=1.0)
    for may_wait in (False, True):
        known = Known(Credit(), may_wait_for_follower=may_wait)
        found = estimate(seen(newcomer), mine, SETTINGS, 0.0, known)
        assert found.is_due_with(TARGET) == (not may_wait)
        assert not (may_wait and found.wants_batch_after(TARGET))


def test_slots_are_carried_forward_by_their_rate_since_they_were_seen() -> None:
    found = estimated(seen(slot(40, 10.0), at=3.0), slot(20, 5.0), now=5.0)
    assert found.samples == 40 + 2 * 10 + 20
    assert found.rate == 15.0
    assert found.due_in_seconds == pytest.approx(20 / 15)


def test_a_peer_that_says_nothing_more_is_not_carried_forward_for_ever_nor_waited_for() -> None:
    others = seen(slot(10, 1.0))
    late = estimated(others, slot(0), now=CARRIED_SECONDS + 1.0)
    assert late.samples == 10 + CARRIED_SECONDS
    assert late.expected == 1
    assert estimated(others, slot(0), now=SLOT_SECONDS + 1.0).peers == ()


def test_no_peer_counts_for_more_than_a_whole_round() -> None:
    assert estimated(seen(slot(10**9)), slot(0)).samples == TARGET


def test_the_training_thread_adds_its_own_batch_to_the_estimate() -> None:
    found = estimated(seen(slot(40)), slot(30))
    assert not found.is_due_with(59)
    assert found.is_due_with(60)


def test_other_epochs_and_histories_do_not_count() -> None:
    others = seen(slot(50, epoch=4), slot(50, epoch=6), slot(50, at=1))
    assert estimated(others, slot(10)).samples == 10


def test_a_member_of_the_last_round_counts_as_company_without_samples_whatever_its_slot_says() -> (
    None
):
    others = seen(slot(90, 7.0, epoch=4))
    found = estimated(others, slot(10, 1.0), members=frozenset(peers(0)))
    assert (found.samples, found.rate, found.company, found.expected) == (10, 8.0, 1, 2)
    assert found.ignored == ()


def test_samples_that_members_compute_beside_a_delayed_round_are_in_the_next_plan() -> None:
    """Each takes as many samples as it brought to the round. Once, the first peer to leave the
    round began another batch, because it did not know of the others' batches."""
    said = msgspec.structs.replace(
        slot(8, epoch=4, averaging=True), batch=4, batch_seconds=0.2, under_way=0.0
    )
    own = msgspec.structs.replace(slot(8), batch=4, batch_seconds=0.2, epoch_seconds=0.0)
    others = seen(said, said, said, at=0.0)
    settings = ProgressSettings(32)

    def wants_batch(now: float) -> bool:
        members = frozenset(peers(0, 1, 2))
        found = estimated(others, own, now, members=members, settings=settings)
        return found.wants_batch_after(8)

    assert not wants_batch(0.5), "they have eight samples each, and this peer too"
    rest = msgspec.structs.replace(said, under_way=-1.0, leaves=True)
    others = seen(rest, rest, rest, at=0.0)
    assert wants_batch(0.5), "nobody else computes"


def test_batches_beside_a_delayed_round_are_planned_like_all_others() -> None:
    """Eight batches; a peer that is twice as fast has twice as many of them."""
    said = msgspec.structs.replace(slot(8, averaging=True), batch=4, batch_seconds=0.2)
    slow = msgspec.structs.replace(said, batch_seconds=0.4)
    settings = ProgressSettings(32, delayed=True)
    found = estimated(seen(slow, slow, said), said, settings=settings)
    assert found.part_beside == 12 or found.part_beside == 8
    assert estimated(seen(said, said, said), said, settings=settings).part_beside == 8
    assert estimated(seen(said), slow, settings=settings).part_beside in (8, 12)
    assert found.wants_batch_beside(4)
    assert not found.wants_batch_beside(12)


def test_a_round_is_begun_early_by_one_batch_at_most_and_only_beside_computing() -> None:
    said = msgspec.structs.replace(slot(8), batch=4, batch_seconds=0.2)
    for seconds in (0.2, 2.0, 20.0):
        own = msgspec.structs.replace(said, batch_seconds=seconds)
        delayed = ProgressSettings(64, delayed=True)
        found = estimated(seen(said), own, settings=delayed)
        assert found.early_seconds == min(seconds, EARLY_PATIENCES * delayed.patience_seconds)
        assert not estimated(seen(said), own, settings=ProgressSettings(64)).early_seconds
    helper = slot(role="auxiliary")
    assert not estimated(
        seen(said), helper, settings=ProgressSettings(64, delayed=True)
    ).early_seconds


def test_beside_a_delayed_round_everybody_computes_a_batch_that_is_too_large_for_a_plan() -> None:
    said = msgspec.structs.replace(slot(20, averaging=True), batch=20, batch_seconds=0.2)
    found = estimated(seen(said, said, said), said, settings=ProgressSettings(40, delayed=True))
    assert found.wants_batch_beside(0)
    assert not found.wants_batch_beside(20)


def test_a_member_of_the_last_round_is_expected_though_an_earlier_epoch_was_read_of_it() -> None:
    """Steps are shorter than the time between two looks. The peer was once counted as gone."""
    older = slot(16, epoch=3)

    def expected(read_at: float, ended_at: float) -> int:
        known = Known(Credit(), frozenset(peers(0)), epoch_began=ended_at)
        return estimate(seen(older, at=read_at), slot(), SETTINGS, 2.0, known).expected

    assert expected(read_at=0.9, ended_at=1.0) == 2
    assert expected(read_at=1.1, ended_at=1.0) == 1, "it says after the round that it is back there"


def test_nobody_steps_alone_beside_a_peer_that_is_further() -> None:
    further, back = slot(0, epoch=12), slot(64, epoch=2)
    found = estimated(seen(further, back), slot(100))
    assert found.behind is None, "one of two is not enough to be followed"
    assert found.company == 1
    assert estimated(seen(back), slot(100)).company == 0, "who is further does not wait"


def test_the_peers_that_made_the_last_steps_decide_whether_a_step_is_made() -> None:
    mine = PeerId("me")

    def holders(own: ProgressSlot, *others: ProgressSlot, members: Sequence[int] = ()) -> set[str]:
        known = Known(Credit(), frozenset(peers(*members)), mine)
        return set(estimate(seen(*others), own, SETTINGS, 0.0, known).holders)

    follower, beginner = slot(follows=True), slot(epoch=0)
    assert holders(slot(), slot(), follower, beginner) == {"me", "peer-0"}
    assert holders(follower, slot(), follower) == {"peer-0"}
    assert holders(follower, slot(epoch=6, at=3), follower) == {"peer-0"}, "who is further has one"
    assert holders(slot(), slot(at=1), slot(epoch=4)) == {"me", "peer-0"}
    assert holders(slot(), slot(epoch=4), members=[0]) == {"me", "peer-0"}, "its slot is late"
    assert holders(follower, follower) == {"me", "peer-0"}, "all, where there is nobody else"
    assert holders(beginner, beginner, beginner) == {"me", "peer-0", "peer-1"}


def test_a_peer_makes_no_step_alone_on_a_state_that_it_will_soon_give_up() -> None:
    assert estimated(seen(slot(at=1), slot(at=1)), slot(100, at=2)).company == 2
    assert estimated(seen(slot(epoch=4), slot(epoch=4)), slot(100)).company == 2


def test_samples_of_an_epoch_long_past_are_ignored_by_name() -> None:
    (ignored,) = estimated(seen(slot(64, epoch=2)), slot(1)).ignored
    assert ignored.peer == "peer-0"
    assert ignored.kind == "past"
    assert "64 samples are of epoch 2" in ignored.reason


def test_auxiliary_peers_come_and_bring_no_samples() -> None:
    found = estimated(seen(slot(50, 9.0, role="auxiliary")), slot(60))
    assert (found.samples, found.rate, found.expected, found.company) == (60, 0.0, 2, 1)


def test_a_peer_that_computes_its_first_batch_is_waited_for() -> None:
    found = estimated(seen(slot(0), slot(0, 2.0)), slot(100))
    assert (found.expected, found.company) == (3, 2)


def test_another_model_is_ignored_by_name() -> None:
    found = estimated(seen(slot(500, signature=OTHER_MODEL, epoch=9)), slot(1))
    assert (found.samples, found.peers, found.behind) == (1, (), None)
    assert "another model" in found.ignored[0].reason


def test_a_million_samples_a_second_are_ignored_by_name() -> None:
    found = estimated(seen(slot(0, 1e6), slot(20, 5.0)), slot(20, 5.0), now=1.0)
    assert not found.is_due
    assert found.peers == peers(1)
    assert "1,000,000 samples a second" in found.ignored[0].reason


def test_batches_of_a_million_samples_a_second_are_ignored_as_well() -> None:
    """Plans are made of batches. Such a peer once got nearly the whole plan, which then seemed to
    be done at once, so all began rounds that were too light."""
    liar = msgspec.structs.replace(slot(0, 1.0), batch=8, batch_seconds=1e-6, under_way=0.0)
    found = estimated(seen(liar, slot(20, 5.0)), slot(20, 5.0), now=1.0)
    assert not found.is_due
    assert found.peers == peers(1)
    assert "8,000,000 samples a second" in found.ignored[0].reason


def with_members(others: Mapping[PeerId, Seen], mine: ProgressSlot, now: float) -> Estimate:
    """The estimate of a member of the round that began the epoch."""
    known = Known(Credit(), epoch_began=0.0)
    return estimate(others, mine, ProgressSettings(8 * 80), now, known)


MEMBER = msgspec.structs.replace(slot(40, 8.0), batch=8, batch_seconds=1.0, epoch_seconds=5.0)


def test_a_newcomer_that_never_begins_holds_nobody_up() -> None:
    idle = msgspec.structs.replace(slot(), batch=8, batch_seconds=1.0, came_seconds=0.0)
    member = msgspec.structs.replace(MEMBER, under_way=0.0)
    now = 5.0
    others = seen(member, msgspec.structs.replace(idle, epoch_seconds=4.9), at=now)
    assert with_members(others, member, now).others_ready_in_seconds < math.inf


def test_a_newcomer_is_planned_with_by_when_it_was_seen_not_by_when_it_believes_it_came() -> None:
    """It takes the time from old slots: it believes that it came at 0.5 s, but it came at 5 s. Once
    it was given the batches of the time between, and all waited for them."""
    new = msgspec.structs.replace(
        slot(0), batch=8, batch_seconds=1.0, came_seconds=0.5, epoch_seconds=0.5, under_way=0.0
    )
    member = msgspec.structs.replace(MEMBER, under_way=0.0)
    others = seen(*[member] * 7, new, at=5.0)
    found = with_members(others, member, 5.0)
    fair = (8 * 80 - 8 * 40) / 9 / 8  # batches still to do, shared out among nine
    assert found.own_part - 40 <= 8 * math.ceil(fair)
    assert found.others_ready_in_seconds <= math.ceil(fair) + 1


def test_a_rate_a_thousand_times_the_usual_is_ignored_where_there_is_a_usual_one() -> None:
    liar = slot(0, 6000.0)
    assert not estimated(seen(liar), slot(0, 5.0), now=1.0).ignored
    found = estimated(seen(liar, slot(0, 5.0), slot(0, 4.0)), slot(0, 5.0), now=1.0)
    assert [one.peer for one in found.ignored] == ["peer-0"]


def test_a_peer_a_hundred_times_slower_counts() -> None:
    found = estimated(seen(slot(50, 100.0), slot(1, 1.0)), slot(48, 100.0))
    assert found.samples == 99
    assert found.expected == 3


def test_once_another_has_begun_a_little_less_is_enough() -> None:
    assert not estimated(seen(slot(45)), slot(46)).is_due
    assert estimated(seen(slot(45, averaging=True)), slot(46)).is_due
    assert not estimated(seen(slot(40, averaging=True)), slot(46)).is_due


def test_a_round_of_one_that_was_killed_in_it_or_is_doubted_has_not_begun() -> None:
    """Its last slot says that it averages. A backbone once came to its round again and again,
    alone, and doubted the honest peer that did not come."""
    one = slot(45, averaging=True)
    silent = CARRIED_SECONDS + 0.1
    found = estimated(seen(one), slot(46), silent)
    assert not found.is_due
    assert not found.averaging
    credit = Credit()
    credit.round_ended(5, {PeerId("peer-0"): 45}, {}, 0.0)
    doubted = estimated(seen(one, slot(5)), slot(90), credit=credit)
    assert not doubted.is_due
    assert doubted.averaging == frozenset(peers(0)), "a group of its that has begun may still end"


def test_once_most_have_begun_nobody_stays_behind() -> None:
    two = [slot(20, averaging=True), slot(20, averaging=True)]
    assert estimated(seen(*two), slot(15)).is_due
    assert not estimated(seen(*two), slot(5)).is_due


def test_a_peer_that_does_not_bring_what_it_claimed_is_doubted_and_later_given_up() -> None:
    credit = Credit()
    claimed = {PeerId("peer-0"): 80}
    credit.round_ended(5, claimed, {}, 0.0)
    found = estimated(seen(slot(80, 1.0)), slot(30), credit=credit)
    assert (found.samples, found.expected, found.company) == (30, 1, 1)
    assert "did not bring" in found.ignored[0].reason
    credit.round_ended(5, claimed, {}, 0.0)
    assert estimated(seen(slot(80, 1.0)), slot(30), credit=credit).company == 0
    assert estimated(seen(slot(80, epoch=9)), slot(30, epoch=9), credit=credit).samples == 110


def test_a_peer_whose_state_could_not_be_fetched_is_ignored_for_a_while() -> None:
    credit = Credit()
    credit.state_refused(PeerId("peer-0"), "nothing is served there", now=0.0)
    others = seen(slot(0, epoch=900))
    assert estimated(others, slot(1), credit=credit).behind is None
    later = seen(slot(0, epoch=900), at=REFUSED_SECONDS)
    assert estimated(later, slot(1), REFUSED_SECONDS, credit=credit).behind is not None


def test_a_restarted_peer_counts_with_what_its_new_slot_says() -> None:
    others = seen(slot(70))
    assert estimated(others, slot(0)).samples == 70
    others |= seen(slot(0))
    assert estimated(others, slot(0)).samples == 0


@given(
    samples=st.lists(st.integers(0, 150), max_size=8),
    own=st.integers(0, 150),
    rate=st.floats(0.0, 1e5),
    now=st.floats(0.0, 30.0),
)
def test_reading_is_as_frequent_as_the_step_is_near(
    samples: list[int], own: int, rate: float, now: float
) -> None:
    found = estimated(seen(*(slot(one, rate) for one in samples)), slot(own, rate), now)
    assert SHORTEST_READ_SECONDS <= found.read_again_in_seconds <= LONGEST_READ_SECONDS
    assert found.samples >= own
    assert 1 <= found.expected <= len(samples) + 1
    if not found.is_due and math.isfinite(found.due_in_seconds):
        assert found.read_again_in_seconds <= max(SHORTEST_READ_SECONDS, found.due_in_seconds)


def test_a_slot_is_small_and_says_nothing_that_is_no_number() -> None:
    full = ProgressSlot(
        1 << 40,
        history(),
        1 << 50,
        1e6,
        MODEL,
        state_digest=b"d" * 32,
        torch="2.13.0+cu130",
    )
    assert len(PROGRESS.encode(full)) < 200
    assert PROGRESS.check is not None
    assert PROGRESS.check("", slot(0, math.nan)) is not None
    assert PROGRESS.check("", slot(0, math.inf)) is not None
    assert PROGRESS.check("", slot(0, 1.0)) is None
    assert PROGRESS.check("", msgspec.structs.replace(full, earlier_digest=b"e" * 32)) is not None
    for wrong in (slot(-1), slot(0, -1.0), slot(0, epoch=1 << 41), slot(0, signature=b"short")):
        with pytest.raises(SlotRefused):
            PROGRESS.encode(wrong)


def test_a_live_peer_loses_two_writes_without_being_forgotten() -> None:
    assert 3 * SAY_AGAIN_SECONDS <= SLOT_SECONDS


@pytest.mark.slow
def test_the_estimate_costs_in_proportion_to_the_number_of_peers() -> None:
    def seconds(number: int) -> float:
        others = seen(*(slot(1) for _ in range(number)))
        mine, taken = slot(1), []
        for _ in range(5):
            began = time.thread_time()
            estimated(others, mine)
            taken.append(time.thread_time() - began)
        return min(taken)

    gc.disable()  # whose turn a collection falls in says nothing
    try:
        few, many = seconds(500), seconds(8000)
    finally:
        gc.enable()
    # 16 times if it is linear, over 100 where each peer is looked for among all others
    assert many < 48 * few
