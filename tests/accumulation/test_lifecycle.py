"""One peer's epochs, move by move."""

from __future__ import annotations

from collections import deque

import pytest

from protocols.accumulation.estimate import Estimate
from protocols.accumulation.lifecycle import (
    LONGEST_ASKED_SECONDS,
    MOST_ASKED,
    MOST_LOOKS_PAST,
    TABLE,
    Announce,
    Average,
    Averaged,
    AverageParameters,
    Contributed,
    DropGradients,
    Ending,
    Estimated,
    Fetch,
    Fetched,
    FoundNotFinite,
    HoldBack,
    KeepGradients,
    Lifecycle,
    LookAgain,
    Mode,
    ParametersRoundEnded,
    Phase,
    Restored,
    StateFetchFailed,
    Step,
    StepAlone,
    Stepped,
)
from protocols.accumulation.lineage import (
    Elsewhere,
    FindingKind,
    history_after_parameters,
    next_history,
)
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from tests.accumulation.progress_slots import history, peers

DIGEST = b"d" * 32
OTHER = history(7)
ME = PeerId("peer-00")  # the name after that of peer-0
SYNC = Mode(target_samples=100)
DELAYED = Mode(target_samples=100, delayed=True)
AFTER = next_history(history(), 0, DIGEST)


def looked(
    lifecycle: Lifecycle,
    *,
    others: float = 0.0,
    due: bool = False,
    company: int = 0,
    expected: int = 1,
    behind: Elsewhere | None = None,
    fork: Elsewhere | None = None,
    averaging: tuple[PeerId, ...] = (),
    awaited: tuple[PeerId, ...] = (),
    holders: frozenset[PeerId] = frozenset(),
    ahead: tuple[PeerId, ...] = (),
    just_ahead: tuple[PeerId, ...] = (),
    may_be_ahead: tuple[PeerId, ...] = (),
    made: bytes = b"",
    needs: int = 0,
    is_asked: bool = False,
    is_again: bool = False,
) -> Estimated:
    """A new look at the others, for the epoch and history that the peer is at."""
    life = lifecycle.life
    return Estimated(
        Estimate(
            life.number + 1,
            life.epoch,
            life.history,
            others_samples=others,
            target_samples=lifecycle.mode.target_samples,
            is_due=due,
            is_asked=is_asked,
            is_again=is_again,
            company=company,
            expected=expected,
            behind=behind,
            fork=fork,
            averaging=frozenset(averaging),
            awaited=frozenset(awaited),
            holders=holders,
            needs=needs,
            ahead=frozenset(ahead) | frozenset(just_ahead),
            just_ahead=frozenset(just_ahead),
            may_be_ahead=frozenset(may_be_ahead),
            made=frozenset((one, made) for one in (*ahead, *just_ahead, *may_be_ahead)),
            me=ME,
        )
    )


def accumulating(mode: Mode = SYNC, samples: int = 60) -> Lifecycle:
    lifecycle = Lifecycle(mode, epoch=0, history=history())
    assert lifecycle.take(looked(lifecycle)) == ()
    if samples:
        assert lifecycle.take(Contributed(samples)) == ()
    return lifecycle


def averaging(mode: Mode = SYNC, samples: int = 60, company: int = 1) -> Lifecycle:
    lifecycle = accumulating(mode, samples)
    effects = lifecycle.take(looked(lifecycle, others=40, due=True, company=company, expected=2))
    assert effects == (Average(0, history(), samples, 2), Announce())
    return lifecycle


def stepping(mode: Mode = SYNC) -> Lifecycle:
    lifecycle = averaging(mode)
    effects = lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1)))
    assert effects == (Step(0, AFTER), Announce())
    return lifecycle


def test_an_epoch_from_the_first_batch_to_the_step() -> None:
    lifecycle = stepping()
    assert lifecycle.take(Stepped()) == ()
    life = lifecycle.life
    assert (life.phase, life.epoch, life.history) == (Phase.ACCUMULATING, 1, AFTER)
    assert (life.samples, life.in_round, life.published_samples) == (0, 0, 0)


