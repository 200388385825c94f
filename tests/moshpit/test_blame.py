"""Which members are left out of the next attempt, by the complaints, and which are proven liars."""

from __future__ import annotations

import time

from protocols.moshpit.agreement_messages import Held
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.blame import BAD_STATEMENT, LIED, Blame, liars
from tests.moshpit.agreement_group import statement, verify

FIRST, SECOND = Ballot(0, 0), Ballot(1, 1)


def _out(said: dict[int, list[Suspicion]], size: int = 4, ballot: Ballot = FIRST) -> set[int]:
    blame = Blame()
    for complainer, suspicions in said.items():
        blame.complain(complainer, ballot, suspicions)
    return set(blame.ruled_out(range(size)))


def test_a_member_that_breaks_the_protocol_towards_one_other_is_left_out() -> None:
    assert _out({3: [Suspicion(1, "malformed")]}) == {1}


def test_a_member_that_breaks_the_protocol_towards_all_is_the_only_one_left_out() -> None:
    assert _out({member: [Suspicion(1, "malformed")] for member in (0, 2, 3)}) == {1}


def test_nobody_can_have_everybody_else_left_out() -> None:
    assert _out({3: [Suspicion(member, "malformed") for member in range(3)]}) == {3}


def test_two_that_call_each_other_malformed_lose_one_of_them() -> None:
    assert _out({0: [Suspicion(2, "malformed")], 2: [Suspicion(0, "malformed")]}) == {2}


def test_of_a_pair_the_member_with_more_failed_transfers_is_left_out() -> None:
    assert _out({0: [Suspicion(1, "stalled")], 2: [Suspicion(0, "stalled")]}) == {0}


def test_a_transfer_that_merely_ended_counts_when_it_happens_again() -> None:
    blame = Blame()
    blame.complain(0, FIRST, [Suspicion(1, "cut")])
    blame.complain(0, FIRST, [Suspicion(1, "cut")])
    assert not blame.ruled_out(range(3))
    blame.complain(1, SECOND, [Suspicion(0, "cut")])
    assert set(blame.ruled_out(range(3))) == {0}


def test_a_complaint_counts_against_the_one_that_was_waited_for() -> None:
    for code in ("lacking", "unclosed"):
        waits = {1: [Suspicion(2, code)]}
        assert _out({3: [Suspicion(1, "not_closed")], **waits}) == {2}
        assert _out({3: [Suspicion(1, "no_averages")], **waits}) == {
            1
        }  # it could have sent its own
        assert _out({3: [Suspicion(1, "idle")], **waits}) == {1}
        assert _out(waits) == set()


def test_to_have_waited_for_the_accuser_does_not_make_the_accuser_go() -> None:
    assert _out({0: [Suspicion(3, "not_closed")], 3: [Suspicion(0, "unclosed")]}) == {3}
    both = [Suspicion(1, "unclosed"), Suspicion(3, "unclosed")]
    assert _out({3: [Suspicion(0, "not_closed")], 0: both}) == {3}


def test_a_coordinator_that_waited_with_another_was_not_idle() -> None:
    idle = {3: [Suspicion(0, "idle")]}
    both = {0: [Suspicion(2, "unclosed")], 1: [Suspicion(2, "unclosed")]}
    assert _out({**idle, **both}) == {2}
    assert _out({**idle, 0: [Suspicion(2, "unclosed")]}) == {0}
    assert _out({**idle, 0: [Suspicion(2, "lacking")], 1: [Suspicion(2, "lacking")]}) == {0}
    assert _out(both) == set(), "it may only be slow"
    starved = {2: [Suspicion(0, "no_averages")], 1: [Suspicion(2, "unclosed")]}
    lie = {0: [Suspicion(2, "unclosed")]}
    assert _out({**idle, **starved, **lie}) == {0}, "it keeps the other one from closing itself"


def test_what_hostile_members_say_is_weighed_in_a_moment() -> None:
    blame, size = Blame(), 64
    for one in range(size):
        others = [(one + step) % size for step in range(1, 33)]
        said = [Suspicion(each, "idle") for each in others[:16]]
        blame.complain(one, FIRST, said + [Suspicion(each, "unclosed") for each in others[16:]])
    began = time.process_time()
    assert blame.ruled_out(range(size))
    assert time.process_time() - began < 1.0  # it takes 0.04 s


PARTS = [0, 1, 2]


def _out_of_those_that_withhold(*withhold: int, said: dict[int, Suspicion]) -> set[int]:
    blame = Blame()
    for member in withhold:
        blame.withholds(member, FIRST, PARTS)
    for member, why in said.items():
        blame.complain(member, FIRST, [why])
    return set(blame.ruled_out(range(4)))


