"""Claims are believed until they fail, and doubted for longer each time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest

from protocols.accumulation.claims import (
    CHECKED_AT_ONCE,
    DOUBTED_SECONDS,
    LONGEST_REFUSED_SECONDS,
    MOST_DOUBTED_ROUNDS,
    MOST_EXCUSED_ROUNDS,
    MOST_REMEMBERED,
    OVERDUE_SECONDS,
    REFUSED_SECONDS,
    REFUTED_SECONDS,
    REMEMBERED_SECONDS,
    SHORTEST_PAUSE_SECONDS,
    STEPS_OF_THE_PAST,
    CohortPlace,
    Credit,
    Past,
    StateClaims,
    met_elsewhere,
)
from protocols.accumulation.lineage import Lineage, Voter, reached_by
from protocols.identity import PeerId

LIAR = PeerId("liar")
NOW = 0.0


def test_one_liar_spoils_ever_fewer_rounds() -> None:
    credit = Credit()
    spoilt = []
    for epoch in range(100):
        if not credit.is_doubted(LIAR, epoch, NOW):
            spoilt.append(epoch)
            credit.round_ended(epoch, {LIAR: 50}, {}, NOW)
    assert spoilt == [0, 1, 3, 7, 15, 31, 63, 95]
    assert MOST_DOUBTED_ROUNDS == 95 - 63


def test_a_peer_may_have_some_times_what_it_brought_to_one_of_the_last_steps() -> None:
    past, slow, fast = Past(), PeerId("slow"), PeerId("fast")
    for samples in (10.0, 0.0):
        assert past.most_of(slow, 1.0) == math.inf, "its first part may be small"
        past.step({slow: samples, fast: 90.0}, {}, 0.0)
    for _ in range(STEPS_OF_THE_PAST - 2):
        past.step({slow: 0.0, fast: 100.0}, {}, 0.0)
        assert past.most_of(slow, 1.0) == 2 * 10 + 50, "it computes a batch in some steps only"
    assert past.most_of(slow, 0.5) == 2 * 10 + 50
    assert past.most_of(slow, 3.0) == 3 * (2 * 10 + 50), "many have gone, and this step takes long"
    past.step({slow: 0.0, fast: 100.0}, {}, 0.0)
    assert past.most_of(slow, 1.0) == math.inf, "nothing is known of it any more"
    assert past.most_of(fast, 1.0) == 2 * 100 + 50
    assert past.most_of(PeerId("newcomer"), 1.0) == math.inf


def test_one_that_signs_an_enormous_weight_makes_nobody_else_believed() -> None:
    past, liar, honest = Past(), PeerId("liar"), [PeerId(f"{number}") for number in range(3)]
    for _ in range(2):
        past.step({**dict.fromkeys(honest, 10.0), liar: 1e12}, {0: 1e12, 1: 10.0, 2: 10.0}, 10.0)
    assert past.most_of(honest[0], 1.0) == 30
    assert past.most_of_cohort(3, 5.0) == 0.25 * 10 + 1.5 * 5


def test_a_cohort_may_have_half_as_much_again_as_before_and_a_quarter_of_a_step() -> None:
    past = Past()
    assert past.most_of_cohort(0, 5.0) == math.inf
    past.step({}, {0: 10.0}, 0.0)
    assert past.most_of_cohort(0, 5.0) == math.inf, "nobody knows how long that took"
    past.step({}, {0: 100.0, 1: 300.0}, 10.0)
    past.step({}, {0: 50.0, 1: 300.0}, 10.0)
    assert past.most_of_cohort(0, 0.0) == 25
    assert past.most_of_cohort(0, 5.0) == 25 + 75
    assert past.rate_of(0) == 2 * 10
    assert past.most_of_cohort(2, 5.0) == 1.75 * (25 + 75), "what others have"
    assert past.least_rate_of(1) == 0.0, "that is too few steps"
    for cohorts in ({0: 50.0, 1: 300.0}, {1: 300.0}):
        past.step({}, cohorts, 10.0)
    assert (past.least_rate_of(0), past.least_rate_of(1)) == (0.0, 30.0)
    past.step({}, {1: 300.0, 4: 0.0}, 10.0)
    assert past.most_of_cohort(4, 0.0) == past.most_of_cohort(2, 0.0) < math.inf
    past.divided()
    assert past.most_of_cohort(0, 5.0) == math.inf
    assert past.least_rate_of(1) == 0.0


def test_a_peer_that_keeps_its_claim_is_believed_again() -> None:
    credit = Credit()
    for _ in range(5):
        credit.round_ended(0, {LIAR: 50}, {}, NOW)
    assert credit.is_given_up(LIAR, 0, NOW)
    credit.round_ended(1, {}, {LIAR: 50.0}, NOW)
    assert not credit.is_doubted(LIAR, 2, NOW)


def test_a_doubt_ends_where_no_epoch_does() -> None:
    """A backbone once doubted the only peer that computed, which could make no step alone."""
    credit = Credit()
    credit.round_ended(5, {LIAR: 50}, {}, NOW)
    assert credit.is_doubted(LIAR, 5, NOW + DOUBTED_SECONDS - 0.1)
    assert not credit.is_doubted(LIAR, 5, NOW + DOUBTED_SECONDS)
    now = NOW + DOUBTED_SECONDS
    credit.round_ended(5, {LIAR: 50}, {}, now)
    assert credit.is_given_up(LIAR, 5, now + 2 * DOUBTED_SECONDS - 0.1)
    assert not credit.is_given_up(LIAR, 5, now + 2 * DOUBTED_SECONDS)


def test_bringing_far_less_than_claimed_breaks_the_claim() -> None:
    credit = Credit()
    credit.round_ended(0, {LIAR: 50}, {LIAR: 24.0}, NOW)
    assert credit.is_doubted(LIAR, 0, NOW)
    credit.round_ended(3, {LIAR: 50}, {LIAR: 26.0}, NOW)
    assert not credit.is_doubted(LIAR, 3, NOW)


def test_one_that_comes_and_breaks_its_claim_again_is_doubted_for_longer() -> None:
    credit = Credit()
    spoilt = []
    for epoch in range(64):
        if not credit.is_doubted(LIAR, epoch, NOW):
            spoilt.append(epoch)
            credit.round_ended(epoch, {LIAR: 50}, {LIAR: 10.0}, NOW)
    assert spoilt == [0, 1, 5, 13, 29, 61]


@pytest.mark.parametrize("weight", [0.0, 1.0, 50.0])
def test_coming_without_a_claim_makes_nobody_believe_one_that_broke_its_claims(
    weight: float,
) -> None:
    """A liar could claim nothing while it was in doubt, and be believed at once."""
    credit = Credit()
    spoilt = []
    for epoch in range(64):
        if credit.is_doubted(LIAR, epoch, NOW):
            credit.round_ended(epoch, {}, {LIAR: weight}, NOW)
        else:
            spoilt.append(epoch)
            credit.round_ended(epoch, {LIAR: 50}, {LIAR: 10.0}, NOW)
    assert spoilt == [0, 1, 5, 13, 29, 61]
    credit.round_ended(64, {LIAR: 50}, {LIAR: 50.0}, NOW)
    assert not credit.is_doubted(LIAR, 65, NOW)


def test_a_first_failure_costs_one_round_and_keeps_nobody_from_waiting() -> None:
    credit = Credit()
    credit.round_ended(7, {LIAR: 50}, {}, NOW)
    assert credit.is_doubted(LIAR, 7, NOW)
    assert not credit.is_given_up(LIAR, 7, NOW)
    assert not credit.is_doubted(LIAR, 8, NOW)


def test_a_doubted_peer_that_nobody_waits_for_does_not_fail_again_by_staying_away() -> None:
    credit = Credit()
    credit.round_ended(0, {LIAR: 50}, {}, NOW)
    credit.round_ended(0, {LIAR: 50}, {}, NOW)
    assert credit.is_given_up(LIAR, 0, NOW)
    assert not credit.is_doubted(LIAR, 1, NOW)
    for epoch in range(1, 5):
        credit.round_ended(epoch, {LIAR: 50}, {}, NOW)
    assert credit.is_doubted(LIAR, 4, NOW)
    assert not credit.is_doubted(LIAR, 5, NOW), (
        "four rounds after its second failure it is waited for"
    )


def test_a_state_that_is_not_there_is_passed_over_for_longer_each_time() -> None:
    credit = Credit()
    now = 0.0
    for seconds in (REFUSED_SECONDS, 2 * REFUSED_SECONDS, 4 * REFUSED_SECONDS):
        credit.state_refused(LIAR, "no such state", now)
        assert "no such state" in (credit.refusal(LIAR, now + seconds - 1.0) or "")
        now += seconds
        assert credit.refusal(LIAR, now) is None
    for _ in range(20):
        credit.state_refused(LIAR, "no such state", now)
    assert credit.refusal(LIAR, now + LONGEST_REFUSED_SECONDS) is None


def test_a_peer_that_never_comes_is_not_waited_for_whatever_it_claims() -> None:
    credit = Credit()
    credit.round_ended(3, {LIAR: 0}, {}, NOW)
    assert credit.is_doubted(LIAR, 3, NOW)
    credit.round_ended(4, {LIAR: 0}, {LIAR: 0.0}, NOW)
    assert not credit.is_doubted(LIAR, 4, NOW), "an auxiliary peer brings nothing but itself"


def test_a_state_that_cannot_be_had_once_may_be_the_networks_fault() -> None:
    credit = Credit()
    credit.fetch_failed(LIAR, "it does not answer", 0.0)
    assert credit.refusal(LIAR, 0.0) is None
    credit.fetch_failed(LIAR, "it does not answer", 1.0)
    assert credit.refusal(LIAR, 1.0) is not None


def test_the_memory_of_claims_is_bounded() -> None:
    credit = Credit()
    for number in range(MOST_REMEMBERED + 10):
        credit.round_ended(0, {PeerId(f"{number}"): 1}, {}, NOW)
    assert not credit.is_doubted(PeerId("0"), 0, NOW)
    assert credit.is_doubted(PeerId(f"{MOST_REMEMBERED + 9}"), 0, NOW)


def test_one_that_has_met_elsewhere_is_excused_a_few_times_until_it_keeps_a_claim() -> None:
    """A third of a run claimed samples again and again, and never came: no step was made."""
    credit = Credit()
    for _ in range(MOST_EXCUSED_ROUNDS):
        credit.round_ended(7, {LIAR: 50}, {}, NOW, {LIAR})
        assert not credit.is_doubted(LIAR, 7, NOW)
    credit.round_ended(7, {LIAR: 50}, {}, NOW, {LIAR})
    assert credit.is_doubted(LIAR, 7, NOW)
    credit.round_ended(7, {LIAR: 50}, {}, NOW, {LIAR})
    assert credit.is_given_up(LIAR, 7, NOW)
    credit.round_ended(9, {LIAR: 50}, {LIAR: 50.0}, NOW)
    credit.round_ended(9, {LIAR: 50}, {}, NOW, {LIAR})
    assert not credit.is_doubted(LIAR, 9, NOW)


def names(*numbers: int) -> list[PeerId]:
    return [PeerId(f"peer-{number}") for number in numbers]


@pytest.mark.parametrize(
    ("expected", "came", "dead", "elsewhere"),
    [
        pytest.param(24, range(12), [], range(12, 24), id="the other half"),
        pytest.param(24, range(12), range(15, 24), [], id="of the absent, too few are alive"),
        pytest.param(24, range(12), range(18, 24), range(12, 18), id="of the living, a third"),
        pytest.param(24, range(17), [], [], id="fewer than a third"),
        pytest.param(6, range(3), [], [], id="three of six"),
    ],
)
def test_many_that_are_absent_at_once_have_met_elsewhere(
    expected: int, came: Sequence[int], dead: Sequence[int], elsewhere: Sequence[int]
) -> None:
    claimed = names(*range(expected))
    alive = set(claimed) - set(names(*dead))
    assert met_elsewhere(claimed, names(*came), alive) == set(names(*elsewhere))


# ---- states that sums name

HERE, THERE = Lineage(5, b"h" * 16), Lineage(6, b"t" * 16)


def place(number: int) -> CohortPlace:
    return CohortPlace(32, number, 32, number)


def claims(*numbers: int) -> dict[PeerId, CohortPlace]:
    return {PeerId(f"head-{number}+"): place(number) for number in numbers}


def test_a_few_claims_are_checked_at_once_and_each_ever_more_rarely() -> None:
    states = StateClaims(Random(7))
    assert not states.to_check(0.0)
    states.note(claims(*range(10)), 0.0)
    first = states.to_check(0.0)
    assert len(first) == CHECKED_AT_ONCE
    assert not {*first} & {*states.to_check(0.0)}
    states = StateClaims(Random(7))
    moments, now = [], 0.0
    while now < 200.0:
        states.note(claims(3), now)
        moments += [now] * len(states.to_check(now))
        now += SHORTEST_PAUSE_SECONDS
    pauses = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(pauses[4:]) == {8.0}


def test_a_claim_that_was_checked_less_comes_first() -> None:
    """Liars that are checked again and again keep no honest one waiting."""
    states = StateClaims(Random(7))
    states.note(claims(*range(30)), 0.0)
    seen = set[PeerId]()
    for _ in range(8):
        states.note(claims(*range(31)), 100.0)
        seen |= {*states.to_check(100.0)}
        for one in claims(*range(30)):
            states._checks[one].again_at = 0.0
    assert seen == {*claims(*range(31))}


def test_one_that_takes_its_claim_back_for_a_moment_is_not_checked_more_often() -> None:
    states = StateClaims(Random(7))
    checks, now = 0, 0.0
    while now < 100.0:
        for made in (claims(3), {}):
            states.note(made, now)
            checks += len(states.to_check(now))
            now += 0.25
    assert checks < 20
    states.note({}, now + REMEMBERED_SECONDS + 1.0)
    assert not states._checks


def test_while_this_peer_averages_a_claim_has_to_be_a_little_old() -> None:
    states = StateClaims(Random(7))
    states.note(claims(3), 0.0)
    assert not states.to_check(OVERDUE_SECONDS - 0.1, averages=True)
    assert states.to_check(OVERDUE_SECONDS, averages=True)


def test_which_cohorts_are_read_cannot_be_foreseen() -> None:
    chosen = set()
    for seed in range(20):
        states = StateClaims(Random(seed))
        states.note(claims(*range(32)), 0.0)
        chosen.add(tuple(states.to_check(0.0)))
    assert len(chosen) > 15


def test_a_claim_is_refuted_if_its_cohort_is_not_there_for_long() -> None:
    states = StateClaims(Random(7))
    liar = frozenset(claims(3))
    states.note(claims(3), 0.0)
    states.read(place(3), (HERE,), 1.0)
    states.note(claims(3), 1.0)
    assert not states.refuted, "its head may be about to hand the step down"
    states.read(place(3), (HERE,), REFUTED_SECONDS)
    states.note(claims(3), 20.0)
    assert states.refuted == liar
    states.note({}, 21.0)
    assert not states.refuted
    states.note(claims(3), 22.0)
    assert not states.refuted, "time counts anew"


def test_who_cannot_show_one_step_may_show_another() -> None:
    states = StateClaims(Random(7))
    liar, honest = PeerId("liar+"), PeerId("honest+")
    states.is_silent(liar, HERE, THERE)
    states.shows(honest, THERE)
    assert (liar, HERE, THERE) in states.silent
    assert (liar, THERE, Lineage(7, THERE.history)) not in states.silent
    assert states.shown == {honest: THERE}


def test_a_claim_that_is_taken_back_now_and_then_is_settled_all_the_same() -> None:
    states = StateClaims(Random(7))
    for now in range(0, 24, 2):
        states.note(claims(3), now)
        assert not states.refuted
        assert states.settled == (frozenset(claims(3)) if now >= REFUTED_SECONDS else frozenset())
        states.note({}, now + 1.0)


def test_nobody_is_refuted_whose_cohort_was_not_read() -> None:
    states = StateClaims(Random(7))
    for now in (0.0, 100.0):
        states.note(claims(3), now)
        assert not states.refuted


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ([], ()),
        ([HERE], (HERE,)),
        ([HERE, THERE], (THERE, HERE)),
        ([HERE] * 4 + [THERE], (HERE,)),
        ([HERE] * 3 + [THERE], (THERE, HERE)),
        ([HERE] * 23 + [THERE] * 8, (THERE, HERE)),
        ([HERE] * 24 + [THERE] * 7, (HERE,)),
        ([HERE] * 20 + [Lineage(5, b"o" * 16)] * 11, (HERE, Lineage(5, b"o" * 16))),
    ],
)
def test_a_cohort_is_as_far_as_a_quarter_of_its_peers(
    at: Sequence[Lineage], expected: tuple[Lineage, ...]
) -> None:
    voters = [Voter(PeerId(f"{number}"), one) for number, one in enumerate(at)]
    assert reached_by(voters) == expected
    new = [Voter(PeerId(f"new {number}"), Lineage(0, bytes(16))) for number in range(99)]
    assert reached_by([*voters, *new]) == expected, "they have no state yet"
