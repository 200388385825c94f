"""The trio side of training together: averager, progress and state, behind one bridge.

    async with open_collaboration(network, rpc, dht, CollaborationSettings(...)) as collaboration:
        await trio.to_thread.run_sync(train, collaboration.bridge)

Progress and state begin when an optimizer enters the bridge: before that nobody knows what model
this peer has.

Promises: everything ends with the block, within seconds, also while the training thread is in the
middle of a step: whoever waits in the bridge is woken with `CollaborationEnded`, and whoever does
not is told at the next call.

Easy to get wrong: the block does not wait for the training thread. Who started it joins it. And
the directory's families must contain GROUP and PROGRESS (node/directory.py has them).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from protocols.accumulation.bridge import Bridge
from protocols.accumulation.events import Event
from protocols.accumulation.far_side import NetworkSide
from protocols.accumulation.keeping import Keeper
from protocols.accumulation.parameters import Codecs
from protocols.accumulation.progress_slot import MOST_PEERS, ProgressSlot
from protocols.dht.service import Dht
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.averager import Averager, open_averager
from protocols.moshpit.settings import (
    GROUP_SIZE,
    MATCHMAKING_SECONDS,
    ROUND_SECONDS,
    AveragerSettings,
)
from protocols.network import Network
from protocols.rpc import Rpc


@dataclass(frozen=True)
class CollaborationSettings:
    """What this node needs to know of a run. All peers of a run say the same `run`,
    `target_batch`, `codec`, `round_seconds`, `group_size` and `approximate`.

    - `run`: its name.
    - `target_batch`: samples of one step of the whole collaboration.
    - `codec`: how averaged values travel, for all or by the parameters' names (others: none).
    - `grace_seconds`: how long at most a round waits for those who are expected; for so long
      without anybody's coming, a sixth of it (moshpit/closing_time.py). A peer whose own batch
      takes longer than that waits for a round that is nearly due instead of beginning one.
    - `round_seconds`: how long a round may take from its list to its decision.
    - `group_size`: the most members of one group, which is how many peers may be in a round. Where
      more take part, the others follow the run, and take a place when one is free.
    - `approximate`: True lets all of them take part: where they do not fit into one group, a step
      is made with an average over a grid. Its groups do not hold the same bits.
    - `client`: this node can only dial out; it reduces nothing for others and serves no state.
    - `name`: what its owner wants to be called by the others.
    - `up_bytes_per_second`, `down_bytes_per_second`: what the owner allows, for averaging and for
      the states that others fetch from here; 0 is measured, and what does not slow the training.
    - `begins`: False waits, when the optimizer is made, until the run has made a step or somebody
      is there who keeps its checkpoints. With this at all peers but the keeper, nobody can begin
      the run anew while the keeper is away (docs/assumptions.md, "Behind").
    - `fetching_folder`: where a state that is being fetched is kept, so that a restart goes on
      where the last attempt ended; None keeps it in memory.
    """

    run: str
    target_batch: int
    codec: Codecs = "none"
    grace_seconds: float = MATCHMAKING_SECONDS
    round_seconds: float = ROUND_SECONDS
    group_size: int = GROUP_SIZE
    approximate: bool = False
    client: bool = False
    name: str = ""
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    begins: bool = True
    fetching_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.target_batch < 1:
            raise ProtocolMisuse(
                f"A step cannot be made of {self.target_batch} samples.",
                advice="Set the target batch to what one machine would use, or larger.",
            )
        self.averager_settings()  # which refuses what makes no sense, by name

    @property
    def places(self) -> int:
        """How many peers may be in a round."""
        return MOST_PEERS if self.approximate else self.group_size

    def averager_settings(self) -> AveragerSettings:
        return AveragerSettings(
            run=self.run,
            group_size=self.group_size,
            matchmaking_seconds=self.grace_seconds,
            round_seconds=self.round_seconds,
            up_bytes_per_second=self.up_bytes_per_second,
            down_bytes_per_second=self.down_bytes_per_second,
            reduces=not self.client,
        )


class Collaboration:
    """Made by `open_collaboration`. `bridge` is for the training thread; the rest is trio's."""

    def __init__(self, bridge: Bridge, side: NetworkSide, averager: Averager) -> None:
        self.bridge = bridge
        self.averager = averager
        self._side = side

    def last_events(self) -> tuple[Event, ...]:
        """What happened lately, the newest last."""
        return tuple(self.bridge.events)

    def peers(self) -> dict[PeerId, ProgressSlot]:
        """What the others in the run say of themselves, as far as it fits and they live."""
        return self._side.peers()

    def mine(self) -> ProgressSlot | None:
        """What this peer says, with its own measured rate, once an optimizer has entered."""
        return self._side.mine()

    def events(self) -> trio.MemoryReceiveChannel[Event]:
        """What happens from now on. Who falls far behind misses the oldest."""
        return self._side.subscribe()


@asynccontextmanager
async def open_collaboration(
    network: Network,
    rpc: Rpc,
    dht: Dht,
    settings: CollaborationSettings,
    *,
    keeper: Keeper | None = None,
) -> AsyncIterator[Collaboration]:
    """Take part in a run from this node, until the block ends. One for each rpc. The optimizer
    begins from what the `keeper` has, and gives it what to keep.

    Errors of the block come out unwrapped.
    """
    bridge = Bridge(
        settings.run,
        settings.target_batch,
        settings.codec,
        settings.grace_seconds,
        trio.lowlevel.current_trio_token(),
    )
    bridge.keeper, bridge.begins = keeper, settings.begins
    bridge.group_size, bridge.approximate = settings.group_size, settings.approximate
    failure: BaseException | None = None
    async with (
        open_averager(network, rpc, dht, settings.averager_settings()) as averager,
        trio.open_nursery() as nursery,
    ):
        side = NetworkSide(network, rpc, dht, averager, settings, nursery)
        bridge.set_far_side(side)
        nursery.start_soon(bridge.hand_on_notes)
        try:
            yield Collaboration(bridge, side, averager)
        except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            failure = error
        finally:
            bridge.end()  # first, so that a training thread is never told of a mere cancellation
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