def test_a_batch_that_turns_out_not_to_be_finite_counts_no_more() -> None:
    lifecycle = accumulating(samples=60)
    assert lifecycle.take(FoundNotFinite(20)) == ()
    assert lifecycle.life.published_samples == 40
    lifecycle = averaging(DELAYED, samples=60)
    lifecycle.take(Contributed(8))
    lifecycle.take(FoundNotFinite(20, in_round=True))
    lifecycle.take(FoundNotFinite(8))
    assert (lifecycle.life.in_round, lifecycle.life.samples) == (40, 0)
    lifecycle.take(Averaged(Ending.DISCARDED))
    assert lifecycle.life.samples == 40


def test_nothing_is_decided_before_the_others_were_looked_at() -> None:
    lifecycle = Lifecycle(SYNC, epoch=0, history=history())
    lifecycle.take(Contributed(200))
    unread = Estimate(0, 0, history(), is_due=True)
    assert lifecycle.take(Estimated(unread)) == ()
    assert lifecycle.life.phase is Phase.JOINING
    assert lifecycle.take(looked(lifecycle, due=True))[0] == Average(0, history(), 200, 1)


def test_an_estimate_of_another_epoch_or_history_decides_nothing() -> None:
    lifecycle = accumulating()
    for epoch, name in ((1, 0), (0, 1)):
        stale = Estimate(9, epoch, history(name), is_due=True)
        assert lifecycle.take(Estimated(stale)) == ()


def test_the_own_batch_makes_a_step_due_that_the_estimate_did_not_know_of() -> None:
    lifecycle = accumulating(samples=60)
    assert lifecycle.take(looked(lifecycle, others=39)) == ()
    assert lifecycle.take(looked(lifecycle, others=40)) != ()


def test_a_batch_that_is_not_finite_is_held_back_and_does_not_count() -> None:
    lifecycle = accumulating()
    assert lifecycle.take(Contributed(32, finite=False)) == (HoldBack(),)
    assert lifecycle.life.samples == 60


def test_a_discarded_round_keeps_the_samples_and_waits_for_a_fresh_look() -> None:
    lifecycle = averaging()
    effects = lifecycle.take(Averaged(Ending.DISCARDED, reason="its leader died"))
    assert effects == (KeepGradients("its leader died", 60), Announce(), LookAgain())
    assert lifecycle.life.published_samples == 60
    old = Estimate(lifecycle.life.number, 0, history(), is_due=True)
    assert lifecycle.take(Estimated(old)) == ()
    assert lifecycle.take(looked(lifecycle, due=True))[0] == Average(0, history(), 60, 1)


def test_a_result_that_is_too_light_makes_no_step() -> None:
    lifecycle = averaging(samples=30)
    effects = lifecycle.take(Averaged(Ending.COMMITTED, 49.0, DIGEST, peers(0, 1)))
    assert isinstance(effects[0], KeepGradients)
    assert "49 samples" in effects[0].reason
    assert (lifecycle.life.epoch, lifecycle.life.samples) == (0, 30)


HOLDERS = frozenset((*peers(0, 1, 2), ME))


@pytest.mark.parametrize(
    ("members", "holders", "ahead", "steps"),
    [
        ((ME, *peers(0, 1)), HOLDERS, (), True),
        ((ME, *peers(0)), HOLDERS, (), True),  # as many as the rest, and of the smallest name
        ((ME, *peers(2)), HOLDERS, (), False),
        ((ME, *peers(0)), HOLDERS, peers(2), False),  # the rest has made a step
        ((ME, *peers(7, 8, 9)), HOLDERS, (), False),  # newcomers have no part in it
        ((ME, *peers(0, 1)), HOLDERS, peers(2), True),
    ],
)
def test_a_part_that_was_torn_off_makes_no_step_of_its_own(
    members: tuple[PeerId, ...], holders: frozenset[PeerId], ahead: tuple[PeerId, ...], steps: bool
) -> None:
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, holders=holders, ahead=ahead))
    first, *_ = lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, members))
    assert isinstance(first, Step if steps else KeepGradients)


