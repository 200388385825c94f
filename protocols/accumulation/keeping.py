"""Where a run's state outlives its peers: what the optimizer tells whoever keeps checkpoints.

The optimizer begins from `newest`, so that a peer that keeps the run's checkpoints never shows
itself at epoch 0 when it has a later state: others that wait for it would begin anew. After each
step it says `advanced`. How and when the state is written is the keeper's own affair
(node/run/checkpoint_keeper.py).

Easy to get wrong: `advanced` is called by the thread that has just stepped, which must not wait for
a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from protocols.accumulation.events import Event
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.training_state import LiveState, TrainingState


class StateHolder(Protocol):
    """The state of a peer in a run, as standing.py has it."""

    lock: StateLock
    at: tuple[int, bytes]
    """Epoch and history of the state."""

    def look(self) -> LiveState:
        """The state as it is, not copied; with the lock for reading."""


class StateKeeper(Protocol):
    """Keeps states, for one optimizer."""

    def newest(self) -> TrainingState | None:
        """The state to begin from, if there is one. Asked once, when the optimizer is made."""

    def entered(self, holder: StateHolder, tell: Callable[[Event], None]) -> None:
        """The optimizer takes part from now on; events are told through `tell`, in any thread."""

    def advanced(self) -> None:
        """The state has changed. Any thread; never waits."""
