"""One averaging of a run with more peers than fit into one group.

    outcome = await cohort_rounds.average(request)        # with `request.cohort`

1. The cohort averages, in a round like any other (group_round.py). Now each of its members has the
   cohort's average and its weight.
2. The first member in order (cohorts.py) that can be dialled is the head. It brings them to the
   round of all heads, whose result is the run's.
3. When it applies the result, it hands it down (handing_down.py). The bytes are those of the heads'
   round, so all peers of the run hold the same bits.

If the link to the head is lost, the next member in order takes its place: it has the same average.
If it comes too late for the heads' round, the members learn that from the others' progress, and
take the step over from them. When the first head is lost, all others together have as much time as
it had: however many fail, a member is not lost to its run for longer.

Promises: those of a round (round.py). A cohort counts once. If two of its members come to the round
of the heads, because it has met in two groups, only the one that comes for more peers is listed. If
both are, all heads discard the round, and do not follow its leader for some time.

Easy to get wrong: a cohort's average is no result. Only the heads' round decides. And cohorts with
slow links average for longer than others, so heads that are there are waited for that long.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio
from torch import Tensor

from auth.bounded_map import BoundedMap
from protocols.blocking import in_thread
from protocols.errors import DeadlineExceeded, PotluckError, ProtocolMisuse, RemoteMisbehaviour
from protocols.identity import PeerId
from protocols.moshpit.attempt import SLOW_BYTES_PER_SECOND
from protocols.moshpit.closing_time import FOR_MORE_SECONDS
from protocols.moshpit.cohorts import Cohort, cohort_of, in_order
from protocols.moshpit.encoded_result import encode_result, part_digests
from protocols.moshpit.group import group_key
from protocols.moshpit.group_round import GridRound, GroupResult, GroupRounds, with_one_seat
from protocols.moshpit.handing_down import (
    TOO_FEW_KNOWN,
    DecidedPart,
    HandedResult,
    HandingDown,
    HeadsDecision,
    NoDecision,
    ResultShelf,
    has_known_heads,
)
from protocols.moshpit.layout import Layout, SentParts, Vector, digest_of_parts
from protocols.moshpit.outcome import (
    Alone,
    Committed,
    Discarded,
    LeftOut,
    Outcome,
    RoundStatistics,
    Verdict,
)
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.roster import Entry, Terms
from protocols.moshpit.seals import most_hold
from protocols.moshpit.settings import AveragerSettings
from protocols.network import Network
from protocols.rpc import Rpc
from protocols.tensors import CODECS

log = logging.getLogger("potluck.moshpit")

COHORTS_ROUND, HEADS_ROUND = 0, 1

IDLE_SECONDS = 300.0  # a head that has done nothing is the last in order for so long
MOST_IDLE = 64

SHOWN_SECONDS = 5.0  # for the answer of one that says it has made the step: some 10 KB

OVERTAKEN_SECONDS = 3.0
"""How long a head may need for its decision after the others have announced the step. Slots may
tell of a step before this peer's head does."""


@dataclass(frozen=True)
class _Asked:
    """What this peer checks a decision with: the terms of the heads' round, the layout, its cohort,
    the heads that it knew, and whether one head is enough."""

    terms: Terms
    layout: Layout
    cohort: Cohort
    known: tuple[frozenset[PeerId], ...]
    may_be_one: bool


@dataclass(frozen=True)
class CohortAverage:
    """What a cohort has averaged. `entries` are of those that hold it, this peer included, in the
    order in which they become head; none if this peer was alone. `sent`: how this peer's own values
    went to the others of its cohort."""

    request: RoundRequest
    statistics: RoundStatistics
    round_id: bytes = b""
    entries: tuple[Entry, ...] = ()
    sent: SentParts | None = None

    @property
    def members(self) -> tuple[PeerId, ...]:
        return tuple(one.peer for one in self.entries)


