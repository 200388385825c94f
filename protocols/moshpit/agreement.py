"""How a round ends the same for all members: the pure state machine of one member.

    agreement = Agreement(me, size, coordinators, timing, now, plan=plan, verify=verify)
    agreement.begin(now)                       # at the leader only: coordinators[0]
    for effect in agreement.effects(): ...     # after this and after each call below

A round is one decision: commit the result of one attempt at the exchange, or discard. All members
of the signed roster take it by single-decree Paxos, in ballots that coordinators drive
(coordinator.py). This file is the member: it hands every message to the right part, does what a
coordinator asks for, follows the highest ballot, and takes over when the coordinator is gone. What
it remembers is in member_state.py. docs/protocols.md has the whole protocol, its assumptions, and
what each failure costs.

In this file: `Agreement`; `check_against_memory`, which refuses dishonest messages; `Succession`,
for who coordinates; `Follower`, for what a coordinator asks of this member.

Promises, even if messages are lost, duplicated, delayed or reordered, and if members die:

- Two members never commit different results.
- A member that commits holds that result, and its digest.
- A discard that is not in doubt never stands beside a commit.
- While a quorum is connected and answers in time, all its members get the same verdict.

Easy to get wrong: after a promise for one ballot, nothing of a lower ballot may have an effect
here, not even an exchange that was almost finished. And the verdict does not end the conversation:
a member that was away asks later what was decided, so this object goes on answering for as long as
it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from protocols.errors import ProtocolMisuse
from protocols.moshpit.agreement_messages import (
    Accept,
    Acceptance,
    Accepted,
    AgreementMessage,
    Attempt,
    BallotQuery,
    Decided,
    Forswear,
    GivenUp,
    Holding,
    NotAnHonestMessage,
    Open,
    Opened,
    Outbid,
    Prepare,
    Progress,
    Promise,
    Result,
    Start,
    Trouble,
    check,
)
from protocols.moshpit.ballots import (
    LARGEST_BALLOT_NUMBER,
    MOST_BALLOTS_MISSED,
    Ballot,
    Statement,
    Suspicion,
)
from protocols.moshpit.blame import IDLE, Blame, Verify
from protocols.moshpit.coordinator import Coordinator, Plan
from protocols.moshpit.member_state import (
    TIME_IS_OVER,
    Acceptor,
    AwaitedMembers,
    Desk,
    KnownDecision,
    OwnExchange,
    Timing,
)
from protocols.moshpit.verdicts import Effect, OwnVerdict

__all__ = ["Agreement", "CheckCuts", "Plan", "Timing", "Verify"]

COMPLAINT_SECONDS = 7.0
"""A coordinator does nothing while its own exchange goes on. If another keeps it from ending that,
it complains some seven seconds after most have ended theirs (attempt.py), or, if that one closes at
last, it waits five more for what the others hold (coordinator.py). So whoever has the result waits
at least this much longer for it than for one that merely does nothing, unless the round's time is
nearly over."""

# Once there is a decision, these messages are answered with it. The others are answers themselves.
_ASKS = (Start, Prepare, Open, Accept, BallotQuery, Forswear, Holding, Trouble, Promise, GivenUp)


class Agreement:
    """One member's side of one round. Any method may add effects: drain them after each call."""

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
        awaited: AwaitedMembers = lambda _ballot: (),
    ) -> None:
        """`coordinators`: the order of succession, leader first; members missing in it come last.
        `awaited`: the members for whose values our exchange is waiting."""
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
        self._ending = KnownDecision(self._desk, self._acceptor, self._exchange)
        self._follower = Follower(
            self._desk, self._acceptor, self._exchange, self._ending, self._succession, check_cuts
        )
        self.ballots_begun = 0  # by us, not counting the first
        self.idle: set[int] = set()
        """Coordinators that are alive but did nothing when it was their turn."""
        self._untold = False  # our coordinator may not have received our last report
        self._gone: set[int] = set()
        """Members that could not be reached, or whose link was lost, until there is another sign of
        them."""
        self._desk.arm("round", timing.round_seconds)
        self._desk.arm("end", timing.round_seconds + timing.closing_seconds)
        self._expect_more()

    @property
    def verdict(self) -> OwnVerdict | None:
        """How the round ended for this member; None: it has not ended."""
        return self._ending.verdict

    @property
    def accepted(self) -> Acceptance | None:
        """What this member has accepted last."""
        return self._acceptor.accepted

    def holds(self, result: Result) -> bool:
        """Whether this member holds this result, of these members, and nobody has told it
        otherwise."""
        attempt = Attempt(result.attempt, result.members)
        is_it = self._exchange.holds(result) and self._acceptor.attempt == attempt
        return is_it and not self._exchange.doubts(result)

    @property
    def proposed(self) -> Acceptance | None:
        """What this member proposes as the coordinator of a ballot."""
        return None if self._coordinator is None else self._coordinator.proposed

    @property
    def excluded(self) -> Mapping[int, Suspicion]:
        """The members that are not in the newest attempt that we know of, and why."""
        return self._follower.excluded

    # -- called by the shell

    def begin(self, now: float) -> None:
        """Start ballot 0. Call it only at `coordinators[0]`, and once."""
        desk = self._desk
        if desk.me != desk.coordinators[0]:
            raise ProtocolMisuse("Only the leader begins a round.")
        desk.now = now
        if (
            self._succession.following.number > 0
            or self._coordinator is not None
            or self.verdict is not None
        ):
            return  # it has begun already; or we are so late that the others went on without us
        self._coordinator = self._coordinate(self._succession.following)
        self._coordinator.begin()
        self._drain()

    def show_up(self, now: float) -> None:
        """Tell our coordinator at once that the list has arrived here: it may wait for that."""
        self._desk.now = now
        if self._coordinator is None and self.verdict is None:
            self._ask()
            self._drain()

    def receive(self, sender: int, message: AgreementMessage, now: float) -> None:
        """Take a message. Raises NotAnHonestMessage, and changes nothing, if no honest member of
        this round could have sent it."""
        desk, following = self._desk, self._succession.following
        check(message, sender, desk.me, desk.size, desk.coordinators)
        known = max(following, self._acceptor.promised).number
        is_made_up = is_hearsay(sender, message, desk.me, self._own, known, self._ending.decision)
        if not is_made_up:
            check_against_memory(
                sender,
                message,
                desk.me,
                self._own,
                self._acceptor,
                self._exchange,
                self._ending.verdict,
                known,
            )
        desk.now = now
        self._hear(sender)
        if not is_made_up:
            self._take(sender, message)
        elif isinstance(message, BallotQuery):
            self._take(sender, BallotQuery(following, message.attempt))
        self._drain()

    def unreachable(self, member: int, now: float) -> None:
        """A message to this member was not acknowledged, or its link was lost."""
        self._desk.now = now
        if self.verdict is not None or member == self._desk.me:
            return
        self._succession.suspect(member)
        self._gone.add(member)
        if self._coordinator is not None:
            self._coordinator.unreachable(member)
        elif member == self._succession.following.coordinator:
            self._untold = True
        self._drain()

    def linked(self, member: int) -> None:
        """There is a link to this member again."""
        self._gone.discard(member)

    def alive(self, member: int, now: float) -> None:
        """Bytes have arrived from this member, though perhaps no message. Messages wait behind the
        chunks of a full link, so its silence means nothing. A call that failed still counts as
        failed."""
        self._desk.now = now
        self._gone.discard(member)
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
        """The exchange of this ballot has brought the whole result; `digest` as digest_of_result.

        `contradicted`: the members that hold another result. Such a result is reported, but never
        committed. So a coordinator that lied as a reducer cannot make two members commit different
        results.
        """
        self._desk.now = now
        if self._exchange.done(ballot, digest, statements, contradicted):
            self._exchange.report(ballot)
            served = 2.0 * self._exchange.served_seconds  # others may have far slower links
            seconds = min(max(COMPLAINT_SECONDS, served), self._longest_exchange)
            self._expect_more(others_seconds=seconds)
            self._drain()

    def exchange_failed(
        self, ballot: Ballot, suspicions: tuple[Suspicion, ...], now: float
    ) -> None:
        """The exchange of this ballot failed because of these members."""
        self._desk.now = now
        if self._exchange.fail(ballot, suspicions):
            self._exchange.report(ballot)
            self._expect_more()
            self._drain()

    def tick(self, now: float) -> None:
        """Do what is due. Call it at `next_deadline`; at any other time it is harmless."""
        self._desk.now = now
        while (name := self._desk.due()) is not None:
            self.fire(name)

    def fire(self, name: str) -> None:
        """Do what this timer is for, due or not. (Tests fire any timer at any moment.)"""
        self._desk.disarm(name)
        self._timers[name](self)
        self._drain()

    @property
    def next_deadline(self) -> float:
        """When to call `tick`; inf when nothing is left to do."""
        return self._desk.next_deadline

    def effects(self) -> list[Effect]:
        """The effects to carry out now, in order. Drains them."""
        effects, self._desk.effects = self._desk.effects, []
        return effects

    # -- messages

    def _hear(self, sender: int) -> None:
        self._succession.hear(sender)
        self._gone.discard(sender)
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
            case BallotQuery():
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
        """An honest coordinator never brings a doubtful result to a decision. So a coordinator that
        claims to have done so is not believed; another member that has learnt of it is."""
        result, following = decided.result, self._succession.following.coordinator
        if result is not None and self.verdict is None and self._exchange.doubts(result):
            if sender in (following, result.attempt.coordinator) and sender != self._desk.me:
                self._succession.distrust(sender)
            if not self._succession.trusts(sender):
                return
        self._ending.learn(decided)

    def _take_of_coordinator(self, sender: int, message: FromCoordinator) -> None:
        """Take a coordinator's message, unless its ballot is below our promise."""
        ballot = message.ballot
        if ballot < self._acceptor.promised:
            self._desk.send(sender, Outbid(self._acceptor.promised))
            return
        self._follow(ballot)
        self._follower.take(sender, message)
        is_left_out = isinstance(message, Open) and self._desk.me not in message.members
        self._expect_more(
            collects=isinstance(message, Prepare | Forswear),
            others_seconds=self._longest_exchange if is_left_out else 0.0,
        )

    def _take_of_member(
        self, sender: int, message: Promise | Opened | Holding | Trouble | Accepted
    ) -> None:
        coordinator = self._coordinator if self.verdict is None else None
        if coordinator is None or message.ballot != coordinator.ballot:
            return  # too late: the ballot is over
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

    def _take_query(self, sender: int, query: BallotQuery) -> None:
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

    # -- ballots

    def _coordinate(self, ballot: Ballot) -> Coordinator:
        return Coordinator(
            self._desk,
            self,
            self._ending,
            self._blame,
            ballot,
            self._plan,
            self._verify,
            self._gone,
        )

    def _hear_of(self, ballot: Ballot) -> None:
        """A member knows of this ballot. If it is higher than ours, ask its coordinator."""
        if self.verdict is None and self._follow(ballot):
            self._ask()

    def _follow(self, ballot: Ballot) -> bool:
        if self.verdict is not None or not self._succession.follow(ballot):
            return False
        self._untold = False
        self._coordinator = None
        self._desk.disarm("answers", "watch", "reports")
        self._expect_more()
        return True

    @property
    def _longest_exchange(self) -> float:
        """How long the others may exchange from now on: no attempt takes more than half of what is
        left of the round (round.py). If their coordinator does nothing, they find it out sooner
        than a member that has no part in it."""
        return max(0.0, self._desk.timers.get("round", 0.0) - self._desk.now) / 2

    def _expect_more(self, *, collects: bool = False, others_seconds: float = 0.0) -> None:
        """From now on we wait for our coordinator, unless our exchange runs: then it is our turn.
        `collects`: it needs answers from others before it can go on. `others_seconds`: for so long
        the others may be exchanging."""
        desk, seconds = self._desk, self._desk.timing.idle_seconds
        if self.verdict is not None:
            return
        if self._exchange.running is not None or self._succession.following.coordinator == desk.me:
            desk.disarm("idle")
        else:
            desk.arm("idle", (2.0 * seconds if collects else seconds) + others_seconds)

    def _ask(self) -> None:
        if self._untold:
            self._untold = False
            self._exchange.report(self._succession.following)
        self._succession.ask(self._exchange.newest)

    def next_ballot(self) -> None:
        """Coordinate the next ballot. (Also called by the coordinator of our last one.)"""
        number = max(self._succession.following, self._acceptor.promised).number + 1
        if number > LARGEST_BALLOT_NUMBER:
            self._ending.give_up("there are no ballots left")
            return
        self._own = Ballot(number, self._desk.me)
        self.ballots_begun += 1
        self._follow(self._own)
        self._coordinator = self._coordinate(self._own)
        self._coordinator.prepare()

    # -- timers

    def _poll_is_due(self) -> None:
        if self._coordinator is None:
            self._ask()

    def _suspect(self) -> None:
        self._succession.suspect(self._succession.following.coordinator)

    def _is_idle(self) -> None:
        """Our coordinator answers questions but does nothing: succeed it."""
        coordinator = self._succession.following.coordinator
        if coordinator != self._desk.me and self._exchange.running is None:
            self.idle.add(coordinator)
            against = Suspicion(coordinator, IDLE, "It coordinated the round and did nothing.")
            self._exchange.complain(self._acceptor.attempt.ballot, against)
            self._succession.distrust(coordinator)

    def _answers_are_due(self) -> None:
        if self._coordinator is not None:
            self._coordinator.answers_are_due()

    def _watch(self) -> None:
        if self._coordinator is not None:
            self._coordinator.watch()

    def _reports_are_due(self) -> None:
        if self._coordinator is not None:
            self._coordinator.reports_are_due()

    def _round_is_late(self) -> None:
        self._ending.why_discard = TIME_IS_OVER
        if self._coordinator is not None:
            self._coordinator.discard_instead(TIME_IS_OVER)

    def _time_is_over(self) -> None:
        self._acceptor.vow()
        self._ending.give_up(TIME_IS_OVER)

    _timers: ClassVar[dict[str, Callable[[Agreement], None]]] = {
        "poll": _poll_is_due,
        "idle": _is_idle,
        "suspect": _suspect,
        "takeover": next_ballot,
        "answers": _answers_are_due,
        "watch": _watch,
        "reports": _reports_are_due,
        "round": _round_is_late,
        "end": _time_is_over,
    }


