"""What a peer of a run by cohorts makes of the slots: who is expected, due, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from protocols.accumulation.claims import STEPS_OF_THE_PAST, CohortPlace, Credit, Past
from protocols.accumulation.estimate import Estimate
from protocols.accumulation.known import (
    LONGEST_READ_SECONDS,
    Known,
    OtherCohorts,
    ProgressSettings,
    Seen,
)
from protocols.accumulation.lineage import Lineage
from protocols.accumulation.progress import (
    ASKED_SECONDS,
    LONG_STEP_SECONDS,
    READ_IN_COHORT_SECONDS,
    estimate,
)
from protocols.accumulation.progress_slot import (
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
    is_sum,
    name_of_sum,
    publisher_of,
)
from protocols.identity import PeerId
from protocols.moshpit.cohorts import cohort_of, in_order
from tests.accumulation.progress_slots import slot

RUN, COUNT, TARGET = "poem", 4, 400
SETTINGS = ProgressSettings(TARGET, run=RUN)
PEERS = [PeerId(f"peer-{number:02}") for number in range(24)]


def cohort(number: int) -> list[PeerId]:
    """The peers of a cohort, its head first."""
    return in_order(RUN, (one for one in PEERS if cohort_of(RUN, one, COUNT) == number))


HEADS = [cohort(number)[0] for number in range(COUNT)]
OWN = msgspec.structs.replace(slot(10, 4.0), batch=4, batch_seconds=1.0, cohorts=COUNT)
SUM = msgspec.structs.replace(OWN, samples=60, samples_per_second=24.0, peers=6)


def seen_at(me: PeerId, **sums: ProgressSlot) -> dict[PeerId, Seen]:
    """All slots that this peer reads, each just published."""
    mine = cohort_of(RUN, me, COUNT)
    found = {one: Seen(OWN, 0.0) for one in cohort(mine) if one != me}
    for number, head in enumerate(HEADS):
        if head != me:
            found[name_of_sum(head)] = Seen(sums.get(f"of_{number}", SUM), 0.0)
    return found


def view(
    me: PeerId, seen: Mapping[PeerId, Seen] | None = None, known: Known | None = None
) -> Estimate:
    return estimate(
        seen_at(me) if seen is None else seen, OWN, SETTINGS, 0.0, known or was_in_step(me)
    )


def was_in_step(me: PeerId, **more: Any) -> Known:
    """What a peer knows that was in the last step."""
    return replace(Known(Credit(), me=me, epoch_began=-1.0, cohorts=COUNT), **more)


def test_a_sum_has_a_name_of_its_own() -> None:
    name = name_of_sum(HEADS[0])
    assert is_sum(name)
    assert not is_sum(HEADS[0])
    assert publisher_of(name) == publisher_of(HEADS[0]) == HEADS[0]


def test_the_samples_of_all_cohorts_count_and_only_the_own_one_is_expected() -> None:
    member = cohort(1)[2]
    found = view(member)
    size = len(cohort(1))
    assert found.samples == 10 * size + 60 * 3
    assert found.expected == size
    assert found.awaited == {one for one in cohort(1) if one != member}
    assert found.cohort is not None
    assert (found.cohort.number, found.cohort.count) == (1, COUNT)
    assert found.cohort.heads == {head for head in HEADS if head not in cohort(1)}


def test_a_newcomer_whose_first_batch_comes_too_late_is_not_expected() -> None:
    member, *_, newcomer = cohort(1)[1:]
    enough = msgspec.structs.replace(SUM, samples=TARGET)

    def expected(seconds: float, samples: int = 0) -> bool:
        busy = msgspec.structs.replace(
            OWN, samples=samples, batch_seconds=seconds, under_way=0.0, came_seconds=1.0
        )
        seen = {**seen_at(member, of_2=enough), newcomer: Seen(busy, 0.0)}
        found = view(member, seen)
        assert found.expected == 1 + len(found.coming)
        return newcomer in found.coming

    assert expected(0.5)
    assert not expected(5.0)
    assert expected(5.0, samples=4), "those would be lost"


LATE = msgspec.structs.replace(OWN, samples=0, batch_seconds=2.0, step_peers=len(PEERS), spared=3)
"""The slot of one that got the last step when the others had computed most of the next."""


def seen_late(averaging: int, mine: ProgressSlot = LATE, further: int = 0, **more: Any) -> Estimate:
    """What that peer sees when so many of the nine others are averaging, and so many a step
    further. The other cohorts are averaging; the samples in their sums are old."""
    me, others = cohort(1)[-1], cohort(1)[:-1]
    assert len(others) == 9
    few = msgspec.structs.replace(SUM, samples=10, samples_per_second=1.0, averaging=True)
    computes = msgspec.structs.replace(OWN, samples=4)
    averages = msgspec.structs.replace(OWN, samples=4, averaging=True)
    ahead = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"n" * 16)
    slots = [averages] * averaging + [ahead] * further
    slots += [computes] * (len(others) - len(slots))
    seen = seen_at(me, of_0=few, of_2=few, of_3=few)
    seen |= {one: Seen(said, 0.0) for one, said in zip(others, slots, strict=True)}
    return estimate(seen, mine, SETTINGS, 0.0, was_in_step(me, **more))


def test_a_cohort_waits_for_one_that_got_the_step_late_when_most_others_are_averaging() -> None:
    assert not seen_late(4).is_waited_for
    assert seen_late(5).is_waited_for
    assert seen_late(5).spared == LATE.spared
    for found in (
        seen_late(5, further=1),  # that round is over
        seen_late(9, failed_for=0.0),  # a round of this epoch
        seen_late(9, epoch_began=None),  # it was not in the last step
        seen_late(9, cohorts=1),  # one group
        seen_late(9, msgspec.structs.replace(LATE, follows=True)),
        seen_late(9, msgspec.structs.replace(LATE, batch=5)),  # not four in a step
        seen_late(9, msgspec.structs.replace(LATE, step_peers=len(PEERS) + 2)),
    ):
        assert not found.is_waited_for


def test_one_whose_cohort_waits_for_it_looks_soon_whether_the_round_is_due() -> None:
    found = seen_late(5)
    assert not found.is_due
    assert seen_late(4).read_again_in_seconds > READ_IN_COHORT_SECONDS
    assert found.read_again_in_seconds == READ_IN_COHORT_SECONDS


def test_only_heads_are_holders() -> None:
    assert view(cohort(1)[2]).holders == set(HEADS)
    assert view(HEADS[1]).holders == set(HEADS)


def test_the_head_publishes_what_its_cohort_has_together() -> None:
    found = view(HEADS[2])
    size = len(cohort(2))
    assert found.sum is not None
    assert found.sum.peers == size
    assert found.sum.cohorts == COUNT
    assert found.sum.samples == 10 * size
    assert all(view(one).sum is None for one in cohort(2)[1:])


def test_batches_under_way_count_in_full_in_a_sum() -> None:
    busy = msgspec.structs.replace(OWN, under_way=0.5)
    seen = seen_at(HEADS[2])
    seen[cohort(2)[1]] = Seen(busy, 0.0)
    found = view(HEADS[2], seen)
    assert found.sum is not None
    assert found.sum.samples == 10 * len(cohort(2)) + 4


def test_members_whose_slot_of_this_epoch_has_not_arrived_count_in_a_sum() -> None:
    before = msgspec.structs.replace(OWN, epoch=OWN.epoch - 1, averaging=True, samples=30)
    late = cohort(2)[1]
    seen = seen_at(HEADS[2]) | {late: Seen(before, -1.0)}
    known = Known(Credit(), frozenset((late,)), me=HEADS[2], epoch_began=-0.5, cohorts=COUNT)
    found = view(HEADS[2], seen, known)
    assert found.sum is not None
    assert found.sum.peers == len(cohort(2))
    assert found.sum.samples == 10 * (len(cohort(2)) - 1) + before.batch


def test_the_next_in_order_is_the_head_when_the_first_is_silent_or_idle() -> None:
    me = cohort(2)[1]
    assert view(me).sum is None
    without = {peer: one for peer, one in seen_at(me).items() if peer != HEADS[2]}
    assert view(me, without).sum is not None
    first = frozenset((HEADS[2],))
    assert view(me, known=was_in_step(me, idle_heads=first)).sum is not None
    assert view(me, known=was_in_step(me, lost=first)).sum is not None


def test_a_round_is_told_which_peers_of_the_cohort_seem_to_be_gone() -> None:
    me, lost = cohort(1)[2], cohort(1)[4]
    before = view(me)
    found = view(me, known=was_in_step(me, lost=frozenset((lost, HEADS[2]))))
    assert (before.lost, found.lost) == (frozenset(), {lost})
    assert (found.coming, found.awaited) == (before.coming, before.awaited)
    assert (found.expected, found.samples) == (before.expected, before.samples)


def test_a_peer_that_can_only_dial_out_is_no_head() -> None:
    me = cohort(2)[1]
    seen = seen_at(me)
    seen[HEADS[2]] = Seen(msgspec.structs.replace(OWN, client=True), 0.0)
    assert view(me, seen).sum is not None


def test_a_peer_that_has_just_taken_its_state_is_no_head_as_long_as_there_is_another() -> None:
    """Else heads change, and cohorts have two, whenever many peers come at once, or come back."""
    new, me = msgspec.structs.replace(OWN, follows=True), cohort(2)[1]
    seen = seen_at(me)
    seen[HEADS[2]] = Seen(new, 0.0)
    assert view(me, seen).sum is not None
    known = Known(Credit(), me=HEADS[2], cohorts=COUNT)
    assert estimate(seen_at(HEADS[2]), new, SETTINGS, 0.0, known).sum is None
    seen |= {one: Seen(new, 0.0) for one in cohort(2) if one != me}
    assert estimate(seen, new, SETTINGS, 0.0, replace(known, me=me)).sum is None
    assert view(me, seen).sum is not None


def test_the_peer_with_the_fastest_link_is_the_head() -> None:
    me, slow = cohort(2)[-1], msgspec.structs.replace(OWN, uplink=4)
    fast = msgspec.structs.replace(OWN, uplink=5)
    known = was_in_step(me)
    seen = seen_at(me) | {one: Seen(slow, 0.0) for one in cohort(2) if one != me}
    assert estimate(seen, fast, SETTINGS, 0.0, known).sum is not None
    assert estimate(seen, slow, SETTINGS, 0.0, known).sum is None
    new = msgspec.structs.replace(fast, follows=True)
    assert estimate(seen, new, SETTINGS, 0.0, known).sum is None


def test_of_two_sums_of_one_cohort_that_of_a_peer_that_was_in_a_step_counts() -> None:
    me, second = cohort(1)[2], cohort(3)[1]
    seen = seen_at(me, of_3=msgspec.structs.replace(SUM, follows=True))
    seen[name_of_sum(second)] = Seen(SUM, 0.0)
    found = view(me, seen)
    assert found.cohort is not None
    assert second in found.cohort.heads
    assert HEADS[3] not in found.cohort.heads


@pytest.mark.parametrize(
    ("ago", "is_lost", "counts"),
    [
        (0.5, False, HEADS[3]),
        (0.5, True, cohort(3)[1]),
        (SAY_AGAIN_SECONDS + 0.5, False, cohort(3)[1]),
    ],
)
def test_of_two_sums_of_one_cohort_the_heads_counts_until_it_is_silent_or_lost(
    ago: float, is_lost: bool, counts: PeerId
) -> None:
    """Another peer may take itself for the head because its own link to that is lost."""
    me, others = cohort(1)[2], (HEADS[3], cohort(3)[1])
    still = msgspec.structs.replace(SUM, samples_per_second=0.0)
    seen = seen_at(me, of_3=still)
    seen[name_of_sum(HEADS[3])] = Seen(still, -ago)
    seen[name_of_sum(cohort(3)[1])] = Seen(msgspec.structs.replace(still, samples=70), 0.0)
    found = view(me, seen, was_in_step(me, lost=frozenset(HEADS[3:] if is_lost else ())))
    brought = 60 if counts == HEADS[3] else 70
    assert found.samples == 10 * len(cohort(1)) + 60 * 2 + brought
    assert found.cohort is not None
    assert {one for one in others if one in found.cohort.heads} == {counts}


def test_own_slots_of_another_cohort_do_not_count() -> None:
    me = cohort(1)[2]
    before = view(me)
    after = view(me, seen_at(me) | {cohort(3)[1]: Seen(OWN, 0.0)})
    assert (after.samples, after.expected) == (before.samples, before.expected)


FURTHER = msgspec.structs.replace(SUM, epoch=SUM.epoch + 1, history=b"f" * 16)
OTHER = msgspec.structs.replace(SUM, history=b"o" * 16)
THERE = Lineage(FURTHER.epoch, FURTHER.history)


def place(number: int, cohorts: int = COUNT) -> CohortPlace:
    return CohortPlace(cohorts, number, COUNT, number)


def reached(*numbers: int, at: Lineage = THERE) -> dict[CohortPlace, tuple[Lineage, ...]]:
    """The slots of these cohorts were read, and a quarter of the peers there are so far."""
    return {place(number): (at,) for number in numbers}


def test_heads_that_are_further_are_followed_if_their_cohorts_are() -> None:
    me = cohort(1)[2]
    seen = seen_at(me, of_0=FURTHER, of_2=FURTHER)
    found = view(me, seen, was_in_step(me, reached=reached(0, 2)))
    assert found.behind is not None
    assert set(found.behind.peers) == {HEADS[0], HEADS[2]}
    assert not found.unproved
    alone = view(me, seen_at(me, of_0=FURTHER), was_in_step(me, reached=reached(0)))
    assert alone.behind is None, "one head may lie"


def test_a_later_state_that_only_a_sum_names_is_not_looked_for() -> None:
    me = cohort(1)[2]
    seen = seen_at(me, of_0=FURTHER, of_2=FURTHER)
    here = Lineage(OWN.epoch, OWN.history)
    for known in (was_in_step(me), was_in_step(me, reached=reached(0, 2, at=here))):
        found = view(me, seen, known)
        assert found.behind is None
        assert found.unproved == {
            name_of_sum(HEADS[0]): place(0),
            name_of_sum(HEADS[2]): place(2),
        }
        assert found.ahead == found.just_ahead == found.may_be_ahead == frozenset()
        assert found.company == view(me).company, "but nobody makes a step alone beside it"


@pytest.mark.parametrize("number", [0, 1])
def test_after_a_failed_round_one_that_says_it_is_a_step_further_has_to_show_it(
    number: int,
) -> None:
    """A head of another cohort, by its sum; or a peer of the same cohort, by its own slot."""
    me, one = cohort(1)[2], cohort(number)[0]
    moved = msgspec.structs.replace(OWN, epoch=FURTHER.epoch, history=FURTHER.history)
    name = one if number == 1 else name_of_sum(one)
    seen = seen_at(me) | {name: Seen(moved if number == 1 else FURTHER, 0.0)}

    def after(seconds: float, **more: Any) -> Estimate:
        return view(me, seen, was_in_step(me, failed_for=seconds, **more))

    asked = after(1.0)
    assert (asked.may_be_ahead, asked.just_ahead) == ({one}, frozenset())
    assert asked.made == {(one, FURTHER.history)}
    assert asked.unproved == {name: place(number)}
    silent = after(2.0, silent={(name, (OWN.epoch, OWN.history), THERE)})
    assert (silent.may_be_ahead, silent.just_ahead) == (frozenset(), frozenset())
    shown = after(2.0, shown={PeerId("another"): THERE})
    assert (shown.may_be_ahead, shown.just_ahead, shown.ahead) == (frozenset(), {one}, {one})
    assert not after(ASKED_SECONDS).may_be_ahead, "nobody holds it up for longer"


def test_in_one_group_no_single_peer_is_believed_that_it_is_a_step_further() -> None:
    seen = {one: Seen(OWN, 0.0) for one in PEERS[:20]}
    moved = Seen(msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"f" * 16), 0.0)
    known = Known(Credit(), me=PEERS[22])
    assert not estimate(seen | {PEERS[0]: moved}, OWN, SETTINGS, 0.0, known).just_ahead
    two = {PEERS[0]: moved, PEERS[1]: moved}
    assert estimate(seen | two, OWN, SETTINGS, 0.0, known).just_ahead == {*two}


def test_a_peer_that_is_far_behind_follows_what_is_proved_of_a_later_state() -> None:
    me, far = cohort(1)[2], msgspec.structs.replace(FURTHER, epoch=FURTHER.epoch + 7)
    known = was_in_step(me, reached=reached(0, 2))
    found = view(me, seen_at(me, of_0=far, of_2=far), known)
    assert found.behind is not None
    assert found.behind.epoch == THERE.epoch


def test_the_own_cohort_is_proof_of_what_its_sum_says() -> None:
    me, others = cohort(1)[2], [one for one in cohort(1) if one != cohort(1)[2]]
    moved = msgspec.structs.replace(OWN, epoch=FURTHER.epoch, history=FURTHER.history)
    quarter = others[: -(-len(others) // 4)]
    seen = seen_at(me, of_0=FURTHER, of_1=FURTHER) | {one: Seen(moved, 0.0) for one in quarter}
    found = view(me, seen, was_in_step(me, reached=reached(0)))
    assert found.behind is not None
    fewer = seen | {one: Seen(OWN, 0.0) for one in quarter}
    assert view(me, fewer, was_in_step(me, reached=reached(0))).behind is None


def test_a_fork_needs_the_same_proof() -> None:
    me = cohort(1)[2]
    seen = seen_at(me, of_0=OTHER, of_2=OTHER, of_3=OTHER)
    assert view(me, seen).fork is None
    there = Lineage(OTHER.epoch, OTHER.history)
    found = view(me, seen, was_in_step(me, reached=reached(0, 2, 3, at=there)))
    assert found.fork is not None
    assert found.fork.history == OTHER.history


def test_a_newcomer_waits_for_the_proof_of_a_cohort_and_others_for_two() -> None:
    me = cohort(1)[2]
    fresh = msgspec.structs.replace(OWN, epoch=0, history=b"0" * 16, samples=0)
    seen = {peer: one for peer, one in seen_at(me).items() if is_sum(peer)}
    at = Lineage(SUM.epoch, SUM.history)
    for numbers in ((), (0,), (0, 2)):
        known = Known(Credit(), me=me, cohorts=COUNT, reached=reached(*numbers, at=at))
        found = estimate(seen, fresh, SETTINGS, 0.0, known)
        assert (found.behind is not None) is bool(numbers)
        assert found.may_be_behind
        earlier = msgspec.structs.replace(fresh, epoch=1)
        found = estimate(seen, earlier, SETTINGS, 0.0, known)
        assert (found.behind is not None) is (len(numbers) == 2)
    liars = {one for one in seen if one not in map(name_of_sum, (HEADS[0],))}
    known = replace(known, reached=reached(0, at=at), settled=frozenset(liars))
    found = estimate(seen, earlier, SETTINGS, 0.0, known)
    assert found.behind is not None, "nobody else is left"
    assert not estimate(seen, fresh, SETTINGS, 0.0, known).may_be_behind


def test_one_that_is_two_steps_further_shows_the_first_of_them() -> None:
    me = cohort(1)[2]
    far = msgspec.structs.replace(FURTHER, epoch=FURTHER.epoch + 1, history=b"g" * 16)
    seen, name = seen_at(me, of_0=far), name_of_sum(HEADS[0])
    found = view(me, seen, was_in_step(me, failed_for=1.0, shown={name: THERE}))
    assert found.just_ahead == found.ahead == {HEADS[0]}
    lies = view(me, seen_at(me, of_0=OTHER), was_in_step(me, failed_for=1.0, shown={name: THERE}))
    assert name in lies.unproved, "it has shown another step than it says"
    much_further = msgspec.structs.replace(FURTHER, epoch=FURTHER.epoch + 2)
    waits = view(me, seen_at(me, of_0=much_further), was_in_step(me, failed_for=1.0))
    assert not waits.may_be_ahead, "nobody keeps decisions for so long"


def test_of_two_sides_at_one_epoch_one_gives_way_also_if_each_cohort_has_both() -> None:
    """It is the same side at the peers of both."""
    here, there = (Lineage(one.epoch, one.history) for one in (OWN, OTHER))
    both = {place(number): (here, there) for number in range(COUNT)}
    me, *others = cohort(1)[2], *cohort(1)[3:]
    there_too = {
        one: Seen(msgspec.structs.replace(OWN, history=OTHER.history), 0.0) for one in others
    }
    sums = {f"of_{number}": (OTHER if number else SUM) for number in range(COUNT)}
    found = view(me, seen_at(me, **sums) | there_too, was_in_step(me, reached=both))
    assert found.fork is not None
    ours = {f"of_{number}": (OTHER if number == 3 else SUM) for number in range(COUNT)}
    assert view(me, seen_at(me, **ours) | there_too, was_in_step(me, reached=both)).fork is None


def test_in_one_group_a_member_of_the_last_round_is_believed_also_by_its_sum() -> None:
    """The run has grown into cohorts with the step that this peer has missed."""
    seen = {one: Seen(msgspec.structs.replace(OWN, cohorts=1), 0.0) for one in PEERS[:20]}
    seen[name_of_sum(PEERS[21])] = Seen(FURTHER, 0.0)
    found = estimate(seen, OWN, SETTINGS, 0.0, Known(Credit(), me=PEERS[22]))
    assert (found.ahead, found.just_ahead) == ({PEERS[21]}, frozenset())


def test_a_sum_that_names_another_number_of_cohorts_is_not_proved_by_those_it_is_alone_with() -> (
    None
):
    """Where the run has 37 cohorts, or one, only liars publish; the tracker reads both places."""
    me = cohort(1)[2]
    for cohorts in (1, 37):
        odd = msgspec.structs.replace(FURTHER, cohorts=cohorts)
        seen = seen_at(me, of_0=odd, of_2=odd)
        there = CohortPlace(cohorts, cohort_of(RUN, HEADS[0], cohorts), COUNT, 0)
        found = view(me, seen)
        assert found.unproved[name_of_sum(HEADS[0])] == there
        if cohorts == 1:
            known = was_in_step(me, reached={there: (THERE,)})
            assert name_of_sum(HEADS[0]) in view(me, seen, known).unproved


def test_after_a_failed_round_one_that_says_the_run_is_one_group_has_to_show_it() -> None:
    me, liar = cohort(1)[2], cohort(0)[1]
    alone = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"f" * 16, cohorts=1)
    seen = seen_at(me) | {liar: Seen(alone, 0.0)}
    found = view(me, seen, was_in_step(me, failed_for=1.0))
    assert (found.ahead, found.just_ahead, found.may_be_ahead) == (set(), set(), {liar})
    shown = view(me, seen, was_in_step(me, failed_for=1.0, shown={liar: THERE}))
    assert shown.just_ahead == {liar}


def test_one_sum_of_very_many_peers_keeps_nobody_from_a_run_that_is_one_group_again() -> None:
    me = cohort(1)[2]
    alone = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"f" * 16, cohorts=1)
    seen = {peer: one for peer, one in seen_at(me).items() if not is_sum(peer)}
    seen |= {PeerId(f"lone-{number}"): Seen(alone, 0.0) for number in range(25)}
    seen[name_of_sum(HEADS[0])] = Seen(msgspec.structs.replace(SUM, peers=1024), 0.0)
    settings = replace(SETTINGS, places=64)
    assert estimate(seen, OWN, settings, 0.0, was_in_step(me)).behind is not None


def test_of_two_sums_of_one_cohort_an_unproved_one_does_not_count() -> None:
    me, liar = cohort(1)[2], cohort(0)[1]
    seen = seen_at(me) | {name_of_sum(liar): Seen(FURTHER, 0.0)}
    honest = view(me)
    assert view(me, seen).samples == honest.samples
    found = view(me, seen, was_in_step(me, refuted=frozenset({name_of_sum(liar)})))
    assert found.samples == honest.samples
    assert found.cohort == honest.cohort
    assert [(one.peer, one.kind) for one in found.ignored] == [(liar, "state")]


def test_a_few_that_say_the_run_is_one_group_move_no_run_by_cohorts() -> None:
    me = cohort(1)[2]
    alone = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"f" * 16, cohorts=1)
    said = [one for one in PEERS if cohort_of(RUN, one, COUNT) != 1]
    few = {one: Seen(alone, 0.0) for one in said[:5]}
    assert view(me, seen_at(me) | few).behind is None
    proved = was_in_step(me, reached=reached(0, 2))
    found = view(me, seen_at(me, of_0=FURTHER, of_2=FURTHER) | few, proved)
    assert found.behind is not None, "and they keep nobody from following the others"
    many = {one: Seen(alone, 0.0) for one in said[:10]}
    assert view(me, seen_at(me) | many).behind is not None


def test_a_peer_of_a_run_without_cohorts_ignores_a_sum_of_its_epoch() -> None:
    seen = {one: Seen(OWN, 0.0) for one in PEERS[:4]}
    known = Known(Credit(), me=PEERS[5])
    before = estimate(seen, OWN, SETTINGS, 0.0, known)
    after = estimate(seen | {name_of_sum(PEERS[6]): Seen(SUM, 0.0)}, OWN, SETTINGS, 0.0, known)
    assert (after.samples, after.expected, after.holders) == (
        before.samples,
        before.expected,
        before.holders,
    )


def test_a_peer_that_is_further_in_one_group_is_followed_if_no_head_is_left() -> None:
    me = cohort(1)[2]
    alone = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1, history=b"f" * 16, cohorts=1)
    seen = {peer: one for peer, one in seen_at(me).items() if not is_sum(peer)}
    found = view(me, seen | {cohort(3)[1]: Seen(alone, 0.0)})
    assert found.ahead == {cohort(3)[1]}
    assert found.behind is not None
    assert found.behind.peers == (cohort(3)[1],)


def told(seen: Mapping[PeerId, Seen], head: PeerId, **more: object) -> dict[PeerId, Seen]:
    """The same, where this head tells what all other cohorts have together."""
    rest = {"rest_cohorts": 3, "rest_samples": 150, "rest_per_second": 60.0, **more}
    return {**seen, head: Seen(msgspec.structs.replace(seen[head].slot, **rest), 0.0)}


def test_a_head_knows_from_the_sums_what_all_other_cohorts_have_together() -> None:
    found = view(HEADS[1]).rest
    assert found is not None
    assert (found.cohorts, found.samples, found.rate, found.told_by) == (3, 180.0, 72.0, None)
    assert estimate({}, OWN, SETTINGS, 0.0, Known(Credit(), me=PEERS[0])).rest is None


def test_a_member_believes_its_head_and_knows_the_other_heads_from_their_sums() -> None:
    me, head = cohort(1)[2], HEADS[1]
    found = view(me, told(seen_at(me), head))
    assert found.rest is not None
    assert (found.rest.samples, found.rest.told_by) == (150.0, head)
    assert found.samples == 10 * len(cohort(1)) + 150
    assert found.expected == len(cohort(1))
    assert found.cohort is not None
    assert found.cohort.heads == set(HEADS) - {head}
    assert found.holders == set(HEADS)
    assert set(found.peers) == set(cohort(1)) - {me} | set(HEADS)


def test_what_a_head_tells_grows_at_the_rate_that_it_tells() -> None:
    me = cohort(1)[2]
    known = was_in_step(me)
    found = estimate(told(seen_at(me), HEADS[1]), OWN, SETTINGS, 2.0, known)
    assert found.rest is not None
    assert found.rest.samples == 150 + 2.0 * 60.0


def test_the_last_word_of_a_head_that_has_died_counts_until_the_next_one_tells() -> None:
    me, head, successor = cohort(1)[2], HEADS[1], cohort(1)[1]
    seen = told(seen_at(me), head)
    known = was_in_step(me, rest=view(me, seen).rest, lost=frozenset((head,)))

    def word(seen: Mapping[PeerId, Seen], known: Known, now: float = 2.0) -> OtherCohorts:
        found = estimate(seen, OWN, SETTINGS, now, known).rest
        assert found is not None
        return found

    alone = {peer: one for peer, one in seen.items() if peer != head}
    goes_on = word(alone, known)
    assert (goes_on.cohorts, goes_on.samples, goes_on.told_by) == (3, 150 + 2.0 * 60.0, head)
    again = word(alone, replace(known, rest=goes_on), 3.0)
    assert again.samples == 150 + 3.0 * 60.0, "counted from when it was said"
    newer = word(told(seen, successor, rest_samples=200), known)
    assert (newer.samples, newer.told_by) == (200 + 2.0 * 60.0, successor)
    assert word(alone, known, SLOT_SECONDS - 1.0).told_by == head
    assert word(alone, known, SLOT_SECONDS + 1.0).told_by is None
    assert word(alone, replace(known, sums_read_at=1.0)).samples == 180.0 + 2.0 * 72.0
    assert goes_on.told is not None
    much = msgspec.structs.replace(goes_on.told.slot, samples=10**9)
    bold = replace(goes_on, told=replace(goes_on.told, slot=much))
    boasted = estimate(alone, OWN, SETTINGS, 0.5, replace(known, rest=bold))
    assert boasted.boaster == head
    assert word(alone, replace(known, boasters=frozenset((head,)))).told_by is None
    further = msgspec.structs.replace(OWN, epoch=OWN.epoch + 1)
    found = estimate(alone, further, SETTINGS, 2.0, known).rest
    assert found is not None
    assert found.told_by is None
    one_liar = word(alone | {successor: Seen(further, 1.0)}, known)
    assert one_liar.told_by == head
    there = {peer: Seen(further, 1.0) for peer in cohort(1) if peer not in (me, head)}
    assert word(alone | there, known).told_by is None, "this peer has missed the step"
    alike = msgspec.structs.replace(OWN, cohorts=2 * COUNT)
    found = estimate(alone, alike, SETTINGS, 2.0, replace(known, cohorts=2 * COUNT)).rest
    assert found is not None
    assert found.told_by is None, "other cohorts"


def test_a_head_tells_on_what_the_last_one_told_until_it_has_read_the_sums() -> None:
    me, head, successor = cohort(1)[2], HEADS[1], cohort(1)[1]
    rest = view(me, told(seen_at(me), head)).rest
    known = was_in_step(successor, rest=rest, lost=frozenset((head,)))
    seen = {peer: one for peer, one in seen_at(successor).items() if peer != name_of_sum(head)}
    last = msgspec.structs.replace(SUM, epoch=OWN.epoch - 1)
    old = {peer: Seen(last, -5.0) if is_sum(peer) else one for peer, one in seen.items()}
    found = estimate(old, OWN, SETTINGS, 0.0, known)
    assert found.sum is not None
    assert found.rest is not None
    assert (found.rest.cohorts, found.rest.samples, found.rest.told_by) == (3, 150.0, head)
    some = old | {name_of_sum(HEADS[0]): seen[name_of_sum(HEADS[0])]}
    found = estimate(some, OWN, SETTINGS, 0.0, known)
    assert found.rest is not None
    assert found.rest.samples == 150.0, "it has read only that one"
    found = estimate(seen, OWN, SETTINGS, 0.5, replace(known, sums_read_at=0.1))
    assert found.rest is not None
    assert (found.rest.samples, found.rest.told_by) == (180.0 + 0.5 * 72.0, None)


def test_a_sum_that_is_read_late_counts_from_when_it_was_made() -> None:
    """A peer that has just become head reads the sums for the first time in this step. They have
    not been written again, because they are still right."""
    made = msgspec.structs.replace(SUM, epoch_seconds=1.0)
    seen = {
        peer: Seen(made, 4.5) if is_sum(peer) else one for peer, one in seen_at(HEADS[1]).items()
    }
    found = estimate(seen, OWN, SETTINGS, 5.0, was_in_step(HEADS[1], epoch_began=0.0)).rest
    assert found is not None
    assert found.samples == 3 * (60 + 4.0 * 24.0)
    came = was_in_step(HEADS[1], epoch_began=None)
    found = estimate(seen, OWN, SETTINGS, 5.0, came).rest
    assert found is not None
    assert found.samples == 3 * (60 + 0.5 * 24.0), "it does not know when the step began"


def test_the_sum_of_the_last_step_counts_at_the_rate_of_that_step() -> None:
    """When it was made, most peers of that cohort waited for the round."""
    head, others = HEADS[1], [name_of_sum(one) for one in HEADS if one != HEADS[1]]
    last = {"epoch": OWN.epoch - 1, "samples": 100}
    idle = msgspec.structs.replace(SUM, samples_per_second=0.0, batch=0, batch_seconds=0.0, **last)
    seen = seen_at(head) | {one: Seen(idle, -1.0) for one in others}
    known = was_in_step(head, members=frozenset(others), step_seconds=10.0)
    found = estimate(seen, OWN, SETTINGS, 0.0, known)
    assert found.rest is not None
    assert (found.rest.rate, found.rest.samples) == (30.0, 30.0), "the step is a second old"
    assert found.rate == 30.0 + 4.0 * len(cohort(1))
    assert found.others_ready_in_seconds < 10.0, "they are in the plan"
    later = estimate(seen, OWN, SETTINGS, 9.0, known).rest
    assert later is not None
    assert later.samples == 30.0 * SETTINGS.patience_seconds, "they may be gone"
    ahead = replace(known, head_start=2.0)  # they have computed beside the round
    beside = estimate(seen, OWN, SETTINGS, 0.0, ahead).rest
    assert beside is not None
    assert beside.samples == 30.0 * 3.0


def test_a_clock_that_stood_still_dates_no_slot_into_the_future() -> None:
    """A machine has slept, and its clock did not count that."""
    made = msgspec.structs.replace(SUM, epoch_seconds=60.0)
    seen = {
        peer: Seen(made, 1.0) if is_sum(peer) else one for peer, one in seen_at(HEADS[1]).items()
    }
    found = estimate(seen, OWN, SETTINGS, 9.0, was_in_step(HEADS[1], epoch_began=0.0)).rest
    assert found is not None
    assert found.samples == 3 * (60 + (8.0 - LONGEST_READ_SECONDS) * 24.0)


def test_a_head_that_tells_of_far_more_than_the_sums_say_boasts() -> None:
    me, head = cohort(1)[2], HEADS[1]
    known = was_in_step(me)
    bold = told(seen_at(me), head, rest_samples=10**9)
    found = estimate(bold, OWN, SETTINGS, 0.5, known)
    assert found.boaster == head
    assert found.rest is not None
    assert found.rest.told_by is None
    assert view(me, told(seen_at(me), head)).boaster is None
    some = {peer: one for peer, one in bold.items() if peer != name_of_sum(HEADS[0])}
    assert estimate(some, OWN, SETTINGS, 0.5, known).boaster == head
    old = {peer: Seen(one.slot, -5.0 if is_sum(peer) else 0.0) for peer, one in bold.items()}
    found = estimate(old, OWN, SETTINGS, 0.5, known)
    assert found.boaster is None, "the sums may have grown since"
    assert found.rest is not None
    assert found.rest.samples == TARGET, "but to no more than a whole step"


def after_a_step(me: PeerId, **more: Any) -> Known:
    """The same, of one that knows what the last steps were made of. Each took four seconds, and the
    last one ended a second ago: half of this one may be done, and a quarter more."""
    past = Past()
    for _ in range(STEPS_OF_THE_PAST):
        past.step(dict.fromkeys(cohort(1), 16.0), dict.fromkeys(range(COUNT), 96.0), 4.0)
    return was_in_step(me, past=past, step_seconds=4.0, **more)


def test_a_cohort_does_not_count_for_much_more_than_it_brought_before() -> None:
    me = HEADS[1]
    bold = msgspec.structs.replace(SUM, samples=TARGET)
    assert view(me, seen_at(me, of_2=bold)).is_due
    found = view(me, seen_at(me, of_2=bold), after_a_step(me))
    assert not found.is_due
    assert found.samples == view(me, known=after_a_step(me)).samples
    assert view(me, known=after_a_step(me)).samples == view(me).samples, "60 of 60 may be there"


def test_a_cohort_whose_head_is_doubted_counts_for_what_it_brought_to_the_last_steps() -> None:
    """The others would compute its samples a second time."""
    me, liar = HEADS[1], name_of_sum(HEADS[2])
    seen = seen_at(me, of_2=msgspec.structs.replace(SUM, samples=TARGET))
    known = after_a_step(me)
    known.credit.round_ended(OWN.epoch, {liar: TARGET}, {}, 0.0)
    found = view(me, seen, known)
    assert found.samples == view(me, known=after_a_step(me)).samples - 60 + 24
    assert [(one.peer, one.kind) for one in found.ignored] == [(HEADS[2], "doubted")]
    assert found.cohort is not None
    assert HEADS[2] not in found.cohort.heads
    assert found.cohort.doubted == {HEADS[2]}, "it is waited for a little"
    known.past.step({}, {0: 96.0, 1: 96.0, 3: 96.0}, 4.0)
    none = view(me, seen, known)
    assert none.samples == found.samples - 24, "it was not in that step"
    assert none.cohort is not None
    assert not none.cohort.doubted


def test_what_a_cohort_had_in_the_step_before_is_not_measured_by_this_one() -> None:
    me = HEADS[1]
    waits = {"averaging": True, "samples_per_second": 0.0, "batch": 0, "batch_seconds": 0.0}
    older = msgspec.structs.replace(SUM, epoch=OWN.epoch - 1, samples=90, **waits)
    bold = msgspec.structs.replace(older, samples=10**9, beside=10**9)

    def rate_with(of_2: ProgressSlot) -> float:
        seen = seen_at(me, of_0=older, of_2=of_2, of_3=older)
        found = view(me, seen, replace(after_a_step(me), members=frozenset(seen)))
        assert not found.is_due
        assert found.rest is not None
        return found.rest.rate

    assert rate_with(older) == 3 * 90 / 4.0
    assert rate_with(bold) == 2 * 90 / 4.0 + 2 * 24.0, "nor may it have all of that"
    elsewhere = msgspec.structs.replace(bold, cohorts=2 * COUNT)
    assert rate_with(elsewhere) == rate_with(bold), "whatever it says of the number of cohorts"


def test_a_peer_does_not_compute_more_beside_a_round_than_it_brings_to_one() -> None:
    me, liar = HEADS[1], cohort(1)[1]
    waits = msgspec.structs.replace(
        OWN, epoch=OWN.epoch - 1, averaging=True, beside=10**9, samples_per_second=0.0
    )
    seen = {**seen_at(me), liar: Seen(waits, 0.0)}
    members = frozenset(seen)
    assert view(me, seen, was_in_step(me, members=members)).done_by_others >= TARGET
    found = view(me, seen, after_a_step(me, members=members))
    assert found.done_by_others < TARGET


def test_one_that_missed_a_step_believes_no_cohort_to_have_far_more_than_a_part() -> None:
    me = HEADS[1]
    missed = replace(after_a_step(me), epoch_began=None, step_seconds=0.0)
    bold = seen_at(me, of_2=msgspec.structs.replace(SUM, samples=TARGET))
    assert not view(me, bold, missed).is_due
    assert view(me, bold, missed).samples == view(me).samples - 60 + 1.75 * 96


def test_after_a_round_in_which_nobody_had_samples_a_peer_computes_some() -> None:
    """Whoever says that others have them all keeps nobody idle."""
    me = cohort(1)[2]
    idle = msgspec.structs.replace(OWN, samples=0)
    bold = seen_at(me, of_2=msgspec.structs.replace(SUM, samples=TARGET))
    bold |= {one: Seen(idle, 0.0) for one in bold if not is_sum(one)}

    def found(**more: Any) -> Estimate:
        return estimate(bold, idle, SETTINGS, 0.0, was_in_step(me, **more))

    assert found().is_due
    assert found().own_part == 0
    assert not found(in_vain=True).is_due
    assert found(in_vain=True).own_part > 0
    bold[cohort(1)[1]] = Seen(msgspec.structs.replace(OWN, samples=1), 0.0)
    assert found(in_vain=True).is_due, "another one has some by now"


def test_a_cohort_is_not_believed_to_compute_for_all_others() -> None:
    me = HEADS[1]
    bold = msgspec.structs.replace(
        SUM, samples=0, samples_per_second=2400.0, batch=4, batch_seconds=4 / 2400.0
    )
    seen, large = seen_at(me, of_2=bold), replace(SETTINGS, target_samples=4 * TARGET)
    assert estimate(seen, OWN, large, 0.0, was_in_step(me)).own_part == 10, "it computes no more"
    assert estimate(seen, OWN, large, 0.0, after_a_step(me)).own_part > 10


def test_a_peer_does_not_count_for_much_more_than_it_brought_before() -> None:
    me, liar = HEADS[1], cohort(1)[1]
    seen = seen_at(me) | {liar: Seen(msgspec.structs.replace(OWN, samples=TARGET // 2), 0.0)}
    assert view(me, seen).is_due
    found = view(me, seen, after_a_step(me))
    assert not found.is_due
    assert found.samples == view(me).samples + 2 * 16 + 16 - 10
    assert found.sum is not None
    assert found.sum.samples < TARGET // 2, "nor do the others hear of it"


def test_a_head_boasts_if_it_tells_of_more_than_cohorts_with_old_sums_can_have() -> None:
    me, head = cohort(1)[2], HEADS[1]
    bold = told(seen_at(me), head, rest_samples=10**9)
    old = {peer: Seen(one.slot, -9.0 if is_sum(peer) else 0.0) for peer, one in bold.items()}
    assert estimate(old, OWN, SETTINGS, 0.0, after_a_step(me)).boaster == head
    assert estimate(old, OWN, SETTINGS, 3.0, after_a_step(me)).boaster is None, "they may by now"


def test_a_head_that_counts_a_cohort_whose_sum_is_gone_does_not_boast() -> None:
    """Its own head has died, and the next one has said nothing yet."""
    me, head = cohort(1)[2], HEADS[1]
    known = was_in_step(me)
    counted = told(seen_at(me), head, rest_samples=300, rest_cohorts=COUNT - 1, rest_per_second=0.0)
    for gone in (HEADS[0], HEADS[2]):
        del counted[name_of_sum(gone)]
        assert estimate(counted, OWN, SETTINGS, 0.5, known).boaster is None


@pytest.mark.parametrize("why", ["boaster", "newcomer", "no head", "elsewhere"])
def test_a_head_that_is_not_believed_leaves_the_sums_to_count(why: str) -> None:
    """A newcomer cannot know whether the head lives: it has no link to it that could be lost."""
    me, head = cohort(1)[2], HEADS[1]
    known, seen = was_in_step(me), told(seen_at(me), head)
    match why:
        case "boaster":
            known = was_in_step(me, boasters=frozenset((head,)))
        case "newcomer":
            known = was_in_step(me, epoch_began=None)
        case "no head":
            seen = told(seen_at(me), cohort(1)[1])
        case "elsewhere":
            seen = told(seen_at(me), head, history=b"e" * 16)
    found = view(me, seen, known)
    assert found.rest is not None
    assert (found.rest.samples, found.rest.told_by) == (180.0, None)


def test_what_a_head_told_in_the_last_step_counts_by_its_rate_until_it_tells_again() -> None:
    me, head = cohort(1)[2], HEADS[1]
    before = {"epoch": OWN.epoch - 1, "averaging": True}
    seen = {
        peer: Seen(msgspec.structs.replace(one.slot, **before), -1.0)
        for peer, one in told(seen_at(me), head).items()
    }
    made = frozenset(seen)
    known = Known(Credit(), made, me=me, epoch_began=-0.5, cohorts=COUNT)
    found = estimate(seen, OWN, SETTINGS, 0.0, known)
    assert found.rest is not None
    assert (found.rest.samples, found.rest.rate, found.rest.told_by) == (30.0, 60.0, head)
    assert found.cohort is not None
    assert found.cohort.heads == set(HEADS) - {head}, "they made that step, too"
    assert found.holders == set(HEADS)
    assert found.fork is None


def almost(me: PeerId, samples: int) -> dict[PeerId, Seen]:
    """All peers wait, and have so many samples together with this one."""
    missing = samples - 10 * len(cohort(cohort_of(RUN, me, COUNT)))
    parts = [missing // 3, missing // 3, missing - 2 * (missing // 3)]
    idle = msgspec.structs.replace(SUM, samples_per_second=0.0, batch=0, batch_seconds=0.0)
    others = [number for number, head in enumerate(HEADS) if head not in cohort(1)]
    sums = {
        f"of_{number}": msgspec.structs.replace(idle, samples=part)
        for number, part in zip(others, parts, strict=True)
    }
    return seen_at(me, **sums)


def test_no_batch_is_begun_for_the_last_hundredth_of_a_step() -> None:
    me = cohort(1)[2]
    found = view(me, almost(me, TARGET - 5))
    assert (found.samples, found.slack) == (TARGET - 5, 5)
    assert found.is_due
    assert not found.wants_batch_after(10)


def test_for_more_than_a_hundredth_or_two_somebody_begins_a_batch() -> None:
    found = {me: view(me, almost(me, TARGET - 9)) for me in cohort(1)}
    assert not any(one.slack or one.is_due for one in found.values())
    assert any(one.wants_batch_after(10) for one in found.values())


def test_a_step_of_one_group_has_the_whole_target() -> None:
    mine = msgspec.structs.replace(OWN, samples=TARGET - 5, cohorts=1)
    known = Known(Credit(), me=PEERS[0], epoch_began=-1.0)
    found = estimate({}, mine, SETTINGS, 0.0, known)
    assert not found.slack
    assert not found.is_due
    assert found.wants_batch_after(TARGET - 5)


def test_lists_wait_for_newcomers_that_follow_only_if_steps_are_short() -> None:
    me, newcomer = cohort(1)[2], cohort(1)[3]
    behind = msgspec.structs.replace(OWN, epoch=OWN.epoch - 1, samples=0, follows=True)
    seen = seen_at(me) | {newcomer: Seen(behind, 0.0)}
    for seconds, followers in ((LONG_STEP_SECONDS - 0.1, {newcomer}), (LONG_STEP_SECONDS, set())):
        known = was_in_step(me, may_wait_for_follower=True, step_seconds=seconds)
        found = view(me, seen, known)
        assert found.followers == followers
        assert found.expected == len(cohort(1)) - 1 + len(followers)
