"""One round of one group, from its signed roster to its decision.

    finished = await run_round(shell, task, buffers)              # in a group, with two buffers

The agreement (agreement.py) only decides. `Round` carries out its decisions, and reports to it what
happens:

    Send             send a message to a member, through the `Outbox`; if it fails: `unreachable`
    StartExchange    run one attempt of the butterfly; then `exchange_done` or `exchange_failed`
    StopExchange     cancel that attempt
    Conclude          the round is over

A lost link is also reported as `unreachable`, long before any deadline. `RoundPlan`, at the end,
computes the members' parts, and checks those that others announce.

Promises: `source` is never written. If the verdict is a commit with this peer as a member, `result`
holds the bits that were decided, whatever happened in between. Nothing of the round runs after
`run_round` has returned, except messages that tell others the decision, each with its deadline.
Cancelling it is like dying: the others notice as they would notice a death.

Easy to get wrong: two attempts share one result buffer. The later one begins only when the earlier
one has ended entirely. It may overwrite what that one left because of the ballots: a later attempt
is started only when the earlier one can no longer be decided.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import trio
from torch import Tensor

from protocols.errors import DeadlineExceeded, PotluckError
from protocols.identity import PeerId
from protocols.moshpit.agreement import Agreement, Timing
from protocols.moshpit.agreement_messages import (
    Acceptance,
    Accepted,
    AgreementMessage,
    Decided,
    NotAnHonestMessage,
    Proof,
    Result,
)
from protocols.moshpit.ballots import Ballot, Seal, Statement, Suspicion
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.blame import LATE_CODES, OVERDUE
from protocols.moshpit.butterfly import Butterfly, Pulse
from protocols.moshpit.exchange import ExchangeFailed, ExchangePlan, Participant
from protocols.moshpit.group import Group
from protocols.moshpit.handing_on import LONGEST_FETCH_SECONDS, MARGIN_SECONDS
from protocols.moshpit.layout import (
    CUT_VALUES,
    SMALLEST_CHUNK_BYTES,
    Layout,
    ResultCut,
    cut,
    result_cut,
)
from protocols.moshpit.outcome import Failure
from protocols.moshpit.part_messages import counts
from protocols.moshpit.plan import best_reducers, fractions_for, predicted_seconds
from protocols.moshpit.roster import Entry
from protocols.moshpit.seals import is_proof, is_valid, make_seal, proof_of
from protocols.moshpit.switchboard import (
    AGREE,
    SHOW,
    Agree,
    NotInThisRound,
    Show,
    Switchboard,
    UnknownRound,
)
from protocols.moshpit.verdicts import (
    Commit,
    Conclude,
    Effect,
    OwnVerdict,
    Send,
    StartExchange,
    StopExchange,
)
from protocols.network import LinkEvent, Network, Reach
from protocols.rpc import Rpc

MOST_FAILURES = 64  # kept for the statistics of one round

PART_OF_WHAT_IS_LEFT = 0.5
"""One attempt may take this share of the round's remaining time. Then the member furthest behind is
named, and there is still time to average without it."""

SHORTEST_ATTEMPT_SECONDS = 1.0
"""The least time that an attempt gets. If the coordinator allows the round more time than we do, no
member should be named for that. The agreement ends the attempt soon."""

LONGEST_QUEUE_SECONDS = 12.0
"""For so long a question may wait behind the chunks that this peer sends to everybody."""


@dataclass(frozen=True)
class Shell:
    """The parts that all rounds of an averager share."""

    network: Network
    rpc: Rpc
    butterfly: Butterfly
    switchboard: Switchboard
    bandwidth: Bandwidth
    nursery: trio.Nursery  # the averager's: it sends the messages of rounds that are over


@dataclass(frozen=True)
class Task:
    """The task of one round. `most_weight`: as in RoundRequest. `sealed`: its members prove to
    others what they have decided (seals.py)."""

    group: Group
    layout: Layout
    chunk_bytes: int
    timing: Timing
    most_weight: float = math.inf
    sealed: bool = False


@dataclass(frozen=True, eq=False)
class Buffers:
    """The values: flat tensors of the layout and its dtype that do not overlap."""

    source: Tensor
    result: Tensor


@dataclass
class Course:
    """How a round went, for its statistics. Times are `trio.current_time`."""

    attempts: int = 0
    exchange_began: float | None = None  # of the last attempt
    exchange_ended: float | None = None
    exchange_seconds: float = 0.0  # of all attempts
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: list[Failure] = field(default_factory=list)
    late: set[PeerId] = field(default_factory=set)  # this peer has waited for their values
    idle: set[PeerId] = field(default_factory=set)  # they coordinated and did nothing


@dataclass(frozen=True)
class Finished:
    """A round that is over for this peer. `excluded`: why members are not in the last attempt.
    `cut`: how the committed result was cut; `proof`: that it was decided, if the round is sealed.
    """

    verdict: OwnVerdict
    excluded: dict[int, Suspicion]
    course: Course
    cut: ResultCut | None = None
    proof: Proof | None = None


async def run_round(shell: Shell, task: Task, buffers: Buffers) -> Finished:
    """Take part in a round until it is decided, or until this peer gives it up."""
    this = Round(shell, task)
    with shell.switchboard.running(task.group.round_id, this.receive):
        return await this.run(buffers)


class Round:
    """The shell around one `Agreement`."""

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
            timing=_timing(task),
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
        self._seals: tuple[Acceptance, dict[int, Seal]] | None = None
        """Of members that have accepted what this peer proposed last."""
        self._proven: tuple[Result, Proof] | None = None
        self._one_exchange = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._buffers: Buffers | None = None
        self._verdict: OwnVerdict | None = None
        self._decided = trio.Event()
        self._something_new = trio.Event()
        self._present: set[int] = set()
        self._arrival = trio.Event()

    async def run(self, buffers: Buffers) -> Finished:
        self._buffers = buffers
        try:
            await self._run()
        finally:
            self._buffers = None  # the round is remembered for longer than its values
        assert self._verdict is not None
        self._course.idle.update(self._peers[member] for member in self._agreement.idle)
        excluded = dict(self._agreement.excluded)
        if not isinstance(self._verdict, Commit):
            return Finished(self._verdict, excluded, self._course)
        proof = self._proof_of_one if self._proven is None else self._proven[1]
        return Finished(self._verdict, excluded, self._course, self._cut, proof)

    async def _run(self) -> None:
        with self._shell.network.link_events() as events:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._watch_links, events)
                self._nursery.start_soon(self._pulse.follow)
                self._nursery.start_soon(self._keep_time)
                group = self._task.group
                if group.me != group.leader:
                    if group.list_seconds:
                        self._agreement.show_up(trio.current_time())
                elif group.list_seconds:
                    self._nursery.start_soon(self._begin_when_all_have_the_list)
                else:
                    self._agreement.begin(trio.current_time())
                self._carry_out()
                await self._decided.wait()
                self._nursery.cancel_scope.cancel()
        self._nursery = None

    async def _begin_when_all_have_the_list(self) -> None:
        """Begin when all others have shown that they are here, or are lost, or when none has shown
        it for longer than the list should take. (A Start that arrives before the list is in vain,
        and it starts a clock at the members that have the list: the others should be there then.)
        """
        patience = self._task.group.list_seconds + MARGIN_SECONDS
        others = set(range(len(self._peers))) - {self._task.group.me}
        with trio.move_on_after(LONGEST_FETCH_SECONDS):
            while missing := others - self._present:
                with trio.move_on_after(patience):
                    while others - self._present == missing:
                        await self._arrival.wait()
                if others - self._present == missing:
                    break
        self._agreement.begin(trio.current_time())
        self._carry_out()

    def _is_present(self, place: int) -> None:
        """This member has the list, or nobody should wait for it."""
        if place not in self._present:
            self._present.add(place)
            self._arrival.set()
            self._arrival = trio.Event()

    # -- what happens

    def receive(self, peer: PeerId, message: AgreementMessage) -> None:
        """Take a member's message; also after the end, when it may ask what was decided."""
        place = self._places.get(peer)
        if place is None:
            raise NotInThisRound(
                f"{peer} is not in round {self._task.group.round_id.hex()[:16]}.",
                why="The signed list of its members does not name it.",
                advice="Find a group for the next round.",
            )
        if self._task.sealed and not self._takes_seals(place, message):
            return
        self._agreement.receive(place, message, trio.current_time())
        self._is_present(place)
        self._carry_out()

    def _not_told(self, place: int, error: PotluckError) -> None:
        self._note(place, "unreachable", error.what)
        self._lost(place)

    async def _watch_links(self, events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
        async for event in events:
            place = self._places.get(event.peer)
            if place is None:
                continue
            if event.reach is Reach.NONE:
                self._note(place, "lost", "The link was lost.")
                self._lost(place)
            else:
                self._agreement.linked(place)

    def _heard(self, place: int) -> None:
        self._agreement.alive(place, trio.current_time())
        self._carry_out()

    def _lost(self, place: int) -> None:
        self._is_present(place)
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

    # -- carrying out effects

    def _carry_out(self) -> None:
        for effect in self._agreement.effects():
            self._do(effect)
        self._something_new.set()

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(to=member, message=message):
                self._outbox.post(member, self._sealed(message) if self._task.sealed else message)
            case StartExchange():
                self._start(effect)
            case StopExchange(ballot=ballot):
                scope = self._exchanges.get(ballot)
                if scope is not None:
                    scope.cancel()
            case Conclude(verdict=verdict):
                self._verdict = self._verdict or verdict
                self._decided.set()

    def _start(self, start: StartExchange) -> None:
        if self._nursery is None or self._decided.is_set():
            return
        self._exchanges[start.ballot] = trio.CancelScope()
        self._nursery.start_soon(self._exchange, start)

    async def _exchange(self, start: StartExchange) -> None:
        """Run one attempt, once the one before it has ended entirely."""
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
        plan = self._plan_of(start)
        try:
            report = await self._shell.butterfly.exchange(plan, buffers.source, buffers.result)
        except ExchangeFailed as error:
            for suspicion in error.suspicions:
                self._note(suspicion.member, suspicion.code, suspicion.text)
            told = error.suspicions + error.awaited
            self._note_late(told)
            self._agreement.exchange_failed(start.ballot, told, trio.current_time())
        else:
            self._course.bytes_sent += report.bytes_sent
            self._course.bytes_received += report.bytes_received
            self._cut = result_cut(start.members, start.cuts, plan.chunk_bytes)
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

    # -- seals (seals.py)

    def _takes_seals(self, place: int, message: AgreementMessage) -> bool:
        """Keep the seals that another member has sent. Returns whether the message counts: an
        acceptance without one would leave all others without a proof. NotAnHonestMessage if they
        are false."""
        round_id, wrong = self._task.group.round_id, ""
        match message:
            case Accepted(ballot, seal):
                proposed = self._agreement.proposed
                if proposed is None or proposed.result is None or proposed.ballot != ballot:
                    return True  # it counts for nothing
                if seal is None:
                    return False
                peer, result = self._peers[place], proposed.result
                if seal.member == place and is_valid(seal, peer, round_id, ballot, result):
                    self._seals_of(proposed)[place] = seal
                else:
                    wrong = "accepts a result and signs something else"
            case Decided(result, _, proof) if result is not None:
                if self._proven is not None and self._proven[0] == result:
                    return True
                if proof and is_proof(proof, self._task.group.roster, round_id, result):
                    self._proven = result, proof
                else:
                    wrong = "tells of a result and does not prove it"
        if wrong:
            raise NotAnHonestMessage(
                f"{self._peers[place]} {wrong}.",
                why="It is broken, or it lies.",
                advice="It is left out of the round, and avoided.",
            )
        return True

    def _seals_of(self, accepted: Acceptance) -> dict[int, Seal]:
        if self._seals is None or self._seals[0] != accepted:
            self._seals = accepted, {}
        return self._seals[1]

    def _sealed(self, message: AgreementMessage) -> AgreementMessage:
        """What this peer says, with its own seal, or with the proof."""
        match message:
            case Accepted(ballot):
                return Accepted(ballot, self._own_seal(ballot))
            case Decided(result, reason) if result is not None:
                if self._proven is None or self._proven[0] != result:
                    proof = self._collected(result)
                    self._proven = None if proof is None else (result, proof)
                return Decided(result, reason, None if self._proven is None else self._proven[1])
        return message

    def _own_seal(self, ballot: Ballot) -> Seal | None:
        accepted = self._agreement.accepted
        if accepted is None or accepted.ballot != ballot or accepted.result is None:
            return None
        group, identity = self._task.group, self._shell.network.identity
        result, holds = accepted.result, self._agreement.holds(accepted.result)
        return make_seal(identity, group.me, group.round_id, ballot, result, holds=holds)

    def _collected(self, result: Result) -> Proof | None:
        """The proof of a result that was decided in a ballot of this peer."""
        if self._seals is None or self._seals[0].result != result:
            return None
        ballot, seals = self._seals[0].ballot, dict(self._seals[1])
        if own := self._own_seal(ballot):
            seals[own.member] = own
        return proof_of(seals.values(), ballot, len(self._peers)) if seals else None

    @property
    def _proof_of_one(self) -> Proof | None:
        """The proof of a peer that is a group by itself: it has nobody to tell."""
        accepted = self._agreement.accepted
        if len(self._peers) > 1 or accepted is None:
            return None
        seal = self._own_seal(accepted.ballot)
        return None if seal is None else proof_of([seal], accepted.ballot, 1)

    # -- what the agreement asks for

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
            chunk_bytes=self._plan.chunk_bytes_for(
                start.members, start.cuts, self._task.chunk_bytes
            ),
            seconds=max(
                SHORTEST_ATTEMPT_SECONDS,
                (self._deadline - trio.current_time()) * PART_OF_WHAT_IS_LEFT,
            ),
            most_weight=self._task.most_weight,
        )

    # -- what is remembered

    def _note_late(self, told: Iterable[Suspicion]) -> None:
        late = (each.member for each in told if each.code in LATE_CODES | {OVERDUE})
        self._course.late.update(self._peers[member] for member in late)

    def _note(self, place: int, code: str, text: str) -> None:
        failures = self._course.failures
        if not self._decided.is_set() and len(failures) < MOST_FAILURES:
            failures.append(Failure(self._peers[place], code, text))