def test_a_member_that_reports_nothing_is_left_out_unless_it_says_for_whom_it_waits() -> None:
    assert _out_of_those_that_withhold(1, said={}) == {1}
    for code in ("lacking", "unclosed", "awaited", "stalled"):
        assert _out_of_those_that_withhold(1, said={1: Suspicion(2, code)}) == {2}
    both = {1: Suspicion(2, "lacking"), 2: Suspicion(1, "not_closed")}
    assert _out_of_those_that_withhold(1, said=both) == {2}  # the later of the two


def test_it_does_not_wait_for_a_coordinator_that_has_ended_its_exchange() -> None:
    said = {1: Suspicion(FIRST.coordinator, "lacking")}
    assert _out_of_those_that_withhold(1, said=said) == {1}
    both = {**said, FIRST.coordinator: Suspicion(1, "unclosed")}
    assert _out_of_those_that_withhold(1, FIRST.coordinator, said=both) == {1}  # the later
    assert _out_of_those_that_withhold(1, FIRST.coordinator, said=said) == {FIRST.coordinator}


def test_a_coordinator_that_did_not_end_an_earlier_exchange_has_ended_this_one() -> None:
    blame, later = Blame(), Ballot(1, FIRST.coordinator)
    blame.withholds(FIRST.coordinator, FIRST, PARTS)
    blame.complain(FIRST.coordinator, FIRST, [Suspicion(3, "unclosed")])
    blame.withholds(1, later, PARTS)
    blame.complain(1, later, [Suspicion(FIRST.coordinator, "lacking")])
    assert set(blame.ruled_out(range(3))) == {1}


def _withholds_twice(first: int, then: int, candidates: list[int]) -> set[int]:
    blame = Blame()
    blame.withholds(1, FIRST, PARTS)
    blame.complain(1, FIRST, [Suspicion(first, "unclosed")])
    assert set(blame.ruled_out(range(4))) == {first}
    blame.withholds(1, SECOND, PARTS)
    blame.complain(1, SECOND, [Suspicion(then, "unclosed")])
    return set(blame.ruled_out(candidates))


def test_a_member_cannot_wait_for_the_same_one_again() -> None:
    assert _withholds_twice(2, 2, [0, 1, 2, 3]) == {1}
    assert _withholds_twice(2, 3, [0, 1, 2, 3]) == {1}, "nor for one after the other"
    assert _withholds_twice(2, 3, [0, 1, 3]) == {3}, "unless the first one is gone"


def test_a_member_that_shows_its_result_late_is_not_left_out() -> None:
    true = tuple(statement(FIRST, part) for part in PARTS)

    def out(shown: tuple[Statement, ...], attempt: Ballot = FIRST) -> set[int]:
        blame = Blame()
        blame.withholds(2, FIRST, PARTS)
        held = {one: Held(attempt, bytes(32), true) for one in (0, 1)}
        blame.judge({**held, 2: Held(attempt, bytes(32), shown)}, attempt, verify)
        return set(blame.ruled_out(range(3)))

    assert out(true) == set()
    assert out(()) == out(true[:2]) == {2}
    assert out((*true[:2], Statement(2, bytes(32), true[2].signature))) == {2}  # it forges
    assert out(true, SECOND) == {2}


def test_a_member_that_is_left_out_finds_its_own_name() -> None:
    blame = Blame()
    blame.complain(2, FIRST, [Suspicion(0, "stalled", "4 s"), Suspicion(1, "stalled", "4 s")])
    (why,) = blame.ruled_out(range(3)).values()
    assert why == Suspicion(2, "stalled", "it and member 0: 4 s")


def test_each_statement_is_checked_once_however_many_show_it() -> None:
    honest = tuple(statement(FIRST, part) for part in range(16))
    forged = tuple(Statement(each.part, bytes(32), each.signature) for each in honest)
    shown = dict.fromkeys(range(15), honest) | {15: forged}
    checked = []

    def counted(ballot: Ballot, one: Statement) -> bool:
        checked.append(one)
        return verify(ballot, one)

    (found,) = liars(shown, FIRST, counted)
    assert (found.member, found.code) == (15, BAD_STATEMENT)
    assert len(checked) <= len(honest) + 1


def test_two_signed_statements_for_one_part_prove_the_lie_of_its_reducer() -> None:
    true = (statement(FIRST, 0), statement(FIRST, 1))
    false = (statement(FIRST, 0), statement(FIRST, 1, b"something else"))
    (found,) = liars({0: true, 1: true, 2: false}, FIRST, verify)
    assert (found.member, found.code) == (1, LIED)
