"""What one member of a round keeps: its promises, its exchange, and the decision as far as known.

A member has two sides. `Coordinator` (coordinator.py) drives a ballot of its own; `Follower`
(agreement.py) does what other coordinators ask. Both read and change the state in this file, and
`Agreement` makes it, once for each round.

In this file: `Timing` and `Desk`, with the timers and messages; `Acceptor`, the memory that keeps
decisions safe; `OwnExchange`, this member's own exchange; `KnownDecision`, the decision and the
verdict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocols.moshpit import verdicts
from protocols.moshpit.agreement_messages import (
    SUSPICIONS_PER_MESSAGE,
    Acceptance,
    AgreementMessage,
    Attempt,
    Decided,
    GivenUp,
    Held,
    Holding,
    Result,
    Start,
    Trouble,
)
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.blame import clipped
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

# ---- timers and messages


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

    def hasten(self, name: str, seconds: float) -> None:
        """Arm a timer, unless it is due sooner: however often this is called, it is not put off."""
        if self.now + seconds < self.timers.get(name, math.inf):
            self.arm(name, seconds)

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


# ---- this member's own exchange


AwaitedMembers = Callable[[Ballot], tuple[Suspicion, ...]]


class OwnExchange:
    """This member's exchanges: one is running, or the result of the last is held, or it failed.

    At most one exchange runs at a time, in the ballot that was started last.

    Promise: a result that is `held` is complete in the result buffer, and nothing has been written
    over it. A *contradicted* result is held because it proves who lied. It is never committed.

    Easy to get wrong: a stopped exchange is over here at once. If the shell reports afterwards that
    it finished, that is too late: we have promised not to hold its result.
    """

    def __init__(self, desk: Desk, awaited: AwaitedMembers) -> None:
        """`awaited`: the members for which an exchange that runs here is waiting."""
        self.held: Held | None = None
        self.failed: Trouble | None = None
        self.running: Ballot | None = None
        self.newest: Ballot | None = None
        """The ballot of the newest exchange that began here, whatever became of it. No exchange
        begins twice, although a Start may arrive again after its exchange was stopped."""
        self.served_seconds = math.inf
        """How long the exchange of the held result took, if we served others in it; else infinity:
        then we do not know how long the others need."""
        self._serves_since = -math.inf
        self._desk = desk
        self._awaited = awaited

    def has_ended(self, ballot: Ballot) -> bool:
        return self.running is None and self.newest == ballot

    def start(self, start: Start) -> None:
        """Start an exchange. From here on, the held result is overwritten."""
        place, self.held = start.members.index(self._desk.me), None
        reduces = start.cuts[place] < start.cuts[place + 1]
        self._serves_since = self._desk.now if reduces else -math.inf
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
        self.served_seconds = self._desk.now - self._serves_since
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
        before = self.complaints(ballot)[: SUSPICIONS_PER_MESSAGE - 1]
        self.refuse(ballot, (*before, against))  # of two about one member, the first counts

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
