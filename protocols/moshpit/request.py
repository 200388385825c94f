"""A request for a round: what this peer brings, and which peers it wants to average with.

    outcome = await averager.average(RoundRequest(vector, weight=samples, epoch=epoch))

It is made once and handed down through the averager to the round. Matchmaking and the exchange take
single fields of it: matchmaking knows nothing of tensors, and a round is remembered for longer than
its values.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.cohorts import Cohort
from protocols.moshpit.group import check_topic
from protocols.moshpit.layout import Vector
from protocols.moshpit.roster import LARGEST_EPOCH, LARGEST_WEIGHT


@dataclass(frozen=True, eq=False)
class RoundRequest:
    """ProtocolMisuse if a field makes no sense.

    - `vector`: what is averaged.
    - `weight`: how much the vector counts (samples). 0 is an auxiliary peer: it brings no data, may
      reduce for the others, and gets the result.
    - `epoch`: all members of a group have the same.
    - `expected`: how many peers will take part, this one included, if the caller knows. The group
      forms as soon as so many have come, even if more are on their way, unless those are `awaited`.
    - `awaited`: which of those are waited for by name; used where there is one group. For up to
      the matchmaking time, the group is not closed without an awaited peer that is there, and a
      peer that is not awaited takes nobody's place. Only the names given by the leading peer count.
    - `coming`: all of those that are known by name. If one is lost, one peer less is expected.
      `lost`: those that are, unless they are heard of.
    - `number`: from 0, this peer's first place in a grid, if the caller numbers the peers.
      Otherwise the first place is random, and later averagings go on from the last place.
    - `votes`: what this peer adds to `Committed.votes`, in an averaging over a grid.
    - `cohort`: this peer's part of a run with more peers than fit into one group. `expected` and
      `awaited` are then of the cohort.
    - `confirms`: at the head of a cohort, the result is handed down only when it is confirmed
      (`Averager.confirm`): the members apply what their head applies.
    - `peers`: for how many this request is made; more than one at the head of a cohort.
    - `follows`: this peer was in no step yet since it took its state from others. It is
      the last to become head of its cohort.
    - `most_peers`: for how many any member counts at most, whatever it says. It is more than one in
      the round of the heads, where others may come in place of those that are lost.
    - `fewest`: with fewer peers the result would be of no use. The group waits for more, up to the
      matchmaking time; longer if the request `is_again`, because another has come to nothing.
    - `topic`: peers with different topics never meet. At most 80 letters, digits, '.', '_' and '-'
      (group.py).
    - `most_weight`: the largest weight with which any member counts, this peer included; the same
      at all members. A weight is only what its owner signs: nobody can see what it has computed.
    """

    vector: Vector
    weight: float
    epoch: int
    expected: int | None = None
    awaited: frozenset[PeerId] | None = None
    coming: frozenset[PeerId] = frozenset()
    lost: frozenset[PeerId] = frozenset()
    number: int | None = None
    votes: float = 0.0
    cohort: Cohort | None = None
    confirms: bool = False
    peers: int = 1
    follows: bool = False
    most_peers: int = 1
    fewest: int = 0
    is_again: bool = False
    topic: str = ""
    most_weight: float = LARGEST_WEIGHT

    @property
    def expects_nobody(self) -> bool:
        """Whether no other peer is expected. Then nothing is likely to be sent, and the vector is
        only checked when somebody comes nevertheless."""
        return self.expected == 1 and self.cohort is None

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
