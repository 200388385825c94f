"""Peers of a simulated run that lie, each in one way, from some moment on.

    directory = lying(dht, told, also)    # lie.told and lie.also_told say what becomes of slots

A liar is a trainer as all others, but what it says is changed on its way into the directory, or it
brings something else to rounds (virtual_trainer.py). Members that sign two results, or hand down
another one than was decided, are simulated in tests/moshpit: there it is a matter of one group.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, cast

import msgspec

from protocols.accumulation.lineage import HISTORY_BYTES
from protocols.accumulation.progress_slot import LARGEST_SAMPLES, ProgressSlot
from protocols.dht import Dht
from protocols.moshpit.cohorts import LARGEST_UPLINK

BROUGHT_SHARE = 0.2  # of what it has, by one that keeps its samples back


class Lie(enum.Enum):
    """What a liar does."""

    CLAIMS = "claims the samples of half a step beside its own"
    KEEPS = "brings a part of what it says"
    BOASTS = "says as head that its cohort has all samples of the step"
    TELLS = "tells its cohort as head that the others have all samples of the step"
    REPEATS = "says the same for ever"
    SLEEPS = "claims samples and comes to no round"
    HURRIES = "says that its cohort has made a step more"

    @property
    def is_of_heads(self) -> bool:
        return self in (Lie.BOASTS, Lie.TELLS)

    def told(self, slot: ProgressSlot, first: ProgressSlot, target: int) -> ProgressSlot:
        """What it says in place of this slot. `first`: what it said last before it began to lie."""
        is_sum = slot.peers > 0
        samples, rest = slot.samples, slot.rest_samples
        match self:
            case Lie.CLAIMS if not is_sum:
                samples = min(samples + target // 2, LARGEST_SAMPLES)
            case Lie.BOASTS if is_sum:
                samples = min(target, LARGEST_SAMPLES)
            case Lie.TELLS if slot.rest_cohorts:
                rest = min(target, LARGEST_SAMPLES)
            case Lie.REPEATS if not is_sum:
                return first
            case Lie.HURRIES if is_sum:
                return self.also_told(slot) or slot
        return msgspec.structs.replace(slot, samples=samples, rest_samples=rest)

    def also_told(self, slot: ProgressSlot) -> ProgressSlot | None:
        """What it says of its cohort, as if it were the head."""
        if self is not Lie.HURRIES or slot.cohorts == 1:
            return None
        return msgspec.structs.replace(
            slot,
            epoch=slot.epoch + 1,
            history=b"hurry".ljust(HISTORY_BYTES),
            samples=0,
            averaging=False,
            follows=False,
            peers=max(1, slot.peers),
            rest_cohorts=0,
            uplink=LARGEST_UPLINK,
        )


class _LyingDirectory:
    """All but `put` is the directory's own."""

    def __init__(
        self,
        dht: Dht,
        told: Callable[[ProgressSlot], ProgressSlot],
        also: Callable[[ProgressSlot], tuple[str, ProgressSlot] | None],
    ) -> None:
        self._dht, self._told, self._also = dht, told, also

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dht, name)

    async def put(self, key: str, value: object, ttl: float, **how: Any) -> object:
        if isinstance(value, ProgressSlot):
            also = self._also(value)
            if also is not None:
                await self._dht.put(also[0], also[1], ttl, **how)
            value = self._told(value)
        return await self._dht.put(key, value, ttl, **how)


def lying(
    dht: Dht,
    told: Callable[[ProgressSlot], ProgressSlot],
    also: Callable[[ProgressSlot], tuple[str, ProgressSlot] | None],
) -> Dht:
    """This directory, in which a slot of progress is what `told` makes of it, and what `also` makes
    of it is under another key beside it."""
    return cast(Dht, _LyingDirectory(dht, told, also))
