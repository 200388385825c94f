"""How a ballot is driven to a decision.

A coordinator takes its ballot through these stages:

    PREPARING    ask all members for a promise; then re-propose what may be decided already, or
                 propose a result that all who answered hold, or open a new attempt
    OPENING      until a quorum has noted the new attempt
    EXCHANGING   until all its members hold the same result; any trouble leads to a next ballot
    PROPOSING    until a quorum has accepted: decided
    FORSWEARING  no quorum can be reached: collect vows that make that final, or end in doubt

The first ballot begins with EXCHANGING, because all members promised it by joining.

In this file: `Coordinator`, which drives one ballot; the choice from a quorum's promises;
`ExchangeUnderWay`, an exchange as its coordinator sees it.

Promises: a ballot proposes at most one result, once. A result is proposed only when every member of
its attempt that is waited for holds it, with one digest. After promising a ballot, a member
takes nothing of a lower one (`Acceptor` in member_state.py).

A member that is alive and does not say what it holds is not waited for. Once the coordinator, or
most of the reducers, have ended their exchange, all have the result, and have as long for saying so
as for an answer. The next ballot asks those that have not for a promise as well: another may have
kept them from ending their exchange, and then they say which (blame.py).

Easy to get wrong: the coordinator votes last. As long as it has not accepted its own proposal, one
member less can have decided without it; so a pair that loses one member is certain of its discard.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from protocols.moshpit.agreement_messages import (
    SUSPICIONS_PER_MESSAGE,
    Accept,
    Acceptance,
    AgreementMessage,
    Attempt,
    BallotQuery,
    Forswear,
    Held,
    Holding,
    Open,
    Prepare,
    Promise,
    Result,
    Start,
)
from protocols.moshpit.ballots import Ballot, Suspicion, digest_of_result
from protocols.moshpit.blame import SILENT, Blame, Verify
from protocols.moshpit.member_state import Desk, KnownDecision, blocking_of, quorum_of

BALLOTS_BEYOND_SIZE = 2  # each failed attempt costs a member or names a pair; two are for duels
MORE_WAITS = 2  # for members whose link is so full that an answer takes some seconds
PREPARE_TRIES = 2  # the second one reaches members that were reconnecting
NOBODY_CAN = "none of the members that are left brings data, or none can reduce"
RECONNECT_SECONDS = 0.5
"""How long members that could not be reached have at most to come back before a ballot goes on
without them, and if too few are left without them, until they are asked again."""

Plan = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Takes the members of an attempt. Returns its cuts; () if they cannot do it (nobody reduces)."""


class Stage(enum.Enum):
    PREPARING = "preparing"
    OPENING = "opening"
    EXCHANGING = "exchanging"
    PROPOSING = "proposing"
    FORSWEARING = "forswearing"


class Owner(Protocol):
    """The member that a coordinator belongs to."""

    @property
    def ballots_begun(self) -> int:
        """How many ballots it has coordinated, this one included. (A ballot's number shows only
        what others claim to have heard of.)"""

    def next_ballot(self) -> None:
        """Coordinate a higher ballot instead of this one."""


