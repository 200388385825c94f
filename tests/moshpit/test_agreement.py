"""How a round ends, with a clock: which members commit, which are left out, why, and how soon."""

from __future__ import annotations

import itertools
import time

import pytest

from protocols.moshpit.agreement import Agreement, Timing
from protocols.moshpit.agreement_messages import (
    Accept,
    Accepted,
    Attempt,
    BallotQuery,
    Decided,
    Forswear,
    Holding,
    NotAnHonestMessage,
    Outbid,
    Prepare,
    Progress,
    Promise,
    Result,
    Start,
)
from protocols.moshpit.ballots import Ballot, Suspicion, digest_of_result
from protocols.moshpit.coordinator import RECONNECT_SECONDS, ExchangeUnderWay
from protocols.moshpit.verdicts import (
    Commit,
    Discard,
    MemberLeftOut,
    OwnVerdict,
    Send,
    StartExchange,
    StopExchange,
)
from tests.moshpit.agreement_group import (
    TIMING,
    Exchange,
    Group,
    plan,
    smooth,
    statement,
    statements,
    verify,
)

ALL_MOMENTS = [0.001 + 0.028 * step for step in range(26)]  # every step of an undisturbed round


def _round(size: int, latency: float = 0.03, exchange_seconds: float = 0.5) -> Group:
    group = Group(size, latency=latency, exchange_seconds=exchange_seconds)
    group.begin()
    return group


def _kind(verdict: OwnVerdict) -> object:
    """The result that all survivors must have."""
    if isinstance(verdict, Discard):
        return "discard"
    return verdict.attempt, verdict.members, verdict.digest


def check_committed(
    group: Group, members: tuple[int, ...], excluded: dict[int, str] | None = None
) -> None:
    """These have committed one result with only their data, and name the reason for each other."""
    for member in members:
        commit = group.verdicts[member]
        assert isinstance(commit, Commit)
        assert commit.members == members
        for other, code in (excluded or {}).items():
            assert group.members[member].excluded[other].code == code


@pytest.mark.parametrize("size", [1, 2, 3, 16, 64])
def test_undisturbed_all_commit_the_same_in_the_first_attempt(size: int) -> None:
    group = _round(size)
    group.run()
    assert len(group.verdicts) == size
    commits = set(group.verdicts.values())
    assert len(commits) == 1
    commit = commits.pop()
    assert isinstance(commit, Commit)
    assert commit.members == tuple(range(size))
    assert commit.attempt == Ballot(0, 0)


def test_undisturbed_agreement_takes_two_round_trips_beyond_the_exchange() -> None:
    group = _round(16)
    group.run()
    # start, holding, accept, accepted, decided
    assert max(group.decided_at.values()) == pytest.approx(0.5 + 5 * 0.03)


def test_agreement_of_sixteen_costs_a_few_milliseconds() -> None:
    costs = []
    for _ in range(5):
        group = _round(16)
        began = time.process_time()
        group.run()
        costs.append(time.process_time() - began)
    assert min(costs) < 0.02  # about 0.003 for all sixteen on the machine that this was made on


def _after(size: int, how: str, victim: int, moment: float) -> tuple[set[object], float]:
    """How the survivors of a death (or a stop) at this moment end, and how much later."""
    group = _round(size)
    group.run(until=moment)
    getattr(group, how)(victim)
    group.run(until=60.0)
    survivors = [member for member in range(size) if member != victim]
    assert all(member in group.verdicts for member in survivors)
    ends = {_kind(group.verdicts[member]) for member in survivors}
    return ends, max(group.decided_at[member] for member in survivors) - moment


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_death_at_any_moment_is_over_for_the_survivors_in_under_five_seconds(size: int) -> None:
    worst = 0.0
    for victim, moment in itertools.product(range(size), ALL_MOMENTS):
        ends, took = _after(size, "kill", victim, moment)
        assert len(ends) == 1, (victim, moment, ends)
        worst = max(worst, took)
    assert worst < 5.0


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_stopped_member_at_any_moment_costs_the_others_under_ten_seconds(size: int) -> None:
    worst = 0.0
    for victim, moment in itertools.product(range(size), ALL_MOMENTS):
        ends, took = _after(size, "stop", victim, moment)
        assert len(ends) == 1, (victim, moment, ends)
        worst = max(worst, took)
    assert worst < 10.0


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_while_a_quorum_lives_one_death_never_costs_the_round(size: int) -> None:
    for victim, moment in itertools.product(range(size), ALL_MOMENTS):
        (end,), _ = _after(size, "kill", victim, moment)
        assert end != "discard", (victim, moment)