@pytest.mark.parametrize(
    ("needs", "peers_in_it", "steps"),
    [(3, 0, True), (4, 0, False), (10, 10, True), (11, 10, False)],
)
def test_a_large_run_makes_no_step_without_most_of_the_peers_of_its_last_one(
    needs: int, peers_in_it: int, steps: bool
) -> None:
    lifecycle = averaging()
    members = (ME, *peers(0, 1))
    lifecycle.take(looked(lifecycle, holders=frozenset(members), needs=needs))
    committed = Averaged(Ending.COMMITTED, 100.0, DIGEST, members, peers=peers_in_it)
    first, *_ = lifecycle.take(committed)
    assert isinstance(first, Step if steps else KeepGradients)


def test_with_most_of_the_last_step_a_large_run_goes_on_without_most_of_its_heads() -> None:
    """Others of their cohorts have come in their place."""
    lifecycle = averaging()
    gone = frozenset(peers(2, 3, 4))
    lifecycle.take(looked(lifecycle, holders=gone, needs=10))
    committed = Averaged(Ending.COMMITTED, 100.0, DIGEST, (ME, *peers(0, 1)), peers=10)
    assert isinstance(lifecycle.take(committed)[0], Step)


def test_nobody_makes_a_step_alone_where_many_made_the_last_one() -> None:
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, needs=9))
    kept, *_ = lifecycle.take(Averaged(Ending.ALONE, digest=DIGEST))
    assert isinstance(kept, KeepGradients)
    assert "9 are most of the peers in the last step" in kept.reason


def test_a_peer_that_was_left_out_of_the_group_does_not_prevent_the_step() -> None:
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, holders=HOLDERS))
    committed = Averaged(Ending.COMMITTED, 100.0, DIGEST, (ME,), left_out=peers(1, 2))
    assert isinstance(lifecycle.take(committed)[0], Step)


@pytest.mark.parametrize(("votes", "effect"), [(2.0, KeepGradients), (2.999, Step)])
def test_over_a_grid_a_step_needs_more_than_half_of_those_who_made_the_last_ones(
    votes: float, effect: type
) -> None:
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, holders=HOLDERS))
    committed = Averaged(Ending.COMMITTED, 100.0, DIGEST, (ME,), votes=votes)
    assert isinstance(lifecycle.take(committed)[0], effect)


def test_after_a_round_in_doubt_one_of_its_members_is_enough_to_be_followed() -> None:
    lifecycle = averaging()
    lifecycle.take(Averaged(Ending.DISCARDED, members=peers(0, 1), in_doubt=True))
    assert lifecycle.take(looked(lifecycle, ahead=peers(5))) == ()
    drop, _, fetch = lifecycle.take(looked(lifecycle, ahead=peers(1, 5)))
    assert isinstance(drop, DropGradients)
    assert isinstance(fetch, Fetch)
    assert (fetch.at_least_epoch, fetch.peers) == (1, peers(1))


def test_a_member_that_does_not_apply_a_result_follows_one_that_does() -> None:
    """That member may know better which peers are alive; a single vote would not be enough."""
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, holders=HOLDERS))
    lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, (ME, *peers(2))))
    assert lifecycle.take(looked(lifecycle, holders=HOLDERS, ahead=peers(0))) == ()
    drop, _, fetch = lifecycle.take(looked(lifecycle, holders=HOLDERS, ahead=peers(0, 2)))
    assert isinstance(drop, DropGradients)
    assert isinstance(fetch, Fetch)
    assert (fetch.at_least_epoch, fetch.peers) == (1, peers(2))