class Coordinator:
    """Drives one ballot of our own."""

    def __init__(
        self,
        desk: Desk,
        owner: Owner,
        ending: KnownDecision,
        blame: Blame,
        ballot: Ballot,
        plan: Plan,
        verify: Verify,
        gone: AbstractSet[int],
    ) -> None:
        """`gone`: at any time, the members that could not be reached, and not heard since."""
        self.ballot = ballot
        self.stage = Stage.PREPARING
        self._desk = desk
        self._owner = owner
        self._ending = ending
        self._blame = blame
        self._plan = plan
        self._verify = verify
        self._gone = gone
        self._quorum = quorum_of(desk.size)
        self._tries = PREPARE_TRIES
        self._patience = MORE_WAITS
        self._failed: set[int] = set()  # not reached, and not heard from since
        self._vows: set[int] = set()
        self._promises: dict[int, Promise] = {}
        self._attempt = ExchangeUnderWay((), ())
        self._excluded: tuple[Suspicion, ...] = ()
        self._opened: set[int] = set()
        self._heard: set[int] = set()  # since we last began to wait or to watch
        self._result: Result | None = None
        self._reason = ""
        self._accepted: set[int] = set()
        self._forsworn: set[int] = set()  # have answered that we find no quorum

    @property
    def proposed(self) -> Acceptance | None:
        """What this ballot proposes, once it does."""
        if self.stage is Stage.PROPOSING:
            return Acceptance(self.ballot, self._result)
        return None

    # -- the stages

    def begin(self) -> None:
        """The first ballot: exchange at once, with all members."""
        everybody = tuple(range(self._desk.size))
        self._attempt = ExchangeUnderWay(everybody, self._plan(everybody))
        if self._attempt.cuts:
            self._exchange()
        else:
            self._propose(None, NOBODY_CAN)

    def prepare(self) -> None:
        self._enter(Stage.PREPARING)
        self._desk.send_to_all(Prepare(self.ballot))

    def _choose(self) -> None:
        """A quorum has promised: choose what this ballot is for (Paxos, phase 2a)."""
        accepted = self._newest_acceptance()
        if accepted is not None:
            if accepted.result is None or self._enough_are_free:
                self._propose(accepted.result, "it may have been decided already")
            else:
                self._forswear()  # members that have vowed no longer accept it
            return
        reason = self._ending.why_discard
        begun = self._owner.ballots_begun
        if not reason and begun > self._desk.size + BALLOTS_BEYOND_SIZE:
            reason = f"{begun} ballots were not enough"
        if reason:
            self._propose(None, reason)
            return
        attempt = newest_attempt(self._promises)
        held = holders(self._promises, attempt)
        self._blame.judge(held, attempt.ballot, self._verify)
        free = free_members(self._promises)
        if not self._enough_are_free:
            self._forswear()
        elif len(free - doubters(held)) >= self._quorum and is_at_hand(
            held, free - self._blame.ruled_out(free).keys()
        ):
            digest = next(iter(held.values())).digest
            self._propose(Result(attempt.ballot, attempt.members, digest), "")
        else:
            self._open()

    def _newest_acceptance(self) -> Acceptance | None:
        return newest_acceptance(self._promises)

    @property
    def _enough_are_free(self) -> bool:
        """Whether the members that have promised and may still accept a result are a quorum."""
        return len(free_members(self._promises)) >= self._quorum

    def _open(self) -> None:
        """Begin a new attempt with the members that answered, except those that are ruled out."""
        free = free_members(self._promises)
        out = self._blame.ruled_out(free)
        members = tuple(sorted(free - out.keys()))
        if len(members) < 2:
            self._propose(None, "fewer than two members are left")
            return
        self._attempt = ExchangeUnderWay(members, self._plan(members))
        if not self._attempt.cuts:
            self._propose(None, NOBODY_CAN)
            return
        for member in range(self._desk.size):
            if member not in out and member not in members:
                why = "has vowed" if member in self._promises else "did not answer in time"
                out[member] = self._blame.guilty.get(member) or Suspicion(member, SILENT, why)
        self._excluded = tuple(out[member] for member in sorted(out))
        self._enter(Stage.OPENING)
        self._desk.send_to_all(Open(self.ballot, members, self._excluded))

    def _exchange(self) -> None:
        self._enter(Stage.EXCHANGING)
        members = self._attempt.members
        for member in members:
            self._desk.send(member, Start(self.ballot, members, self._attempt.cuts))

    def _propose(self, result: Result | None, reason: str) -> None:
        self._enter(Stage.PROPOSING)
        self._result, self._reason = result, reason
        self._desk.send_to_others(Accept(self.ballot, result, reason))
        self._vote_last()

    def _vote_last(self) -> None:
        if len(self._accepted) >= self._quorum:
            self._ending.conclude(self._result, self._reason)
        elif len(self._accepted) == self._quorum - 1 and self._desk.me not in self._accepted:
            self._desk.send(self._desk.me, Accept(self.ballot, self._result, self._reason))

    def _forswear(self) -> None:
        self._enter(Stage.FORSWEARING)
        self._desk.send_to_all(Forswear(self.ballot))

    def discard_instead(self, reason: str) -> None:
        """The round's time is over: propose a discard, unless this ballot has proposed something
        already."""
        if self.stage in (Stage.OPENING, Stage.EXCHANGING):
            self._propose(None, reason)

    # -- what it is told

    def promised(self, sender: int, promise: Promise) -> None:
        self._blame.complain(sender, promise.attempt.ballot, promise.suspicions)
        accepted = promise.accepted
        if promise.vowed and (accepted is None or accepted.result is None):
            self._vows.add(sender)
            if len(self._vows) >= blocking_of(self._desk.size):
                self._ending.conclude(None, "too few members could be reached")
                return
        if self.stage is Stage.PREPARING:
            self._promises[sender] = promise
            self._weigh(patient=True)
        elif self.stage is Stage.FORSWEARING:
            self._take_forsworn(sender, promise)

    def _take_forsworn(self, sender: int, promise: Promise) -> None:
        if not promise.vowed and (promise.accepted is None or promise.accepted.result is None):
            self._desk.send(sender, Forswear(self.ballot))  # it has just heard of this ballot
            return
        self._forsworn.add(sender)
        self._end_if_all_have_forsworn()

    def _weigh(self, *, patient: bool) -> None:
        """Go on if there is a quorum, and no other member to wait for."""
        if len(self._promises) < self._quorum:
            return
        to_come = set(range(self._desk.size)) - self._promises.keys() - self._failed
        knows = self._newest_acceptance() is not None and self._enough_are_free
        if not patient or not to_come or knows:
            self._choose()
        elif to_come <= self._gone:  # dialling one behind a router may take seconds to fail
            self._desk.hasten("answers", RECONNECT_SECONDS)

    def opened(self, sender: int) -> None:
        self._opened.add(sender)
        if self.stage is Stage.OPENING and len(self._opened) >= self._quorum:
            self._exchange()

    def holding(self, sender: int, holding: Holding) -> None:
        attempt = self._attempt
        if self.stage is not Stage.EXCHANGING or sender not in attempt.members:
            return
        wrong = attempt.take(sender, holding)
        if wrong:
            self._blame.convict(Suspicion(sender, "malformed", wrong))
            self._owner.next_ballot()
        elif attempt.missing - self._failed:
            self._expect_reports()
        elif attempt.missing:
            self._owner.next_ballot()
        elif attempt.is_agreed:
            self._propose(Result(self.ballot, attempt.members, holding.digest), "")
        else:
            self._blame.judge(attempt.shown, self.ballot, self._verify)
            self._owner.next_ballot()

    def _expect_reports(self) -> None:
        """Wait for a limited time for those that have not reported, once they have the result."""
        desk = self._desk
        if "reports" not in desk.timers and self._attempt.is_everywhere(desk.me, self._failed):
            desk.arm("reports", (1 + MORE_WAITS) * desk.timing.answer_seconds)

    def reports_are_due(self) -> None:
        """Some are alive, and have not said what they hold, long after they could."""
        if self.stage is Stage.EXCHANGING:
            for member in self._attempt.missing - self._failed:
                self._blame.withholds(member, self.ballot, self._attempt.reducers)
            self._owner.next_ballot()

    def trouble(self, sender: int, suspicions: tuple[Suspicion, ...]) -> None:
        if self.stage is Stage.EXCHANGING and sender not in self._attempt.members:
            return
        self._blame.complain(sender, self.ballot, suspicions[:SUSPICIONS_PER_MESSAGE])
        if self.stage is Stage.EXCHANGING:
            self._owner.next_ballot()

    def accepted(self, sender: int) -> None:
        if self.stage is Stage.PROPOSING:
            self._accepted.add(sender)
            self._vote_last()

    def heard(self, sender: int) -> None:
        """Any message has come from this member: it is alive, and calls get through."""
        self.is_not_silent(sender)
        self._failed.discard(sender)

    def is_not_silent(self, sender: int) -> None:
        self._heard.add(sender)
        self._attempt.is_live(sender)

    def exchanges(self, sender: int) -> None:
        """The member says that it has begun this ballot's exchange."""
        self._attempt.joined.add(sender)

    def unreachable(self, member: int) -> None:
        self._failed.add(member)
        if self.stage is Stage.PREPARING:
            self._weigh(patient=True)
            if self.stage is Stage.PREPARING and self._no_quorum_left(self._promises.keys()):
                self._desk.hasten("answers", RECONNECT_SECONDS)
        elif self.stage is Stage.FORSWEARING:
            self._end_if_all_have_forsworn()
        elif self.stage is Stage.EXCHANGING and member in self._attempt.members:
            if member not in self._attempt.joined:
                self._owner.next_ballot()  # it never got the Start: the others would wait for it
            else:
                self._give_up_on_the_rest()
        elif self._is_short_of_answers():
            self._owner.next_ballot()

    def _is_short_of_answers(self) -> bool:
        if self.stage is Stage.OPENING:
            return self._no_quorum_left(self._opened)
        return self.stage is Stage.PROPOSING and self._no_quorum_left(self._accepted)

    def _no_quorum_left(self, answered: AbstractSet[int]) -> bool:
        return self._desk.size - len(self._failed - answered) < self._quorum

    def _end_if_all_have_forsworn(self) -> None:
        if len(self._forsworn | self._failed) == self._desk.size:
            self._ending.give_up("too few members could be reached")

    def _give_up_on_the_rest(self) -> None:
        if self._attempt.missing <= self._failed:
            self._owner.next_ballot()
        else:
            self._expect_reports()

    # -- what it owes others, and its timers

    def owed(self, member: int, exchanges: bool) -> AgreementMessage | None:
        """The message that this member has not answered yet, to be sent again."""
        attempt = self._attempt
        if self.stage is Stage.PREPARING and member not in self._promises:
            return Prepare(self.ballot)
        if self.stage is Stage.OPENING and member not in self._opened:
            return Open(self.ballot, attempt.members, self._excluded)
        if self.stage is Stage.EXCHANGING and member in attempt.members and not exchanges:
            return Start(self.ballot, attempt.members, attempt.cuts)
        if self.stage is Stage.EXCHANGING and member not in {*attempt.members, *self._opened}:
            return Open(self.ballot, attempt.members, self._excluded)  # or it takes us for idle
        if self.stage is Stage.PROPOSING and member not in self._accepted:
            return Accept(self.ballot, self._result, self._reason)
        if self.stage is Stage.FORSWEARING and member not in self._forsworn:
            return Forswear(self.ballot)
        return None

    def answers_are_due(self) -> None:
        """Some have not answered in time. Members that show otherwise that they are alive get more
        time."""
        if self._patience > 0 and self._heard - self._answered():
            self._patience -= 1
            self._wait_for_answers()
        elif self.stage is Stage.PREPARING:
            self._tries -= 1
            if len(self._promises) >= self._quorum:
                self._weigh(patient=False)
            elif self._tries == 0:
                self._forswear()
            else:
                for member in range(self._desk.size):
                    if member not in self._promises:
                        self._desk.send(member, Prepare(self.ballot))
                self._wait_for_answers()
        elif self.stage is Stage.FORSWEARING:
            self._ending.give_up("too few members could be reached")
        elif self.stage in (Stage.OPENING, Stage.PROPOSING):
            self._owner.next_ballot()

    def _answered(self) -> AbstractSet[int]:
        answered: dict[Stage, AbstractSet[int]] = {
            Stage.PREPARING: self._promises.keys(),
            Stage.OPENING: self._opened,
            Stage.PROPOSING: self._accepted,
            Stage.FORSWEARING: self._forsworn,
        }
        return answered.get(self.stage, self._heard)

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._patience = MORE_WAITS
        self._desk.disarm("answers", "watch", "reports")
        if stage is Stage.EXCHANGING:
            self._heard.clear()
            self._desk.arm("watch", self._desk.timing.silence_seconds / 2)
        else:
            self._wait_for_answers()

    def _wait_for_answers(self) -> None:
        self._heard.clear()
        self._desk.arm("answers", self._desk.timing.answer_seconds)

    def watch(self) -> None:
        """Ask members that have not shown that they are alive; if they do not answer, they count as
        gone."""
        if self.stage is not Stage.EXCHANGING:
            return
        to_probe, gone = self._attempt.to_probe(self._heard | {self._desk.me})
        self._failed |= gone
        for member in sorted(to_probe):
            self._desk.send(member, BallotQuery(self.ballot))
        self._heard.clear()
        self._desk.arm("watch", self._desk.timing.silence_seconds / 2)
        self._give_up_on_the_rest()


