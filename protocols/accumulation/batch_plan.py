"""Plans which batches of which peers make up the round that ends an epoch. Pure.

    plan = plan_batches(workers, target_samples, order)
    plan.parts[peer]                        # the samples it brings, in whole batches
    plan.ready_at                           # when the last of these batches is done

A batch cannot be stopped once it has begun, so a step keeps to its target only if peers begin the
right batches. All peers of a run make this plan from the same slots, and reach the same result
without a message. Batches under way count in full. The following ones are ordered by when they
would be done, and as many of them belong to the round as bring it nearest to the target. A peer
begins a batch if it is in the plan; otherwise it waits for the others' last batches.

Promises: if no batch is larger than a quarter of the target, a plan has 7/8 to 9/8 of the target,
unless more is done or under way already. Exaggerated claims in slots do not make a plan slower: the
work grows with the number of peers, not with the numbers in their slots.

Easy to get wrong: peers read the slots at different moments, so the order must not depend on small
differences in time. Equally fast peers begin together after a step, but not exactly: their steps
and batches take slightly different times. So the times at which batches begin, and how long they
take, are rounded before peers are compared, and `order` decides between equal peers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocols.identity import PeerId

SAME_TIME_SHARE: Final = 1 / 16  # of the shortest batch: the precision of the end that is sought

MANY_BATCHES: Final = 4  # of one peer in a step: fewer are rounded by less than one anyway
FEWEST_PER_OCTAVE: Final = 2  # measured times vary from step to step
MOST_TOLD_APART: Final = 64  # a finer distinction than peers keep their pace

MOST_HALVINGS: Final = 80  # a double has no more digits than that between two times

MOST_LATE: Final = 8  # late batches left out of one plan; the round waits for any further ones
MOST_FITTED: Final = 8  # spared peers for which room is sought: each costs another plan

MOST_SPARED: Final = 8
"""The most steps in a row without a batch of one peer that are counted. For each of them the next
step may take a quarter longer for that peer, so a slow peer costs the run at most a quarter of its
time. A peer whose batch does not fit even then is told so."""

PLANNED_SHARE: Final = 0.25
"""Batches larger than this share of the target are not planned; everybody begins them. With two or
three batches in a step, a plan would leave most peers out of it."""

SPARED_SHARE: Final = 0.25

SHORTEST_BATCH_SECONDS: Final = 1e-6  # shorter claims are taken to be this long


@dataclass(frozen=True)
class Worker:
    """The samples that one peer has for the epoch, and can add.

    - `samples`: of the batches that are done.
    - `batch`: samples of one batch; 0 for a peer that computes none.
    - `seconds`: how long one batch takes.
    - `free_at`: when it can begin its next batch: at the end of the one under way, or, if none is,
      since it began to wait.
    - `is_busy`: a batch is under way.
    - `order_at`, `order_seconds`: `free_at` and `seconds` for comparing peers: counted from the
      beginning of the epoch, and rounded.
    - `is_guessed`: the duration of its batches, or the beginning of its first, is not known. None
      of its batches counts as done before it says so.
    - `spared`: how many steps in a row were made without a batch of this peer.
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
        """How many batches it adds, by its order times, to the one under way until this moment."""
        if not self.batch or at < self.order_at:
            return 0
        return math.floor((at - self.order_at) / self.order_seconds)

    def done_by(self, at: float, part: int) -> int:
        """Samples of the batches done by this moment, if it computes only its part."""
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
    """A plan for one round.

    - `parts`: the samples that each peer brings.
    - `is_full`: the parts make up the target, as nearly as batches allow. Otherwise no peer is
      known that could add more.
    - `ready_at`: when all of it is done.
    - `order_ready_at`: the same, counted from the beginning of the epoch and rounded.
    """

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
    """Plan the round. `order` ranks peers that would be done at the same time. A batch under way
    that would end more than `patience_seconds` after the rest of a plan without it is left out, and
    nobody waits for it."""
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
    """The same workers, but peers that were spared in the last steps count as busy with their first
    batch, if there is room for it and the step takes only a little longer for each step they were
    spared in. All peers must decide this alike, so only the order times are compared."""
    found = {one.peer: one for one in workers}
    spared = [one for one in workers if one.spared and one.batch and not one.is_busy]
    spared.sort(key=lambda one: (-one.spared, order(one.peer)))
    for one in spared[:MOST_FITTED]:
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
    """How much longer a step may take for a peer that was spared in the last ones."""
    if not worker.spared or not 0.0 < without.order_ready_at < math.inf:
        return 0.0
    return min(worker.spared, MOST_SPARED) * SPARED_SHARE * without.order_ready_at


def _is_like_the_rest(busy: Sequence[Worker], patience_seconds: float) -> bool:
    """Whether the last one is in time: not much later than another that the round waits for."""
    return len(busy) > 1 and busy[-1].free_at <= busy[-2].free_at + patience_seconds


def rounded_times(
    free_at: float, seconds: float, per_octave: int = FEWEST_PER_OCTAVE
) -> tuple[float, float]:
    """`free_at` (since the epoch began) rounded to whole batches, and `seconds` rounded to a power
    of two, with `per_octave` steps between one power and the next. Batches done and batches to come
    take the same time here, so that an older slot of a peer that keeps its pace gives the same
    place in the order."""
    pace = 2.0 ** (round(per_octave * math.log2(seconds)) / per_octave)
    return math.floor(free_at / seconds + 0.5) * pace, pace


def paces_per_octave(batches: float) -> int:
    """How finely to distinguish the duration of batches if each peer brings this many to a step:
    together they are rounded by at most a quarter of a batch. A few batches are distinguished only
    roughly, because measured times vary from step to step."""
    if batches < MANY_BATCHES:
        return FEWEST_PER_OCTAVE
    return 1 << math.ceil(math.log2(2.0 * math.log(2.0) * min(batches, MOST_TOLD_APART)))


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
    """Two moments so close that each peer adds at most one batch between them. The missing samples
    are not there by the first, and are there by the second."""

    facts = [(one.order_at, one.order_seconds, one.batch) for one in able]

    def added(at: float) -> int:
        return sum(
            [math.floor((at - begin) / s) * batch for begin, s, batch in facts if at > begin]
        )

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
    """The workers that add a batch between the two moments, in order."""
    coming = [
        (one.order_at + (one.added_by(after) + 1) * one.order_seconds, order(one.peer), one)
        for one in able
        if one.added_by(until) > one.added_by(after)
    ]
    return [one for _, _, one in sorted(coming, key=lambda each: each[:2])]


def may_be_planned(largest_batch: int, target: int) -> bool:
    """Whether a step with this target is planned if no batch is larger."""
    return largest_batch <= PLANNED_SHARE * target