def test_a_peer_that_was_left_out_makes_no_other_step_if_it_cannot_fetch_the_state() -> None:
    lifecycle = averaging()
    lifecycle.take(Averaged(Ending.LEFT_OUT, 80.0, DIGEST, peers(1)))
    lifecycle.take(StateFetchFailed())
    assert isinstance(lifecycle.take(looked(lifecycle, ahead=peers(1)))[-1], Fetch)
    lifecycle.take(StateFetchFailed())
    assert lifecycle.take(looked(lifecycle)) == ()
    assert lifecycle.life.phase is Phase.ACCUMULATING


def test_a_peer_that_takes_a_state_follows_until_its_next_step() -> None:
    lifecycle = accumulating(samples=0)
    ahead = Elsewhere(FindingKind.BEHIND, 7, None, peers(1, 2), "two are ahead")
    lifecycle.take(looked(lifecycle, behind=ahead))
    lifecycle.take(Fetched(7, history(7)))
    assert lifecycle.life.follows
    lifecycle.take(Contributed(60))
    lifecycle.take(looked(lifecycle, others=40, due=True, company=1))
    lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1)))
    assert not lifecycle.life.follows


def test_a_peer_that_takes_the_state_from_which_a_run_begins_does_not_follow() -> None:
    lifecycle = accumulating(samples=0)
    begins = Elsewhere(FindingKind.BEHIND, 0, None, peers(1), "another one begins the run")
    lifecycle.take(looked(lifecycle, behind=begins))
    lifecycle.take(Fetched(0, history(0)))
    assert not lifecycle.life.follows


def test_a_peer_that_is_left_out_drops_its_samples_and_takes_the_others_state() -> None:
    lifecycle = averaging()
    drop, told, fetch = lifecycle.take(Averaged(Ending.LEFT_OUT, 80.0, DIGEST, peers(1, 2)))
    assert isinstance(drop, DropGradients)
    assert drop.samples == 60
    assert isinstance(fetch, Fetch)
    assert (fetch.at_least_epoch, fetch.peers) == (1, peers(1, 2))
    assert told == Announce(), "the slot says no more that it averages"
    assert lifecycle.life.published_samples == 0


def test_a_peer_that_is_left_out_of_a_round_without_a_step_keeps_its_samples() -> None:
    lifecycle = averaging()
    effects = lifecycle.take(Averaged(Ending.LEFT_OUT, 20.0, DIGEST, peers(1)))
    assert isinstance(effects[0], KeepGradients)


def test_alone_makes_a_step_only_where_nobody_else_takes_part() -> None:
    lifecycle = averaging(company=1)
    assert isinstance(lifecycle.take(Averaged(Ending.ALONE, digest=DIGEST))[0], KeepGradients)
    lifecycle.take(looked(lifecycle, due=True, company=0))
    assert lifecycle.take(Averaged(Ending.ALONE, digest=DIGEST))[0] == StepAlone(0, AFTER)


def test_the_others_may_have_left_while_the_round_was_tried() -> None:
    lifecycle = averaging(company=1)
    lifecycle.take(looked(lifecycle, company=0))
    assert isinstance(lifecycle.take(Averaged(Ending.ALONE, digest=DIGEST))[0], StepAlone)


def test_a_peer_that_is_left_out_of_a_round_of_too_few_for_a_step_keeps_its_samples() -> None:
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, needs=9))
    left_out = Averaged(Ending.LEFT_OUT, 80.0, DIGEST, peers(1, 2), peers=8)
    effects = lifecycle.take(left_out)
    assert isinstance(effects[0], KeepGradients)
    assert "8 came, and 9 are most" in effects[0].reason
    *_, fetch = lifecycle.take(looked(lifecycle, ahead=peers(2), needs=9))
    assert isinstance(fetch, Fetch), "they had waited for long enough, and made the step"
    assert fetch.peers == peers(2)


def test_alone_with_less_than_a_step_needs_goes_on_accumulating() -> None:
    lifecycle = averaging(samples=40, company=0)
    assert isinstance(lifecycle.take(Averaged(Ending.ALONE, digest=DIGEST))[0], KeepGradients)


