"""Progress on one node: says how this peer is, reads how the others are, keeps the estimate.

    async with open_tracker(network, dht, TrackerSettings(run, target_samples), mine) as tracker:
        tracker.note(mine)                   # from any thread, whenever something has changed
        tracker.estimate                     # from any thread: a plain attribute

What others carry forward by our rate is right most of the time, so a slot is written only when
they would be wrong by more than a little, when something else than the samples has changed, or
when the slot would soon be over. Reading is as frequent as the estimate asks for.

Promises: everything ends with the `async with`, and the slot is taken back. Neither `note` nor
`estimate` ever waits. A directory that cannot be reached is tried again for ever; what was known
ends with the life of its slots.

Easy to get wrong: `estimate` is replaced, never changed; take it once and look at that one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from protocols.accumulation.lifecycle_events import Ending
from protocols.accumulation.progress import Estimate
from protocols.accumulation.progress_slot import ProgressSlot
from protocols.dht.service import Dht
from protocols.identity import PeerId
from protocols.network import Network


@dataclass(frozen=True)
class TrackerSettings:
    """- `run`: the name of the run. - `target_samples`: of one round."""

    run: str
    target_samples: int


@asynccontextmanager
async def open_tracker(
    network: Network, dht: Dht, settings: TrackerSettings, mine: ProgressSlot
) -> AsyncIterator[Tracker]:
    """Publish and read until the block ends. `mine` is what is said first. Stub."""
    if network and dht and settings and mine:
        raise NotImplementedError
    yield Tracker()


class Tracker:
    """Made by `open_tracker`."""

    estimate: Estimate
    """The latest. Plain attribute; any thread may read it."""

    def note(self, mine: ProgressSlot, *, at_once: bool = False) -> None:
        """How this peer is now. Any thread; never waits. `at_once`: published without delay (also
        what is not samples always is). `samples_per_second` in it is replaced by what the tracker
        measures from the samples that it is told."""
        raise NotImplementedError(mine, at_once)

    def look_now(self) -> None:
        """Read the others' slots as soon as can be. Any thread; never waits."""
        raise NotImplementedError

    async def looked(self, after: int = 0) -> Estimate:
        """Wait for an estimate whose number is higher than this."""
        raise NotImplementedError(after)

    def slots(self) -> dict[PeerId, ProgressSlot]:
        """What all others say that are alive and fit: where a state may be had."""
        raise NotImplementedError

    def round_ended(self, ending: Ending, members: Iterable[PeerId], *, applied: bool) -> None:
        """A round of this peer has ended: who was in it. Those who had samples and did not come
        are counted less from then on. trio's thread."""
        raise NotImplementedError(ending, members, applied)

    def state_refused(self, peer: PeerId, reason: str) -> None:
        """A peer did not have the state that its slot claims: it is ignored for a while."""
        raise NotImplementedError(peer, reason)

    async def changed(self) -> Estimate:
        """Wait for the next estimate that differs from the one before."""
        await trio.lowlevel.checkpoint()
        raise NotImplementedError
