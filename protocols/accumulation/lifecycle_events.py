"""What happens to a peer in a run, and what it is to do: the words of its lifecycle.

`lifecycle.py` says which of these effects follows from which event. They are plain data: an
effect is carried out by whoever drives the lifecycle (optimizer.py), in the order it came in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protocols.accumulation.progress import Estimate
from protocols.identity import PeerId


class Ending(enum.Enum):
    """How a round ended for this peer (moshpit/outcome.py)."""

    COMMITTED = "committed"
    DISCARDED = "discarded"
    LEFT_OUT = "left out"
    ALONE = "alone"


# -- what happens


@dataclass(frozen=True)
class Contributed:
    """A batch was computed with this peer's parameters as they are."""

    samples: int
    finite: bool = True


@dataclass(frozen=True)
class Estimated:
    estimate: Estimate


@dataclass(frozen=True)
class Averaged:
    """The round that `Average` asked for has ended. `weight`, `digest` and `members` are of what
    was committed, with this peer or (LEFT_OUT) without it; a weight of 0 is unknown. `left_out`:
    who was in the group too, and knows that its data is not in it. `votes`: over a grid, where
    `members` are only those of the last group, how many of all who are in the result have had a
    part in the run's steps.
    `begun_without`: DISCARDED, because these have begun without this peer. `in_doubt`: DISCARDED,
    but `members` may have made the step.

    For ALONE, `digest` is 16 bytes or more that nobody else has, by chance: a step that is made
    alone makes a history of its own.
    """

    ending: Ending
    weight: float = 0.0
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()
    left_out: tuple[PeerId, ...] = ()
    votes: float | None = None
    reason: str = ""
    begun_without: tuple[PeerId, ...] = ()
    in_doubt: bool = False


@dataclass(frozen=True)
class Stepped:
    """The step that `Step` or `StepAlone` asked for is made."""


@dataclass(frozen=True)
class ParametersAveraged:
    """The averaging that `AverageParameters` asked for has ended. What was committed is taken
    over by the time this is told."""

    ending: Ending
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """A state that `Fetch` asked for is taken over."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class FetchFailed:
    reason: str


@dataclass(frozen=True)
class Restored:
    """A state was loaded from this peer's own disk."""

    epoch: int
    history: bytes


Event = (
    Contributed
    | Estimated
    | Averaged
    | Stepped
    | ParametersAveraged
    | Fetched
    | FetchFailed
    | Restored
)


# -- what is to be done


@dataclass(frozen=True)
class Average:
    """Begin the round that ends this epoch, with what was accumulated; `weight` is its samples.
    In delayed mode: first take over the parameters of the last step, if they wait to be."""

    epoch: int
    history: bytes
    weight: int
    expected: int
    awaited: frozenset[PeerId] = frozenset()


@dataclass(frozen=True)
class Step:
    """Apply the committed result to the parameters of `epoch`; then tell `Stepped`. The life is
    at the next epoch already, with `history`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class StepAlone:
    """Nobody else is in the run: make the step of `epoch` with this peer's own gradients, as they
    were given to the round; then tell `Stepped`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class AverageParameters:
    """Average the parameters, each peer's with the same weight, with those at the same epoch and
    history; then tell `ParametersAveraged`."""

    epoch: int
    history: bytes
    expected: int


@dataclass(frozen=True)
class Fetch:
    """Take the state of others who are at this epoch or later; `peers` claim to be. With a
    `history` only that one will do. Then tell `Fetched` or `FetchFailed`."""

    reason: str
    at_least_epoch: int
    history: bytes | None
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class DropGradients:
    """Forget all that was accumulated (in delayed mode: also what was in the round)."""

    reason: str
    samples: int


@dataclass(frozen=True)
class KeepGradients:
    """The round brought no step: what was in it is as good as before, and is tried again. In
    delayed mode: add to it what was accumulated meanwhile."""

    reason: str
    samples: int


@dataclass(frozen=True)
class HoldBack:
    """The batch that was just computed is not finite: leave it out."""

    reason: str
    samples: int


@dataclass(frozen=True)
class Announce:
    """Say at once where this peer is now."""


@dataclass(frozen=True)
class LookAgain:
    """Read at once what the others say: the next decision needs an estimate with a higher number
    than the last one that was taken."""


Effect = (
    Average
    | Step
    | StepAlone
    | AverageParameters
    | Fetch
    | DropGradients
    | KeepGradients
    | HoldBack
    | Announce
    | LookAgain
)