def test_behind_drops_what_is_stale_and_fetches() -> None:
    lifecycle = accumulating()
    ahead = Elsewhere(FindingKind.BEHIND, 7, None, peers(1, 2), "two are ahead")
    drop, _, fetch = lifecycle.take(looked(lifecycle, behind=ahead, due=True))
    assert drop == DropGradients("two are ahead", 60)
    assert fetch == Fetch("two are ahead", 7, None, peers(1, 2))
    late = lifecycle.take(Contributed(32))
    assert isinstance(late[0], DropGradients)
    lifecycle.take(Fetched(8, history(8)))
    life = lifecycle.life
    assert (life.phase, life.epoch, life.history) == (Phase.ACCUMULATING, 8, history(8))
    assert life.samples == 0


def test_the_losing_side_of_a_fork_takes_only_the_winners_history() -> None:
    lifecycle = accumulating(samples=0)
    other = Elsewhere(FindingKind.FORK, 0, history(1), peers(1), "outvoted")
    assert lifecycle.take(looked(lifecycle, fork=other)) == (
        Announce(),
        Fetch("outvoted", 0, history(1), peers(1)),
    )


def test_a_fetch_that_fails_looks_again_and_goes_on_where_it_was_if_all_others_are_gone() -> None:
    lifecycle = accumulating(samples=0)
    ahead = Elsewhere(FindingKind.BEHIND, 7, None, peers(1), "ahead")
    lifecycle.take(looked(lifecycle, behind=ahead))
    assert lifecycle.take(StateFetchFailed()) == (LookAgain(),)
    assert isinstance(lifecycle.take(looked(lifecycle, behind=ahead))[-1], Fetch)
    lifecycle.take(StateFetchFailed())
    lifecycle.take(looked(lifecycle))
    assert (lifecycle.life.phase, lifecycle.life.epoch) == (Phase.ACCUMULATING, 0)


def test_delayed_the_next_epochs_samples_are_computed_beside_the_round() -> None:
    lifecycle = averaging(DELAYED)
    lifecycle.take(Contributed(32))
    assert lifecycle.life.published_samples == 60, "those that the round brings"
    lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1)))
    assert lifecycle.life.published_samples == 32
    lifecycle.take(Contributed(32))
    assert lifecycle.take(looked(lifecycle, due=True)) == ()
    assert lifecycle.life.phase is Phase.STEPPING, "the pipeline has one round"
    lifecycle.take(Stepped())
    assert lifecycle.take(looked(lifecycle, due=True))[0] == Average(1, AFTER, 64, 1)


def test_delayed_a_failed_round_joins_what_was_computed_beside_it() -> None:
    lifecycle = averaging(DELAYED)
    lifecycle.take(Contributed(32))
    assert lifecycle.take(Averaged(Ending.DISCARDED))[0] == KeepGradients(
        "The round was discarded.", 60
    )
    assert lifecycle.life.samples == 92


def test_delayed_a_peer_that_is_left_out_empties_the_pipeline() -> None:
    lifecycle = averaging(DELAYED)
    lifecycle.take(Contributed(32))
    drop, *_ = lifecycle.take(Averaged(Ending.LEFT_OUT, 80.0, DIGEST, peers(1)))
    assert isinstance(drop, DropGradients)
    assert drop.samples == 92


@pytest.mark.parametrize("phase", [averaging, stepping])
def test_without_delayed_nothing_is_computed_beside_a_round(phase: object) -> None:
    lifecycle = averaging() if phase is averaging else stepping()
    with pytest.raises(ProtocolMisuse, match="A batch was computed while"):
        lifecycle.take(Contributed(32))


def test_an_auxiliary_peer_comes_without_samples() -> None:
    lifecycle = accumulating(Mode(target_samples=100, auxiliary=True), samples=0)
    with pytest.raises(ProtocolMisuse):
        lifecycle.take(Contributed(32))
    assert lifecycle.take(looked(lifecycle, due=True, expected=3))[0] == Average(0, history(), 0, 3)
    assert lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1)))[0] == Step(
        0, AFTER
    )


