"""Where one peer is in the epochs of a run: the data that the lifecycle turns over. Pure.

A `Life` says in which phase a peer is, how many samples it has gathered for which epoch, and what
it remembers of the others; a `Mode` how it takes part, for good. What follows from what is said in
lifecycle.py.

Easy to get wrong: `samples` are those in no round. In delayed mode they are the next epoch's while
a round is under way, and what others are told is `published_samples`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protocols.accumulation.progress import NOBODY
from protocols.identity import PeerId


class Phase(enum.Enum):
    JOINING = "joining"
    """The others have not been looked at yet."""
    ACCUMULATING = "accumulating"
    AVERAGING = "averaging"
    STEPPING = "stepping"
    AVERAGING_PARAMETERS = "averaging parameters"
    BEHIND = "behind"
    """This peer's state is not the run's; a fresh look says whose is."""
    FETCHING = "fetching"


@dataclass(frozen=True)
class Mode:
    """How this peer takes part; fixed for its life.

    - `target_samples`: of one round, as in ProgressSettings.
    - `delayed`: the next epoch's samples are computed while a round is averaged and stepped.
    - `auxiliary`: comes to rounds without samples.
    - `parameters_every`: after so many steps the parameters are averaged, too; 0 is never.
    - `last_epoch`: with which the run is complete: no round is begun for another; 0 is never.
    """

    target_samples: int
    delayed: bool = False
    auxiliary: bool = False
    parameters_every: int = 0
    last_epoch: int = 0


@dataclass(frozen=True)
class Life:
    """Where a peer is.

    - `samples`: accumulated and in no round. `in_round`: in the round that is under way; then, in
      delayed mode, `samples` are the next epoch's.
    - `number`: of the newest estimate that was told. `looked_past`: only newer ones decide.
    - `company`: others who take part, by the newest estimate of this epoch and history.
    - `holders`, `me`: as in the same Estimate: without most of the holders no step is made.
    - `ahead`: who is further, by the same.
    - `passed_by`: the members of a round of this epoch that has been committed without this peer,
      or may have been, or whose result it has not applied: it makes no other step of the epoch
      where one of them is further.
    - `follows`: its state was taken from others, and no step was made with it since.
    - `expected`: how many were to come to the round, or were in it.
    - `begun_without`: the members of a group of this epoch that has begun without this peer, as
      long as they are seen to average, up to the estimate number `waits_to`.
    """

    phase: Phase
    epoch: int
    history: bytes
    samples: int = 0
    in_round: int = 0
    number: int = 0
    looked_past: int = 0
    company: int = 0
    holders: frozenset[PeerId] = frozenset()
    me: PeerId = NOBODY
    ahead: frozenset[PeerId] = frozenset()
    passed_by: frozenset[PeerId] = frozenset()
    follows: bool = False
    expected: int = 1
    begun_without: frozenset[PeerId] = frozenset()
    waits_to: int = 0

    @property
    def published_samples(self) -> int:
        """What the progress slot says: what this peer brings to the round that ends its epoch."""
        return self.in_round if self.phase is Phase.AVERAGING else self.samples
