"""How a ballot is driven to a decision, and the parts of a member that both sides of it share.

A coordinator takes its ballot through these stages:

    PREPARING    ask all members for a promise; then re-propose what may be decided already, or
                 propose a result that all who answered hold, or open a new attempt
    OPENING      until a quorum has noted the new attempt
    EXCHANGING   until all its members hold the same result; any trouble leads to a next ballot
    PROPOSING    until a quorum has accepted: decided
    FORSWEARING  no quorum can be reached: collect vows that make that final, or end in doubt

The first ballot begins with EXCHANGING, because all members promised it by joining.

In this file: `Coordinator`, which drives one ballot; `Acceptor`, the memory that keeps decisions
safe; the choice from a quorum's promises; `ExchangeUnderWay`, an exchange as its coordinator sees
it; `Desk`, with timers and messages; `OwnExchange`, this member's own exchange; `KnownDecision`,
the decision and the verdict.

Promises: a ballot proposes at most one result, once. A result is proposed only when every
reachable member of its attempt holds it, with one digest. After promising a ballot, a member
takes nothing of a lower one.

Easy to get wrong: the coordinator votes last. As long as it has not accepted its own proposal, one
member less can have decided without it; so a pair that loses one member is certain of its discard.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from protocols.moshpit import verdicts
from protocols.moshpit.agreement_messages import (
    SUSPICIONS_PER_MESSAGE,
    Accept,
    Acceptance,
    AgreementMessage,
    Attempt,
    BallotQuery,
    Decided,
    Forswear,
    GivenUp,
    Held,
    Holding,
    Open,
    Prepare,
    Promise,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import Ballot, Statement, Suspicion, digest_of_result
from protocols.moshpit.blame import SILENT, Blame, Verify, clipped
from protocols.moshpit.verdicts import (
    Commit,
    Discard,
    Effect,
    MemberLeftOut,
    OwnVerdict,
    Send,
    StartExchange,
    StopExchange,
)

BALLOTS_BEYOND_SIZE = 2  # each failed attempt costs a member or names a pair; two are for duels
MORE_WAITS = 2  # for members whose link is so full that an answer takes some seconds
PREPARE_TRIES = 2  # the second one reaches members that were reconnecting
NOBODY_CAN = "none of the members that are left brings data, or none can reduce"
RECONNECT_SECONDS = 0.5  # until the second try, if calls failed and too few members are left

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
    ) -> None:
        self.ballot = ballot
        self.stage = Stage.PREPARING
        self._desk = desk
        self._owner = owner
        self._ending = ending
        self._blame = blame
        self._plan = plan
        self._verify = verify
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
        to_come = self._desk.size - len(self._promises.keys() | self._failed)
        knows = self._newest_acceptance() is not None and self._enough_are_free
        if not patient or to_come == 0 or knows:
            self._choose()

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
        elif attempt.missing:
            self._give_up_on_the_rest()
        elif attempt.is_agreed:
            self._propose(Result(self.ballot, attempt.members, holding.digest), "")
        else:
            self._blame.judge(attempt.shown, self.ballot, self._verify)
            self._owner.next_ballot()

    def trouble(self, sender: int, suspicions: tuple[Suspicion, ...]) -> None:
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
                self._desk.arm("answers", RECONNECT_SECONDS)
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
        self._desk.disarm("answers", "watch")
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


# ---- the acceptor
#
# One member's memory, because of which two results can never both be decided: Lamport's acceptor
# ("Paxos made simple", 2001), with two additions.
#
# First, a ballot has two steps. It may *open* a new attempt at the exchange, which makes void
# whatever was accepted in lower ballots, and later have its result accepted. A coordinator opens
# only after a quorum has promised and none of it had accepted, so what becomes void cannot have
# been decided. And no member overwrites a result that it holds before a quorum has noted the
# opening, so no later coordinator can revive a result that was overwritten somewhere.
#
# Second, a member may *vow* never to accept a result. When so many have vowed that the others are
# no quorum, the round is certainly discarded, although no quorum can be reached.
#
# Promise: `promised` never falls; after promising a ballot, nothing of a lower one is taken.
#
# Easy to get wrong: this memory must outlive its round. A process that was restarted has lost it,
# and must not answer for the first one. It is not in the round any more: the roster has a nonce
# that only the first process knows.


def quorum_of(size: int) -> int:
    """How many members decide a round: any two sets of so many have a member in common."""
    return size // 2 + 1


def blocking_of(size: int) -> int:
    """How many vows make a quorum of acceptances impossible."""
    return size - quorum_of(size) + 1


class Acceptor:
    """The promises, openings, acceptances and vows of one member."""

    def __init__(self, first: Attempt) -> None:
        """All members have promised the first ballot by joining; its attempt is open from the
        start."""
        self.promised: Ballot = first.ballot
        self.attempt: Attempt = first
        self.accepted: Acceptance | None = None
        self.vowed = False

    @property
    def has_accepted_a_result(self) -> bool:
        return self.accepted is not None and self.accepted.result is not None

    def promise(self, ballot: Ballot) -> bool:
        """Promise this ballot: nothing lower counts from now on. Returns whether it may go on."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def open(self, attempt: Attempt) -> bool:
        """Note that a new attempt is open, and forget what it makes void."""
        if self.vowed or not self.promise(attempt.ballot):
            return False
        self.attempt = attempt
        if self.accepted is not None and self.accepted.ballot < attempt.ballot:
            self.accepted = None
        return True

    def accept(self, ballot: Ballot, result: Result | None) -> bool:
        if (self.vowed and result is not None) or not self.promise(ballot):
            return False
        self.accepted = Acceptance(ballot, result)
        return True

    def vow(self) -> None:
        """Vow never to accept a result, unless one is accepted already: a vow would then be
        worthless."""
        if not self.has_accepted_a_result:
            self.vowed = True

    def close(self) -> None:
        """Accept no result from now on, whatever was accepted before: our values are dropped."""
        self.vowed = True


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
        parts = [each.part for each in holding.statements]
        expected = [
            reducer
            for place, reducer in enumerate(self.members)
            if self.cuts[place + 1] > self.cuts[place]
        ]
        if parts != expected:
            return "has not one statement for each part, in order"
        if holding.digest != digest_of_result(holding.statements):
            return "has a digest that is not that of its statements"
        self._holdings[member] = holding
        return ""

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