def test_a_member_that_dies_before_its_result_is_complete_is_left_out() -> None:
    group = _round(4)
    group.run(until=0.2)
    group.kill(2)
    group.run(until=60.0)
    check_committed(group, (0, 1, 3), {2: "silent"})


def test_when_all_survivors_hold_the_result_the_exchange_is_not_repeated() -> None:
    group = _round(4)
    group.run(until=0.55)  # all exchanges are over, nothing is proposed
    group.kill(2)
    group.run(until=60.0)
    assert {start.ballot for _, _, start in group.started} == {Ballot(0, 0)}
    assert {_kind(group.verdicts[member])[1] for member in (0, 1, 3)} == {(0, 1, 2, 3)}  # type: ignore[index]


def test_the_survivor_of_two_is_certain_that_nothing_was_committed_if_it_has_not_accepted() -> None:
    for victim in (0, 1):
        group = _round(2)
        group.run(until=0.3)
        group.kill(victim)
        group.run(until=60.0)
        verdict = group.verdicts[1 - victim]
        assert isinstance(verdict, Discard)
        assert not verdict.in_doubt


def test_the_survivor_of_two_that_has_accepted_is_in_doubt() -> None:
    group = _round(2)
    group.run(until=0.595)  # member 1 has accepted, and its answer is on the way
    group.kill(0)
    group.run(until=60.0)
    verdict = group.verdicts[1]
    assert isinstance(verdict, Discard)
    assert verdict.in_doubt


def test_a_stopped_member_that_continues_learns_that_it_was_left_out() -> None:
    group = _round(4)
    group.run(until=0.2)
    group.stop(3)
    group.run(until=30.0)
    assert 3 not in group.verdicts
    group.wake(3)
    group.run(until=60.0)
    verdict = group.verdicts[3]
    assert isinstance(verdict, MemberLeftOut)
    assert verdict.members == (0, 1, 2)
    assert group.decided_at[3] < 32.0


def test_a_stopped_leader_that_continues_learns_it_too() -> None:
    group = _round(4)
    group.run(until=0.2)
    group.stop(0)
    group.run(until=30.0)
    group.wake(0)
    group.run(until=60.0)
    verdict = group.verdicts[0]
    assert isinstance(verdict, MemberLeftOut)
    assert verdict.members == (1, 2, 3)


def test_a_coordinator_that_stops_and_carries_no_data_is_noticed() -> None:
    def without_the_leader(_group: Group, _member: int, start: StartExchange) -> Exchange:
        return Exchange(20.0, statements(start.ballot, start.members))  # nobody waits for 0

    group = Group(3, exchange=without_the_leader)
    group.begin()
    group.run(until=5.0)
    group.stopped.add(0)
    group.run(until=15.0)
    prepared = [message for _, _, message in group.said if isinstance(message, Prepare)]
    assert prepared
    assert prepared[0].ballot == Ballot(1, 1)


def test_a_minority_is_in_doubt_and_the_majority_goes_on_without_it() -> None:
    group = _round(5)
    group.run(until=0.2)
    for one, other in itertools.product((0, 1), (2, 3, 4)):
        group.cut.add(frozenset((one, other)))
    for member in range(5):
        group.break_exchanges_with(member, 0.1, "cut")
    group.run(until=60.0)
    for member in (0, 1):
        verdict = group.verdicts[member]
        assert isinstance(verdict, Discard)
        assert verdict.in_doubt
    check_committed(group, (2, 3, 4))


def test_two_halves_of_four_are_both_certain_of_their_discard() -> None:
    group = _round(4)
    group.run(until=0.2)
    for one, other in itertools.product((0, 1), (2, 3)):
        group.cut.add(frozenset((one, other)))
    for member in range(4):
        group.break_exchanges_with(member, 0.1, "cut")
    group.run(until=60.0)
    for verdict in group.verdicts.values():
        assert isinstance(verdict, Discard)
        assert not verdict.in_doubt
    assert len(group.verdicts) == 4