# ---- messages that no honest member would send
#
# agreement_messages.py judges a message by itself. This judges it by what this member remembers:
# the ballots that it has begun, what it has promised and holds, and the decision, if known.
#
# Promise: a check changes nothing, and no honest message is refused, however late it comes.
#
# Easy to get wrong: an honest member's message may be out of date, and contradict what is
# remembered here of a lower ballot. It is answered as such. Only what could never have been true is
# refused. And an honest member may hand on what a liar has told it: that is believed by nobody who
# knows better, and nobody is blamed.


def is_hearsay(
    sender: int,
    message: AgreementMessage,
    me: int,
    own: Ballot | None,
    known: int,
    decision: Decided | None,
) -> bool:
    """Whether this cannot be true, and an honest sender may have it from a liar. `own`: the highest
    ballot that this member has begun. `known`: the highest number that it has heard of."""
    if isinstance(message, Decided):
        return decision is not None and message.result != decision.result
    if not isinstance(message, BallotQuery | Progress | Outbid):
        return False
    ballot = message.ballot
    if ballot.coordinator == me:
        return own is None or ballot > own
    # whoever believes it goes on from there, and must not seem to lie to those who know of less
    return ballot.coordinator != sender and ballot.number > known + MOST_BALLOTS_MISSED // 2


