"""The interface between the optimizer and a keeper of checkpoints.

The optimizer begins from `newest`. So a peer that keeps the run's checkpoints never publishes epoch
0 if it has a later state; others that wait for it would begin anew. After each step the optimizer
calls `advanced`. The keeper decides how and when to write the state
(node/run/checkpoint_keeper.py).

Easy to get wrong: `advanced` is called by the thread that has just stepped, which must not wait for
a disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from protocols.accumulation.events import TrainingEvent
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.training_state import LiveState, TrainingState


class StateHolder(Protocol):
    """The state of a peer in a run, as standing.py has it."""

    lock: StateLock
    at: tuple[int, bytes]
    """Epoch and history of the state."""

    def look(self) -> LiveState:
        """The live state, not copied. Call it with the lock held for reading."""


class StateKeeper(Protocol):
    """Keeps states, for one optimizer."""

    def newest(self) -> TrainingState | None:
        """The state to begin from, if there is one. Called once, when the optimizer is made."""

    def entered(self, holder: StateHolder, tell: Callable[[TrainingEvent], None]) -> None:
        """The optimizer takes part from now on. Report events through `tell`, from any thread."""

    def advanced(self) -> None:
        """The state has changed. The thread that changed it; waits for a copy at most."""