def test_of_two_that_cannot_reach_each_other_one_goes_after_one_more_attempt() -> None:
    group = Group(4)
    group.cut.add(frozenset((1, 3)))
    group.begin()
    group.run(until=60.0)
    check_committed(group, (0, 1, 2))
    assert len({start.ballot for _, _, start in group.started}) == 2
    assert isinstance(group.verdicts[3], MemberLeftOut)


def test_a_reducer_that_tells_one_member_something_else_is_proven_a_liar_and_left_out() -> None:
    def member_two_lies_to_three(group: Group, member: int, start: StartExchange) -> Exchange:
        ended = smooth(group, member, start)
        if member == 3 and 2 in start.members:
            told = [
                statement(start.ballot, part, b"a lie" if part == 2 else b"average")
                for part in start.members
            ]
            return Exchange(ended.seconds, tuple(told))
        return ended

    group = Group(4, exchange=member_two_lies_to_three)
    group.begin()
    group.run(until=60.0)
    check_committed(group, (0, 1, 3), {2: "lied"})
    assert isinstance(group.verdicts[2], MemberLeftOut)


def _told_two_stories(me: int, contradicted: tuple[int, ...]) -> OwnVerdict | None:
    """Member 0 leads, tells 1 and 2 different results, and wants each to commit its own."""
    member, ballot, members = _round(3).members[me], Ballot(0, 0), (0, 1, 2)
    member.receive(0, Start(ballot, members, plan(members)), 0.0)
    shown = (statement(ballot, 0, b"%d" % me), *statements(ballot, (1, 2)))
    digest = digest_of_result(shown)
    member.exchange_done(ballot, digest, shown, 1.0, contradicted)
    result = Result(ballot, members, digest)
    member.receive(0, Accept(ballot, result), 1.1)
    member.receive(0, Decided(result), 1.2)
    sent = [one for one in member.effects() if isinstance(one, Send)]
    assert contradicted == () or not any(isinstance(one.message, Accepted) for one in sent)
    member.receive(0, Progress(ballot), 1.3)  # it lives; that does not help it
    member.tick(1.8)
    assert contradicted == () or any(
        isinstance(one, Send) and isinstance(one.message, Prepare) for one in member.effects()
    )
    return member.verdict


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("named", [(0, 1), (0, 1, 2, 3)])
def test_nobody_accepts_a_result_of_other_members_than_took_part(
    named: tuple[int, ...], number: int
) -> None:
    """The weight of a result and the number of its peers are those of its members."""
    member, first, members = _round(5).members[4], Ballot(0, 0), (0, 1, 2, 3, 4)
    member.receive(0, Start(first, members, plan(members)), 0.0)
    shown = statements(first, members)
    result = Result(first, named, digest_of_result(shown))
    member.exchange_done(first, result.digest, shown, 1.0)
    ballot = Ballot(number, 0)
    for message in (Accept(ballot, result), Decided(result)):
        with pytest.raises(NotAnHonestMessage, match="other members"):
            member.receive(0, message, 1.1)
    assert member.verdict is None


def test_nobody_commits_a_result_of_which_another_member_has_told_it_that_its_own_differs() -> None:
    assert _told_two_stories(1, contradicted=(2,)) is None
    assert _told_two_stories(2, contradicted=(1,)) is None
    assert isinstance(_told_two_stories(1, contradicted=()), Commit)


@pytest.mark.parametrize("denies", [0, 2])
def test_a_member_that_denies_the_result_it_shows_is_left_out(denies: int) -> None:
    def denied(group: Group, member: int, start: StartExchange) -> Exchange:
        ended = smooth(group, member, start)
        if denies in start.members and member != denies:
            ended.contradicted = (denies,)
        return ended

    group = Group(4, exchange=denied)
    group.begin()
    group.run()
    honest = tuple(member for member in range(4) if member != denies)
    check_committed(group, honest, {denies: "denied"})


