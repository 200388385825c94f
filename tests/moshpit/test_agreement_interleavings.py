"""No order of events breaks a round: all of them are tried, for two to five members.

The soak forms see 2.3 million worlds, in two minutes of processor time and 0.4 GB.

The last half shows that the checker would tell: agreements that are wrong in one thing are caught.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from protocols.moshpit.agreement import Agreement
from protocols.moshpit.agreement_messages import Accept, Decided, Holding, Open, Start
from protocols.moshpit.verdicts import Commit, Discard, MemberLeftOut
from tests.moshpit import broken_agreements as broken
from tests.moshpit.interleavings import (
    Broken,
    Budgets,
    Interleavings,
    Step,
    World,
    search,
    walk,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "budgets"),
    [
        (1, Budgets(timers=2, ends=1)),
        (2, Budgets(deaths=2, timers=1)),
        pytest.param(2, Budgets(deaths=1, ends=1), marks=pytest.mark.slow),
        (2, Budgets(losses=2)),
        (2, Budgets(doubles=2)),
        pytest.param(3, Budgets(deaths=1), marks=pytest.mark.slow),
        pytest.param(3, Budgets(timers=1), marks=pytest.mark.slow),
        (2, Budgets(denials=1, deaths=1)),
        (3, Budgets(losses=1)),
        (3, Budgets(doubles=1)),
    ],
)
def test_every_order_of_events_keeps_the_promises(size: int, budgets: Budgets) -> None:
    found = search(Interleavings(size, budgets))
    assert found.complete
    assert found.ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "budgets", "detours"),
    [
        (3, Budgets(failures=1), None),  # all orders
        (3, Budgets(denials=2), None),
        (3, Budgets(deaths=1, ends=1), 1),
        (3, Budgets(deaths=2, timers=1), 1),
        (4, Budgets(deaths=1), 2),
        (5, Budgets(deaths=1), 1),
    ],
)
def test_a_death_at_every_moment_of_many_orders_keeps_them(
    size: int, budgets: Budgets, detours: int | None
) -> None:
    assert search(Interleavings(size, budgets), detours=detours).complete


@pytest.mark.soak
@pytest.mark.parametrize(
    ("size", "budgets", "detours"),
    [
        (2, Budgets(deaths=1, timers=2, doubles=1), None),
        (2, Budgets(timers=2, losses=1, doubles=1), None),
        (3, Budgets(deaths=2), None),
        (3, Budgets(deaths=1, ends=1), 3),
        (3, Budgets(deaths=2, timers=1), 2),
        (4, Budgets(deaths=1), None),
        (3, Budgets(deaths=1, timers=1, losses=1), 3),
        (4, Budgets(deaths=2), 2),
        (5, Budgets(deaths=1), 2),
        (5, Budgets(deaths=2), 1),
        (3, Budgets(deaths=1, denials=1), None),
        (4, Budgets(denials=2), 3),
    ],
)
def test_every_order_of_events_in_larger_rounds_keeps_them(
    size: int, budgets: Budgets, detours: int | None
) -> None:
    assert search(Interleavings(size, budgets), detours=detours).complete


ROUGH = [
    (3, Budgets(deaths=1, timers=8, failures=2, losses=2, doubles=1, ends=1)),
    (5, Budgets(deaths=2, timers=10, failures=3, losses=4, doubles=2, ends=2)),
    (8, Budgets(deaths=3, timers=12, failures=3, losses=6, doubles=2, ends=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "budgets"), ROUGH)
def test_no_walk_through_many_faults_breaks_a_promise(size: int, budgets: Budgets) -> None:
    space = Interleavings(size, budgets)
    for seed in range(20):
        walk(space, Random(seed), 400)


@pytest.mark.soak
@pytest.mark.parametrize(("size", "budgets"), ROUGH)
def test_none_of_a_thousand_such_walks_does(size: int, budgets: Budgets) -> None:
    space = Interleavings(size, budgets)
    for seed in range(1000):
        walk(space, Random(seed), 600)


# the checker can fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "size", "budgets", "detours"),
    [
        (broken.CommitsOnItsOwn, 2, Budgets(deaths=1), None),
        (broken.VowsFalsely, 2, Budgets(deaths=1), None),
        (broken.DecidesWithHalf, 2, Budgets(deaths=1, ends=1), None),
        (broken.StartsWhatIsOver, 2, Budgets(deaths=1, timers=1), None),
        pytest.param(
            broken.IgnoresWhatWasAccepted,
            3,
            Budgets(timers=2, ends=1),
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_search_finds_out_an_agreement_that(
    wrong: type[Agreement], size: int, budgets: Budgets, detours: int | None
) -> None:
    with pytest.raises(Broken):
        search(Interleavings(size, budgets, wrong), detours=detours)
    search(Interleavings(size, budgets), 5_000, detours=detours, progress=False)


class Script:
    """A way through the worlds that a test chooses step by step."""

    def __init__(self, size: int, budgets: Budgets, agreement_type: type[Agreement]) -> None:
        self.space = Interleavings(size, budgets, agreement_type)
        self.world: World = self.space.first()

    def go(self, *wanted: Any) -> bool:
        """Take the step that begins like this, a message by its type. False: there is none."""
        for step, world in self.space.steps(self.world):
            if len(step) >= len(wanted) and all(
                isinstance(part, each) if isinstance(each, type) else part == each
                for part, each in zip(step, wanted, strict=False)
            ):
                self.world = world
                wrong = self.space.what_is_wrong(world)
                if wrong:
                    raise Broken(wrong, [step])
                return True
        return False

    def settle(self, members: set[int], but: tuple[type, ...] = ()) -> None:
        """Carry all messages among these, and end their exchanges, until there are no more."""

        def is_among_them(step: Step) -> bool:
            if step[0] == "message":
                return {step[1], step[2]} <= members and not isinstance(step[3], but)
            return step[0] == "done" and step[1] in members

        while True:
            found = [each for each in self.space.steps(self.world) if is_among_them(each[0])]
            if not found:
                return
            assert self.go(*found[0][0])

    def take_over(self, member: int) -> None:
        for name in ("poll", "suspect", "takeover"):
            assert self.go("timer", member, name)


def _a_late_proposal(agreement_type: type[Agreement]) -> Script:
    """Member 1 gets the round discarded, and then 2 hears of the proposal of a lower ballot."""
    script = Script(3, Budgets(timers=9, ends=1), agreement_type)
    assert script.go("begin")
    script.settle({0, 1, 2}, but=(Accept,))
    assert script.go("timer", 1, "round")
    script.take_over(1)
    script.settle({1, 2})
    assert script.go("timer", 1, "answers")
    script.settle({1, 2}, but=(Decided,))
    script.settle({0, 2})
    return script


def test_an_agreement_that_breaks_its_promise_is_found() -> None:
    _a_late_proposal(Agreement)
    with pytest.raises(Broken, match="different results are decided"):
        _a_late_proposal(broken.BreaksItsPromise)


def _a_revived_result(agreement_type: type[Agreement]) -> Script:
    """Of five, 1 alone has accepted the second attempt's result (of 0 to 3). Then 4 begins a third
    attempt with 0 and 2, of which 2 hears nothing; and 1, with 2 and 3, revives the second's."""
    script = Script(5, Budgets(timers=99, failures=1), agreement_type)
    assert script.go("begin")
    for member in (1, 2, 3):
        assert script.go("message", 0, member, Start)
    assert script.go("failed", 0, 4)
    script.settle({0, 1, 2, 3})
    assert script.go("timer", 0, "answers")
    script.settle({0, 1, 2, 3}, but=(Accept,))
    assert script.go("message", 0, 1, Accept)
    script.take_over(4)
    script.settle({0, 2, 4}, but=(Accept, Start, Open))
    assert script.go("timer", 4, "answers")
    assert script.go("message", 4, 0, Start) or script.go("message", 4, 0, Open)
    script.take_over(1)
    script.settle({1, 2, 3})
    script.settle({0, 1, 2, 3, 4})
    return script