def _timing(task: Task) -> Timing:
    """The timing of a round. A leader whose list is handed on begins later, when the list has
    reached the others, so a coordinator may be idle for longer. A question to it waits behind what
    this peer sends to everybody, so on a slow uplink it may be silent for longer."""
    timing, entries = task.timing, task.group.roster.entries
    chunks = SMALLEST_TIMED_BYTES * sum(entry.reduces for entry in entries)
    queue_bytes = min(chunks, task.layout.values * task.layout.value_bytes)
    if up := entries[task.group.me].up_bytes_per_second:  # 0: not known
        queue_seconds = min(queue_bytes / up, LONGEST_QUEUE_SECONDS)
        timing = replace(timing, silence_seconds=timing.silence_seconds + queue_seconds)
    if not task.group.list_seconds:
        return timing
    return replace(timing, idle_seconds=timing.idle_seconds + LONGEST_FETCH_SECONDS)


def _succession(entries: Sequence[Entry]) -> tuple[int, ...]:
    """The order of coordinators: the leader, the others that can be dialled, the rest."""
    return tuple(sorted(range(len(entries)), key=lambda place: not entries[place].reduces))


# ---- messages to the members


log = logging.getLogger("potluck.moshpit")

CALL_SECONDS = 4.0
"""How long a member has to acknowledge a message: as long as the wait for a stalled transfer, since
both mean that the member has stopped. It has longer while bytes come from it (butterfly.py): our
message then waits behind chunks that were queued before it, on one of the two home connections."""

