"""A server's experts: which it takes, and what becomes of them.

async with open_expert_host(rpc, directory, grids, make, folder, settings, tell) as host:
    host.hosted()                     # what it serves now
    await host.leave(seconds=4)       # withdraw, and hand the last copies over
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from protocols.experts.directory import ExpertDirectory
from protocols.experts.grid import ExpertGrid, Uid
from protocols.experts.runtime import ExpertBackend, Runtime, open_runtime
from protocols.identity import PeerId
from protocols.rpc import Rpc

CHECKPOINT_SECONDS: Final = 60.0
LARGEST_COPIES_BYTES: Final = 2 << 30

Origin = Literal["new", "own copy", "taken over"]
Maker = Callable[[Uid], ExpertBackend]
"""Makes an expert with fresh weights, which are the same at all servers."""


@dataclass(frozen=True)
class HostSettings:
    """- `most_experts`: how many experts the server hosts at most, those that it takes over too.
    - `uids`: exactly these; empty: those that need a server most.
    - `checkpoint_seconds`: how often each expert is saved, and its copies are sent.
    - `largest_copies_bytes`: how much it keeps for others, on disk.
    """

    most_experts: int
    uids: tuple[Uid, ...] = ()
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    largest_copies_bytes: int = LARGEST_COPIES_BYTES


@dataclass(frozen=True)
class HostedExpert:
    """An expert that this server hosts. `since` and `saved` are times of trio's clock; `saved` is
    None before the first checkpoint. `steps` counts those on other servers before, too."""

    uid: Uid
    origin: Origin
    since: float
    steps: int
    examples: int
    seconds: float
    saved: float | None


@dataclass(frozen=True)
class ExpertTaken:
    """The server hosts this expert now."""

    uid: Uid
    origin: Origin
    steps: int


@dataclass(frozen=True)
class ExpertLost:
    """Another server hosts this expert too, and keeps it. This one has stopped."""

    uid: Uid


@dataclass(frozen=True)
class ExpertSaved:
    """The expert was saved, and these servers have taken a copy."""

    uid: Uid
    steps: int
    keepers: tuple[PeerId, ...]


@dataclass(frozen=True)
class SavingFailed:
    """The expert could not be saved, for this reason. The server goes on."""

    uid: Uid
    why: str


HostEvent = ExpertTaken | ExpertLost | ExpertSaved | SavingFailed


def _tell_nobody(_event: HostEvent) -> None:
    pass


@asynccontextmanager
async def open_expert_host(
    rpc: Rpc,
    directory: ExpertDirectory,
    grids: Sequence[ExpertGrid],
    make: Maker,
    folder: Path,
    settings: HostSettings,
    tell: Callable[[HostEvent], None] = _tell_nobody,
) -> AsyncIterator[ExpertHost]:
    """Host experts of these grids for the length of the block. Call it once for an Rpc."""
    async with open_runtime() as runtime:
        yield ExpertHost(rpc, runtime, directory, grids, make, folder, settings, tell)


class ExpertHost:
    """Made by `open_expert_host`."""

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        directory: ExpertDirectory,
        grids: Sequence[ExpertGrid],
        make: Maker,
        folder: Path,
        settings: HostSettings,
        tell: Callable[[HostEvent], None],
    ) -> None:
        self.runtime = runtime
        """Computes for the experts. A trainer on the same node calls them there."""
        self._rpc, self._directory, self._grids = rpc, directory, tuple(grids)
        self._make, self._folder, self._settings, self._tell = make, folder, settings, tell

    @property
    def load(self) -> float:
        """About how many seconds of work wait here."""
        raise NotImplementedError

    @property
    def paused(self) -> bool:
        raise NotImplementedError

    def hosted(self) -> tuple[HostedExpert, ...]:
        raise NotImplementedError

    def pause(self) -> None:
        """Withdraw from the directory, and answer Busy."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    async def leave(self, seconds: float) -> None:
        """Stop serving, withdraw, save all experts, and send their last copies, within this time.
        Returns sooner if all is done. End the block afterwards."""
        raise NotImplementedError