def test_a_member_that_shows_what_was_never_signed_is_left_out_itself() -> None:
    def member_three_forges(group: Group, member: int, start: StartExchange) -> Exchange:
        ended = smooth(group, member, start)
        if member == 3:
            forged = statement(Ballot(7, 0), 0, b"other")
            return Exchange(ended.seconds, (forged, *ended.statements[1:]))
        return ended

    group = Group(4, exchange=member_three_forges)
    group.begin()
    group.run(until=60.0)
    check_committed(group, (0, 1, 2), {3: "bad_statement"})


def test_a_high_ballot_that_a_member_makes_up_costs_an_attempt_and_not_the_round() -> None:
    group = _round(4)
    group.run(until=0.5)
    group.members[0].receive(3, Outbid(Ballot(200, 3)), group.now)
    group.carry_out(0)
    group.kill(3)
    group.run(until=60.0)
    for member in (0, 1, 2):
        commit = group.verdicts[member]
        assert isinstance(commit, Commit)
        assert commit.members == (0, 1, 2)
        assert commit.attempt.number > 200


def test_a_member_that_reports_its_own_data_as_not_finite_is_left_out() -> None:
    def member_one_has_nan(group: Group, member: int, start: StartExchange) -> Exchange:
        if member == 1:
            return Exchange(0.0, suspicions=(Suspicion(1, "not_finite", "layer.weight has NaN"),))
        return smooth(group, member, start)

    group = Group(3, exchange=member_one_has_nan)
    group.begin()
    group.run(until=60.0)
    commit = group.verdicts[0]
    assert isinstance(commit, Commit)
    assert commit.members == (0, 2)
    assert group.members[0].excluded[1].text == "layer.weight has NaN"


def test_exchanges_that_always_fail_end_in_an_agreed_discard() -> None:
    def nothing_works(_group: Group, me: int, start: StartExchange) -> Exchange:
        other = next(each for each in start.members if each != me)
        return Exchange(0.1, suspicions=(Suspicion(other, "gave_up"),))

    group = Group(4, exchange=nothing_works)
    group.begin()
    group.run(until=100.0)
    assert len(group.verdicts) == 4
    for verdict in group.verdicts.values():
        assert isinstance(verdict, Discard)
        assert not verdict.in_doubt
    assert len({start.ballot for _, _, start in group.started}) <= 4 + 3


def test_when_its_time_is_over_the_round_is_discarded_for_certain() -> None:
    group = Group(4, timing=Timing(round_seconds=10.0), exchange_seconds=100.0)
    group.begin()
    group.run(until=60.0)
    assert set(group.verdicts.values()) == {Discard("the round's time was over", in_doubt=False)}
    assert max(group.decided_at.values()) < 10.5


def test_a_round_whose_leader_never_begins_goes_on_without_it() -> None:
    group = Group(3)
    group.killed.add(0)
    group.run(until=60.0)
    for member in (1, 2):
        commit = group.verdicts[member]
        assert isinstance(commit, Commit)
        assert commit.members == (1, 2)
        assert group.decided_at[member] < 5.0


def test_a_member_that_asks_late_is_told_the_decision() -> None:
    group = _round(3)
    group.run()
    group.members[1].receive(2, BallotQuery(Ballot(0, 0)), 100.0)
    (answer,) = group.members[1].effects()
    assert isinstance(answer.message, Decided)  # type: ignore[union-attr]
    assert group.members[1].next_deadline == float("inf")


def test_a_lost_start_costs_an_attempt_and_no_member_if_it_answers_again() -> None:
    group = Group(3)
    group.members[0].begin(0.0)
    effects = group.members[0].effects()
    starts = [each for each in effects if isinstance(getattr(each, "message", None), Start)]
    assert len(starts) == 2
    group._running[0] = Ballot(0, 0)
    group.started.append((0.0, 0, StartExchange(Ballot(0, 0), (0, 1, 2), (0, 10, 20, 30))))
    group.members[0].unreachable(2, 0.0)  # it has not had it, nor has 1
    group.carry_out(0)
    group.run(until=60.0)
    assert {_kind(verdict) for verdict in group.verdicts.values()} == {
        (Ballot(1, 0), (0, 1, 2), group.verdicts[0].digest)  # type: ignore[union-attr]
    }


