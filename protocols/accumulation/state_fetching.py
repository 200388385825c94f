"""Fetching a state from several peers at once. Stub: signatures are final, bodies follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocols.accumulation.state import LiveState, TrainingState
from protocols.identity import PeerId
from protocols.rpc import Rpc


@dataclass(frozen=True)
class StateSource:
    """A peer that serves state, as its progress slot says."""

    peer: PeerId
    epoch: int
    history: bytes
    digest: bytes = b""  # not computed yet
    signature: bytes = b""
    torch: str = ""


@dataclass(frozen=True)
class Fetched:
    """A state that was fetched and verified, and what came of each source."""

    state: TrainingState
    bytes_from: Mapping[PeerId, int]
    given_up: Mapping[PeerId, str]  # why, in words
    liars: Mapping[PeerId, str]
    seconds: float


async def fetch_state(
    rpc: Rpc,
    sources: Callable[[], Sequence[StateSource]],
    mine: LiveState,
    *,
    at_least_epoch: int = 0,
    history: bytes | None = None,
    keep_in: Path | None = None,
) -> Fetched:
    """The state of up-to-date peers, verified piece by piece.

    `sources` is asked again while fetching, so that new peers can help. `mine` is what this
    peer's own model looks like (its values do not matter): another model is refused before memory
    is taken. `history`: take only states of this history. With `keep_in` verified pieces also go
    to a file there, and a later call goes on from it.

    FetchFailed, naming what befell each source, when nobody is left or nothing came for long.
    Limit the total with a cancel scope; a cancelled fetch goes on where it was with `keep_in`.
    """
    raise NotImplementedError
