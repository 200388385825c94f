"""When a peer has to say again how far it is. Pure.

    seconds = say_again_in(said, mine, estimate, settings, largest_batch, now)

Others carry a slot forward by the rate in it. So nothing has to be said while that gives what is
true: only when it is wrong by more than a little, when anything but the number of samples is
another, and before the slot is over. What all are wrong by together then stays at a few hundredths
of a round, whether there are four peers or sixty.

Easy to get wrong: samples come a batch at a time. What is done of the batch under way counts here
on both sides, so that half a batch is an error, and a peer that waits is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec

from protocols.accumulation.progress import CARRIED_SECONDS, Estimate, ProgressSettings
from protocols.accumulation.progress_slot import SAY_AGAIN_SECONDS, ProgressSlot

ERROR_SHARE: Final = 0.05
"""Of a round's target, by which all peers together may be wrong."""

SHORTEST_SECONDS: Final = 0.25
"""Between two slots that differ in samples only. A write goes to five replicas at once and to the
rest within a second; this keeps it under a hundredth of a processor."""

AT_ONCE_SECONDS: Final = 1e-3


@dataclass(frozen=True)
class Said:
    """What was published last, and when (monotonic)."""

    slot: ProgressSlot
    at: float


def say_again_in(
    said: Said,
    mine: ProgressSlot,
    found: Estimate,
    settings: ProgressSettings,
    largest_batch: int,
    now: float,
) -> float:
    """Seconds until this has to be said, as it looks now; 0 for at once."""
    age = now - said.at
    if mine.samples < said.slot.samples or not alike_but_for_samples(said.slot, mine):
        return 0.0
    rest = _from_now(SAY_AGAIN_SECONDS - age)
    part = found.own_part if (found.epoch, found.history) == (mine.epoch, mine.history) else inf
    error = _progress(mine) - _carried(said, settings, now, part)
    others = len(found.peers) + 1
    batch = mine.batch / 2 if mine.batch else largest_batch
    tolerance = max(batch, ERROR_SHARE * settings.target_samples / others)
    makes_it_due = (
        not settings.carries_forward
        and mine.samples > said.slot.samples
        and found.others_samples + mine.samples >= settings.target_samples
    )
    is_news = _is_first_word(said.slot, mine) or (said.slot.under_way < 0) != (mine.under_way < 0)
    if abs(error) > tolerance or makes_it_due or is_news:
        return min(rest, _from_now(SHORTEST_SECONDS - age))
    return rest


def _from_now(seconds: float) -> float:
    """Less than clocks and timers can tell apart is now, or one would wait for it for ever."""
    return seconds if seconds > AT_ONCE_SECONDS else 0.0


def alike_but_for_samples(said: ProgressSlot, mine: ProgressSlot) -> bool:
    """But for how many samples there are, how they come, and when this is said."""
    alike = msgspec.structs.replace(
        mine,
        samples=said.samples,
        samples_per_second=said.samples_per_second,
        batch=said.batch,
        batch_seconds=said.batch_seconds,
        under_way=said.under_way,
        epoch_seconds=said.epoch_seconds,
        beside=said.beside,
    )
    return alike == said


def _is_first_word(said: ProgressSlot, mine: ProgressSlot) -> bool:
    """Whether others do not know yet of what size its batches are, or how long they take."""
    return (not said.batch and mine.batch > 0) or (
        not said.batch_seconds and mine.batch_seconds > 0.0
    )


def _progress(slot: ProgressSlot) -> float:
    """Samples, and what is done of the batch under way."""
    if slot.averaging or slot.under_way <= 0.0 or not slot.batch_seconds:
        return slot.samples
    return slot.samples + slot.batch * min(1.0, slot.under_way / slot.batch_seconds)


def _carried(said: Said, settings: ProgressSettings, now: float, part: float) -> float:
    """What others believe by now (progress.py): it computes up to its part of the plan."""
    slot, age = said.slot, min(now - said.at, CARRIED_SECONDS)
    if not settings.carries_forward or slot.averaging:
        return slot.samples
    rate = slot.batch / slot.batch_seconds if slot.batch_seconds else slot.samples_per_second
    return min(_progress(slot) + rate * age, max(part, slot.samples))
