"""Keeps this peer's progress slot in the directory while the peer takes part.

    publishing = Publishing(dht, key, mine, measured, again_in)
    nursery.start_soon(publishing.run)
    publishing.say_soon()                    # something may have changed
    await publishing.brought_out()           # until others can read where this peer is

The first part decides when a slot is written again, and is pure. The second part writes it, tries
again if no peer took it, and withdraws it while this peer is away.

Easy to get wrong: `brought_out` waits until the last slot is written and not withdrawn. Otherwise
two peers that come back at once would each look before the other can be seen.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec
import trio

from protocols.accumulation.estimate import Estimate
from protocols.accumulation.progress_slot import (
    CARRIED_SECONDS,
    SAY_AGAIN_SECONDS,
    SLOT_SECONDS,
    ProgressSlot,
)
from protocols.dht import Dht
from protocols.errors import PotluckError

# ---- when a slot is written
#
#   seconds = say_again_in(said, mine, estimate, largest_batch, now)
#
# The others extrapolate a slot by the rate in it. So a slot is written again only when that is
# wrong by more than a little, when anything but the number of samples changes, and before the slot
# expires. The errors of all peers of a group together stay at a few hundredths of a round, with
# four peers or with sixty. By cohorts each peer may be wrong by more, in either direction.
#
# Easy to get wrong: samples are added a batch at a time. So the finished part of the batch under
# way counts on both sides of the comparison. Otherwise a batch under way would look like an error.

ERROR_SHARE: Final = 0.05
"""The share of a round's target by which all peers together may be wrong."""

REST_ERROR_SHARE: Final = 0.03  # the same for what a head tells of all other cohorts

SHORTEST_SECONDS: Final = 0.25
"""The shortest time between two slots that differ only in samples. A write goes to five replicas at
once and to the others within a second; this limit keeps it under a hundredth of a processor."""

AT_ONCE_SECONDS: Final = 1e-3


@dataclass(frozen=True)
class Said:
    """The slot that was published last, and when (monotonic)."""

    slot: ProgressSlot
    at: float


def say_again_in(
    said: Said,
    mine: ProgressSlot,
    found: Estimate,
    largest_batch: int,
    now: float,
) -> float:
    """Seconds until `mine` must be written, as far as is known now; 0: at once."""
    age = now - said.at
    if mine.samples < said.slot.samples or not alike_but_for_samples(said.slot, mine):
        return 0.0
    rest = _from_now(SAY_AGAIN_SECONDS - age)
    part = found.own_part if (found.epoch, found.history) == (mine.epoch, mine.history) else inf
    error = _progress(mine) - _carried(said, now, part)
    others = len(found.peers) + 1
    batch = mine.batch / 2 if mine.batch else largest_batch
    tolerance = max(batch, ERROR_SHARE * found.target_samples / others)
    is_news = _is_first_word(said.slot, mine) or said.slot.beside != mine.beside
    is_news = is_news or (said.slot.under_way < 0) != (mine.under_way < 0)
    is_news = is_news or _is_wrong_about_the_rest(said.slot, mine, age, found.target_samples)
    if abs(error) > tolerance or is_news:
        return min(rest, _from_now(SHORTEST_SECONDS - age))
    return rest


def _is_wrong_about_the_rest(
    said: ProgressSlot, mine: ProgressSlot, age: float, target: int
) -> bool:
    """Whether a head has told its cohort something else about the other cohorts."""
    if bool(said.rest_cohorts) != bool(mine.rest_cohorts):
        return True
    carried = min(said.rest_samples + said.rest_per_second * age, target)
    return abs(mine.rest_samples - carried) > REST_ERROR_SHARE * target


def _from_now(seconds: float) -> float:
    """0 for a time that is too short for clocks and timers; waiting for it might never end."""
    return seconds if seconds > AT_ONCE_SECONDS else 0.0


def alike_but_for_samples(said: ProgressSlot, mine: ProgressSlot) -> bool:
    """Whether the slots differ only in samples, rates and times."""
    alike = msgspec.structs.replace(
        mine,
        samples=said.samples,
        samples_per_second=said.samples_per_second,
        batch=said.batch,
        batch_seconds=said.batch_seconds,
        under_way=said.under_way,
        epoch_seconds=said.epoch_seconds,
        beside=said.beside,
        rest_cohorts=said.rest_cohorts,
        rest_samples=said.rest_samples,
        rest_per_second=said.rest_per_second,
    )
    return alike == said


def _is_first_word(said: ProgressSlot, mine: ProgressSlot) -> bool:
    """Whether `mine` says for the first time how large the batches are, or how long they take."""
    return (not said.batch and mine.batch > 0) or (
        not said.batch_seconds and mine.batch_seconds > 0.0
    )


def _progress(slot: ProgressSlot) -> float:
    """The samples, plus the finished part of the batch under way."""
    if slot.averaging or slot.under_way <= 0.0 or not slot.batch_seconds:
        return slot.samples
    return slot.samples + slot.batch * min(1.0, slot.under_way / slot.batch_seconds)


