"""Serving the state of the current epoch to newcomers. Stub: signatures are final, bodies follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocols.accumulation.state import LiveState
from protocols.accumulation.state_lock import StateLock
from protocols.rpc import Rpc


@dataclass(frozen=True)
class StateOffer:
    """What this peer can say of its state in its progress slot."""

    epoch: int
    history: bytes
    digest: bytes


@dataclass(frozen=True)
class StateServingSettings:
    """How much serving may cost."""

    most_downloads: int = 4
    upload_bytes_per_second: float | None = None


class StateServer:
    """Names the state of each epoch by its digest and serves it. One per node and run."""

    def __init__(
        self,
        rpc: Rpc,
        look: Callable[[], LiveState],
        lock: StateLock,
        settings: StateServingSettings | None = None,
    ) -> None:
        """`look` is called in a worker thread, under `lock.reading()`."""
        raise NotImplementedError

    @property
    def offer(self) -> StateOffer | None:
        """Of the newest epoch whose digest is known; a plain attribute to read from any thread."""
        raise NotImplementedError

    def advanced(self) -> None:
        """The epoch has changed (trio side; from another thread: `trio.from_thread.run_sync`)."""
        raise NotImplementedError

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, then stop serving."""
        raise NotImplementedError

    async def offered(self, after: StateOffer | None = None) -> StateOffer:
        """Wait for an offer that is not `after`."""
        raise NotImplementedError