# ---- the choice from a quorum's promises
#
# Safety rests on this one choice (Paxos, phase 2a).
#
# Easy to get wrong: an acceptance counts by the ballot in which it was made, not by the attempt
# whose result it accepts. It no longer counts once any member reports a later attempt as open.


Promises = Mapping[int, Promise]


def newest_attempt(promises: Promises) -> Attempt:
    return max((each.attempt for each in promises.values()), key=lambda each: each.ballot)


def newest_acceptance(promises: Promises) -> Acceptance | None:
    """The acceptance that must be proposed again, because a quorum may have made it; else None."""
    found = [each.accepted for each in promises.values() if each.accepted is not None]
    newest = max(found, key=lambda each: each.ballot, default=None)
    if newest is None or newest.ballot < newest_attempt(promises).ballot:
        return None
    return newest


def free_members(promises: Promises) -> set[int]:
    """The members that have promised, and may still accept."""
    return {member for member, each in promises.items() if not each.vowed}


def holders(promises: Promises, attempt: Attempt) -> dict[int, Held]:
    """The free members that hold a result of this attempt whose digest is that of its parts."""
    found = {}
    for member in free_members(promises) & set(attempt.members):
        held = promises[member].held
        if (
            held is not None
            and held.attempt == attempt.ballot
            and held.digest == digest_of_result(held.statements)
        ):
            found[member] = held
    return found