def check_against_memory(
    sender: int,
    message: AgreementMessage,
    me: int,
    own: Ballot | None,
    acceptor: Acceptor,
    exchange: OwnExchange,
    verdict: OwnVerdict | None,
    known: int,
) -> None:
    """Raise NotAnHonestMessage if no honest member could have sent it. `own` and `known` as for
    `is_hearsay`."""
    if isinstance(message, Accept | Decided) and message.result is not None:
        result, attempt = message.result, acceptor.attempt
        if result.attempt == attempt.ballot and result.members != attempt.members:
            raise NotAnHonestMessage(
                f"Member {sender} names other members of ballot {attempt.ballot} than took part."
            )
    if isinstance(message, Decided):
        return
    ballot = message.ballot
    if ballot.number > known + MOST_BALLOTS_MISSED:
        raise NotAnHonestMessage(
            f"Member {sender} names ballot {ballot}, and the highest known here is {known}."
        )
    if ballot.coordinator == me and (own is None or ballot > own):
        raise NotAnHonestMessage(
            f"Member {sender} names ballot {ballot}, which we have never begun."
        )
    if isinstance(message, Accept) and message.result is not None and verdict is None:
        result = message.result
        if (
            acceptor.promised <= ballot == result.attempt
            and me in result.members
            and not exchange.holds(result)
        ):
            raise NotAnHonestMessage(
                f"Member {sender} proposes the result of ballot {result.attempt}, "
                "of which we do not hold that result."
            )


