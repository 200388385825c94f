"""One round for this peer: find the group, average with it, and say what came of it.

    result = await rounds.run(this)                          # one coordinate of the grid

Whatever others or the network do is in the `GroupResult`: no group in time, a round that was
discarded, one that was committed without us. Only our own mistakes raise.

Easy to get wrong: a peer is alone when nobody else is looking for the group, which is fine, and
without a group when somebody was and it came to nothing, which may be tried again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import trio
from torch import Tensor

from auth.bounded_map import BoundedMap
from protocols.blocking import in_thread
from protocols.errors import PotluckError, ProtocolMisuse
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.moshpit.agreement import Timing
from protocols.moshpit.agreement_messages import Proof
from protocols.moshpit.ballots import Ballot
from protocols.moshpit.blame import IDLE, LATE_CODES, OVERDUE
from protocols.moshpit.closing_time import FOR_MORE_SECONDS
from protocols.moshpit.cohorts import turn_of, uplink_of
from protocols.moshpit.group import (
    LONGEST_MATCHMAKING_SECONDS,
    Group,
    Late,
    NeverListed,
    NobodyElse,
    NoGroup,
    Search,
)
from protocols.moshpit.layout import Layout, ResultCut, SentParts, Vector
from protocols.moshpit.matchmaking import Matchmaker
from protocols.moshpit.outcome import Excluded, RoundStatistics, Verdict
from protocols.moshpit.request import RoundRequest
from protocols.moshpit.roster import LARGEST_RATE, Offer
from protocols.moshpit.round import Buffers, Course, Finished, Shell, Task, run_round
from protocols.moshpit.settings import AveragerSettings
from protocols.moshpit.switchboard import SHOW, Show, UnknownRound
from protocols.moshpit.verdicts import Commit, Discard, MemberLeftOut
from protocols.rpc import Empty

log = logging.getLogger("potluck.moshpit")

MOST_DOUBTED_ROUNDS = 32  # as long as samples are doubted that somebody claims and never brings
MOST_DOUBTED = 1024

ROUND_OF_DOUBT_SECONDS = 30.0
"""A doubt for one round ends after this long even if no round has begun since: networks heal, and
where rounds are rare, the next one may be minutes away."""

HELD_UP_CODES = LATE_CODES | {IDLE, OVERDUE}

ROUNDS_UNLED = 32
"""For which a leader is not followed whose round came to nothing: of n peers each leads one round
in n, so that a span of one would be over before it leads again."""
MOST_ROUNDS_UNLED = 1024


CHECKED_IN_PLACE_VALUES = 1 << 18  # checking so many takes well under a millisecond


async def check_finite(vector: Vector) -> None:
    """`Vector.check_finite`, in a thread if it takes longer."""
    if vector.layout.values <= CHECKED_IN_PLACE_VALUES:
        vector.check_finite()
    else:
        await in_thread(vector.check_finite)


@dataclass(frozen=True, eq=False)
class GridRound:
    """One round of an averaging: the key under which its group meets, the request, and memory for
    the result. `splits`: more peers than fit into a group become several, because other rounds
    follow. `more_seconds`: by how much the deadline of its list is later than usual. `may_be_one`
    and `seat_of`: as for `Search`. `sealed`: as for `Task`."""

    key: str
    request: RoundRequest
    result: Tensor
    splits: bool
    more_seconds: float = 0.0
    may_be_one: bool = False
    seat_of: Callable[[PeerId], int] | None = None
    sealed: bool = False


def with_one_seat(peers: Sequence[PeerId], seat_of: Callable[[PeerId], int]) -> list[PeerId]:
    """Those of these peers whose seat another one of them has."""
    times = Counter(map(seat_of, peers))
    return [one for one in peers if times[seat_of(one)] > 1]


@dataclass(frozen=True)
class GroupResult:
    """How a round ended. The digest, the weight and number of all who are in the result, how that
    was cut, and in which ballot are there when it was committed; a proof, if it was sealed.
    `begun_without`: the members of a group that has started without us."""

    statistics: RoundStatistics
    group: Group | None = None
    digest: bytes = b""
    total_weight: float = 0.0
    total_peers: int = 0
    begun_without: tuple[PeerId, ...] = ()
    cut: ResultCut | None = None
    attempt: Ballot | None = None
    proof: Proof | None = None

    @property
    def verdict(self) -> Verdict:
        return self.statistics.verdict

    @property
    def sent(self) -> SentParts | None:
        """How our own values went to the others, if the round was committed."""
        if self.group is None or self.cut is None:
            return None
        return SentParts(self.cut, self.group.me)


class Doubts:
    """The peers that this one avoids because it saw them hold up a round, for growing spans. Where
    it leads, it does not list them for one round, then two, four, up to `MOST_DOUBTED_ROUNDS`,
    until they have been in a result. Each of these rounds is over after `ROUND_OF_DOUBT_SECONDS`
    at the latest. It does not follow a peer that held up a round as its leader, or listed two heads
    of a cohort, for `ROUNDS_UNLED`, then twice as many, and so on, until that peer has led a
    committed round.

    Only some members notice that a member was late, so all still follow it where it leads: a group
    must not fall apart over something that only some have seen. All members notice what their
    leader does, or its successor tells them. So the peers that do not follow it meet under the next
    one. A peer that was away, and still follows it, is late for the others' group.

    Avoiding a peer makes sense only while there are others to average with. If a round finds no
    group, the doubts about the peers that were there end with it: of two peers, one could wait for
    `ROUNDS_UNLED` rounds for the other, which was busy once.

    Invariant: at most `MOST_DOUBTED` of each kind are remembered, those that failed last.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rounds = 0
        self._members = _Spans(1, MOST_DOUBTED_ROUNDS)
        self._leaders = _Spans(ROUNDS_UNLED, MOST_ROUNDS_UNLED)

    @property
    def unwelcome(self) -> frozenset[PeerId]:
        return self._members.at(self._rounds, self._clock())

    @property
    def unled(self) -> frozenset[PeerId]:
        return self._leaders.at(self._rounds, self._clock())

    def round_begins(self) -> None:
        self._rounds += 1

    def held_up(self, peer: PeerId) -> int:
        """It has held up the round that is over; for how many it is not listed now."""
        return self._members.add(peer, self._rounds, self._clock())

    def led_nowhere(self, peer: PeerId) -> int:
        """It led the round that is over, or was to lead it, and nothing came of it; for how many it
        is not followed now."""
        return self._leaders.add(peer, self._rounds, self._clock())

    def was_in(self, members: Iterable[PeerId]) -> None:
        """These are in a result."""
        for peer in members:
            self._members.forget(peer)

    def were_in_vain(self, there: Iterable[PeerId]) -> None:
        """The round that is over found no group, though these peers were there."""
        for peer in there:
            self._members.end(peer, self._rounds)
            self._leaders.end(peer, self._rounds)

    def has_led(self, peer: PeerId) -> None:
        """It has led a round to its result."""
        self._leaders.forget(peer)