MOST_WAITING = 64
"""Messages that wait for one member. A round has a few for each attempt. If there are more, the
member takes nothing in; further ones are dropped, and it will be given up."""


class Outbox:
    """Sends the messages of one round to its members, by their place in the roster: in order to
    each member, and no member waits for another.

    A message is a unary call with an empty answer, which acknowledges it. The next message to the
    same member is sent after that. A slow or dead member holds up no other.

    Promise: a member has a task only while there is something to tell it. The task ends if the
    member is silent for `CALL_SECONDS`. So a round that is over may still be telling its decision,
    but leaves nothing behind.

    A leader may die while it hands out its list. So a member that does not know the round is shown
    the list, once, by any member that has a message for it.

    Easy to get wrong: a call that failed may have arrived. A message must be harmless when it is
    received twice, and a failure is a reason for suspicion, not a proof.
    """

    def __init__(
        self,
        rpc: Rpc,
        nursery: trio.Nursery,
        group: Group,
        failed: Callable[[int, PotluckError], None],
        is_alive: Callable[[int], bool],
    ) -> None:
        """`failed` is called for each member that could not be reached with a message. `is_alive`
        says whether bytes come from a member: while they do, we wait for its answer."""
        self._rpc = rpc
        self._nursery = nursery
        self._group = group
        self._peers = group.members
        self._shown: set[int] = set()
        self._failed = failed
        self._is_alive = is_alive
        self._waiting: dict[int, deque[AgreementMessage]] = {}

    def post(self, member: int, message: AgreementMessage) -> None:
        """Send a message when the earlier ones to this member have arrived."""
        waiting = self._waiting.get(member)
        if waiting is None:
            self._waiting[member] = deque([message])
            self._nursery.start_soon(self._send_all, member)
        elif message not in waiting and len(waiting) < MOST_WAITING:
            waiting.append(message)
        # else: the same one waits already, or the member takes nothing in and will be given up

    async def _send_all(self, member: int) -> None:
        waiting = self._waiting[member]
        try:
            while waiting:
                await self._send(member, waiting[0])
                waiting.popleft()
        except PotluckError as error:
            log.debug("%s was not told of a round: %s", self._peers[member], error)
            del self._waiting[member]  # the messages behind it make no sense without it
            self._failed(member, error)
        finally:
            if self._waiting.get(member) is waiting:
                del self._waiting[member]

    async def _send(self, member: int, message: AgreementMessage) -> None:
        try:
            await self._tell(member, message)
        except UnknownRound:
            if member in self._shown:
                raise
            self._shown.add(member)
            show = Show(self._group.roster)
            await self._rpc.call(self._peers[member], SHOW, show, timeout=CALL_SECONDS)
            await self._tell(member, message)

    async def _tell(self, member: int, message: AgreementMessage) -> None:
        """Send until it is acknowledged; again, if that takes long: to receive it twice does no
        harm."""
        agree = Agree(self._group.round_id, message)
        while True:
            try:
                await self._rpc.call(self._peers[member], AGREE, agree, timeout=CALL_SECONDS)
            except DeadlineExceeded:
                if not self._is_alive(member):
                    raise
            else:
                return