# ---- succession of coordinators


class Succession:
    """Whom one member follows as coordinator, and whom it suspects.

    A member *follows* the highest ballot that it has heard of. Every `poll_seconds` it shows its
    coordinator that it is alive, and expects the same in return. A coordinator is succeeded if it
    cannot be reached, stays silent, or answers but does nothing when it is its turn. Its successor
    is the first in the order of succession that the member does not suspect; a little later the
    next one takes over, and so on. A member that hears of a higher ballot meanwhile follows that.

    Arms the timers `poll`, `suspect` and `takeover`.

    Easy to get wrong: what counts is how long a *question* has had no answer, not when a member was
    last heard. A machine that was asleep has heard nobody for hours, and must not take over before
    it has asked.
    """

    def __init__(self, desk: Desk) -> None:
        self.following = Ballot(0, desk.coordinators[0])
        self._desk = desk
        self._suspected: set[int] = set()  # not heard from since they were found silent
        self._distrusted: set[int] = set()  # wanted us to commit a doubtful result, or did nothing
        if desk.me != self.following.coordinator:
            desk.arm("poll", desk.timing.poll_seconds)

    def follow(self, ballot: Ballot) -> bool:
        """Follow this ballot if it is higher than ours. Returns whether it is."""
        if ballot <= self.following:
            return False
        self.following = ballot
        self._desk.disarm("poll", "suspect", "takeover")
        if ballot.coordinator != self._desk.me:
            self._desk.arm("poll", self._desk.timing.poll_seconds)
        if ballot.coordinator in self._distrusted:
            self._stand_by()
        return True

    def hear(self, member: int) -> None:
        """The member is alive."""
        if member in self._distrusted:
            return
        self._suspected.discard(member)
        if member == self.following.coordinator:
            self._desk.disarm("suspect", "takeover")

    def is_not_silent(self, member: int) -> None:
        if member == self.following.coordinator and member not in self._distrusted:
            self._desk.disarm("suspect")

    def trusts(self, member: int) -> bool:
        return member not in self._distrusted

    def distrust(self, member: int) -> None:
        """The member is alive, but is to be succeeded anyway, whatever it says."""
        if member != self._desk.me:
            self._distrusted.add(member)
            self.suspect(member)

    def suspect(self, member: int) -> None:
        """The member does not answer. If it is our coordinator, get ready to take over."""
        self._suspected.add(member)
        if member == self.following.coordinator and member != self._desk.me:
            self._stand_by()

    def _stand_by(self) -> None:
        desk = self._desk
        if "takeover" not in desk.timers:
            left = [each for each in desk.coordinators if each not in self._suspected]
            desk.disarm("suspect")
            desk.arm("takeover", desk.timing.stagger_seconds * left.index(desk.me))

    def ask(self, newest: Ballot | None) -> None:
        """Show our coordinator that we are alive, and ask for the same. `newest`: our exchange."""
        desk, timing = self._desk, self._desk.timing
        desk.send(self.following.coordinator, BallotQuery(self.following, newest))
        desk.arm("poll", timing.poll_seconds)
        if "suspect" not in desk.timers and "takeover" not in desk.timers:
            desk.arm("suspect", timing.silence_seconds - timing.poll_seconds)