# ---- what the parts of a member share


@dataclass(frozen=True)
class Timing:
    """How long a round waits, in seconds.

    - `round_seconds`: for the exchange, with all its attempts; then the round is discarded.
    - `closing_seconds`: for agreeing on that; then this member stops, if necessary in doubt.
    - `answer_seconds`: for an answer that costs nothing: a few round trips of a bad home link.
    - `poll_seconds`: how often a member and its coordinator show each other that they are alive.
    - `silence_seconds`: after so long a silence the other counts as gone. At least two polls.
    - `stagger_seconds`: how long each successor waits for the one before it.
    - `idle_seconds`: how long a living coordinator may do nothing when it is its turn; twice as
      long while it collects answers. As long as transfers may take to open.
    """

    round_seconds: float
    closing_seconds: float = 8.0
    answer_seconds: float = 1.5
    poll_seconds: float = 1.0
    silence_seconds: float = 3.0
    stagger_seconds: float = 0.4
    idle_seconds: float = 6.0


class Desk:
    """Shared by the parts of one member: who it is, its timers, and the messages that it sends.

    A message of a member to itself goes into `inbox` and is taken like any other, so a coordinator
    treats itself as it treats the others. Timers have names; arming one again moves it. `now` is
    set by the method of the member that was called last.

    Easy to get wrong: no decision may depend on the time of a timer, only on its having fired. So
    tests can fire every timer at every moment.
    """

    def __init__(
        self, me: int, size: int, coordinators: Sequence[int], timing: Timing, now: float
    ) -> None:
        self.me = me
        self.size = size
        self.coordinators = tuple(coordinators)
        self.timing = timing
        self.now = now
        self.timers: dict[str, float] = {}
        self.inbox: deque[AgreementMessage] = deque()
        self.effects: list[Effect] = []

    def send(self, to: int, message: AgreementMessage) -> None:
        if to == self.me:
            self.inbox.append(message)
        else:
            self.effects.append(Send(to, message))

    def send_to_others(self, message: AgreementMessage) -> None:
        for member in range(self.size):
            if member != self.me:
                self.send(member, message)

    def send_to_all(self, message: AgreementMessage) -> None:
        self.send_to_others(message)
        self.send(self.me, message)

    def arm(self, name: str, seconds: float) -> None:
        self.timers[name] = self.now + seconds

    def disarm(self, *names: str) -> None:
        for name in names:
            self.timers.pop(name, None)

    def due(self) -> str | None:
        """The earliest timer, if it is due by now."""
        name = min(self.timers, key=lambda each: self.timers[each], default=None)
        return name if name is not None and self.timers[name] <= self.now else None

    @property
    def next_deadline(self) -> float:
        return min(self.timers.values(), default=math.inf)


# ---- this member's own exchange


Awaited = Callable[[Ballot], tuple[Suspicion, ...]]