def test_an_exchange_that_was_stopped_is_not_begun_again() -> None:
    member, ballot = Group(3).members[1], Ballot(0, 0)
    start = Start(ballot, (0, 1, 2), plan((0, 1, 2)))
    for message in (start, Accept(ballot, None), start):  # the last one late, and told again
        member.receive(0, message, 0.1)
    assert [type(each) for each in member.effects() if not isinstance(each, Send)] == [
        StartExchange,
        StopExchange,
    ]


def test_a_member_whose_link_is_full_gets_more_time_to_answer() -> None:
    group = _round(3)
    group.run(until=0.2)
    group.stop(2)
    group.members[0].exchange_failed(Ballot(0, 0), (Suspicion(1, "gave_up"),), group.now)
    group.carry_out(0)
    group.run(until=1.0)
    group.members[0].alive(2, group.now)  # bytes of chunks, and no message
    group.run(until=2.5)
    group.wake(2)
    group.run(until=60.0)
    assert {_kind(verdict) for verdict in group.verdicts.values()} == {
        (Ballot(1, 0), (0, 1, 2), group.verdicts[0].digest)  # type: ignore[union-attr]
    }


def _dies(group: Group, gone: int) -> None:
    """Its links are lost at once, while a call to it takes long to fail."""
    group.kill(gone)
    for member in set(range(group.size)) - {gone}:
        group.members[member].unreachable(gone, group.now)
        group.carry_out(member)


def test_nobody_waits_long_for_a_member_whose_link_was_lost_though_dialling_it_takes_seconds() -> (
    None
):
    group = Group(5, refusal_seconds=4.0)
    group.at(0.5, lambda: _dies(group, 3))
    group.begin()
    group.run()
    check_committed(group, (0, 1, 2, 4), {3: "silent"})
    took = max(group.decided_at[member] for member in (0, 1, 2, 4)) - 0.5
    assert took < group.exchange_seconds + RECONNECT_SECONDS + 10 * group.latency


def test_a_member_that_repeats_itself_does_not_put_off_the_ballot() -> None:
    group = Group(5, refusal_seconds=30.0)
    died_at = 0.5

    def repeats() -> None:
        said = [message for sender, _, message in group.said if sender == 4]
        promises = [message for message in said if isinstance(message, Promise)]
        if promises and 0 not in group.verdicts:
            group.members[0].receive(4, promises[-1], group.now)
            group.carry_out(0)

    group.at(died_at, lambda: _dies(group, 3))
    for turn in range(50):
        group.at(died_at + 0.4 * turn, repeats)
    group.begin()
    group.run()
    check_committed(group, (0, 1, 2, 4), {3: "silent"})
    took = max(group.decided_at[member] for member in (0, 1, 2, 4)) - died_at
    assert took < group.exchange_seconds + RECONNECT_SECONDS + 10 * group.latency
    assert not any(one.idle for one in group.members)


def test_a_member_that_is_linked_again_has_the_time_of_all_others_to_answer() -> None:
    group = _round(3)
    group.run(until=0.2)
    group.stop(2)
    group.members[0].unreachable(2, group.now)
    group.members[0].linked(2)
    group.members[0].exchange_failed(Ballot(0, 0), (Suspicion(1, "gave_up"),), group.now)
    group.carry_out(0)
    group.run(until=1.2)
    group.wake(2)
    group.run(until=60.0)
    assert {_kind(verdict) for verdict in group.verdicts.values()} == {
        (Ballot(1, 0), (0, 1, 2), group.verdicts[0].digest)  # type: ignore[union-attr]
    }


def test_members_who_may_not_lead_take_over_when_all_others_are_gone() -> None:
    timing = Timing(round_seconds=600.0)
    alone = Agreement(1, 2, (0,), timing, 0.0, plan=plan, verify=verify)
    alone.unreachable(0, 0.0)
    while alone.verdict is None:
        alone.tick(alone.next_deadline)
        for effect in alone.effects():
            if isinstance(effect, Send):
                alone.unreachable(0, alone.next_deadline - 0.01)
        assert alone.next_deadline < 5.0 or alone.verdict is not None
    assert isinstance(alone.verdict, Discard)
    assert not alone.verdict.in_doubt


def test_a_coordinator_votes_last() -> None:
    group = _round(2)
    group.run(until=0.58)  # it has proposed
    assert any(isinstance(message, Accept) for _, _, message in group.said)
    assert group.members[0]._acceptor.accepted is None


