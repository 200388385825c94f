"""Which batches of which peers make up the round that ends an epoch. Pure.

    plan = plan_batches(workers, target_samples, order)
    plan.parts[peer]                        # so many samples it brings, in whole batches
    plan.ready_at                           # when the last of these batches is done

A batch cannot be stopped once it is begun, so what keeps a step at its target is which batches are
begun. All peers of a run make this plan from the same slots and come to the same conclusion without
a message: the batches under way count as whole ones, those that follow are put in the order in
which they would be done, and of those as many belong to the round as bring it nearest to the
target. A peer begins a batch if the plan has it, and else waits for the others' last ones.

Promise: where no batch is larger than a quarter of the target, a plan has 7/8 to 9/8 of it, unless
more was done or under way already. What slots claim is bounded: the work grows with the number of
peers and not with the numbers in their slots.

Easy to get wrong: the peers' slots are read at different moments, so the order must not depend on
small differences of time. How long a batch takes, and when it is begun, is rounded before peers are
compared, and of two that are equal the order says who is first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocols.identity import PeerId

ROUNDED_TO: Final = 0.25
"""Of a batch's time. Peers that are equally fast begin together after a step; they are apart by how
long the step took each, and by how their batches vary, and none of that says who is first."""

SAME_TIME_SHARE: Final = ROUNDED_TO / 4  # of the shortest batch's time: nearer is not looked at

MOST_HALVINGS: Final = 80  # a double has no more digits than that between two times

MOST_LATE: Final = 8  # batches in one plan that nobody waits for; whoever claims more is waited for

MOST_SPARED: Final = 8
"""Steps in a row without a batch of one peer. For each of them the next step may take a quarter
longer for its sake: so a slow peer costs the run a quarter of its time at most, and one whose batch
does not even fit after so many is told that no batch of it fits."""

SPARED_SHARE: Final = 0.25

SHORTEST_BATCH_SECONDS: Final = 1e-6  # what is claimed to be shorter


@dataclass(frozen=True)
class Worker:
    """What one peer has for the epoch, and what it can add.

    - `samples`: of the batches that are done.
    - `batch`: samples of one batch; 0 where it computes none.
    - `seconds`: one batch takes so long.
    - `free_at`: it can begin its next batch then: when the one under way ends, or since it waits.
    - `is_busy`: a batch is under way.
    - `order_at`, `order_seconds`: the same two, but comparable: since the epoch began, and rounded.
    - `spared`: so many steps in a row were made without a batch of it.
    - `is_guessed`: how long its batch takes is not known; none is taken to be done before its peer
      says so.
    """

    peer: PeerId
    samples: int
    batch: int = 0
    seconds: float = 1.0
    free_at: float = 0.0
    is_busy: bool = False
    order_at: float = 0.0
    order_seconds: float = 1.0
    is_guessed: bool = False
    spared: int = 0

    @property
    def under_way(self) -> int:
        return self.batch if self.is_busy else 0

    def with_next(self) -> Worker:
        """As if its next batch were under way."""
        return replace(
            self,
            free_at=self.free_at + self.seconds,
            is_busy=True,
            order_at=self.order_at + self.order_seconds,
        )

    def added_by(self, at: float) -> int:
        """How many batches it adds until then, in that order, to the one under way."""
        if not self.batch or at < self.order_at:
            return 0
        return math.floor((at - self.order_at) / self.order_seconds)

    def done_by(self, at: float, part: int) -> int:
        """Samples of batches that are done at that time, if it computes up to its part."""
        if not self.batch or self.is_guessed:
            return self.samples
        first = self.free_at if self.is_busy else self.free_at + self.seconds
        batches = math.floor((at - first) / self.seconds) + 1 if at >= first else 0
        return max(self.samples, min(self.samples + batches * self.batch, part))

    def ready_at(self, part: int) -> float:
        """When its part is done."""
        missing = part - self.samples
        if missing <= 0 or not self.batch:
            return -math.inf
        batches = math.ceil(missing / self.batch) - self.is_busy
        return self.free_at + batches * self.seconds


@dataclass(frozen=True)
class BatchPlan:
    """- `parts`: what each brings. - `is_full`: whether that is the target, as near as batches come
    to it; where it is not, nobody is known who could add more. - `ready_at`: when all of it is
    done. - `order_ready_at`: the same, but comparable: since the epoch began, and rounded."""

    parts: Mapping[PeerId, int]
    is_full: bool
    ready_at: float
    order_ready_at: float


def plan_batches(
    workers: Sequence[Worker],
    target: int,
    order: Callable[[PeerId], int],
    *,
    patience_seconds: float = math.inf,
) -> BatchPlan:
    """The batches of the round. `order`: who is first of those who would be done at the same time.
    `patience_seconds`: a batch under way that is done so much later than the rest could be without
    it is waited for by nobody, and is no part of the plan."""
    workers = _with_those_who_were_spared(workers, target, order)
    plan = _planned(workers, target, order)
    for _ in range(MOST_LATE):
        busy = sorted((one for one in workers if one.is_busy), key=lambda one: one.free_at)
        if not busy or _is_like_the_rest(busy, patience_seconds):
            break
        last = busy[-1]
        others = [one for one in workers if one is not last]
        without = _planned([*others, Worker(last.peer, last.samples)], target, order)
        waits = max(patience_seconds, _waits_for(last, without))
        if not last.free_at > without.ready_at + waits:
            break
        workers, plan = [*others, Worker(last.peer, last.samples)], without
    return plan


def _with_those_who_were_spared(
    workers: Sequence[Worker], target: int, order: Callable[[PeerId], int]
) -> list[Worker]:
    """The same, with the first batches of those who were in none of the last steps as if they were
    under way: where there is room, and the step takes little longer for each step that they were
    spared in. All peers decide it alike, so only what is comparable is looked at."""
    found = {one.peer: one for one in workers}
    spared = [one for one in workers if one.spared and one.batch and not one.is_busy]
    spared.sort(key=lambda one: (-one.spared, order(one.peer)))
    for one in spared[:MOST_LATE]:
        room = target - sum(each.samples + each.under_way for each in found.values())
        if one.samples or one.batch > 2 * room:
            continue
        others = [each for each in found.values() if each is not one]
        without = _planned([*others, Worker(one.peer, 0)], target, order)
        first = one.with_next()
        if first.order_at <= without.order_ready_at + _waits_for(one, without):
            found[one.peer] = first
    return list(found.values())


def _waits_for(worker: Worker, without: BatchPlan) -> float:
    """So much longer a step may take for the sake of a peer that was spared in the last ones."""
    if not worker.spared or not 0.0 < without.order_ready_at < math.inf:
        return 0.0
    return min(worker.spared, MOST_SPARED) * SPARED_SHARE * without.order_ready_at


def _is_like_the_rest(busy: Sequence[Worker], patience_seconds: float) -> bool:
    """Whether the last one is surely in time: not much later than another that is waited for."""
    return len(busy) > 1 and busy[-1].free_at <= busy[-2].free_at + patience_seconds


def rounded_times(free_at: float, seconds: float) -> tuple[float, float]:
    """When it can begin, since the epoch began, in steps of a quarter of a batch; and the time of a
    batch as a power of the square root of two."""
    step = ROUNDED_TO * seconds
    return math.floor(free_at / step + 0.5) * step, 2.0 ** (round(2.0 * math.log2(seconds)) / 2)


def _planned(workers: Sequence[Worker], target: int, order: Callable[[PeerId], int]) -> BatchPlan:
    total = sum(one.samples + one.under_way for one in workers)
    added, is_full = dict.fromkeys((one.peer for one in workers), 0), total >= target
    able = [one for one in workers if one.batch]
    if not is_full and able:
        before, at = _when_full(able, target - total)
        for one in able:
            added[one.peer] = one.added_by(before)
            total += added[one.peer] * one.batch
        for one in _who_adds(able, before, at, order):
            is_full = total + one.batch / 2 > target
            if is_full:
                break
            added[one.peer] += 1
            total += one.batch
        is_full = is_full or total >= target
    parts = {one.peer: one.samples + one.under_way + added[one.peer] * one.batch for one in workers}
    ready_at = max((one.ready_at(parts[one.peer]) for one in workers), default=-math.inf)
    order_ready_at = max(
        (
            one.order_at + added[one.peer] * one.order_seconds
            for one in workers
            if added[one.peer] or one.is_busy
        ),
        default=0.0,
    )
    if not is_full:
        ready_at = order_ready_at = math.inf
    return BatchPlan(parts, is_full, ready_at, order_ready_at)


def _when_full(able: Sequence[Worker], missing: int) -> tuple[float, float]:
    """Two moments so near to each other that each peer adds at most one batch between them: by the
    first the missing samples are not there, by the second they are."""

    def added(at: float) -> int:
        return sum(one.added_by(at) * one.batch for one in able)

    shortest = min(one.order_seconds for one in able)
    before = min(one.order_at for one in able)
    step = max(one.order_seconds for one in able)
    at = before + step
    while added(at) < missing:
        before, at, step = at, at + step, 2.0 * step
    for _ in range(MOST_HALVINGS):
        middle = (before + at) / 2
        if not before < middle < at or at - before < SAME_TIME_SHARE * shortest:
            break
        if added(middle) < missing:
            before = middle
        else:
            at = middle
    return before, at


def _who_adds(
    able: Iterable[Worker], after: float, until: float, order: Callable[[PeerId], int]
) -> list[Worker]:
    """Of these who adds a batch between the two moments, in order."""
    coming = [
        (one.order_at + (one.added_by(after) + 1) * one.order_seconds, order(one.peer), one)
        for one in able
        if one.added_by(until) > one.added_by(after)
    ]
    return [one for _, _, one in sorted(coming, key=lambda each: each[:2])]