@dataclass(frozen=True)
class _Span:
    times: int  # that the peer was avoided, with this one
    last_round: int
    ends: float


class _Spans:
    """For how many rounds each of some peers is avoided: twice as many each time."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self._peers = BoundedMap[PeerId, _Span](MOST_DOUBTED)

    def at(self, round_: int, now: float) -> frozenset[PeerId]:
        return frozenset(
            peer for peer, it in self._peers.items() if round_ <= it.last_round and now < it.ends
        )

    def add(self, peer: PeerId, round_: int, now: float) -> int:
        before = self._peers.get(peer)
        times = 0 if before is None else before.times
        rounds = min(self._most, self._fewest << min(times, 16))
        ends = now + rounds * ROUND_OF_DOUBT_SECONDS
        self._peers[peer] = _Span(times + 1, round_ + rounds, ends)
        return rounds

    def end(self, peer: PeerId, round_: int) -> None:
        """It is avoided no longer; the next time, as long as if this had not been cut short."""
        span = self._peers.get(peer)
        if span is not None and span.last_round > round_:
            self._peers[peer] = replace(span, last_round=round_)

    def forget(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)


class GroupRounds:
    """The rounds of one averager."""

    def __init__(self, shell: Shell, matchmaker: Matchmaker, settings: AveragerSettings) -> None:
        self._shell = shell
        self._matchmaker = matchmaker
        self._key = ""
        """Of the last round."""
        self._settings = settings
        self._doubts = Doubts(trio.current_time)
        self.uplink = uplink_of(settings.up_bytes_per_second)
        shell.rpc.serve(SHOW, self._shown)

    async def _shown(self, caller: Caller, request: Show) -> Empty:
        """A member brings a list that our leader could not bring us any more."""
        if self._shell.switchboard.knows(request.roster.round_id):
            return Empty()  # the list has come meanwhile
        if not await self._matchmaker.take_roster(request.roster):
            raise UnknownRound(
                f"The list of {request.roster.leader} is of no use here.",
                why="This peer looks for no group under its key, or has found another one.",
                advice="Average without it.",
            )
        log.info("%s has shown us the list of %s", caller.peer, request.roster.leader)
        return Empty()

    async def run(self, this: GridRound) -> GroupResult:
        """NotFinite, before anything is sent, if that is so and was not checked before."""
        began = trio.current_time()
        self._doubts.round_begins()
        self._key = this.key
        request, search = this.request, self._search(this)
        try:
            group = await self._matchmaker.find_group(search)
        except ProtocolMisuse:
            raise
        except NobodyElse as error:
            return _without_group(search, began, Verdict.ALONE, error)
        except PotluckError as error:
            if isinstance(error, NeverListed) and error.leader is not None:
                self._does_not_follow(error.leader, "did not close its list")
            elif isinstance(error, NoGroup):
                self._doubts.were_in_vain(error.there)
            return _without_group(search, began, Verdict.NO_GROUP, error)
        found = trio.current_time()
        if request.expects_nobody:
            await check_finite(request.vector)
        if not any(entry.weight > 0.0 for entry in group.roster.entries):
            nothing = Finished(Discard("nobody brings any data", in_doubt=False), {}, Course())
            return _result_of(group, nothing, began, found, request)
        chunk_bytes, timing = self._settings.chunk_bytes, self._timing()
        layout, most = request.vector.layout, request.most_weight
        task = Task(group, layout, chunk_bytes, timing, most, this.sealed)
        finished = await run_round(self._shell, task, Buffers(request.vector.values, this.result))
        result = _result_of(group, finished, began, found, request)
        self._matchmaker.forget({one.peer for one in result.statistics.excluded})
        self._judge(this, result, finished)
        return result

    def is_void(self) -> None:
        """Nothing has come of the last round."""
        self._matchmaker.forget_list(self._key)

    def _judge(self, this: GridRound, result: GroupResult, finished: Finished) -> None:
        """Doubt who was left out of a round that this peer itself has seen it hold up, and a leader
        that did not do what it was its turn to do."""
        for one in result.statistics.excluded:
            if one.peer in finished.course.late:
                rounds = self._doubts.held_up(one.peer)
                log.warning(
                    "%s held up a round and was left out of it: %s. It is not listed here for "
                    "%d rounds or %.0f seconds.",
                    *(one.peer, one.reason.removesuffix(".")),
                    *(rounds, rounds * ROUND_OF_DOUBT_SECONDS),
                )
        group, leader = result.group, result.statistics.leader
        assert group is not None
        assert leader is not None
        told = {member for member, one in finished.excluded.items() if one.code in HELD_UP_CODES}
        if group.me in told:
            self._shell.bandwidth.was_late()
        members = result.statistics.members
        led_nowhere = leader in finished.course.idle
        if led_nowhere or group.leader in told:
            self._does_not_follow(leader, "held up the round that it led")
        if result.verdict is Verdict.COMMITTED:
            self._doubts.was_in(members)
            if this.seat_of is not None and with_one_seat(group.members, this.seat_of):
                self._does_not_follow(leader, "has listed two heads of a cohort")
            elif leader in members and not led_nowhere:
                self._doubts.has_led(leader)

    def _does_not_follow(self, leader: PeerId, what: str) -> None:
        """This leader is passed over for some time, because of what it did."""
        rounds = self._doubts.led_nowhere(leader)
        log.warning(
            "%s %s. It is not followed here for %d rounds or %.0f seconds.",
            *(leader, what, rounds, rounds * ROUND_OF_DOUBT_SECONDS),
        )

    def _search(self, this: GridRound) -> Search:
        request, settings = this.request, self._settings
        waits_for_more = request.is_again and request.fewest > 0 and not this.splits
        return Search(
            key=this.key,
            epoch=request.epoch,
            layout_digest=request.vector.layout.digest_in_chunks(settings.chunk_bytes),
            offer=self._offer(request),
            group_size=settings.group_size,
            expected=request.expected,
            awaited=request.awaited,
            coming=request.coming,
            lost=request.lost,
            unwelcome=self._doubts.unwelcome,
            unled=self._doubts.unled,
            splits=this.splits,
            most_peers=request.most_peers,
            fewest=request.fewest,
            for_more_seconds=FOR_MORE_SECONDS if waits_for_more else 0.0,
            may_be_one=this.may_be_one,
            seat_of=this.seat_of,
            matchmaking_seconds=settings.matchmaking_seconds,
            more_seconds=min(
                this.more_seconds, LONGEST_MATCHMAKING_SECONDS - settings.matchmaking_seconds
            ),
        )

    def settle_uplink(self) -> None:
        """Between two averagings: what others are told of this peer's link changes only here."""
        self.uplink = uplink_of(self._up(), self.uplink)

    def _up(self) -> float:
        """The owner's limit, or else the measured rate."""
        measured = self._shell.bandwidth.up(trio.current_time())
        return self._settings.up_bytes_per_second or measured

    def _offer(self, request: RoundRequest) -> Offer:
        now, settings, measured = trio.current_time(), self._settings, self._shell.bandwidth
        up = self._up()
        down = settings.down_bytes_per_second or measured.possible_down(now)
        return Offer(
            request.weight,
            min(int(up), LARGEST_RATE),
            min(int(down), LARGEST_RATE),
            settings.reduces(),
            int(settings.router()),
            request.peers,
            turn_of(follows=request.follows, uplink=self.uplink),
        )

    def _timing(self) -> Timing:
        return Timing(round_seconds=self._settings.round_seconds)