# ---- the members' parts


TOLERANCE = 0.01  # of the predicted time: rounding to whole blocks costs less, a bad plan more

CHUNK_SECONDS = 0.1
"""The time of a chunk in the longest part's streams, as predicted. Averages begin after the first
chunk of values and end after the last, and streams wait for each other's chunks (`StreamPace`), so
long ones make a round long on slow links. On fast links larger ones save processor time."""
SMALLEST_TIMED_BYTES = 32 << 10  # smaller chunks mostly cost processor time


class RoundPlan:
    """Decides which member reduces which values in an attempt, from what the members signed. Pure.

    Easy to get wrong: the plan of a coordinator need not equal ours bit by bit (it may run another
    version that breaks a tie differently), but it must be as good. So a plan is refused only if it
    is impossible, or slower than ours by more than `TOLERANCE`.
    """

    def __init__(self, entries: Sequence[Entry], layout: Layout) -> None:
        self._entries = entries
        self._layout = layout

    def cuts_for(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The boundaries of the parts of these members: the same wherever this is computed. Empty
        if there is nothing to average, or no member that can reduce.
        """
        entries = [self._entries[member] for member in members]
        contribute = any(entry.weight > 0.0 for entry in entries)
        if not contribute or not any(entry.reduces for entry in entries):
            return ()
        fractions = fractions_for(
            [entry.up_bytes_per_second for entry in entries],
            [entry.down_bytes_per_second for entry in entries],
            [entry.weight > 0.0 for entry in entries],
            best_reducers(
                [entry.router for entry in entries], [entry.reduces for entry in entries]
            ),
        )
        return cut(self._layout, fractions)

    def objection_to(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> str:
        """Check another member's cuts. Returns what is wrong with them; "" if nothing is."""
        ours = self.cuts_for(members)
        if not ours:
            return "Nobody of these members brings data, or nobody can reduce."
        if cuts == ours:
            return ""
        values = self._layout.values
        if any(one % CUT_VALUES for one in cuts if one < values):
            return f"The parts do not begin at multiples of {CUT_VALUES:,} values."
        if len(cuts) != len(ours) or list(cuts) != sorted(cuts):
            return f"{len(cuts)} cuts do not make {len(members)} parts."
        if cuts[0] != 0 or cuts[-1] != values:
            return f"The parts cover {cuts[0]:,} to {cuts[-1]:,} of {values:,} values."
        for place, member in enumerate(members):
            if cuts[place] != cuts[place + 1] and not self._entries[member].reduces:
                return f"{self._entries[member].peer} cannot be dialled, so it cannot reduce."
        theirs, best = self._seconds(members, cuts), self._seconds(members, ours)
        if theirs > best * (1.0 + TOLERANCE):
            return f"The plan takes {theirs:.3g} s where {best:.3g} s are possible."
        return ""

    def chunk_bytes_for(self, members: tuple[int, ...], cuts: tuple[int, ...], most: int) -> int:
        """The size of a chunk: `most`, or less where that would take longer than CHUNK_SECONDS."""
        seconds = self._seconds(members, cuts)
        if not seconds:  # there is only one member
            return most
        longest = max(stop - start for start, stop in pairwise(cuts))
        rate = longest * self._layout.value_bytes / seconds
        whole = int(rate * CHUNK_SECONDS) // SMALLEST_CHUNK_BYTES * SMALLEST_CHUNK_BYTES
        return min(most, max(whole, SMALLEST_TIMED_BYTES))

    def _seconds(self, members: tuple[int, ...], cuts: tuple[int, ...]) -> float:
        entries = [self._entries[member] for member in members]
        values = max(1, self._layout.values)
        return predicted_seconds(
            [(cuts[place + 1] - cuts[place]) / values for place in range(len(members))],
            [entry.up_bytes_per_second for entry in entries],
            [entry.down_bytes_per_second for entry in entries],
            [entry.weight > 0.0 for entry in entries],
            values * self._layout.value_bytes,
        )