def test_an_agreement_that_commits_a_result_it_does_not_hold_is_found() -> None:
    with pytest.raises(Broken, match="member 4 commits"):
        _a_revived_result(broken.CommitsWhatItDoesNotHold)


def test_an_agreement_that_overwrites_a_result_too_early_is_found() -> None:
    script = _a_revived_result(Agreement)
    verdicts = [script.space.locals[each].verdict for each in script.world[0]]
    assert all(isinstance(each, Commit) for each in verdicts[:4])
    assert isinstance(verdicts[4], MemberLeftOut)
    with pytest.raises(Broken, match="written over"):
        _a_revived_result(broken.WritesOverBeforeItIsNoted)


def test_a_result_that_a_needed_member_doubts_is_discarded_at_once() -> None:
    """Member 2 has told 0 that it holds another result, and died. Member 1 takes over from 0, which
    it leaves out as idle, but without which there is no quorum. It proposed the result that 0 does
    not accept until there were no ballots left, and the round ended in doubt."""
    script = Script(3, Budgets(deaths=1, denials=1), Agreement)
    assert script.go("begin")
    assert script.go("then dies", "message", 0, 2, Start)
    assert script.go("message", 0, 1, Start)
    assert script.go("done", 1)
    assert script.go("denied", 0, 2)
    assert script.go("message", 1, 0, Holding)
    assert script.go("timer", 1, "idle")
    assert script.go("timer", 1, "takeover")
    while script.go("gone", 1, 2):
        script.settle({0, 1})
    verdicts = [script.space.locals[script.world[0][me]].verdict for me in (0, 1)]
    assert all(isinstance(each, Discard) and not each.in_doubt for each in verdicts), verdicts
