"""The trio side of training together: averager, progress, state, behind one bridge.

    async with open_collaboration(network, rpc, dht, CollaborationSettings(...)) as collaboration:
        await trio.to_thread.run_sync(train, collaboration.bridge)

Promises: everything ends with the block, within seconds, also while the training thread is in the
middle of a step: whoever waits in the bridge is woken with `CollaborationEnded`, and whoever does
not is told at the next call.

Easy to get wrong: the block does not wait for the training thread. Who started it joins it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from protocols.accumulation.bridge import Bridge
from protocols.dht.service import Dht
from protocols.moshpit.layout import CodecName
from protocols.moshpit.settings import MATCHMAKING_SECONDS, ROUND_SECONDS
from protocols.network import Network
from protocols.rpc import Rpc


@dataclass(frozen=True)
class CollaborationSettings:
    """What this node needs to know of a run. Those of a run agree on the first three.

    - `run`: its name.
    - `target_batch`: samples of one step of the whole collaboration.
    - `codec`: how averaged values travel, for all or by the parameters' names (others: none).
    - `grace_seconds`: how long a round waits for those who are expected and not there yet.
      Longer than the slowest peer's own step, or that peer is never in time.
    - `round_seconds`: how long a round may take from its list to its decision.
    - `client`: this node can only dial out; it reduces nothing for others and serves no state.
    - `up_bytes_per_second`, `down_bytes_per_second`: limits of this connection, 0 is measured.
    - `fetching_folder`: where a state that is being fetched is kept, so that a restart goes on
      where the last attempt ended; None keeps it in memory.
    """

    run: str
    target_batch: int
    codec: CodecName | Mapping[str, CodecName] = "none"
    grace_seconds: float = MATCHMAKING_SECONDS
    round_seconds: float = ROUND_SECONDS
    client: bool = False
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    fetching_folder: Path | None = field(default=None)


class Collaboration:
    """Made by `open_collaboration`. `bridge` is for the training thread."""

    bridge: Bridge


@asynccontextmanager
async def open_collaboration(
    network: Network, rpc: Rpc, dht: Dht, settings: CollaborationSettings
) -> AsyncIterator[Collaboration]:
    """Take part in a run from this node, until the block ends. One for each rpc."""
    if network and rpc and dht and settings:
        raise NotImplementedError
    yield Collaboration()
