"""One round of one group, from its signed roster to its decision.

    finished = await run_round(shell, task, buffers)              # in a group, with two buffers

The agreement (agreement.py) decides and does nothing; here its decisions are done, and what
happens is told to it:

    Send             -> a message to a member, through the outbox; a failed one: `unreachable`
    StartExchange    -> one attempt of the butterfly; how it ended: `exchange_done` or `_failed`
    StopExchange     -> that attempt is cancelled
    Decided          -> the round is over
    link lost        -> `unreachable`, long before anybody's deadline

Promises: `source` is never written. When the verdict is a commit of which this peer is a member,
`result` holds the bits that were decided, whatever happened in between. Nothing of the round runs
when `run_round` has returned, but for messages that tell others of the decision, each with its
deadline. Cancelling it is like dying: the others find out as they would of a death.

Easy to get wrong: two attempts share one result buffer. The later one begins only when the
earlier has ended entirely; and that it may overwrite what the earlier left is what the ballots
are for: a later attempt is started only when the earlier can no longer be decided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import trio
from torch import Tensor

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.agreement import Agreement, Timing
from protocols.moshpit.agreement_messages import AgreementMessage
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.blame import LATE_CODES, OVERDUE
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.exchange import ExchangeFailed, ExchangePlan, ExchangeReport, Participant
from protocols.moshpit.group import Group
from protocols.moshpit.layout import Layout
from protocols.moshpit.outbox import Outbox
from protocols.moshpit.pulse import Pulse
from protocols.moshpit.result_cut import ResultCut, result_cut
from protocols.moshpit.roster import Entry
from protocols.moshpit.round_messages import NotInThisRound
from protocols.moshpit.round_plan import RoundPlan
from protocols.moshpit.round_statistics import Failure
from protocols.moshpit.statements import counts
from protocols.moshpit.switchboard import Switchboard
from protocols.moshpit.verdicts import (
    Commit,
    Decided,
    Effect,
    Send,
    StartExchange,
    StopExchange,
    Verdict,
)
from protocols.network import LinkEvent, Network, Reach
from protocols.rpc import Rpc

MOST_FAILURES = 64  # kept of one round for its statistics

PART_OF_WHAT_IS_LEFT = 0.5
"""One attempt may take this part of what is left of the round's time. Then whoever is furthest
behind is named, and there is still time to average without it."""

SHORTEST_ATTEMPT_SECONDS = 1.0
"""What an attempt gets in any case: where the coordinator allows the round more time than we do,
nobody is to be named for that. The agreement ends it soon."""


@dataclass(frozen=True)
class Shell:
    """What all rounds of an averager share."""

    network: Network
    rpc: Rpc
    butterfly: Butterfly
    switchboard: Switchboard
    bandwidth: Bandwidth
    nursery: trio.Nursery  # the averager's: messages of a round that is over are sent from there


@dataclass(frozen=True)
class Task:
    """What one round is about. `most_weight`: as in AveragingOptions."""

    group: Group
    layout: Layout
    chunk_bytes: int
    timing: Timing
    most_weight: float = math.inf


@dataclass(frozen=True, eq=False)
class Buffers:
    """Where the values are: flat tensors of the layout and its dtype, which do not overlap."""

    source: Tensor
    result: Tensor


@dataclass
class Course:
    """How a round went, for its statistics. Moments are of `trio.current_time`."""

    attempts: int = 0
    exchange_began: float | None = None  # of the last attempt
    exchange_ended: float | None = None
    exchange_seconds: float = 0.0  # of all attempts
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: list[Failure] = field(default_factory=list)
    late: set[PeerId] = field(default_factory=set)  # whose values this peer has waited for


@dataclass(frozen=True)
class Finished:
    """A round that is over for this peer. `excluded`: why members are not in the last attempt.
    `cut`: how the result was cut that was committed."""

    verdict: Verdict
    excluded: dict[int, Suspicion]
    course: Course
    cut: ResultCut | None = None


async def run_round(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """Take part in a round until it is decided, or until this peer has given it up."""
    this = Round(shell, task)
    with shell.switchboard.running(task.group.round_id, this.receive):
        return await this.run(buffers)


class Round:
    """The shell around one Agreement."""

    def __init__(self, shell: Shell, task: Task) -> None:
        self._shell = shell
        self._task = task
        group = task.group
        entries = group.roster.entries
        self._peers = group.members
        self._plan = RoundPlan(entries, task.layout)
        self._places = {peer: place for place, peer in enumerate(self._peers)}
        self._pulse = Pulse(shell.network, self._peers, self._heard)
        self._outbox = Outbox(shell.rpc, shell.nursery, group, self._not_told, self._pulse.is_fresh)
        self._agreement = Agreement(
            me=group.me,
            size=len(entries),
            coordinators=_succession(entries),
            timing=task.timing,
            now=trio.current_time(),
            plan=self._plan.cuts_for,
            verify=self._is_stated,
            check_cuts=self._plan.objection_to,
            awaited=self._awaited,
        )
        self._deadline = trio.current_time() + task.timing.round_seconds
        self._course = Course()
        self._exchanges: dict[Ballot, trio.CancelScope] = {}
        self._cut: ResultCut | None = None  # of the last exchange that brought a result
        self._one_exchange = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._buffers: Buffers | None = None
        self._verdict: Verdict | None = None
        self._decided = trio.Event()
        self._something_new = trio.Event()

    async def run(self, buffers: Buffers) -> Finished:
        self._buffers = buffers
        try:
            await self._run()
        finally:
            self._buffers = None  # the round is remembered for longer than its values
        assert self._verdict is not None
        cut = self._cut if isinstance(self._verdict, Commit) else None
        return Finished(self._verdict, dict(self._agreement.excluded), self._course, cut)

    async def _run(self) -> None:
        with self._shell.network.link_events() as events:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._watch_links, events)
                self._nursery.start_soon(self._pulse.follow)
                self._nursery.start_soon(self._keep_time)
                if self._task.group.me == self._task.group.leader:
                    self._agreement.begin(trio.current_time())
                self._carry_out()
                await self._decided.wait()
                self._nursery.cancel_scope.cancel()
        self._nursery = None

    # What happens

    def receive(self, peer: PeerId, message: AgreementMessage) -> None:
        """A member said something; also after the end, when it may ask what was decided."""
        place = self._places.get(peer)
        if place is None:
            raise NotInThisRound(
                f"{peer} is not in round {self._task.group.round_id.hex()[:16]}.",
                why="The signed list of its members does not name it.",
                advice="Find a group for the next round.",
            )
        self._agreement.receive(place, message, trio.current_time())
        self._carry_out()

    def _not_told(self, place: int, error: PotluckError) -> None:
        self._note(place, "unreachable", error.what)
        self._lost(place)

    async def _watch_links(self, events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
        async for event in events:
            place = self._places.get(event.peer)
            if place is not None and event.reach is Reach.NONE:
                self._note(place, "lost", "The link was lost.")
                self._lost(place)

    def _heard(self, place: int) -> None:
        self._agreement.alive(place, trio.current_time())
        self._carry_out()

    def _lost(self, place: int) -> None:
        self._agreement.unreachable(place, trio.current_time())
        self._carry_out()

    async def _keep_time(self) -> None:
        while True:
            self._something_new = trio.Event()
            deadline = self._agreement.next_deadline
            with trio.CancelScope(deadline=deadline) as patience:
                await self._something_new.wait()
            if patience.cancelled_caught:
                self._agreement.tick(max(deadline, trio.current_time()))
                self._carry_out()

    # What is to be done

    def _carry_out(self) -> None:
        for effect in self._agreement.effects():
            self._do(effect)
        self._something_new.set()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(to=member, message=message):
                self._outbox.post(member, message)
            case StartExchange():
                self._start(effect)
            case StopExchange(ballot=ballot):
                scope = self._exchanges.get(ballot)
                if scope is not None:
                    scope.cancel()
            case Decided(verdict=verdict):
                self._verdict = self._verdict or verdict
                self._decided.set()

    def _start(self, start: StartExchange) -> None:
        if self._nursery is None or self._decided.is_set():
            return
        self._exchanges[start.ballot] = trio.CancelScope()
        self._nursery.start_soon(self._exchange, start)

    async def _exchange(self, start: StartExchange) -> None:
        """One attempt, from when the one before it has ended entirely."""
        with self._exchanges[start.ballot]:
            async with self._one_exchange:
                await self._attempt(start)
        del self._exchanges[start.ballot]

    async def _attempt(self, start: StartExchange) -> None:
        course, buffers = self._course, self._buffers
        assert buffers is not None
        began = course.exchange_began = trio.current_time()
        course.exchange_ended = None
        course.attempts += 1
        try:
            report = await self._shell.butterfly.exchange(
                self._plan_of(start), buffers.source, buffers.result
            )
        except ExchangeFailed as error:
            for suspicion in error.suspicions:
                self._note(suspicion.member, suspicion.code, suspicion.text)
            told = error.suspicions + error.awaited
            self._note_late(told)
            self._agreement.exchange_failed(start.ballot, told, trio.current_time())
        else:
            self._measure(report)
            self._cut = result_cut(start.members, start.cuts, self._task.chunk_bytes)
            self._agreement.exchange_done(
                start.ballot,
                report.result_digest,
                report.statements,
                trio.current_time(),
                report.contradicted_by,
            )
        finally:
            course.exchange_ended = trio.current_time()
            course.exchange_seconds += course.exchange_ended - began
        self._carry_out()

    # What the agreement asks

    def _is_stated(self, ballot: Ballot, statement: Statement) -> bool:
        reducer = self._peers[statement.part]
        return counts(reducer, self._task.group.round_id, ballot, statement)

    def _awaited(self, ballot: Ballot) -> tuple[Suspicion, ...]:
        awaited = self._shell.butterfly.awaited(self._task.group.round_id, ballot)
        self._note_late(awaited)
        return awaited

    def _plan_of(self, start: StartExchange) -> ExchangePlan:
        entries = self._task.group.roster.entries
        return ExchangePlan(
            round_id=self._task.group.round_id,
            ballot=start.ballot,
            me=self._task.group.me,
            members=tuple(
                Participant(
                    place,
                    entries[place].peer,
                    entries[place].weight,
                    entries[place].up_bytes_per_second,
                    entries[place].down_bytes_per_second,
                )
                for place in start.members
            ),
            cuts=start.cuts,
            layout=self._task.layout,
            chunk_bytes=self._task.chunk_bytes,
            seconds=max(
                SHORTEST_ATTEMPT_SECONDS,
                (self._deadline - trio.current_time()) * PART_OF_WHAT_IS_LEFT,
            ),
            most_weight=self._task.most_weight,
        )

    # What is remembered

    def _measure(self, report: ExchangeReport) -> None:
        self._course.bytes_sent += report.bytes_sent
        self._course.bytes_received += report.bytes_received
        self._shell.bandwidth.add(trio.current_time(), report)

    def _note_late(self, told: Iterable[Suspicion]) -> None:
        late = (each.member for each in told if each.code in LATE_CODES | {OVERDUE})
        self._course.late.update(self._peers[member] for member in late)

    def _note(self, place: int, code: str, text: str) -> None:
        failures = self._course.failures
        if not self._decided.is_set() and len(failures) < MOST_FAILURES:
            failures.append(Failure(self._peers[place], code, text))


def _succession(entries: Sequence[Entry]) -> tuple[int, ...]:
    """Who coordinates after whom: the leader, the others that can be dialled, the rest."""
    return tuple(sorted(range(len(entries)), key=lambda place: not entries[place].reduces))
