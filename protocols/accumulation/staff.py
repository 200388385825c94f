"""Turns the peers' slots into the workers of a plan (batch_plan.py). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median_low
from typing import Final
from zlib import crc32

import msgspec

from protocols.accumulation.batch_plan import (
    FEWEST_PER_OCTAVE,
    MOST_SPARED,
    SHORTEST_BATCH_SECONDS,
    BatchPlan,
    Worker,
    may_be_planned,
    paces_per_octave,
    plan_batches,
    rounded_times,
)
from protocols.accumulation.known import Known, ProgressSettings, Seen, when_said
from protocols.accumulation.progress_slot import CARRIED_SECONDS, LONGEST_SECONDS, ProgressSlot
from protocols.identity import PeerId

OVERDUE_SHARE: Final = 0.25  # of a batch's usual time: when an overdue one is expected to be done


class Staff:
    """Turns peers into workers of a plan. If something about a peer's batches is unknown, the usual
    value among the others is taken. If nobody has computed any yet, all peers are alike."""

    def __init__(
        self,
        slots: Sequence[ProgressSlot],
        number: int,
        mine: ProgressSlot,
        settings: ProgressSettings,
        now: float,
        known: Known,
    ) -> None:
        self._mine, self._settings, self._now, self._known = mine, settings, now, known
        measured = [one for one in (*slots, mine) if one.batch and one.batch_seconds]
        self._usual_batch = median_low([one.batch for one in measured]) if measured else mine.batch
        paces = [one.batch_seconds / one.batch for one in measured]
        self._usual_pace = median_low(paces) if paces else 0.0
        per_step = number * self._usual_batch
        batches = settings.target_samples / per_step if per_step else 0.0
        self._per_octave = paces_per_octave(batches)

    def own(self) -> Worker:
        """This peer as the others see it."""
        return self.worker(self._known.me, self._said())

    def _said(self) -> Seen:
        said, mine = self._known.said, self._mine
        at = (mine.epoch, mine.history)
        if said is None or not said.slot.batch or (said.slot.epoch, said.slot.history) != at:
            return Seen(mine, self._now)
        return said

    def part_beside(self, others: Iterable[tuple[PeerId, Seen]], plan: BatchPlan) -> float:
        """Samples of the next epoch that this peer should compute (delayed), if these others are in
        the round that ends this one with the parts of the plan, and all begin to compute for the
        next epoch together with that round."""
        me, target = self._known.me, self._settings.target_samples
        workers = []
        for peer, seen in (*others, (me, self._said())):
            slot = msgspec.structs.replace(
                seen.slot,
                samples=0,
                averaging=False,
                under_way=-1.0,
                epoch_seconds=0.0,
                came_seconds=-1.0,
                spared=0 if plan.parts[peer] else min(seen.slot.spared + 1, MOST_SPARED),
            )
            workers.append(self._computing(peer, slot, 0, self._now, 0.0))
        part = plan_batches(
            workers,
            target,
            partial(order_in_epoch, self._mine.epoch + 1),
            patience_seconds=self._settings.patience_seconds,
        ).parts[me]
        if may_be_planned(max(one.batch for one in workers), target):
            return part
        return max(part, self._mine.batch)  # everybody begins batches of this size

    def worker(self, peer: PeerId, seen: Seen) -> Worker:
        """A peer whose slot is of this epoch."""
        slot, target = seen.slot, self._settings.target_samples
        began, since = self._known.epoch_began, slot.epoch_seconds
        said_at = when_said(seen, began, self._now)
        if began is not None and not slot.was_in_round:
            # It has come since then, and took the time from slots that were much older.
            since = max(since, said_at - began)
        samples = min(slot.samples, target) if slot.role == "trains" else 0
        found = self._computing(peer, slot, samples, said_at, since)
        if self._now - said_at <= CARRIED_SECONDS:
            return found
        return Worker(peer, found.done_by(said_at + CARRIED_SECONDS, target))

    def moved(self, peer: PeerId, seen: Seen) -> Worker:
        """A peer that was in the last round, and whose slot is not of this epoch yet."""
        slot, now = seen.slot, self._now
        ended = now if self._known.epoch_began is None else self._known.epoch_began
        began = ended - self._known.head_start
        spared = 0 if slot.samples else min(slot.spared + 1, MOST_SPARED)
        samples, under_way, said_at = 0, -1.0, began
        is_newest = slot.averaging and slot.epoch == self._mine.epoch - 1
        if is_newest and (slot.beside or slot.under_way >= 0.0):
            # Its slot says how far it is with the samples that it computes beside the round.
            samples, under_way = min(slot.beside, self._settings.target_samples), slot.under_way
            said_at = seen.at if under_way >= 0.0 else ended
        slot = msgspec.structs.replace(
            slot,
            samples=samples,
            averaging=False,
            under_way=under_way,
            epoch_seconds=0.0,
            came_seconds=-1.0,
            spared=spared,
        )
        found = self._computing(peer, slot, samples, said_at, said_at - ended)
        if now - ended <= found.seconds + self._settings.patience_seconds:
            return found
        return Worker(peer, samples)  # it would have published a batch by now: it may be dead

    def _computing(
        self, peer: PeerId, slot: ProgressSlot, samples: int, said_at: float, since: float
    ) -> Worker:
        if slot.role != "trains" or slot.averaging or slot.leaves:
            return Worker(peer, samples)
        batch, seconds, is_busy = slot.batch, slot.batch_seconds, slot.under_way >= 0.0
        is_guessed = not seconds or not slot.has_begun
        if self._known.epoch_began is not None and slot.came_seconds >= 0.0 and not slot.has_begun:
            return Worker(peer, samples)  # planned once it begins, which it may never do
        if not batch and slot.samples_per_second > 0.0:  # it does not say how large its batches are
            batch, seconds = 1, 1.0 / slot.samples_per_second
            is_busy, is_guessed = True, False
        elif is_busy and not batch:
            batch = self._usual_batch
        if not batch:
            return Worker(peer, samples)
        seconds = seconds or batch * self._usual_pace or self._settings.patience_seconds
        seconds = min(max(seconds, SHORTEST_BATCH_SECONDS), LONGEST_SECONDS)
        # A batch that takes longer than usual is done soon, but not before its slot was published.
        ahead = max(seconds - max(slot.under_way, 0.0), OVERDUE_SHARE * seconds) if is_busy else 0.0
        first_seconds = ahead if is_busy else seconds
        if is_guessed and said_at + first_seconds + self._settings.patience_seconds < self._now:
            return Worker(peer, samples)
        return Worker(
            peer,
            samples,
            min(batch, self._settings.target_samples),
            seconds,
            said_at + ahead,
            is_busy,
            *self._order(slot, since + ahead, batch, seconds),
            is_guessed=is_guessed,
            spared=slot.spared,
        )

    def _order(
        self, slot: ProgressSlot, free_at: float, batch: int, seconds: float
    ) -> tuple[float, float]:
        """When it can begin, and how long a batch takes, in a form that peers can compare.

        For a peer that was not in the round that began the epoch, that is only when it came and how
        many batches it has begun: what its slot says about times has travelled to it and back, and
        its pace is only roughly known in its first batches. In delayed mode, too, only the number
        of batches can be compared: peers begin the round at different moments, and have computed
        since.
        """
        begun = math.ceil(slot.samples / batch) + (slot.under_way >= 0.0)
        if slot.was_in_round and self._settings.delayed:
            return rounded_times(begun * seconds, seconds, self._per_octave)
        knows_time = slot.has_begun and self._known.epoch_began is not None
        if slot.was_in_round:
            return rounded_times(free_at, seconds, self._per_octave)
        if knows_time and self._per_octave > FEWEST_PER_OCTAVE:
            return free_at, rounded_times(0.0, seconds, self._per_octave)[1]
        usual = batch * self._usual_pace or seconds
        pace = usual * 2.0 ** round(math.log2(seconds / usual))
        return max(slot.came_seconds, 0.0) + begun * pace, pace


def order_in_epoch(epoch: int, peer: PeerId) -> int:
    """The order of peers that would be done at the same time: the smallest comes first."""
    return crc32(f"{epoch}/{peer}".encode())