@pytest.mark.parametrize("delayed", [False, True])
def test_when_the_last_step_is_made_no_other_is_begun(*, delayed: bool) -> None:
    mode = Mode(target_samples=100, delayed=delayed, last_epoch=1)
    lifecycle = averaging(mode)
    if delayed:
        lifecycle.take(Contributed(120))  # enough for another one
    assert lifecycle.take(Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1)))[0] == Step(
        0, AFTER
    )
    lifecycle.take(Stepped())
    lifecycle.take(Contributed(120))
    assert lifecycle.take(looked(lifecycle, others=120, due=True, expected=2)) == ()
    assert lifecycle.life.phase is Phase.ACCUMULATING


def test_a_trainer_without_samples_comes_to_no_round() -> None:
    lifecycle = accumulating(samples=0)
    assert lifecycle.take(looked(lifecycle, others=120, due=True, averaging=peers(1, 2))) == ()
    lifecycle.take(Contributed(8))
    effects = lifecycle.take(looked(lifecycle, others=120, due=True, awaited=peers(1, 2)))
    assert effects[0] == Average(0, history(), 8, 1, frozenset(peers(1, 2)))


def in_doubt(needs: int) -> Lifecycle:
    """Of a round with the peers 1 and 2, in a run that needs so many peers."""
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, needs=needs))
    lifecycle.take(Averaged(Ending.DISCARDED, members=peers(1, 2), reason="lost", in_doubt=True))
    return lifecycle


@pytest.mark.parametrize("needs", [0, 9])
def test_after_a_round_in_doubt_of_a_large_run_anybody_who_is_further_may_have_made_the_step(
    needs: int,
) -> None:
    """Its heads may have died right after they had handed it down to one of the cohorts."""
    lifecycle = in_doubt(needs)
    (effect, *rest) = lifecycle.take(looked(lifecycle, due=True, just_ahead=peers(7)))
    if not needs:
        assert isinstance(effect, Average)
        return
    assert isinstance(effect, DropGradients)
    assert [one.peers for one in rest if isinstance(one, Fetch)] == [peers(7)]


def test_those_that_only_claim_it_are_asked_twice_and_not_for_long() -> None:
    lifecycle = in_doubt(needs=9)
    for _ in range(MOST_ASKED):
        effects = lifecycle.take(looked(lifecycle, due=True, just_ahead=peers(7)))
        (fetch,) = (one for one in effects if isinstance(one, Fetch))
        assert fetch.seconds == LONGEST_ASKED_SECONDS
        lifecycle.take(StateFetchFailed())
    lifecycle.take(looked(lifecycle, due=True, just_ahead=peers(7)))
    assert lifecycle.life.phase is Phase.ACCUMULATING
    lifecycle.take(Contributed(60))
    assert isinstance(lifecycle.take(looked(lifecycle, due=True, just_ahead=peers(7)))[0], Average)


@pytest.mark.parametrize("needs", [0, 9])
def test_those_that_may_be_further_are_waited_for_while_they_are_asked(needs: int) -> None:
    lifecycle = in_doubt(needs)
    for _ in range(3):
        effects = lifecycle.take(looked(lifecycle, due=True, may_be_ahead=peers(2)))
        assert not effects, "it was in the round"
    if needs:
        assert not lifecycle.take(looked(lifecycle, due=True, may_be_ahead=peers(7)))
    assert isinstance(lifecycle.take(looked(lifecycle, due=True, needs=needs))[0], Average)
    lifecycle.take(looked(lifecycle, may_be_ahead=peers(2)))
    made = Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1, 3), peers=9)
    assert isinstance(lifecycle.take(made)[0], KeepGradients), "it may have made the step by now"