def _without_group(
    search: Search, began: float, verdict: Verdict, error: PotluckError
) -> GroupResult:
    now = trio.current_time()
    started = error.roster if isinstance(error, Late) else None
    return GroupResult(
        RoundStatistics(
            key=search.key,
            epoch=search.epoch,
            verdict=verdict,
            began=began,
            ended=now,
            reason=str(error),
            matchmaking_seconds=now - began,
        ),
        begun_without=() if started is None else started.members,
    )


def _result_of(
    group: Group, finished: Finished, began: float, found: float, request: RoundRequest
) -> GroupResult:
    entries, course = group.roster.entries, finished.course
    everybody = tuple(range(len(entries)))
    match finished.verdict:
        case Commit(members=members, digest=digest):
            verdict, reason = Verdict.COMMITTED, ""
        case MemberLeftOut(members=members, digest=digest):
            verdict, reason = Verdict.LEFT_OUT, "The others have committed without this peer."
        case Discard(reason=reason, in_doubt=in_doubt):
            verdict = Verdict.IN_DOUBT if in_doubt else Verdict.DISCARDED
            members, digest = everybody, b""
    ended = trio.current_time()
    statistics = RoundStatistics(
        key=group.roster.key,
        epoch=group.roster.epoch,
        verdict=verdict,
        began=began,
        ended=ended,
        reason=reason,
        leader=group.roster.leader,
        exchange_began=course.exchange_began,
        exchange_ended=course.exchange_ended,
        members=tuple(entries[member].peer for member in members),
        weights=tuple(entries[member].weight for member in members),
        rates=tuple(
            (entries[member].up_bytes_per_second, entries[member].down_bytes_per_second)
            for member in members
        ),
        averaged_bytes=_averaged_bytes(group, members, finished.cut, request.vector.layout),
        excluded=_excluded(group, members, finished),
        failures=tuple(course.failures),
        attempts=course.attempts,
        matchmaking_seconds=found - began,
        exchange_seconds=course.exchange_seconds,
        agreement_seconds=ended - found - course.exchange_seconds,
        bytes_sent=course.bytes_sent,
        bytes_received=course.bytes_received,
    )
    total = float(sum(min(entries[member].weight, request.most_weight) for member in members))
    peers = sum(min(entries[member].peers, request.most_peers) for member in members)
    attempt = finished.verdict.attempt if isinstance(finished.verdict, Commit) else None
    return GroupResult(
        statistics,
        group,
        digest,
        total,
        peers,
        cut=finished.cut,
        attempt=attempt,
        proof=finished.proof,
    )


def _averaged_bytes(
    group: Group, members: tuple[int, ...], cut: ResultCut | None, layout: Layout
) -> tuple[int, ...]:
    """How much of the others' data each member has averaged: its part, once for each of them."""
    if cut is None:
        return ()
    entries = group.roster.entries
    senders = {member for member in members if entries[member].weight > 0.0}
    parts = {
        one.reducer: layout.encoded_bytes(one.start, one.stop, cut.chunk_bytes) for one in cut.parts
    }
    return tuple(parts.get(member, 0) * len(senders - {member}) for member in members)


def _excluded(group: Group, members: tuple[int, ...], finished: Finished) -> tuple[Excluded, ...]:
    """The members that are not in the result, and why: as the group found, or as we saw."""
    against = {failure.peer: failure.text for failure in reversed(finished.course.failures)}
    for member, suspicion in finished.excluded.items():
        against[group.members[member]] = suspicion.text or suspicion.code
    return tuple(
        Excluded(peer, against.get(peer, "It did not take part to the end."))
        for member, peer in enumerate(group.members)
        if member not in members
    )
