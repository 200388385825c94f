"""What came of each source of a state, while it is being fetched: who brought what, who lied.

One account is kept over all attempts of one fetch, so that a liar stays one, and so that patience
ends when nothing came from anybody, whatever was tried meanwhile.

Easy to get wrong: what another peer *says* went wrong proves nothing against anybody. A liar is
only who sent bytes that do not have the digest it was asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import trio

from protocols.accumulation.keeping_up import FetchFailed, KeepingUp
from protocols.accumulation.state_messages import (
    MANIFEST,
    STALL_SECONDS,
    STATE_PROTOCOL,
    ManifestAnswer,
    ManifestRequest,
)
from protocols.accumulation.state_paces import Paces
from protocols.bulk import Transfer
from protocols.errors import DeadlineExceeded, MalformedMessage
from protocols.identity import PeerId
from protocols.rpc import Rpc

log = logging.getLogger("potluck.state")

ALIVE_SECONDS = STALL_SECONDS / 4  # Transfer.say_alive finds it due no sooner
ASK_SECONDS = 20.0  # for a manifest or a place: dialling, and the donor's copy of some gigabytes


class Lied(MalformedMessage):
    """A source sent bytes that are not those of the digest it was asked for."""


@dataclass(frozen=True)
class FetchSettings:
    """- `most_sources`: how many are asked at the same time.
    - `patience_seconds`: without a byte of a piece from a source it is given up.
    - `give_up_seconds`: without a byte from anybody, the whole is.
    """

    most_sources: int = 6
    patience_seconds: float = 15.0
    give_up_seconds: float = 60.0


class Account:
    """Of one fetch. `given_up` and `liars` say why, in words."""

    def __init__(
        self,
        rpc: Rpc,
        settings: FetchSettings,
        paces: Paces | None = None,
        keeping_up: KeepingUp | None = None,
    ) -> None:
        self.rpc, self.settings, self.paces = rpc, settings, paces or Paces()
        self.keeping_up = keeping_up or KeepingUp()
        self.bytes_from: Counter[PeerId] = Counter()
        self.given_up: dict[PeerId, str] = {}
        self.liars: dict[PeerId, str] = {}
        self._progress_at = trio.current_time()

    def came(self, peer: PeerId, count: int) -> None:
        """So many bytes of a piece have come."""
        self.bytes_from[peer] += count
        self.keeping_up.came(count)
        self._progress_at = trio.current_time()

    @contextmanager
    def wanting(self) -> Iterator[None]:
        """What comes within the block is as much as the links and the donors give."""
        self.keeping_up.wants(trio.current_time())
        try:
            yield
        finally:
            self.keeping_up.has(trio.current_time())

    def gives_up(self, peer: PeerId, why: str) -> None:
        self.given_up[peer] = why
        log.info("%s is given up as a source of the state: %s", peer, why)

    def lied(self, peer: PeerId, error: Lied) -> None:
        """Name a liar, and let nobody here talk with it for a while."""
        self.liars[peer] = error.what
        self.given_up.pop(peer, None)
        log.warning("%s sends what is not the state: %s", peer, error.what)
        self.rpc.blame(peer, STATE_PROTOCOL, error)

    def failure(self) -> FetchFailed | None:
        """Why to give up altogether, if nothing has come for that long."""
        if trio.current_time() - self._progress_at < self.settings.give_up_seconds:
            return None
        told = [f"{peer}: {why}" for peer, why in {**self.given_up, **self.liars}.items()]
        return FetchFailed(
            f"No state came for {self.settings.give_up_seconds:g} seconds.",
            why="; ".join(told) or "Nobody offers one.",
            advice="See with `potluck status` whether peers of this run are reached.",
        )

    async def ask(self, peer: PeerId, request: ManifestRequest) -> ManifestAnswer:
        """A manifest, or a place; or for how long the peer is busy."""
        return await self.rpc.call(peer, MANIFEST, request, timeout=ASK_SECONDS)


async def next_chunk_bytes(
    transfer: Transfer[Any, Any, Any], patience_seconds: float
) -> int | None:
    """Wait for a chunk, and let the source know meanwhile that we do: its size, None at the end.
    DeadlineExceeded when none has come for so long."""
    deadline = trio.current_time() + patience_seconds
    while trio.current_time() < deadline:
        with trio.move_on_after(ALIVE_SECONDS) as waiting:
            size = await transfer.next_chunk_bytes()
        if not waiting.cancelled_caught:
            return size
        await transfer.say_alive()
    raise DeadlineExceeded(f"Nothing came for {patience_seconds:g} seconds.")