@pytest.mark.parametrize("there", [AFTER, OTHER])
@pytest.mark.parametrize("handed_down", [False, True])
def test_after_that_a_head_makes_no_step_beside_one_that_has_made_another_one(
    there: bytes, *, handed_down: bool
) -> None:
    """Its members do what it does."""
    lifecycle = in_doubt(needs=2)
    lifecycle.take(looked(lifecycle, due=True, needs=2))
    lifecycle.take(looked(lifecycle, just_ahead=peers(7), made=there, needs=2))
    made = Averaged(
        Ending.COMMITTED, 100.0, DIGEST, peers(0, 3, 4), handed_down=handed_down, peers=9
    )
    effect = lifecycle.take(made)[0]
    assert isinstance(effect, KeepGradients if there == OTHER and not handed_down else Step)


@pytest.mark.parametrize(("there", "effect"), [(AFTER, Step), (OTHER, KeepGradients)])
def test_others_may_make_a_step_sooner_than_one_that_was_in_doubt_of_the_last_round(
    there: bytes, effect: type[KeepGradients | Step]
) -> None:
    """Before, all of a round but the first to make its step refused it, and had to fetch it."""
    lifecycle = in_doubt(needs=2)
    lifecycle.take(looked(lifecycle, due=True, needs=2))
    lifecycle.take(looked(lifecycle, ahead=peers(1), made=there, needs=2))
    made = Averaged(Ending.COMMITTED, 100.0, DIGEST, peers(0, 1, 3), peers=9)
    assert isinstance(lifecycle.take(made)[0], effect)


@pytest.mark.parametrize(("came", "effect"), [(8, KeepGradients), (9, Step)])
@pytest.mark.parametrize("handed_down", [False, True])
def test_too_few_of_a_large_run_make_no_step_also_if_their_head_hands_one_down(
    came: int, effect: type[KeepGradients | Step], *, handed_down: bool
) -> None:
    """Before, one head on the smaller side of a cut could make two lines of steps."""
    lifecycle = averaging()
    lifecycle.take(looked(lifecycle, needs=9))
    made = Averaged(
        Ending.COMMITTED, 100.0, DIGEST, peers(3, 4), handed_down=handed_down, peers=came
    )
    assert isinstance(lifecycle.take(made)[0], effect)


def begun_without_us() -> Lifecycle:
    lifecycle = averaging()
    ended = Averaged(Ending.DISCARDED, reason="started", begun_without=peers(1, 2))
    assert isinstance(lifecycle.take(ended)[0], KeepGradients)
    return lifecycle


def test_while_a_group_that_began_without_this_peer_averages_nothing_is_tried() -> None:
    lifecycle = begun_without_us()
    for _ in range(5):
        assert lifecycle.take(looked(lifecycle, due=True, averaging=peers(2))) == ()
        lifecycle.take(Contributed(4))
    assert lifecycle.life.samples == 80
    behind = Elsewhere(FindingKind.BEHIND, 1, None, peers(1, 2), "They are ahead.")
    drop, _, fetch = lifecycle.take(looked(lifecycle, due=True, behind=behind))
    assert isinstance(drop, DropGradients)
    assert isinstance(fetch, Fetch)


def test_when_that_group_has_failed_or_says_for_ever_that_it_averages_it_is_tried_again() -> None:
    failed = begun_without_us()
    assert failed.take(looked(failed, due=True, averaging=peers(3)))[0] == Average(
        0, history(), 60, 1
    )
    liars = begun_without_us()
    looks = 0
    while not liars.take(looked(liars, due=True, averaging=peers(1))):
        looks += 1
    assert looks == MOST_LOOKS_PAST - 1


def test_one_that_is_asked_into_the_next_attempt_comes_though_the_others_average_again() -> None:
    """They begin it before this peer has read that the last one has failed."""
    lifecycle = begun_without_us()
    assert lifecycle.take(looked(lifecycle, due=True, averaging=peers(1, 2))) == ()
    asked = looked(lifecycle, due=True, averaging=peers(1, 2), is_asked=True)
    assert isinstance(lifecycle.take(asked)[0], Average)


def test_a_round_is_begun_again_if_another_of_its_epoch_came_to_nothing() -> None:
    lifecycle = averaging()
    lifecycle.take(Averaged(Ending.DISCARDED, reason="nobody came"))
    (again, *_) = lifecycle.take(looked(lifecycle, due=True, is_again=True))
    assert isinstance(again, Average)
    assert again.is_again