def _carried(said: Said, now: float, part: float) -> float:
    """The samples that others assume now (staff.py): the peer computes its part of the plan."""
    slot, age = said.slot, min(now - said.at, CARRIED_SECONDS)
    if slot.averaging or not slot.has_begun:
        return slot.samples
    rate = slot.batch / slot.batch_seconds if slot.batch_seconds else slot.samples_per_second
    return min(_progress(slot) + rate * age, max(part, slot.samples))


log = logging.getLogger("potluck.accumulation")

WRITE_SECONDS: Final = 3.0  # as long as the rarest reading waits for the next one
FAILED_SECONDS: Final = 1.0  # before another try, if no peer took the slot
SAID_REMEMBERED: Final = 16  # own slots, to tell them from another node's with the same identity


class Publishing:
    """Publishes one slot. `mine`: this peer's progress now; `measured`: the same, with its rate as
    of now; `again_in`: the seconds until the last slot must be written again. For trio's thread
    only."""

    def __init__(
        self,
        dht: Dht,
        key: str,
        mine: Callable[[], ProgressSlot],
        measured: Callable[[], ProgressSlot],
        again_in: Callable[[Said], float],
    ) -> None:
        self._dht, self._key = dht, key
        self._mine, self._measured, self._again_in = mine, measured, again_in
        self.said: Said | None = None
        """The last slot, whether others can read it already or not."""
        self._is_to_say = True
        """The next slot is written at once, whatever the last one was."""
        self._out: ProgressSlot | None = None
        """The slot that others can read."""
        self._own: deque[ProgressSlot] = deque(maxlen=SAID_REMEMBERED)
        self._left: str | None = None
        """The key under which the slot was published before, until it is withdrawn there."""
        self._is_away = False
        self._wants, self._was_said = trio.Event(), trio.Event()

    def say_soon(self) -> None:
        """Write a slot if there is a reason to."""
        self._wants.set()

    def say_at_once(self) -> None:
        """Write a slot, even if only the samples differ."""
        self._is_to_say = True
        self._wants.set()

    def set_away(self, *, is_away: bool) -> bool:
        """Withdraw the slot, or publish it again. Returns whether that is a change."""
        is_new, self._is_away = is_away != self._is_away, is_away
        if is_new:
            self._wants.set()
        return is_new

    def move_to(self, key: str) -> None:
        """Publish under another key from now on."""
        if key != self._key:
            if self._out is not None:
                self._left = self._key
            if self._left == key:
                self._left = None  # back before anything was written elsewhere
            self._key, self._out, self._is_to_say = key, None, True
            self._wants.set()

    def is_own(self, slot: ProgressSlot) -> bool:
        """Whether this node has published this slot lately."""
        return slot in self._own

    async def brought_out(self) -> None:
        """Wait until others can read where this peer is, if it is not away."""
        while not (self._is_away or self._is_out()):
            self._wants.set()
            await self._was_said.wait()

    async def told(self) -> None:
        """Write the slot, again if no peer took it, and wait until it is written."""
        self.say_at_once()
        await self._was_said.wait()

    async def run(self) -> None:
        """Publish whenever there is a reason to, for ever."""
        while True:
            with trio.move_on_after(self._say_again_in()):
                await self._wants.wait()
            self._wants = trio.Event()
            if self._is_away:
                await self._stay_away()
            if self._say_again_in() <= 0.0 and not await self._say():
                await trio.sleep(FAILED_SECONDS)
            elif self._left is not None:
                left, self._left = self._left, None
                with trio.move_on_after(WRITE_SECONDS):
                    await self._withdraw(left)

    async def withdraw(self) -> None:
        """Withdraw the slot: this peer is gone."""
        await self._withdraw(self._key)

    async def _withdraw(self, key: str) -> None:
        try:
            await self._dht.withdraw(key)
        except PotluckError as error:
            log.debug("progress could not be withdrawn: %s", error)

    async def _stay_away(self) -> None:
        if self.said is not None:
            with trio.move_on_after(WRITE_SECONDS):
                await self.withdraw()
        self._out = None
        while self._is_away:
            await self._wants.wait()
            self._wants = trio.Event()
        self._is_to_say = True

    def _say_again_in(self) -> float:
        return 0.0 if self._is_to_say or self.said is None else self._again_in(self.said)

    async def _say(self) -> bool:
        slot, key = self._measured(), self._key
        self.said, self._is_to_say = Said(slot, trio.current_time()), False
        self._own.append(slot)
        try:
            with trio.move_on_after(WRITE_SECONDS):
                await self._dht.put(key, slot, SLOT_SECONDS, keep_up=False)
        except PotluckError as error:
            log.debug("progress could not be published: %s", error)
            self._is_to_say = True
            return False
        if key != self._key:
            self._left = key  # it has moved meanwhile
            return True
        self._out = slot
        self._was_said.set()
        self._was_said = trio.Event()
        return True

    def _is_out(self) -> bool:
        return self._out is not None and alike_but_for_samples(self._out, self._mine())
