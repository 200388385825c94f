"""What this peer brings to one averaging, and how it is to be done. Checked where it is made.

    Contribution(vector, weight=32, epoch=7, expected=4, topic="gradients")

Easy to get wrong: `expected` is a promise about others. The group forms the moment that so many
have come, this peer included, even if more are on their way; unless they are `awaited` by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Required, TypedDict

from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.grid import Grid
from protocols.moshpit.group_keys import check_topic
from protocols.moshpit.roster import LARGEST_EPOCH, LARGEST_WEIGHT
from protocols.moshpit.vector import Vector


@dataclass(frozen=True, eq=False)
class Contribution:
    """A vector, and the words of `AveragingOptions`. ProtocolMisuse where one makes no sense."""

    vector: Vector
    weight: float
    epoch: int
    expected: int | None = None
    grid: Grid | None = None
    number: int | None = None
    topic: str = ""
    awaited: frozenset[PeerId] | None = None
    most_weight: float = LARGEST_WEIGHT
    votes: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= LARGEST_WEIGHT:
            raise ProtocolMisuse(
                f"A weight of {self.weight} was asked for.",
                why=f"A weight is a number of samples, from 0 to {LARGEST_WEIGHT:g}.",
            )
        if not 0.0 < self.most_weight <= LARGEST_WEIGHT:
            raise ProtocolMisuse(f"Nobody can count with a weight of {self.most_weight} at most.")
        if not 0 <= self.epoch <= LARGEST_EPOCH:
            raise ProtocolMisuse(f"There is no epoch {self.epoch}: they count from 0.")
        check_topic(self.topic)


class AveragingOptions(TypedDict, total=False):
    """The same as keywords, for `Averager.average` and `Averager.start`.

    - `weight`: how much the vector counts (samples); 0 is an auxiliary peer, which brings no data,
      may reduce for the others, and gets the result.
    - `epoch`: all members of a group are in the same.
    - `expected`: how many peers the caller believes to take part, if it knows: the group forms as
      soon as they have come.
    - `awaited`: who of those is known by name, where there is one group. It is not closed without
      one of them that is there, for up to the matchmaking time; who is not awaited takes nobody's
      place. Only the names of the peer that leads count.
    - `grid`: it has several rounds; without one there is one group.
    - `number`: from 0, this peer's first place in the grid, if the caller numbers the peers; else
      chance chooses, and later averagings go on from where the last one ended.
    - `votes`: what this peer adds to `Committed.votes`, where the averaging goes over a grid.
    - `topic`: what else those who average together must have in common, at most 80 letters,
      digits, '.', '_' and '-' (group_keys.py). Peers with different topics never meet.
    - `most_weight`: with which any member counts, this peer too: the same at all who average
      together. A weight is what its owner signs, and nobody can see what it has computed.
    """

    weight: Required[float]
    epoch: Required[int]
    expected: int | None
    grid: Grid | None
    number: int | None
    votes: float
    topic: str
    awaited: frozenset[PeerId] | None
    most_weight: float