class CohortRounds:
    """The averagings by cohorts of one averager. `buffer` returns memory that shares nothing with
    the tensor that it is given; `note` takes the statistics of each round."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        rounds: GroupRounds,
        settings: AveragerSettings,
        buffer: Callable[[Tensor], Tensor],
        note: Callable[[RoundStatistics], None],
    ) -> None:
        self._me, self._run = network.peer_id, settings.run
        self._rounds, self._settings = rounds, settings
        self._buffer, self._note = buffer, note
        self._down = HandingDown(network, rpc)
        self._waiting = trio.CancelScope()
        self._epoch = -1
        self._shelf: ResultShelf | None = None
        self._asked: _Asked | None = None
        self._has_result = False
        self._decided: HeadsDecision | None = None
        """What the last averaging was to be, and what this peer has of it."""
        self._heads: frozenset[PeerId] = frozenset()
        """Of the last averaging that has a result. Slots may tell of older heads."""
        self._idle = BoundedMap[PeerId, float](MOST_IDLE)
        self._without: PeerId | None = None
        """The head that had no decision for this peer in the last averaging."""
        self._was_without: PeerId | None = None
        """The one that had none in an earlier averaging, when there was a step."""

    def overtaken(self, epoch: int) -> None:
        """The run has gone on from this epoch: do not wait much longer for its result."""
        if epoch == self._epoch:
            until = trio.current_time() + OVERTAKEN_SECONDS
            self._waiting.deadline = min(self._waiting.deadline, until)

    def confirm(self, *, applied: bool) -> None:
        """Whether this peer has applied the result of the last averaging. If it is a head, its
        cohort does the same."""
        if self._shelf is not None:
            self._shelf.confirm(applied=applied)
        if applied and self._has_result and self._asked is not None:
            self._down.made(self._asked.terms.key, self._decided)
        self._has_result, self._decided = False, None

    async def handed_on(self) -> None:
        """Before this node ends: let its cohort have the last result, if that takes from it."""
        await self._down.handed_on()

    async def shown_by(self, peer: PeerId, epoch: int) -> bytes | None:
        """The digest of the result of this peer's last averaging, which was of this epoch, if that
        peer shows the heads' decision on it. None: it cannot. PotluckError: it does not answer."""
        asked = self._asked
        if asked is None or asked.terms.epoch != epoch:
            raise NoDecision("This peer has averaged nothing in that epoch.")
        try:
            said = await self._down.shown(asked.terms.key, peer, SHOWN_SECONDS)
        except NoDecision:
            return None
        try:
            await self._check(said, asked)
        except NoDecision:
            raise  # by heads that this peer does not know
        except PotluckError as error:
            log.warning("%s shows no step, though it says that it has made one: %s", peer, error)
            return None
        if self._without is not None:  # an honest one comes too late now and then
            if self._without == self._was_without:
                self._is_last_for_now(self._without)
            self._was_without, self._without = self._without, None
        return said.digest

    async def average(self, request: RoundRequest, cohort: Cohort) -> Outcome:
        layout, self._without = request.vector.layout, None
        # if a step no longer needs most of the last one, all that are left may be in this cohort
        may_be_one = not (request.fewest or cohort.heads or cohort.doubted)
        self._asked = _Asked(
            self._terms(request.epoch, request.topic, cohort, layout),
            layout,
            cohort,
            tuple(heads for heads in (cohort.heads, self._heads) if heads),
            may_be_one,
        )
        outcome = await self._average(request, cohort)
        if isinstance(outcome, Committed):
            self._heads = frozenset(outcome.members)
        return outcome

    async def _average(self, request: RoundRequest, cohort: Cohort) -> Outcome:
        mine = await self._in_cohort(request, cohort)
        if not isinstance(mine, CohortAverage):
            return mine
        self._epoch = request.epoch
        reason = "Nobody brought the cohort's average to the others."
        idle = self.idle_heads
        heads = [one.peer for one in mine.entries if one.reduces] or [self._me]
        heads.sort(key=lambda one: one in idle)  # a stable sort
        has_lost_head, until = False, math.inf
        patience = self._patience(request)
        try:
            self.confirm(applied=False)  # nobody has confirmed the last one
            with self._down.shelf(mine.round_id, mine.entries) as shelf:
                self._shelf = shelf
                for head in heads:
                    left = until - trio.current_time()
                    if left <= 0.0:
                        break
                    if head == self._me:
                        outcome = await self._as_head(mine, cohort, shelf)
                        if isinstance(outcome, Discarded) and has_lost_head:
                            reason = outcome.reason
                            break
                        return outcome
                    try:
                        return await self._from_head(mine, shelf, head, min(patience, left))
                    except NoDecision as error:
                        reason, self._without = error.what, head
                        break
                    except PotluckError as error:
                        log.info("the cohort's head %s is lost: %s", head, error)
                        if isinstance(error, DeadlineExceeded) and left >= patience:
                            self._is_last_for_now(head)  # it is there, and decides nothing
                        has_lost_head = True  # it may have made the step
                        until = min(until, trio.current_time() + patience)
        finally:
            self._epoch = -1
        # others may have made a step with the cohort's average
        others = replace(
            mine.statistics,
            members=(*mine.members, *cohort.heads, *cohort.doubted),
            exchange_began=None,
            exchange_ended=None,
        )
        return Discarded(reason, in_doubt=True, rounds=(mine.statistics, others))

    def _patience(self, request: RoundRequest) -> float:
        """How long the heads' round may take."""
        settings, apart = self._settings, self._seconds_apart(request.vector.layout)
        for_more = FOR_MORE_SECONDS if request.fewest else 0.0  # the head may be in it again
        return settings.matchmaking_seconds + apart + for_more + settings.round_seconds

    def _is_last_for_now(self, head: PeerId) -> None:
        self._idle[head] = trio.current_time() + IDLE_SECONDS

    @property
    def idle_heads(self) -> frozenset[PeerId]:
        """Peers that were their cohort's head lately, and did nothing or lied."""
        now = trio.current_time()
        return frozenset(peer for peer, until in self._idle.items() if now < until)

    # -- the cohort

    async def _in_cohort(self, request: RoundRequest, cohort: Cohort) -> CohortAverage | Outcome:
        name = f"{cohort.count}.{cohort.number}"
        result = self._buffer(request.vector.values)
        key = group_key(self._run, request.epoch, COHORTS_ROUND, name, request.topic)
        found = await self._rounds.run(
            GridRound(key, replace(request, fewest=0), result, splits=False)
        )
        self._note(found.statistics)
        match found.verdict:
            case Verdict.COMMITTED:
                assert found.group is not None
                entries = {one.peer: one for one in found.group.roster.entries}
                turns = {one.peer: one.turn for one in entries.values()}
                members = in_order(self._run, found.statistics.members, turns)
                brought = replace(
                    request,
                    vector=Vector(request.vector.layout, result),
                    weight=found.total_weight,
                    peers=len(members),
                )
                return CohortAverage(
                    brought,
                    found.statistics,
                    found.group.round_id,
                    tuple(entries[one] for one in members),
                    found.sent,
                )
            case Verdict.ALONE:
                return CohortAverage(request, found.statistics)
            case verdict:
                # the others may bring an average with this peer's samples to the heads' round
                in_doubt = verdict in (Verdict.IN_DOUBT, Verdict.LEFT_OUT)
                return Discarded(
                    found.statistics.reason, in_doubt, (found.statistics,), found.begun_without
                )

    # -- at the head

    async def _as_head(self, mine: CohortAverage, cohort: Cohort, shelf: ResultShelf) -> Outcome:
        assert self._asked is not None
        known = cohort.heads  # if all that were known are lost, others come in their place
        coming = known | cohort.doubted
        expected = 1 + len(coming) if coming else None
        request = replace(
            mine.request,
            expected=expected,
            awaited=known,
            coming=coming,
            cohort=None,
            most_peers=self._settings.group_size,
        )
        result = self._buffer(request.vector.values)
        found = await self._rounds.run(
            GridRound(
                self._heads_key(request.epoch, request.topic, cohort),
                request,
                result,
                splits=False,
                more_seconds=self._seconds_apart(request.vector.layout),
                may_be_one=self._asked.may_be_one and bool(mine.entries),
                seat_of=self._seat_of(cohort),
                sealed=True,
            )
        )
        self._note(found.statistics)
        outcome = self._outcome(mine, cohort, found, result)
        if not isinstance(outcome, Committed):
            reason = "No other head came."
            if isinstance(outcome, LeftOut):
                reason = "The others decided without this head."
            elif isinstance(outcome, Discarded):
                reason = outcome.reason
            shelf.failed(NoDecision(f"The heads of the cohorts made no step: {reason}"))
        else:
            self._has_result = True
            await self._offer(shelf, found, outcome, request)
        return outcome

    def _seconds_apart(self, layout: Layout) -> float:
        """How long after the first head the last one may come: a cohort exchanges the vector both
        ways, some over slow links, and a cohort of one is ready at once."""
        size = sum(CODECS[one.codec].encoded_bytes(one.values) for one in layout.segments)
        exchange = 2.0 * size / SLOW_BYTES_PER_SECOND
        return min(exchange, self._settings.round_seconds / 2)

    def _heads_key(self, epoch: int, topic: str, cohort: Cohort) -> str:
        return group_key(self._run, epoch, HEADS_ROUND, f"{cohort.count}.heads", topic)

    def _terms(self, epoch: int, topic: str, cohort: Cohort, layout: Layout) -> Terms:
        """Of the heads' round."""
        digest = layout.digest_in_chunks(self._settings.chunk_bytes)
        return Terms(self._heads_key(epoch, topic, cohort), epoch, digest)

    def _outcome(
        self, mine: CohortAverage, cohort: Cohort, found: GroupResult, result: Tensor
    ) -> Outcome:
        rounds: tuple[RoundStatistics, ...] = (mine.statistics,)
        listed = () if found.group is None else found.group.members
        twice = with_one_seat(listed, self._seat_of(cohort))
        match found.verdict:
            case Verdict.COMMITTED | Verdict.LEFT_OUT if twice:  # nobody makes a step of it
                return Discarded(f"A cohort had two heads: {', '.join(twice)}.", False, rounds)
            case Verdict.COMMITTED | Verdict.LEFT_OUT if self._lacks_heads(mine, listed):
                return Discarded(TOO_FEW_KNOWN, True, (mine.statistics, found.statistics))
            case Verdict.COMMITTED:
                return Committed(
                    result=result,
                    members=found.statistics.members,
                    left_out=found.statistics.excluded,
                    digest=found.digest,
                    weight=found.total_weight,
                    rounds=rounds,
                    cut=found.cut,
                    sent=mine.sent if mine.entries else found.sent,
                    peers=found.total_peers,
                    heads=dict(
                        zip(found.statistics.members, found.statistics.weights, strict=False)
                    ),
                )
            case Verdict.LEFT_OUT:
                return LeftOut(
                    found.statistics.members,
                    found.digest,
                    rounds,
                    found.total_weight,
                    found.total_peers,
                )
            case Verdict.ALONE if not mine.entries:
                return Alone(rounds)
            case _:
                in_doubt = found.verdict is Verdict.IN_DOUBT
                if in_doubt:
                    rounds = (mine.statistics, found.statistics)
                reason = found.statistics.reason
                return Discarded(reason, in_doubt, rounds, found.begun_without)

    def _lacks_heads(self, mine: CohortAverage, listed: tuple[PeerId, ...]) -> bool:
        """Whether those that are known here may have decided before, and have died. It does not
        last for longer than the wait for most of the last step: heads that never come are no harm.
        """
        assert self._asked is not None
        return mine.request.fewest > 0 and not has_known_heads(listed, self._asked.known)

    def _seat_of(self, cohort: Cohort) -> Callable[[PeerId], int]:
        """In the heads' round, each cohort has one seat."""
        return lambda peer: cohort_of(self._run, peer, cohort.count)

    async def _offer(
        self, shelf: ResultShelf, found: GroupResult, outcome: Committed, request: RoundRequest
    ) -> None:
        group, cut, attempt, proof = found.group, found.cut, found.attempt, found.proof
        if group is None or cut is None or attempt is None or proof is None:
            raise ProtocolMisuse("A committed round of heads knows how its result was made.")
        layout = request.vector.layout
        if not most_hold(proof):
            shelf.failed(NoDecision("Too few heads hold the result that they have accepted."))
            return
        try:
            memory = await in_thread(encode_result, outcome.result, layout, cut)
            digests = await in_thread(part_digests, memory, layout, cut)
        except PotluckError as error:
            shelf.failed(NoDecision("The head cannot encode the result.", why=error.what))
            return
        if digest_of_parts(digests) != outcome.digest:
            shelf.failed(
                NoDecision("The head encodes the result in another way than its reducers.")
            )
            return
        places = tuple(sorted(group.roster.index_of(one) for one in outcome.members))
        parts = (
            DecidedPart(part.reducer, part.start, part.stop, digests[part.reducer])
            for part in cut.parts
        )
        decision = HeadsDecision(
            group.roster, attempt, places, tuple(parts), cut.chunk_bytes, proof
        )
        self._decided = decision
        shelf.prepare(HandedResult(decision, layout, memory))
        if not request.confirms:
            self.confirm(applied=True)

    # -- at the other members

    async def _from_head(
        self,
        mine: CohortAverage,
        shelf: ResultShelf,
        head: PeerId,
        patience: float,
    ) -> Outcome:
        """What the head hands down, if it decides within this time. NoDecision if its round made no
        step; any other error: it is lost."""
        vector = mine.request.vector
        said: HeadsDecision | None = None
        with trio.CancelScope() as self._waiting:
            said = await self._down.decision(mine.round_id, head, patience)
        if self._waiting.cancelled_caught:
            log.warning("%s is the head of this peer's cohort and has decided nothing.", head)
            self._is_last_for_now(head)
            raise NoDecision("The others have gone on, and the cohort's head has no result.")
        assert said is not None
        assert self._asked is not None
        try:
            await self._check(said, self._asked)
        except NoDecision:
            raise
        except PotluckError as error:
            log.warning("%s, the head of this peer's cohort, lies: %s", head, error.what)
            self._is_last_for_now(head)
            raise
        offered = await self._down.taken(mine.round_id, shelf, head, said, vector.layout)
        result = vector.values  # the cohort's average is not needed any more
        await in_thread(offered.decode, result)
        self._has_result, self._decided, self._was_without = True, said, None
        return Committed(
            result=result,
            members=said.heads,
            left_out=(),
            digest=said.digest,
            weight=said.weight(mine.request.most_weight),
            rounds=(mine.statistics,),
            cut=said.cut,
            sent=mine.sent,
            peers=said.peers(self._settings.group_size),
            heads=said.weights,
            handed_down=True,
        )

    async def _check(self, said: HeadsDecision, asked: _Asked) -> None:
        """PotluckError unless the heads' round has made this result."""
        listed, seat_of = said.roster.members, self._seat_of(asked.cohort)
        # Only this peer's own cohort may be the last one, and no other list goes without the heads
        # that are known: anybody can sign a list of peers of its own.
        is_last_cohort = (
            len(listed) == 1
            and asked.may_be_one
            and all(seat_of(one) == asked.cohort.number for one in listed)
        )
        await said.check(asked.terms, asked.layout, () if is_last_cohort else asked.known)
        if len(listed) == 1 and not is_last_cohort:
            raise NoDecision("It has decided without any other head, and this peer waits for more.")
        if with_one_seat(listed, seat_of):
            raise RemoteMisbehaviour("It hands down a result of a list with a cohort twice.")
