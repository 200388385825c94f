"""How a round ends as one: the pure state machine of one member, without I/O and without a clock.

    agreement = Agreement(me, size, coordinators, timing, now, plan=plan, verify=verify)
    agreement.begin(now)                       # at the leader only: coordinators[0]
    for effect in agreement.effects(): ...     # after this and after each call below

One round is one decision: commit the result of one attempt at the exchange, or discard. It is
taken by single-decree Paxos (acceptor.py) among all members of the signed roster, in ballots that
their coordinators drive (coordinator.py). This file is the member: it takes every message to where
it belongs (what a coordinator wants of it, to follower.py), follows the highest ballot, and takes
over when whoever coordinates is gone (succession.py).
docs/protocols.md has the whole, with what is assumed and what each failure costs.

Promises, whatever is lost, doubled, delayed or overtaken, and whoever dies: two members never
commit different results; who commits holds that result, and its digest; a discard that is not in
doubt is never beside a commit. While a quorum is connected and answers in time, everybody in it
gets the same verdict.

Easy to get wrong: after promising a ballot, nothing of a lower one may have an effect here, also
not an exchange that was all but finished. And the verdict does not end the conversation: who was
away asks later what was decided, so this goes on answering for as long as it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from protocols.errors import ProtocolMisuse
from protocols.moshpit.acceptor import Acceptor
from protocols.moshpit.agreement_messages import (
    Accept,
    Accepted,
    AgreementMessage,
    Attempt,
    Decided,
    Forswear,
    GivenUp,
    Holding,
    Open,
    Opened,
    Outbid,
    Prepare,
    Progress,
    Promise,
    Query,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import LARGEST_BALLOT_NUMBER, Ballot, Statement, Suspicion
from protocols.moshpit.blame import Blame, Verify
from protocols.moshpit.coordinator import Coordinator, Plan
from protocols.moshpit.desk import Desk, Timing
from protocols.moshpit.ending import TIME_IS_OVER, Ending
from protocols.moshpit.follower import CheckCuts, Follower, FromCoordinator
from protocols.moshpit.memory_checks import check_against_memory
from protocols.moshpit.message_checks import check
from protocols.moshpit.own_exchange import Awaited, OwnExchange
from protocols.moshpit.succession import Succession
from protocols.moshpit.verdicts import Effect, Verdict

__all__ = ["Agreement", "CheckCuts", "Plan", "Timing", "Verify"]

# What is answered with the decision, once there is one. The others are answers themselves.
_ASKS = (Start, Prepare, Open, Accept, Query, Forswear, Holding, Trouble, Promise, GivenUp)


class Agreement:
    """One member's side of one round. Every method may add effects; drain them after each call."""

    def __init__(
        self,
        me: int,
        size: int,
        coordinators: Sequence[int],
        timing: Timing,
        now: float,
        *,
        plan: Plan,
        verify: Verify,
        check_cuts: CheckCuts | None = None,
        awaited: Awaited = lambda _ballot: (),
    ) -> None:
        """`coordinators`: the order of succession, leader first; who is not named comes last.
        `awaited`: for whose values an exchange that runs here is waiting."""
        others = [member for member in range(size) if member not in coordinators]
        self._desk = Desk(me, size, (*coordinators, *others), timing, now)
        self._plan = plan
        self._verify = verify
        first = Ballot(0, coordinators[0])
        self._acceptor = Acceptor(Attempt(first, tuple(range(size))))
        self._blame = Blame()
        self._coordinator: Coordinator | None = None
        self._own = first if me == coordinators[0] else None  # our highest ballot
        self._succession = Succession(self._desk)
        self._exchange = OwnExchange(self._desk, awaited)
        self._ending = Ending(self._desk, self._acceptor, self._exchange)
        self._follower = Follower(
            self._desk, self._acceptor, self._exchange, self._ending, self._succession, check_cuts
        )
        self.ballots_begun = 0  # by us, beside the first
        self._untold = False  # our coordinator may not have had our last report
        self._desk.arm("round", timing.round_seconds)
        self._desk.arm("end", timing.round_seconds + timing.closing_seconds)

    @property
    def verdict(self) -> Verdict | None:
        """How the round has ended for this member; None: it has not."""
        return self._ending.verdict

    @property
    def excluded(self) -> Mapping[int, Suspicion]:
        """Who is not in the newest attempt that we know of, and why."""
        return self._follower.excluded

    # what the shell calls

    def begin(self, now: float) -> None:
        """Start ballot 0; at `coordinators[0]` only, and once."""
        desk = self._desk
        if desk.me != desk.coordinators[0]:
            raise ProtocolMisuse("Only the leader begins a round.")
        desk.now = now
        if (
            self._succession.following.number > 0
            or self._coordinator is not None
            or self.verdict is not None
        ):
            return  # it has begun; or so late that the others have gone on without us
        self._coordinator = self._coordinate(self._succession.following)
        self._coordinator.begin()
        self._drain()

    def receive(self, sender: int, message: AgreementMessage, now: float) -> None:
        """Take a message. NotAnHonestMessage, with nothing changed, if an honest member of this
        round could not have sent it."""
        desk = self._desk
        check(message, sender, desk.me, desk.size, desk.coordinators)
        check_against_memory(
            sender,
            message,
            desk.me,
            self._own,
            self._acceptor,
            self._exchange,
            self._ending,
            self._succession.following,
        )
        desk.now = now
        self._hear(sender)
        self._take(sender, message)
        self._drain()

    def unreachable(self, member: int, now: float) -> None:
        """A message to this member was not acknowledged, or its link is lost."""
        self._desk.now = now
        if self.verdict is not None or member == self._desk.me:
            return
        self._succession.suspect(member)
        if self._coordinator is not None:
            self._coordinator.unreachable(member)
        elif member == self._succession.following.coordinator:
            self._untold = True
        self._drain()

    def alive(self, member: int, now: float) -> None:
        """Bytes have come from this member, though perhaps no message: behind the chunks of a full
        link, messages wait, and silence means nothing. A call that failed has failed all the same.
        """
        self._desk.now = now
        if self.verdict is None and member != self._desk.me:
            self._succession.is_not_silent(member)
            if self._coordinator is not None:
                self._coordinator.is_not_silent(member)

    def exchange_done(
        self,
        ballot: Ballot,
        digest: bytes,
        statements: tuple[Statement, ...],
        now: float,
        contradicted: tuple[int, ...] = (),
    ) -> None:
        """The exchange of this ballot has brought the whole result; digest as digest_of_result.

        `contradicted`: by whom, who holds another. Such a result is shown and never committed, so
        a coordinator that lied as a reducer cannot bring two members to commit each its own.
        """
        self._desk.now = now
        if self._exchange.done(ballot, digest, statements, contradicted):
            self._exchange.report(ballot)
            self._drain()

    def exchange_failed(
        self, ballot: Ballot, suspicions: tuple[Suspicion, ...], now: float
    ) -> None:
        """The exchange of this ballot has failed because of these."""
        self._desk.now = now
        if self._exchange.fail(ballot, suspicions):
            self._exchange.report(ballot)
            self._drain()

    def tick(self, now: float) -> None:
        """Do what is due; to be called at `next_deadline`, and harmless at any other time."""
        self._desk.now = now
        while (name := self._desk.due()) is not None:
            self.fire(name)

    def fire(self, name: str) -> None:
        """Do what this timer is for, due or not (the tests fire any timer at any moment)."""
        self._desk.disarm(name)
        self._timers[name](self)
        self._drain()

    @property
    def next_deadline(self) -> float:
        """When `tick` is due; inf after the verdict, when nothing is left to do."""
        return self._desk.next_deadline

    def effects(self) -> list[Effect]:
        """What is to be done now, in order; drained."""
        effects, self._desk.effects = self._desk.effects, []
        return effects

    # messages

    def _hear(self, sender: int) -> None:
        self._succession.hear(sender)
        if self._coordinator is not None:
            self._coordinator.heard(sender)

    def _drain(self) -> None:
        desk = self._desk
        while desk.inbox:
            self._take(desk.me, desk.inbox.popleft())

    def _take(self, sender: int, message: AgreementMessage) -> None:
        if self._ending.decision is not None:
            if isinstance(message, _ASKS) and sender != self._desk.me:
                self._desk.send(sender, self._ending.decision)
            return
        match message:
            case Decided():
                self._take_decided(sender, message)
            case Query():
                self._take_query(sender, message)
            case Outbid(ballot) | Progress(ballot):
                self._hear_of(ballot)
            case GivenUp(ballot):
                self._take_given_up(sender, ballot)
            case Prepare() | Open() | Start() | Accept() | Forswear():
                self._take_of_coordinator(sender, message)
            case Promise() | Opened() | Holding() | Trouble() | Accepted():
                self._take_of_member(sender, message)

    def _take_decided(self, sender: int, decided: Decided) -> None:
        """Nobody coordinates a doubtful result to its end: who claims that it has is not believed,
        but anybody else who has learnt it is."""
        result, following = decided.result, self._succession.following.coordinator
        if result is not None and self.verdict is None and self._exchange.doubts(result):
            if sender in (following, result.attempt.coordinator) and sender != self._desk.me:
                self._succession.distrust(sender)
            if not self._succession.trusts(sender):
                return
        self._ending.learn(decided)

    def _take_of_coordinator(self, sender: int, message: FromCoordinator) -> None:
        """Only what is not below our promise counts."""
        ballot = message.ballot
        if ballot < self._acceptor.promised:
            self._desk.send(sender, Outbid(self._acceptor.promised))
            return
        self._follow(ballot)
        self._follower.take(sender, message)

    def _take_of_member(
        self, sender: int, message: Promise | Opened | Holding | Trouble | Accepted
    ) -> None:
        coordinator = self._coordinator if self.verdict is None else None
        if coordinator is None or message.ballot != coordinator.ballot:
            return  # late, for a ballot that is over
        match message:
            case Promise():
                coordinator.promised(sender, message)
            case Opened():
                coordinator.opened(sender)
            case Holding():
                coordinator.holding(sender, message)
            case Trouble():
                coordinator.trouble(sender, message.suspicions)
            case Accepted():
                coordinator.accepted(sender)

    def _take_query(self, sender: int, query: Query) -> None:
        if self.verdict is not None:
            self._desk.send(sender, GivenUp(self._acceptor.promised))
            return
        self._hear_of(query.ballot)
        coordinator = self._coordinator
        owed: AgreementMessage | None = None
        if coordinator is not None:
            exchanges = query.attempt == coordinator.ballot
            if exchanges:
                coordinator.exchanges(sender)
            owed = coordinator.owed(sender, exchanges)
        self._desk.send(sender, owed or Progress(self._succession.following))

    def _take_given_up(self, sender: int, ballot: Ballot) -> None:
        if self.verdict is not None:
            return
        followed = ballot == self._acceptor.promised and sender == ballot.coordinator
        if followed and self._acceptor.vowed:
            self._ending.end_without_quorum("too few members could be reached")
        else:
            self._succession.suspect(sender)

    # ballots

    def _coordinate(self, ballot: Ballot) -> Coordinator:
        return Coordinator(
            self._desk, self, self._ending, self._blame, ballot, self._plan, self._verify
        )

    def _hear_of(self, ballot: Ballot) -> None:
        """Somebody knows of this ballot: if it is higher than ours, ask its coordinator."""
        if self.verdict is None and self._follow(ballot):
            self._ask()

    def _follow(self, ballot: Ballot) -> bool:
        if self.verdict is not None or not self._succession.follow(ballot):
            return False
        self._untold = False
        self._coordinator = None
        self._desk.disarm("answers", "watch")
        return True

    def _ask(self) -> None:
        if self._untold:
            self._untold = False
            self._exchange.report(self._succession.following)
        self._succession.ask(self._exchange.newest)

    def next_ballot(self) -> None:
        """Coordinate the next ballot (also called by the coordinator of our last)."""
        number = max(self._succession.following, self._acceptor.promised).number + 1
        if number > LARGEST_BALLOT_NUMBER:
            self._ending.give_up("there are no ballots left")
            return
        self._own = Ballot(number, self._desk.me)
        self.ballots_begun += 1
        self._follow(self._own)
        self._coordinator = self._coordinate(self._own)
        self._coordinator.prepare()

    # timers

    def _poll_is_due(self) -> None:
        if self._coordinator is None:
            self._ask()

    def _suspect(self) -> None:
        self._succession.suspect(self._succession.following.coordinator)

    def _answers_are_due(self) -> None:
        if self._coordinator is not None:
            self._coordinator.answers_are_due()

    def _watch(self) -> None:
        if self._coordinator is not None:
            self._coordinator.watch()

    def _round_is_late(self) -> None:
        self._ending.why_discard = TIME_IS_OVER
        if self._coordinator is not None:
            self._coordinator.discard_instead(TIME_IS_OVER)

    def _time_is_over(self) -> None:
        self._acceptor.vow()
        self._ending.give_up(TIME_IS_OVER)

    _timers: ClassVar[dict[str, Callable[[Agreement], None]]] = {
        "poll": _poll_is_due,
        "suspect": _suspect,
        "takeover": next_ballot,
        "answers": _answers_are_due,
        "watch": _watch,
        "round": _round_is_late,
        "end": _time_is_over,
    }