def test_the_timing_is_what_the_page_says() -> None:
    assert TIMING.silence_seconds >= 2 * TIMING.poll_seconds


def promises_of(agreement: Agreement) -> list[Promise]:
    return [
        effect.message
        for effect in agreement.effects()
        if isinstance(effect, Send) and isinstance(effect.message, Promise)
    ]


def test_a_vow_is_not_given_to_a_coordinator_of_whose_ballot_nobody_has_heard() -> None:
    """It may receive nothing: then it finds no quorum, and all others have one."""
    one = Agreement(2, 4, range(4), TIMING, 0.0, plan=plan, verify=verify)
    ballot = Ballot(1, 1)
    one.receive(1, Forswear(ballot), 1.0)
    (promise,) = promises_of(one)
    assert (promise.ballot, promise.vowed) == (ballot, False)
    one.receive(1, Forswear(ballot), 2.0)
    assert promises_of(one)[0].vowed


def test_a_coordinator_whose_quorum_has_too_many_vows_discards_at_once() -> None:
    one = Agreement(0, 4, range(4), TIMING, 0.0, plan=plan, verify=verify)
    one.begin(0.0)
    one.next_ballot()
    one.effects()
    attempt = Attempt(Ballot(0, 0), (0, 1, 2, 3))
    one.receive(1, Promise(Ballot(1, 0), attempt, vowed=True), 1.0)
    one.receive(2, Promise(Ballot(1, 0), attempt), 1.0)
    one.tick(10.0)
    asked = [effect for effect in one.effects() if isinstance(effect, Send)]
    assert any(isinstance(effect.message, Decided) for effect in asked)
    assert isinstance(one.verdict, Discard)
    assert not one.verdict.in_doubt


def test_a_member_that_accepted_a_result_without_a_possible_quorum_ends_in_doubt() -> None:
    """It does not propose it again and again, until the round's time is over."""
    one = Agreement(1, 3, range(3), TIMING, 0.0, plan=plan, verify=verify)
    first, own = Ballot(0, 0), Ballot(1, 1)
    everybody = (0, 1, 2)
    one.receive(0, Start(first, everybody, plan(everybody)), 0.1)
    shown = statements(first, everybody)
    one.exchange_done(first, digest_of_result(shown), shown, 1.0)
    one.receive(0, Accept(first, Result(first, everybody, digest_of_result(shown))), 1.1)
    one.next_ballot()
    one.unreachable(2, 1.2)
    vowed = Promise(own, Attempt(first, everybody), vowed=True)
    one.receive(0, vowed, 1.3)
    said = [effect.message for effect in one.effects() if isinstance(effect, Send)]
    assert Forswear(own) in said
    assert not any(isinstance(message, Accept) for message in said)
    one.receive(0, vowed, 1.4)
    assert isinstance(one.verdict, Discard)
    assert one.verdict.in_doubt


def _attempts(group: Group) -> int:
    return len({start.ballot for _, _, start in group.started})


@pytest.mark.parametrize("left_out", [1, 4])
def test_a_member_that_is_left_out_lets_the_others_exchange_for_long(left_out: int) -> None:
    """It once took the coordinator for idle after 6 s, and ended their exchange again and again."""

    def has_nan(group: Group, member: int, start: StartExchange) -> Exchange:
        if left_out in start.members:
            return Exchange(1.0, suspicions=(Suspicion(left_out, "not_finite", "NaN"),))
        return smooth(group, member, start)

    group = Group(5, Timing(round_seconds=120.0), exchange_seconds=50.0, exchange=has_nan)
    group.begin()
    group.run()
    honest = tuple(member for member in range(5) if member != left_out)
    check_committed(group, honest, {left_out: "not_finite"})
    assert _attempts(group) == 2
    assert not any(one.idle for one in group.members)


def test_one_that_holds_a_result_of_an_earlier_attempt_lets_the_others_exchange_as_long() -> None:
    def not_heard(_group: Group, member: int, start: StartExchange) -> Exchange:
        if 4 in start.members and member in (2, 3):
            return Exchange(8.0, suspicions=(Suspicion(4, "no_averages", "too late"),))
        seconds = 5.0 if member == 4 else 40.0
        return Exchange(seconds, statements(start.ballot, start.members))

    group = Group(5, Timing(round_seconds=120.0), exchange=not_heard)
    group.begin()
    group.run()
    check_committed(group, (0, 1, 2, 3), {4: "no_averages"})
    assert _attempts(group) == 2


