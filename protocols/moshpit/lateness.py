"""Who is late with values, by what the plan foresees and by how far the others are.

A member that answers everything and sends no values looks alive to all other deadlines of an
attempt. So values have a deadline of their own. What is expected of a flow (one direction of one
transfer, in chunks) is the longer of

    what the plan predicts for it       from the rates that the members have declared
    what the others take for the same   the median of them, as far as they are

and chunk k of n is due when `SLACK` times k/n of that has passed, and a grace. Flows go evenly
(pacing.py), so a flow that stops is found out by its next chunk, and need not be waited for to the
end. Nobody is late who is not behind the others. Each member judges what it alone can see:

    no_values     a sender's values, at their reducer                     after GRACE_SECONDS
    no_averages   a reducer's averages, at a member                       after STEP_SECONDS more
    not_closed    a closing message, where most of the others' are here   counted from these

A reducer has no averages while it waits for values, and a member has no whole result while it
waits for averages. So each judgement comes later than the one that could explain it, and every
member that stops says at the end for whom it was waiting (`awaited`, `overdue`): blame.py puts
the two together.

Easy to get wrong: an unknown rate is no prediction. A link whose rate nobody knows may be slow, so
the time in which its bytes arrive does not count, nor as much again, in which it may have been
busy with other transfers. Who sends nothing, or next to nothing, gains nothing by that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import trio

from protocols.bulk import Transfer
from protocols.moshpit.ballots import Suspicion
from protocols.moshpit.blame import AWAITED, NO_AVERAGES, NO_VALUES, NOT_CLOSED, OVERDUE
from protocols.moshpit.exchange import SMALL_PART
from protocols.moshpit.plan import UNKNOWN, predicted_link_seconds

if TYPE_CHECKING:
    from protocols.moshpit.attempt import Attempt

GRACE_SECONDS = 4.0
"""Beyond what is expected: as long as a member that is silent altogether is waited for. A busy
machine stands still for a second or two."""

STEP_SECONDS = 2.0
"""From one judgement to the next: time for a reducer to name a sender, and for all to hear of it,
through the queues of a full link."""

SLACK = 3.0
"""Times what is expected: a link may be a good deal worse than when it was measured."""

ROUND_TRIPS = 4.0  # of the link, beside the grace: to be told, to send, and a queue each way
BEAT_SECONDS = 0.5  # between two looks

SLOWEST_BYTES_PER_SECOND = 10_000.0
"""Of an uplink whose rate is unknown, all its transfers together; what comes slower is not what a
link does. The slowest that anybody trains over carries ten times as much."""

SLOW_BYTES_PER_SECOND = 62_500.0
"""Half a megabit a second: what a link may carry whose rate is unknown, where nothing else says how
long to wait."""

NEARLY_SECONDS = 2.0
"""Who would be late this much later is overdue: it counts against a member that somebody else has
found late. Members look at different moments, and the first ends the attempt for all."""


class Flow:
    """One direction of one transfer, in chunks. `transfer` is given where its bytes can be seen."""

    def __init__(self, chunks: int, transfer: Transfer[Any, Any, Any] | None = None) -> None:
        self.chunks, self.done = chunks, 0
        self.began = self.moved = trio.current_time()
        self.ended: float | None = None
        self.excused = 0.0
        """How long bytes have been arriving."""
        self._transfer = transfer
        self._arrived = 0
        self._looked = self.began

    @property
    def is_over(self) -> bool:
        return self.done >= self.chunks

    @property
    def part(self) -> float:
        return 1.0 if self.is_over else self.done / self.chunks

    def advanced(self, to: int | None = None) -> None:
        """One more chunk is here; or so many, if a number is given."""
        done = self.done + 1 if to is None else to
        if done > self.done:
            self.moved = trio.current_time()
            self.done = done
            if self.is_over:
                self.ended = self.moved

    def look(self, bytes_per_second: float) -> None:
        """See whether bytes came. Those that come slower than this excuse only some of the time."""
        now, passed = trio.current_time(), trio.current_time() - self._looked
        self._looked = now
        if self._transfer is None or self.is_over:
            return
        came = self._transfer.bytes_arrived - self._arrived
        self._arrived += came
        if came:
            self.moved = now
            self.excused += min(passed, came / bytes_per_second)

    def whole_seconds(self) -> float:
        """How long all of it takes, as far as can be said now, and rather too much."""
        if self.is_over:
            return (self.moved if self.ended is None else self.ended) - self.began
        return (trio.current_time() - self.began) * self.chunks / (self.done + 1)

    def due(self, expected: float, grace: float, *, excuses: bool) -> float:
        """When the next chunk is late."""
        excused = self.excused if excuses else 0.0
        by_the_whole = self.began + 2.0 * excused + SLACK * expected * (self.done + 1) / self.chunks
        by_the_last = self.moved + excused + SLACK * expected / self.chunks
        return grace + min(by_the_whole, by_the_last)


class Lateness:
    """The judgements of one member in one attempt."""

    def __init__(self, attempt: Attempt, round_trip: Callable[[int], float]) -> None:
        """`round_trip` says what was measured of the link with a member, in seconds."""
        plan = attempt.plan
        values = max(1, plan.layout.values)
        seconds = predicted_link_seconds(
            [(stop - start) / values for start, stop in pairwise(plan.cuts)],
            [one.up_bytes_per_second for one in plan.members],
            [one.down_bytes_per_second for one in plan.members],
            [one.weight > 0.0 for one in plan.members],
            values * plan.layout.value_bytes,
        )
        reducers = [place for place, cuts in enumerate(pairwise(plan.cuts)) if cuts[0] < cuts[1]]
        taken = max(seconds[place][1] for place in reducers)
        self._round_seconds = max(max(each) for each in seconds)
        self._values_seconds = {  # values go as fast as the slowest reducer takes them
            one.index: max(sending, taken)
            for one, (sending, _) in zip(plan.members, seconds, strict=True)
        }
        self._unknown = {one.index for one in plan.members if one.up_bytes_per_second == UNKNOWN}
        self._slow_readers = {
            one.index for one in plan.members if one.down_bytes_per_second == UNKNOWN
        }
        self._slowest = SLOWEST_BYTES_PER_SECOND / (2 * max(1, len(plan.members) - 1))
        parts = [stop - start for start, stop in pairwise(plan.cuts)]
        self._is_small_part = parts[plan.my_place] * SMALL_PART < max(parts)
        self._vector_bytes = values * plan.layout.value_bytes
        self._senders = [one.index for one in attempt.senders if one.weight > 0.0]
        self._reducers = [one.index for one in attempt.reducers]
        self._attempt = attempt
        self._round_trip = round_trip
        self._own_part = Flow(len(attempt.reduction.chunks))
        self._most_closed: float | None = None

    async def watch(self) -> None:
        """Name who is late; returns when somebody is."""
        while not (late := self.late()):
            await trio.sleep(BEAT_SECONDS)
            self._look()
        member, code, text = late[0]
        self._attempt.suspect(member, code, text)

    def _look(self) -> None:
        for member in self._senders:
            flow = self._attempt.values_of.get(member)
            if flow is not None:
                flow.look(self._slowest)
        self._own_part.advanced(self._attempt.reduction.finished)
        if self._most_closed is None and self._attempt.whole.is_set():
            told = self._attempt.told_by
            if len(told) >= len(self._closing) // 2:
                self._most_closed = trio.current_time()

    @property
    def _closing(self) -> list[int]:
        """Who tells us which result it has."""
        return [one.index for one in self._attempt.senders] or self._reducers

    def late(self) -> list[tuple[int, str, str]]:
        """Who is late, the first of them most: the place, the code and words."""
        late = self._late_senders(GRACE_SECONDS)
        return late or self._late_reducers() or self._late_closers()

    def awaited(self) -> tuple[Suspicion, ...]:
        """For whose values this member waits: who is all but late, then who is behind the rest."""
        nearly = self._late_senders(GRACE_SECONDS - NEARLY_SECONDS)
        if nearly:
            return tuple(Suspicion(member, OVERDUE, text) for member, _, text in nearly)
        flows = self._flows(self._attempt.values_of, self._senders)
        behind = min(flows, key=lambda member: flows[member].part, default=None)
        if behind is None or flows[behind].part == max(one.part for one in flows.values()):
            return ()
        return (Suspicion(behind, AWAITED, "Its values are awaited."),)

    def _late_senders(self, grace: float) -> list[tuple[int, str, str]]:
        flows = self._flows(self._attempt.values_of, self._senders)
        late = []
        for member, flow in flows.items():
            others = [each for one, each in flows.items() if one != member]
            arriving = len(self._senders) - len(flows)
            if not others and not arriving:
                others = [*self._flows(self._attempt.values_to, [member]).values()]
            predicted = self._values_seconds[member]
            if member in self._unknown and self._is_small_part:
                # It is busy with larger parts for long, and small ones are through early or late.
                predicted = max(predicted, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            expected = self._expected(flow, others, arriving, predicted)
            patience = grace + ROUND_TRIPS * self._round_trip(member)
            due = flow.due(expected, patience, excuses=member in self._unknown)
            if trio.current_time() > due:
                late.append((flow.part, member, _words("of its values", flow, expected)))
        return [(member, NO_VALUES, text) for _, member, text in sorted(late)]

    def _late_reducers(self) -> list[tuple[int, str, str]]:
        flows = self._flows(self._attempt.averages_of, self._reducers)
        own = [self._own_part] if self._own_part.chunks else []
        opening = len(self._reducers) - len(flows)
        late = []
        for member, flow in flows.items():
            others = own + [each for one, each in flows.items() if one != member]
            predicted = self._round_seconds
            if not others and self._unknown:  # nobody can tell whether it waits for a slow link
                predicted = max(predicted, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            expected = self._expected(flow, others, opening, predicted)
            expected = max(expected, self._own_seconds(member))
            patience = GRACE_SECONDS + STEP_SECONDS + ROUND_TRIPS * self._round_trip(member)
            if trio.current_time() > flow.due(expected, patience, excuses=False):
                late.append((flow.part, member, _words("averages", flow, expected)))
        return [(member, NO_AVERAGES, text) for _, member, text in sorted(late)]

    def _own_seconds(self, reducer: int) -> float:
        """How long our own values for this reducer take, as far as it has taken them: it cannot
        average what has not come. A reducer that takes nothing gains nothing by that."""
        ours = self._attempt.values_to.get(reducer)
        if ours is None:
            return 0.0
        if ours.done:
            return (ours.moved - ours.began) * ours.chunks / ours.done
        others_take = any(one.done for one in self._attempt.values_to.values())
        me = self._attempt.plan.me
        return math.inf if me in self._unknown and not others_take else self._values_seconds[me]

    def _late_closers(self) -> list[tuple[int, str, str]]:
        if self._most_closed is None:
            return []
        waited = trio.current_time() - self._most_closed
        late = []
        for member in self._closing:
            if member in self._attempt.told_by:
                continue
            longer = max(self._round_seconds, (self._most_closed - self._attempt.began) / 2.0)
            if member in self._slow_readers:
                longer = max(longer, self._vector_bytes / SLOW_BYTES_PER_SECOND)
            patience = GRACE_SECONDS + STEP_SECONDS + ROUND_TRIPS * self._round_trip(member)
            if waited > patience + longer:
                text = f"It has not closed its transfer, {waited:.1f} s after most of the others."
                late.append((member, NOT_CLOSED, text))
        return late

    def usual_seconds(self) -> float:
        """How long values may take, by those that are on their way; infinity if none are. (Averages
        wait for a member that has not opened its transfer.)"""
        flows = [*self._attempt.values_of.values(), *self._attempt.values_to.values()]
        seconds = [one.whole_seconds() for one in flows if one.chunks]
        longest = statistics.median_high(seconds) if seconds else math.inf
        return max(self._round_seconds, longest)

    def _flows(self, flows: Mapping[int, Flow], members: Iterable[int]) -> dict[int, Flow]:
        return {member: flows[member] for member in members if member in flows}

    def _expected(self, flow: Flow, others: list[Flow], missing: int, predicted: float) -> float:
        """How long all of this flow may take; infinity for one that is not behind the others.
        `missing`: how many of them have not begun."""
        if flow.is_over:
            return math.inf
        if not others and not missing:
            return predicted
        parts = [one.part for one in others] + [0.0] * missing
        if statistics.median_low(parts) <= flow.part:
            return math.inf
        seconds = [one.whole_seconds() for one in others] + [math.inf] * missing
        return max(predicted, statistics.median_high(seconds))


def _words(what: str, flow: Flow, expected: float) -> str:
    seconds = trio.current_time() - flow.began
    return (
        f"{flow.done:,} of {flow.chunks:,} chunks {what} came in {seconds:.1f} s, where all take "
        f"about {expected:.1f} s."
    )