def test_parameters_are_averaged_every_so_many_epochs_and_make_another_history() -> None:
    lifecycle = stepping(Mode(target_samples=100, parameters_every=1))
    assert lifecycle.take(Stepped()) == (AverageParameters(1, AFTER, 2),)
    lifecycle.take(ParametersRoundEnded(Ending.COMMITTED, DIGEST, peers(0, 1)))
    assert lifecycle.life.history == history_after_parameters(AFTER, 1, DIGEST)
    assert lifecycle.life.phase is Phase.ACCUMULATING


@pytest.mark.parametrize("ending", [Ending.DISCARDED, Ending.ALONE])
def test_parameters_that_were_not_averaged_stay_as_they_were(ending: Ending) -> None:
    lifecycle = stepping(Mode(target_samples=100, parameters_every=1))
    lifecycle.take(Stepped())
    lifecycle.take(ParametersRoundEnded(ending))
    assert lifecycle.life.history == AFTER
    assert lifecycle.life.phase is Phase.ACCUMULATING


def test_a_peer_that_is_left_out_of_averaging_the_parameters_takes_the_others() -> None:
    lifecycle = stepping(Mode(target_samples=100, parameters_every=1))
    lifecycle.take(Stepped())
    _, fetch = lifecycle.take(ParametersRoundEnded(Ending.LEFT_OUT, DIGEST, peers(1, 2)))
    assert isinstance(fetch, Fetch)
    assert fetch.history == history_after_parameters(AFTER, 1, DIGEST)


def test_a_state_from_the_own_disk_is_compared_with_the_others_first() -> None:
    lifecycle = accumulating()
    drop = lifecycle.take(Restored(40, history(4)))[0]
    assert isinstance(drop, DropGradients)
    assert (lifecycle.life.phase, lifecycle.life.epoch) == (Phase.JOINING, 40)


def test_an_impossible_event_is_a_misuse_and_changes_nothing() -> None:
    lifecycle = accumulating()
    before = lifecycle.life
    for event in (Averaged(Ending.ALONE), Stepped(), Fetched(1, history()), StateFetchFailed()):
        with pytest.raises(ProtocolMisuse, match="cannot happen while accumulating"):
            lifecycle.take(event)
    with pytest.raises(ProtocolMisuse):
        lifecycle.take(Contributed(0))
    assert lifecycle.life == before


LEADS_TO = {
    (Phase.JOINING, Estimated): {Phase.ACCUMULATING, Phase.FETCHING, Phase.AVERAGING},
    (Phase.ACCUMULATING, Estimated): {Phase.AVERAGING, Phase.FETCHING},
    (Phase.AVERAGING, Averaged): {Phase.STEPPING, Phase.ACCUMULATING, Phase.FETCHING},
    (Phase.STEPPING, Stepped): {Phase.ACCUMULATING, Phase.AVERAGING_PARAMETERS},
    (Phase.AVERAGING_PARAMETERS, ParametersRoundEnded): {Phase.ACCUMULATING, Phase.FETCHING},
    (Phase.BEHIND, Estimated): {Phase.FETCHING, Phase.ACCUMULATING},
    (Phase.FETCHING, Fetched): {Phase.ACCUMULATING},
    (Phase.FETCHING, StateFetchFailed): {Phase.BEHIND},
}


def test_every_phase_has_a_way_to_accumulating() -> None:
    assert set(LEADS_TO) <= set(TABLE)
    for start in Phase:
        reached, waiting = {start}, deque([start])
        while waiting:
            at = waiting.popleft()
            for (phase, _), after in LEADS_TO.items():
                if phase is at:
                    waiting.extend(after - reached)
                    reached |= after
        assert Phase.ACCUMULATING in reached, start


def test_every_phase_says_what_a_batch_and_an_estimate_are_in_it() -> None:
    for phase in Phase:
        assert (phase, Contributed) in TABLE
        assert (phase, Estimated) in TABLE
