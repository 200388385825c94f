"""A round of several members in one place, with a clock and a network that do as they are told.

`Group` carries the messages of its members' agreements, each after `latency` seconds unless a
link or a member is down. Exchanges end as `exchange` says. A member that is `killed` is silent and
its callers are told at once; one that is `stopped` is silent, and they are told after the
`call_seconds` of the outbox. Nothing here is random but what a test draws itself.

Easy to get wrong: a call that fails because its answer was lost has been delivered all the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from blake3 import blake3

from protocols.moshpit.agreement import Agreement, Timing
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.ballots import Ballot, Statement, Suspicion, digest_of_result
from protocols.moshpit.verdicts import Conclude, OwnVerdict, Send, StartExchange, StopExchange

TIMING = Timing(round_seconds=60.0)


def plan(members: tuple[int, ...]) -> tuple[int, ...]:
    """All members reduce equal parts."""
    return tuple(10 * place for place in range(len(members) + 1))


def statement(ballot: Ballot, part: int, text: bytes = b"average") -> Statement:
    """The statement of an honest reducer; another text means another result. The signature is a
    stand-in that `verify` knows."""
    told = b"%d %d %d %s" % (ballot.number, ballot.coordinator, part, text)
    return Statement(part, blake3(told).digest(), _signature(ballot, part, blake3(told).digest()))


def _signature(ballot: Ballot, part: int, digest: bytes) -> bytes:
    signed = b"%d %d %d" % (ballot.number, ballot.coordinator, part)
    return blake3(signed + digest).digest(length=64)


def verify(ballot: Ballot, shown: Statement) -> bool:
    return shown.signature == _signature(ballot, shown.part, shown.digest)


def statements(ballot: Ballot, members: tuple[int, ...]) -> tuple[Statement, ...]:
    return tuple(statement(ballot, part) for part in members)


@dataclass
class Exchange:
    """The end of one member's exchange: it holds these, or these members are to blame."""

    seconds: float
    statements: tuple[Statement, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    contradicted: tuple[int, ...] = ()


Exchanging = Callable[["Group", int, StartExchange], Exchange]


def smooth(group: Group, member: int, start: StartExchange) -> Exchange:
    """Every exchange works, unless a member is down: then that is noticed after a while."""
    for other in start.members:
        if other in group.killed:
            return Exchange(0.1, suspicions=(Suspicion(other, "cut", "is gone"),))
        if other in group.stopped or not group.linked(member, other):
            return Exchange(4.0, suspicions=(Suspicion(other, "stalled", "stands still"),))
    return Exchange(group.exchange_seconds, statements(start.ballot, start.members))


@dataclass
class Group:
    """`size` members that may all coordinate; the first is the leader."""

    size: int
    timing: Timing = TIMING
    latency: float = 0.05
    call_seconds: float = 4.0
    refusal_seconds: float = 0.001  # until a call to a member that is killed or cut off fails
    exchange_seconds: float = 1.0
    exchange: Exchanging = smooth
    now: float = 0.0
    killed: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    cut: set[frozenset[int]] = field(default_factory=set)
    verdicts: dict[int, OwnVerdict] = field(default_factory=dict)
    decided_at: dict[int, float] = field(default_factory=dict)
    started: list[tuple[float, int, StartExchange]] = field(default_factory=list)
    said: list[tuple[int, int, AgreementMessage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [self._member(me) for me in range(self.size)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._running: dict[int, Ballot] = {}
        self._doomed: set[tuple[int, Ballot]] = set()
        self._count = 0
        self._asleep: dict[int, list[Callable[[], None]]] = {}

    def _member(self, me: int) -> Agreement:
        return Agreement(
            me, self.size, range(self.size), self.timing, 0.0, plan=plan, verify=verify
        )

    def begin(self) -> None:
        self.members[0].begin(self.now)
        self.carry_out(0)

    def at(self, moment: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, what))

    def linked(self, one: int, other: int) -> bool:
        return frozenset((one, other)) not in self.cut

    def alive(self, member: int) -> bool:
        return member not in self.killed and member not in self.stopped

    def kill(self, member: int) -> None:
        """Kill a member: its links break, so exchanges with it fail within a moment."""
        self.killed.add(member)
        self.break_exchanges_with(member, 0.1, "cut")

    def stop(self, member: int) -> None:
        """Stop a member, as with SIGSTOP: it is silent, and exchanges with it stall."""
        self.stopped.add(member)
        self.break_exchanges_with(member, 4.0, "stalled")

    def wake(self, member: int) -> None:
        """Continue a member: it first handles everything that has come meanwhile."""
        self.stopped.discard(member)
        for what in self._asleep.pop(member, []):
            what()

    def break_exchanges_with(self, gone: int, after: float, code: str) -> None:
        """Exchanges that still need this member fail; those that have everything from it do not."""
        if gone not in self._running:
            return
        for member, ballot in list(self._running.items()):
            starts = [one for _, who, one in self.started if who == member]
            if member != gone and gone in starts[-1].members:
                self._doomed.add((member, ballot))
                failed = Exchange(after, suspicions=(Suspicion(gone, code, "is gone"),))
                self.at(self.now + after, partial(self._end, member, ballot, failed))

    # running

    def run(self, until: float = math.inf) -> None:
        """Run until nothing more happens, or until this moment."""
        while True:
            due = min((self.members[m].next_deadline, m) for m in range(self.size) if self.alive(m))
            moment = min(due[0], self._events[0][0] if self._events else math.inf)
            if moment > until or moment == math.inf:
                self.now = max(self.now, until) if until != math.inf else self.now
                return
            self.now = max(self.now, moment)
            if self._events and self._events[0][0] <= due[0]:
                heapq.heappop(self._events)[2]()
            else:
                self.members[due[1]].tick(self.now)
                self.carry_out(due[1])

    def carry_out(self, me: int) -> None:
        for effect in self.members[me].effects():
            match effect:
                case Send(to, message):
                    self._send(me, to, message)
                case StartExchange() as start:
                    self.started.append((self.now, me, start))
                    self._running[me] = start.ballot
                    ended = self.exchange(self, me, start)
                    end = partial(self._end, me, start.ballot, ended)
                    self.at(self.now + ended.seconds, end)
                case StopExchange():
                    self._running.pop(me, None)
                case Conclude(verdict):
                    assert me not in self.verdicts, "decided twice"
                    self.verdicts[me] = verdict
                    self.decided_at[me] = self.now

    def _end(self, me: int, ballot: Ballot, ended: Exchange) -> None:
        if me in self.killed or self._running.get(me) != ballot:
            return
        if ended.statements and (me, ballot) in self._doomed:
            return
        if me in self.stopped:
            self._asleep.setdefault(me, []).append(lambda: self._end(me, ballot, ended))
            return
        del self._running[me]
        if ended.statements:
            digest = digest_of_result(ended.statements)
            self.members[me].exchange_done(
                ballot, digest, ended.statements, self.now, ended.contradicted
            )
        else:
            self.members[me].exchange_failed(ballot, ended.suspicions, self.now)
        self.carry_out(me)

    def _send(self, me: int, to: int, message: AgreementMessage) -> None:
        self.said.append((me, to, message))
        if not self.linked(me, to) or to in self.killed:
            self.at(self.now + self.refusal_seconds, lambda: self._fail(me, to))
        else:
            self.at(self.now + self.latency, lambda: self._arrive(me, to, message))

    def _arrive(self, sender: int, to: int, message: AgreementMessage) -> None:
        if to in self.killed:
            self._fail(sender, to)
        elif to in self.stopped:
            self._asleep.setdefault(to, []).append(lambda: self._arrive(sender, to, message))
            self.at(self.now + self.call_seconds, lambda: self._fail(sender, to))
        else:
            self.members[to].receive(sender, message, self.now)
            self.carry_out(to)

    def _fail(self, sender: int, to: int) -> None:
        if self.alive(sender) and not (self.alive(to) and self.linked(sender, to)):
            self.members[sender].unreachable(to, self.now)
            self.carry_out(sender)
