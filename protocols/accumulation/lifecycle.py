"""One peer's way through the epochs: what it does next, whatever happens. Pure.

    life = Lifecycle(Mode(target_samples=4096), epoch=0, history=first)
    for effect in life.take(Contributed(samples=32)):
        match effect:
            case Average(weight=weight, expected=expected): ...
            case Step(): ...
            case Fetch(at_least_epoch=epoch): ...

    joining -> accumulating -> averaging -> stepping (-> averaging parameters) -> accumulating
    anywhere else's state is the run's:  behind -> fetching -> accumulating

The caller tells what happened and does what comes back, in order; nothing else decides what is
applied, kept or dropped. The whole machine is one table, at the end of this module.

Promises: a sample is in at most one step (it is counted when its round commits with this peer in
it, and else kept or dropped, by name); no result of another epoch or history is ever applied; every
phase has a way out.

Easy to get wrong: `Averaged` tells of the outcome of the round that `Average` asked for, and
of no other; a result that is too light (fewer than COMMIT_SHARE of the target's samples stand
behind it) is not applied although it was committed, by any of its members.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from protocols.accumulation.progress import Estimate
from protocols.identity import PeerId

COMMIT_SHARE: Final = 0.5
"""Of the target: fewer samples behind a result make no step (stragglers who found each other
after the others had left would otherwise make a step of their own)."""


class Phase(enum.Enum):
    JOINING = "joining"
    """The others have not been looked at yet: nothing is contributed before."""
    ACCUMULATING = "accumulating"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    AVERAGING_PARAMETERS = "averaging parameters"
    BEHIND = "behind"
    """The run is elsewhere, and it is not known yet where; a fresh look decides."""
    FETCHING = "fetching"


class Ending(enum.Enum):
    """How a round ended for this peer (moshpit/outcome.py)."""

    COMMITTED = "committed"
    DISCARDED = "discarded"
    LEFT_OUT = "left out"
    ALONE = "alone"


@dataclass(frozen=True)
class Mode:
    """How this peer takes part; fixed for its life.

    - `target_samples`: of one round, as in ProgressSettings.
    - `delayed`: the next epoch's samples are computed while a round is averaged and stepped.
    - `auxiliary`: comes to rounds without samples.
    - `parameters_every`: after so many steps the parameters are averaged, too; 0 is never.
    """

    target_samples: int
    delayed: bool = False
    auxiliary: bool = False
    parameters_every: int = 0


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
    was committed (with or without this peer)."""

    ending: Ending
    weight: float = 0.0
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Stepped:
    """The step that `Step` asked for is made."""


@dataclass(frozen=True)
class ParametersAveraged:
    """The averaging that `AverageParameters` asked for has ended; what it brought, if it was
    committed, is taken over."""

    ending: Ending
    digest: bytes = b""
    members: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Fetched:
    """A state was fetched and is taken over."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class FetchFailed:
    reason: str


Event = Contributed | Estimated | Averaged | Stepped | ParametersAveraged | Fetched | FetchFailed


# -- what is to be done


@dataclass(frozen=True)
class Average:
    """Begin the round that ends this epoch, with what was accumulated; `weight` is its samples.
    In delayed mode: first take over the parameters of the last step, if they wait to be."""

    epoch: int
    history: bytes
    weight: int
    expected: int


@dataclass(frozen=True)
class Step:
    """Apply the committed result to the parameters of `epoch`; then tell `Stepped`. The life is
    in the next epoch already, with `history`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class StepAlone:
    """Nobody else is in the run: make the step with this peer's own gradients; then `Stepped`."""

    epoch: int
    history: bytes


@dataclass(frozen=True)
class AverageParameters:
    """Average the parameters with equal weights with those who made the same step."""

    epoch: int
    history: bytes
    expected: int


@dataclass(frozen=True)
class Fetch:
    """Take the state of others who are at this epoch or later: in the first place of `peers`.
    With a history only that one will do."""

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
    """The round brought no step: what was in it is as good as before, and is tried again."""

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


@dataclass(frozen=True)
class Life:
    """Where a peer is. `samples`: accumulated and in no round. `in_round`: in the round that is
    under way, or was and is to be tried again (delayed). Both are of this epoch and history,
    except that in delayed mode `samples` are the next round's while `in_round` is not 0."""

    phase: Phase
    epoch: int
    history: bytes
    samples: int = 0
    in_round: int = 0
    number: int = 0
    """Of the last estimate that was taken."""

    @property
    def published_samples(self) -> int:
        """What the progress slot says."""
        return self.in_round or self.samples


class Lifecycle:
    """Invariant: `life` is what the table makes of the one before. Not for two threads at once.

    ProtocolMisuse for what cannot happen in a phase, by name: a bug on our side.
    """

    def __init__(self, mode: Mode, *, epoch: int, history: bytes) -> None:
        self.mode = mode
        self.life = Life(Phase.JOINING, epoch, history)

    def take(self, event: Event) -> tuple[Effect, ...]:
        """What is to be done now that this happened. Stub."""
        raise NotImplementedError(event)