def test_one_that_missed_that_it_is_left_out_is_told_again() -> None:
    """Its link was lost when the others were told, as is usual for one that is left out."""

    def broken(group: Group, member: int, start: StartExchange) -> Exchange:
        if not all(group.linked(member, other) for other in start.members):
            return Exchange(0.5, suspicions=(Suspicion(4, "stalled", "is gone"),))
        return Exchange(40.0, statements(start.ballot, start.members))

    group = Group(5, Timing(round_seconds=120.0), exchange=broken)

    def cut() -> None:
        group.cut.update(frozenset((4, other)) for other in range(4))
        group.break_exchanges_with(4, 0.1, "cut")
        for other in range(4):
            group.members[other].unreachable(4, group.now)
            group.members[4].unreachable(other, group.now)
        for member in range(5):
            group.carry_out(member)

    group.at(2.0, cut)
    group.at(4.5, group.cut.clear)
    group.begin()
    group.run()
    check_committed(group, (0, 1, 2, 3), {})
    assert _attempts(group) == 2


@pytest.mark.parametrize("reduces", [False, True])
def test_a_member_that_has_the_result_early_lets_the_others_finish(reduces: bool) -> None:
    def early(_group: Group, member: int, start: StartExchange) -> Exchange:
        seconds = (16.0 if reduces else 5.0) if member == 3 else 45.0
        reducers = start.members if reduces else start.members[:3]
        return Exchange(seconds, statements(start.ballot, reducers))

    group = Group(4, Timing(round_seconds=120.0), exchange=early)
    if not reduces:
        group.members[0] = Agreement(
            0, 4, range(4), group.timing, 0.0, plan=lambda _: (0, 10, 20, 30, 30), verify=verify
        )
    group.begin()
    group.run()
    check_committed(group, (0, 1, 2, 3), {})
    assert _attempts(group) == 1


def test_a_coordinator_that_does_nothing_although_all_have_the_result_is_succeeded_soon() -> None:
    group = Group(4, Timing(round_seconds=120.0), exchange_seconds=10.0)
    group.members[0].begin(0.0)
    group.carry_out(0)
    group.run(until=5.0)
    group.members[0]._coordinator.holding = lambda *_: None  # type: ignore[union-attr,method-assign]
    group.run()
    commits = [group.verdicts[member] for member in (1, 2, 3)]
    assert all(isinstance(commit, Commit) for commit in commits)
    assert max(group.decided_at.values()) < 10.0 + 20.0 + 6.0 + 3.0


# When everybody has the result, by the reports of some


def _everywhere(
    reported: set[int],
    me: int = 0,
    reducers: int = 5,
    members: int = 5,
    gone: frozenset[int] = frozenset(),
) -> bool:
    cuts = tuple(min(place, reducers) for place in range(members + 1))
    exchange = ExchangeUnderWay(tuple(range(members)), cuts)
    shown = tuple(statement(Ballot(0, 0), part) for part in range(reducers))
    for one in reported:
        assert not exchange.take(one, Holding(Ballot(0, 0), digest_of_result(shown), shown))
    return exchange.is_everywhere(me, gone)


def test_a_coordinator_believes_itself_if_it_reduces() -> None:
    assert _everywhere({0})
    assert not _everywhere({4}, me=4, reducers=3)


def test_it_believes_most_of_the_other_reducers_and_no_single_one() -> None:
    assert _everywhere({1, 2, 3})
    assert not _everywhere({1, 2})  # most of the others, and not most members
    assert _everywhere({1, 2, 4}, reducers=4)
    assert not _everywhere({1, 3, 4}, reducers=3, members=6)
    assert not _everywhere({1, 3, 4}, reducers=2)


def test_it_believes_all_but_one() -> None:
    assert _everywhere({1}, me=0, reducers=2, members=2)
    assert _everywhere({2, 3, 4}, reducers=2, gone=frozenset({1}))
    assert not _everywhere(set(), reducers=2, members=2, gone=frozenset({1}))