class OwnExchange:
    """This member's exchanges: one is running, or the result of the last is held, or it failed.

    At most one exchange runs at a time, in the ballot that was started last.

    Promise: a result that is `held` is complete in the result buffer, and nothing has been written
    over it. A *contradicted* result is held because it proves who lied. It is never committed.

    Easy to get wrong: a stopped exchange is over here at once. If the shell reports afterwards that
    it finished, that is too late: we have promised not to hold its result.
    """

    def __init__(self, desk: Desk, awaited: Awaited) -> None:
        """`awaited`: the members for which an exchange that runs here is waiting."""
        self.held: Held | None = None
        self.failed: Trouble | None = None
        self.running: Ballot | None = None
        self.newest: Ballot | None = None
        """The ballot of the newest exchange that began here, whatever became of it. No exchange
        begins twice, although a Start may arrive again after its exchange was stopped."""
        self._desk = desk
        self._awaited = awaited

    def has_ended(self, ballot: Ballot) -> bool:
        return self.running is None and self.newest == ballot

    def start(self, start: Start) -> None:
        """Start an exchange. From here on, the held result is overwritten."""
        self.held = None
        self.running = self.newest = start.ballot
        self._desk.effects.append(StartExchange(start.ballot, start.members, start.cuts))

    def stop(self) -> None:
        if self.running is not None:
            awaited = self._told(self._awaited(self.running))
            if awaited:
                self.failed = Trouble(self.running, awaited)
            self._desk.effects.append(StopExchange(self.running))
            self.running = None

    def done(
        self,
        ballot: Ballot,
        digest: bytes,
        statements: tuple[Statement, ...],
        contradicted: tuple[int, ...],
    ) -> bool:
        """Hold the result. False if the exchange was stopped meanwhile."""
        if self.running != ballot:
            return False
        self.running = None
        self.held = Held(ballot, digest, statements, contradicted)
        return True

    def fail(self, ballot: Ballot, suspicions: tuple[Suspicion, ...]) -> bool:
        """Note the failure. False if the exchange was stopped meanwhile."""
        if self.running != ballot:
            return False
        self.running = None
        self.refuse(ballot, suspicions)
        return True

    def refuse(self, ballot: Ballot, suspicions: tuple[Suspicion, ...]) -> None:
        """Note the failure of an exchange that does not even begin."""
        self.newest = ballot
        self.failed = Trouble(ballot, self._told(suspicions))

    def complain(self, ballot: Ballot, against: Suspicion) -> None:
        """Add a suspicion about the attempt of this ballot, which does not begin any more."""
        self.refuse(ballot, (against, *self.complaints(ballot)))

    def _told(self, suspicions: tuple[Suspicion, ...]) -> tuple[Suspicion, ...]:
        return clipped(suspicions, SUSPICIONS_PER_MESSAGE)

    def holds(self, result: Result) -> bool:
        held = self.held
        return held is not None and (held.attempt, held.digest) == (result.attempt, result.digest)

    def doubts(self, result: Result | None) -> bool:
        """Whether this is what we hold, and a member has told us that it holds another."""
        return (
            result is not None
            and self.held is not None
            and self.holds(result)
            and bool(self.held.contradicted)
        )

    def complaints(self, ballot: Ballot) -> tuple[Suspicion, ...]:
        failed = self.failed
        return failed.suspicions if failed is not None and failed.ballot == ballot else ()

    def report(self, ballot: Ballot) -> None:
        """Tell this ballot's coordinator how the exchange ended here, if it has ended."""
        held, failed = self.held, self.failed
        if held is not None and held.attempt == ballot:
            report = Holding(ballot, held.digest, held.statements, held.contradicted)
            self._desk.send(ballot.coordinator, report)
        elif failed is not None and failed.ballot == ballot:
            self._desk.send(ballot.coordinator, failed)


# ---- the decision and the verdict


TIME_IS_OVER = "the round's time was over"


class KnownDecision:
    """The decision, as far as it is known, and the verdict of one member, given once.

    Easy to get wrong: a verdict in doubt is final, too. If the decision becomes known afterwards,
    it is told to members that ask, but this member has dropped its values.
    """

    def __init__(self, desk: Desk, acceptor: Acceptor, exchange: OwnExchange) -> None:
        self.verdict: OwnVerdict | None = None
        self.decision: Decided | None = None
        self.why_discard = ""
        """Why no more attempts should be made; "" if they should."""
        self._desk = desk
        self._acceptor = acceptor
        self._exchange = exchange

    def conclude(self, result: Result | None, reason: str) -> None:
        """Our ballot has decided: tell all members."""
        decided = Decided(result, reason)
        self._desk.send_to_others(decided)
        self.learn(decided)

    def learn(self, decided: Decided) -> None:
        """Take the decision, and give the verdict that follows from it."""
        self.decision = decided
        if self.verdict is not None:
            return  # the verdict was in doubt, and stays so: the values are dropped
        result = decided.result
        if result is None:
            self.end(Discard(decided.reason, in_doubt=False))
        elif self._exchange.holds(result) and not self._exchange.doubts(result):
            self.end(Commit(result.attempt, result.members, result.digest))
        else:
            self.end(MemberLeftOut(result.attempt, result.members, result.digest))

    def give_up(self, reason: str) -> None:
        """No quorum can be found: say so, and end."""
        self._desk.send_to_others(GivenUp(self._acceptor.promised))
        self.end_without_quorum(reason)

    def end_without_quorum(self, reason: str) -> None:
        """End in doubt, unless our own vow alone makes a quorum impossible."""
        acceptor = self._acceptor
        alone_blocks = blocking_of(self._desk.size) == 1
        if alone_blocks and acceptor.vowed and not acceptor.has_accepted_a_result:
            self.learn(Decided(None, reason))
            return
        acceptor.close()
        self.end(Discard(reason, in_doubt=True))

    def end(self, verdict: OwnVerdict) -> None:
        self.verdict = verdict
        self._desk.timers.clear()
        self._exchange.stop()
        self._desk.effects.append(verdicts.Conclude(verdict))