# ---- the member, towards its coordinator


CheckCuts = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""Takes the members and cuts of a coordinator's Start. Returns what is wrong with them, or ""."""

FromCoordinator = Prepare | Open | Start | Accept | Forswear


class Follower:
    """Does what the coordinator of the highest known ballot asks of this member: promise, note an
    attempt, exchange, accept, vow.

    The acceptor (member_state.py) is the memory that makes this safe. This class adds the member's
    own exchange and the answers. `Agreement` has already checked that the ballot counts here.

    Easy to get wrong: a request that is not carried out is still answered, with what was promised,
    so that the coordinator learns why. A vow is for ever, so it is not given to a coordinator whose
    ballot we have only just heard of: a coordinator that hears nobody finds no quorum, and its
    conclusion must not end everybody's round.
    """

    def __init__(
        self,
        desk: Desk,
        acceptor: Acceptor,
        exchange: OwnExchange,
        ending: KnownDecision,
        succession: Succession,
        check_cuts: CheckCuts | None,
    ) -> None:
        self.excluded: dict[int, Suspicion] = {}
        """The members that are not in the newest attempt that we know of, and why."""
        self._desk = desk
        self._acceptor = acceptor
        self._exchange = exchange
        self._ending = ending
        self._succession = succession
        self._check_cuts = check_cuts

    def take(self, sender: int, message: FromCoordinator) -> None:
        """Take a message whose ballot is not below our promise."""
        ballot = message.ballot
        knew = ballot == self._acceptor.promised
        self._acceptor.promise(ballot)
        running = self._exchange.running
        if running is not None and (running < ballot or isinstance(message, Accept)):
            self._exchange.stop()
        match message:
            case Open(_, members, excluded):
                if self._acceptor.open(Attempt(ballot, members)):
                    self.excluded = {each.member: each for each in excluded}
                    self._desk.send(sender, Opened(ballot))
                    return
            case Accept(_, result) if self._exchange.doubts(result):
                self._succession.distrust(sender)
                return
            case Accept(_, result):
                if self._acceptor.accept(ballot, result):
                    self._desk.send(sender, Accepted(ballot))
                    return
            case Start():
                if not self._acceptor.vowed:
                    self._start(message)
                    return
            case Forswear() if knew:
                self._acceptor.vow()
        self._desk.send(sender, self._promise())

    def _start(self, start: Start) -> None:
        ballot = start.ballot
        if self._exchange.running == ballot:
            return
        if self._exchange.has_ended(ballot):
            self._exchange.report(ballot)
            return
        self._acceptor.open(Attempt(ballot, start.members))  # a quorum has opened it
        wrong = self._check_cuts(start.members, start.cuts) if self._check_cuts else ""
        if wrong:
            against = Suspicion(ballot.coordinator, "wrong_plan", wrong)
            self._exchange.refuse(ballot, (against,))
            self._exchange.report(ballot)
            return
        self._exchange.start(start)

    def _promise(self) -> Promise:
        acceptor = self._acceptor
        return Promise(
            acceptor.promised,
            acceptor.attempt,
            acceptor.accepted,
            self._exchange.held if self._ending.verdict is None else None,
            self._exchange.complaints(acceptor.attempt.ballot),
            acceptor.vowed,
        )
