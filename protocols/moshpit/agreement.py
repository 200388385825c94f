"""How a round ends as one: the pure state machine of one member, without I/O and without a clock.

    agreement = Agreement(me, size, coordinators, timing, now, plan=plan, verify=verify)
    agreement.begin(now)                       # at the leader only: coordinators[0]
    for effect in agreement.effects(): ...     # after this and after each call below

One round is one decision: commit the result of one attempt at the exchange, or discard. It is
taken by single-decree Paxos (acceptor.py) among all members of the signed roster, in ballots that
their coordinators drive (coordinator.py). This file is the member: it takes part in the exchange,
keeps the acceptor's memory, watches whoever coordinates, and takes over when that one is gone.
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

from collections.abc import Callable, Sequence
from typing import ClassVar

from protocols.errors import ProtocolMisuse
from protocols.moshpit import verdicts
from protocols.moshpit.acceptor import Acceptor, blocking_of
from protocols.moshpit.agreement_messages import (
    SUSPICIONS_PER_MESSAGE,
    Accept,
    Accepted,
    AgreementMessage,
    Attempt,
    Decided,
    Forswear,
    GivenUp,
    Held,
    Holding,
    Open,
    Opened,
    Outbid,
    Prepare,
    Progress,
    Promise,
    Query,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import LARGEST_BALLOT_NUMBER, Ballot, Statement, Suspicion
from protocols.moshpit.blame import Blame, Verify, clipped
from protocols.moshpit.coordinator import Coordinator, Plan
from protocols.moshpit.desk import Desk, Timing
from protocols.moshpit.message_checks import NotAnHonestMessage, check
from protocols.moshpit.verdicts import Commit, Discard, Effect, LeftOut, Verdict

__all__ = ["Agreement", "CheckCuts", "Plan", "Timing", "Verify"]

CheckCuts = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""From members and cuts of a coordinator's Start to what is wrong with them; "" if nothing is."""

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
    ) -> None:
        """`coordinators`: the order of succession, leader first. Whoever is not named in it never
        takes over: name all, those who can be dialled first."""
        self.verdict: Verdict | None = None
        self.excluded: dict[int, Suspicion] = {}
        """Who is not in the newest attempt that we know of, and why."""
        self._desk = Desk(me, size, coordinators, timing, now)
        self._plan = plan
        self._verify = verify
        self._check_cuts = check_cuts
        first = Ballot(0, coordinators[0])
        self._acceptor = Acceptor(Attempt(first, tuple(range(size))))
        self._blame = Blame()
        self._coordinator: Coordinator | None = None
        self._own = first if me == coordinators[0] else None  # our highest ballot
        self._following = first  # the highest ballot that we know of
        self._suspected: set[int] = set()  # not heard of since they were found silent
        self._untold = False  # our coordinator may not have had our last report
        self._late = False
        self._running: Ballot | None = None
        self._held: Held | None = None
        self._failed: Trouble | None = None
        self._decision: Decided | None = None
        self._desk.arm("round", timing.round_seconds)
        self._desk.arm("end", timing.round_seconds + timing.closing_seconds)
        if first.coordinator != me:
            self._desk.arm("poll", timing.poll_seconds)

    # what the shell calls

    def begin(self, now: float) -> None:
        """Start ballot 0; at `coordinators[0]` only, and once."""
        desk = self._desk
        if desk.me != desk.coordinators[0]:
            raise ProtocolMisuse("Only the leader begins a round.")
        desk.now = now
        if self._following.number > 0 or self._coordinator is not None or self.verdict is not None:
            return  # it has begun; or so late that the others have gone on without us
        self._coordinator = self._coordinate(self._following)
        self._coordinator.begin()
        self._drain()

    def receive(self, sender: int, message: AgreementMessage, now: float) -> None:
        """Take a message. NotAnHonestMessage, with nothing changed, if an honest member of this
        round could not have sent it."""
        desk = self._desk
        check(message, sender, desk.me, desk.size, desk.coordinators)
        self._check_against_what_we_know(sender, message)
        desk.now = now
        self._hear(sender)
        self._take(sender, message)
        self._drain()

    def unreachable(self, member: int, now: float) -> None:
        """A message to this member was not acknowledged, or its link is lost."""
        self._desk.now = now
        if self.verdict is not None or member == self._desk.me:
            return
        self._suspected.add(member)
        if self._coordinator is not None:
            self._coordinator.unreachable(member)
        elif member == self._following.coordinator:
            self._untold = True
            self._succeed()
        self._drain()

    def exchange_done(
        self, ballot: Ballot, digest: bytes, statements: tuple[Statement, ...], now: float
    ) -> None:
        """The exchange of this ballot has brought the whole result; digest as digest_of_result."""
        self._desk.now = now
        if self._running != ballot:
            return  # it was stopped meanwhile, and we have said that we do not hold it
        self._running = None
        self._held = Held(ballot, digest, statements)
        self._report()
        self._drain()

    def exchange_failed(
        self, ballot: Ballot, suspicions: tuple[Suspicion, ...], now: float
    ) -> None:
        """The exchange of this ballot has failed because of these."""
        self._desk.now = now
        if self._running != ballot:
            return
        self._running = None
        self._failed = Trouble(ballot, clipped(suspicions, SUSPICIONS_PER_MESSAGE))
        self._report()
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

    def _check_against_what_we_know(self, sender: int, message: AgreementMessage) -> None:
        """What no honest member would say to *us*, by what we remember."""
        me = self._desk.me
        if (
            not isinstance(message, Decided)
            and message.ballot.coordinator == me
            and (self._own is None or message.ballot > self._own)
        ):
            raise NotAnHonestMessage(
                f"Member {sender} names ballot {message.ballot}, which we have never begun."
            )
        if isinstance(message, Accept) and message.result is not None:
            result = message.result
            if (
                self._acceptor.promised <= message.ballot == result.attempt
                and me in result.members
                and not self._holds(result)
                and self.verdict is None
            ):
                raise NotAnHonestMessage(
                    f"Member {sender} proposes the result of ballot {result.attempt}, "
                    "of which we do not hold that result."
                )
        if (
            isinstance(message, Decided)
            and self._decision is not None
            and message.result != self._decision.result
        ):
            raise NotAnHonestMessage(
                f"Member {sender} says that something else was decided than is known here."
            )

    def _hear(self, sender: int) -> None:
        self._suspected.discard(sender)
        if sender == self._following.coordinator:
            self._desk.disarm("suspect", "takeover")
        if self._coordinator is not None:
            self._coordinator.heard(sender)

    def _drain(self) -> None:
        desk = self._desk
        while desk.inbox:
            self._take(desk.me, desk.inbox.popleft())

    def _take(self, sender: int, message: AgreementMessage) -> None:
        if self._decision is not None:
            if isinstance(message, _ASKS) and sender != self._desk.me:
                self._desk.send(sender, self._decision)
            return
        match message:
            case Decided(result, reason):
                self._learn(Decided(result, reason))
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

    def _take_of_coordinator(
        self, sender: int, message: Prepare | Open | Start | Accept | Forswear
    ) -> None:
        """As an acceptor: only what is not below our promise counts."""
        ballot = message.ballot
        if ballot < self._acceptor.promised:
            self._desk.send(sender, Outbid(self._acceptor.promised))
            return
        self._follow(ballot)
        self._acceptor.promise(ballot)
        if self._running is not None and (self._running < ballot or isinstance(message, Accept)):
            self._desk.effects.append(verdicts.StopExchange(self._running))
            self._running = None
        match message:
            case Open(_, members, excluded):
                if self._acceptor.open(Attempt(ballot, members)):
                    self.excluded = {each.member: each for each in excluded}
                    self._desk.send(sender, Opened(ballot))
                    return
            case Accept(_, result):
                if self._acceptor.accept(ballot, result):
                    self._desk.send(sender, Accepted(ballot))
                    return
            case Start():
                if not self._acceptor.vowed:
                    self._take_start(message)
                    return
            case Forswear():
                self._acceptor.vow()
        self._desk.send(sender, self._promise())

    def _take_start(self, start: Start) -> None:
        ballot = start.ballot
        if self._running == ballot:
            return
        if self._reports_on(ballot):
            self._report()
            return
        self._acceptor.open(Attempt(ballot, start.members))  # it was, by a quorum
        wrong = self._check_cuts(start.members, start.cuts) if self._check_cuts else ""
        if wrong:
            against = Suspicion(ballot.coordinator, "wrong_plan", wrong)
            self._failed = Trouble(ballot, clipped([against], 1))
            self._report()
            return
        self._held = None  # from here on it is written over
        self._running = ballot
        self._desk.effects.append(verdicts.StartExchange(ballot, start.members, start.cuts))

    def _take_of_member(
        self, sender: int, message: Promise | Opened | Holding | Trouble | Accepted
    ) -> None:
        coordinator = self._coordinator
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
        self._desk.send(sender, owed or Progress(self._following))

    def _take_given_up(self, sender: int, ballot: Ballot) -> None:
        if self.verdict is not None:
            return
        if ballot == self._acceptor.promised and sender == ballot.coordinator:
            self._acceptor.vow()
            self._end_without_quorum("too few members could be reached")
        elif sender == self._following.coordinator:
            self._suspected.add(sender)
            self._succeed()

    # ballots

    def _coordinate(self, ballot: Ballot) -> Coordinator:
        return Coordinator(self._desk, self, self._blame, ballot, self._plan, self._verify)

    def _hear_of(self, ballot: Ballot) -> None:
        """Somebody knows of this ballot: if it is higher than ours, ask its coordinator."""
        if ballot > self._following and self.verdict is None:
            self._follow(ballot)
            self._ask()

    def _follow(self, ballot: Ballot) -> None:
        if ballot <= self._following:
            return
        self._following = ballot
        self._untold = False
        self._desk.disarm("suspect", "takeover")
        if self._coordinator is not None and self._coordinator.ballot < ballot:
            self._coordinator = None
            self._desk.disarm("answers", "watch")
        if self._coordinator is None and self.verdict is None:
            self._desk.arm("poll", self._desk.timing.poll_seconds)

    def _ask(self) -> None:
        """Show our coordinator that we live, and be shown it."""
        timing, to = self._desk.timing, self._following.coordinator
        if self._untold:
            self._untold = False
            self._report()
        self._desk.send(to, Query(self._following, self._attempt_of_ours()))
        self._desk.arm("poll", timing.poll_seconds)
        if "suspect" not in self._desk.timers and "takeover" not in self._desk.timers:
            self._desk.arm("suspect", timing.silence_seconds - timing.poll_seconds)

    def _succeed(self) -> None:
        """Our coordinator is gone: take over, unless somebody before us does."""
        desk = self._desk
        left = [each for each in desk.coordinators if each not in self._suspected]
        if desk.me in left and "takeover" not in desk.timers:
            desk.disarm("suspect")
            desk.arm("takeover", desk.timing.stagger_seconds * left.index(desk.me))

    def next_ballot(self) -> None:
        """Coordinate the next ballot (also called by the coordinator of our last)."""
        number = max(self._following, self._acceptor.promised).number + 1
        if number > LARGEST_BALLOT_NUMBER:
            self.give_up("there are no ballots left")
            return
        self._own = self._following = Ballot(number, self._desk.me)
        self._desk.disarm("suspect", "takeover", "poll", "answers", "watch")
        self._coordinator = self._coordinate(self._own)
        self._coordinator.prepare()

    # what we report

    def _attempt_of_ours(self) -> Ballot | None:
        """The newest ballot whose exchange we have begun."""
        begun = [
            self._running,
            self._held.attempt if self._held is not None else None,
            self._failed.ballot if self._failed is not None else None,
        ]
        return max((each for each in begun if each is not None), default=None)

    def _reports_on(self, ballot: Ballot) -> bool:
        return self._running is None and self._attempt_of_ours() == ballot

    def _report(self) -> None:
        """Tell our coordinator how its exchange has ended here, if it has."""
        ballot = self._following
        if self._held is not None and self._held.attempt == ballot:
            holding = Holding(ballot, self._held.digest, self._held.statements)
            self._desk.send(ballot.coordinator, holding)
        elif self._failed is not None and self._failed.ballot == ballot:
            self._desk.send(ballot.coordinator, self._failed)

    def _promise(self) -> Promise:
        acceptor, failed = self._acceptor, self._failed
        about = failed is not None and failed.ballot == acceptor.attempt.ballot
        return Promise(
            acceptor.promised,
            acceptor.attempt,
            acceptor.accepted,
            self._held if self.verdict is None else None,
            failed.suspicions if failed is not None and about else (),
            acceptor.vowed,
        )

    # timers

    def _poll_is_due(self) -> None:
        if self._coordinator is None:
            self._ask()

    def _suspect(self) -> None:
        self._suspected.add(self._following.coordinator)
        self._succeed()

    def _answers_are_due(self) -> None:
        if self._coordinator is not None:
            self._coordinator.answers_are_due()

    def _watch(self) -> None:
        if self._coordinator is not None:
            self._coordinator.watch()

    def _round_is_late(self) -> None:
        self._late = True
        if self._coordinator is not None:
            self._coordinator.discard_instead(self.why_discard())

    def _time_is_over(self) -> None:
        self._acceptor.vow()
        self.give_up("the round's time was over")

    _timers: ClassVar[dict[str, Callable[[Agreement], None]]] = {
        "poll": _poll_is_due,
        "suspect": _suspect,
        "takeover": next_ballot,
        "answers": _answers_are_due,
        "watch": _watch,
        "round": _round_is_late,
        "end": _time_is_over,
    }

    # the end

    def why_discard(self) -> str:
        return "the round's time was over" if self._late else ""

    def conclude(self, result: Result | None, reason: str) -> None:
        """Our ballot has decided: tell everybody."""
        decided = Decided(result, reason)
        self._desk.send_to_others(decided)
        self._learn(decided)

    def give_up(self, reason: str) -> None:
        """No quorum is to be found: say so, and end."""
        self._desk.send_to_others(GivenUp(self._acceptor.promised))
        self._end_without_quorum(reason)

    def _learn(self, decided: Decided) -> None:
        self._decision = decided
        if self.verdict is not None:
            return  # in doubt it was, and stays: the values are dropped
        result = decided.result
        if result is None:
            self._end(Discard(decided.reason, in_doubt=False))
        elif self._holds(result):
            self._end(Commit(result.attempt, result.members, result.digest))
        else:
            self._end(LeftOut(result.attempt, result.members, result.digest))

    def _holds(self, result: Result) -> bool:
        held = self._held
        return held is not None and (held.attempt, held.digest) == (result.attempt, result.digest)

    def _end_without_quorum(self, reason: str) -> None:
        """In doubt, unless our own vow alone makes a quorum impossible."""
        acceptor = self._acceptor
        if (
            blocking_of(self._desk.size) == 1
            and acceptor.vowed
            and not acceptor.has_accepted_a_result
        ):
            self._learn(Decided(None, reason))
            return
        acceptor.close()
        self._end(Discard(reason, in_doubt=True))

    def _end(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._coordinator = None
        self._desk.timers.clear()
        if self._running is not None:
            self._desk.effects.append(verdicts.StopExchange(self._running))
            self._running = None
        self._desk.effects.append(verdicts.Decided(verdict))