def doubters(held: Mapping[int, Held]) -> set[int]:
    """The holders of a result that would not accept it, also those that a new attempt leaves out:
    a member has told them that it holds another."""
    return {member for member, each in held.items() if each.contradicted}


def is_at_hand(held: Mapping[int, Held], wanted: AbstractSet[int]) -> bool:
    """Whether all members of a new attempt would hold one result of the last attempt, and would
    commit it. A new attempt could then only lose the data of members that are gone."""
    one = len({each.digest for each in held.values()}) == 1
    return one and wanted <= held.keys() and not wanted & doubters(held)


# ---- an exchange, as its coordinator sees it


class ExchangeUnderWay:
    """Which members have begun the exchange, hold a result, or are gone.

    Easy to get wrong: as long as a member that is there still exchanges, no member is given up. The
    chunks that it lacks may have been sent before the sender went away, and a member that has
    reported its result is not needed any more.
    """

    def __init__(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> None:
        self.members = members
        self.cuts = cuts
        self.joined: set[int] = set()  # have said that they have begun
        self._holdings: dict[int, Holding] = {}
        self._probed: set[int] = set()  # were asked whether they are alive, and have not answered

    def take(self, member: int, holding: Holding) -> str:
        """Take a report. Returns what is wrong with it; "" if nothing is."""
        self.joined.add(member)
        if [each.part for each in holding.statements] != self.reducers:
            return "has not one statement for each part, in order"
        if holding.digest != digest_of_result(holding.statements):
            return "has a digest that is not that of its statements"
        self._holdings[member] = holding
        return ""

    @property
    def reducers(self) -> list[int]:
        cuts = self.cuts
        return [one for place, one in enumerate(self.members) if cuts[place + 1] > cuts[place]]

    def is_everywhere(self, me: int, gone: AbstractSet[int]) -> bool:
        """Whether all have the whole result. A reducer reports when each has told it so. We believe
        this one; or most of the others (a single one is not most), if most members have reported;
        or all members but one, and those that are gone."""
        reported, reducers = self._holdings.keys(), set(self.reducers)
        others = reducers - {me}
        most = 2 * len(others & reported) > max(2, len(others))
        most = most and 2 * len(reported) > len(self.members)
        all_but_one = reported and len(self.missing - gone) == 1
        return bool(me in reducers & reported or most or all_but_one)

    def is_live(self, member: int) -> None:
        self._probed.discard(member)

    def to_probe(self, heard: AbstractSet[int]) -> tuple[set[int], set[int]]:
        """Of the members that have not reported and were not heard: those to be asked whether they
        are alive; and those that were asked before, and count as gone."""
        silent = set(self.members) - self._holdings.keys() - heard
        gone = silent & self._probed
        self._probed |= silent
        return silent - gone, gone

    @property
    def missing(self) -> set[int]:
        return set(self.members) - self._holdings.keys()

    @property
    def is_agreed(self) -> bool:
        """Whether the members that have reported hold one result, and none was told another."""
        shown = self._holdings.values()
        return len({each.digest for each in shown}) == 1 and not any(e.contradicted for e in shown)

    @property
    def shown(self) -> dict[int, Holding]:
        return dict(self._holdings)
