"""The input and the output of one exchange: its plan, its report, and the error if it failed.

Easy to get wrong: a member is named by its place in the *roster* of the round. The `members` of an
attempt are some of these; the part of `members[k]` goes from `cuts[k]` up to `cuts[k + 1]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.layout import (
    Chunk,
    Layout,
    check_chunk_bytes,
    chunks_of,
    part_chunk_bytes,
)


@dataclass(frozen=True)
class Participant:
    """One member of an attempt. `index`: its place in the roster. A weight of 0: it brings no data.
    The rates are as declared by the member; 0: unknown."""

    index: int
    peer: PeerId
    weight: float
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class ExchangePlan:
    """One attempt at a round, as all its members know it.

    - `me`: our place in the roster (the `index` of one member).
    - `members`: in ascending order of index.
    - `cuts`: len(members) + 1 boundaries, in values. An empty part needs no reducer.
    - `most_weight`: the largest weight with which a member counts, whatever it has signed.
    - `seconds`: when they have passed, the exchange fails and names the member furthest behind.
    """

    round_id: bytes
    ballot: Ballot
    me: int
    members: tuple[Participant, ...]
    cuts: tuple[int, ...]
    layout: Layout
    chunk_bytes: int
    seconds: float = math.inf
    most_weight: float = math.inf

    @property
    def shares(self) -> dict[int, float]:
        """The share of each member's values in the average; 1 in all."""
        counted = {one.index: min(one.weight, self.most_weight) for one in self.members}
        total = math.fsum(counted.values())
        return {index: weight / total for index, weight in counted.items()}

    @property
    def my_place(self) -> int:
        """Our place among the members."""
        return self.place_of(self.me)

    @property
    def total_weight(self) -> float:
        return math.fsum(member.weight for member in self.members)

    def place_of(self, index: int) -> int:
        """The place among the members of the one with this place in the roster."""
        for place, member in enumerate(self.members):
            if member.index == index:
                return place
        raise ProtocolMisuse(f"Member {index} does not take part in this attempt.")

    def chunks_at(self, place: int) -> list[Chunk]:
        """The chunks of the part of the member at this place: the same at every member."""
        lengths = [stop - start for start, stop in pairwise(self.cuts)]
        size = part_chunk_bytes(self.layout, lengths[place], max(lengths), self.chunk_bytes)
        return chunks_of(self.layout, self.cuts[place], self.cuts[place + 1], size)

    def member_of(self, index: int) -> Participant:
        return self.members[self.place_of(index)]

    def check(self) -> None:
        """Raise ProtocolMisuse for a plan that nobody can carry out."""
        indices = [member.index for member in self.members]
        if indices != sorted(set(indices)) or self.me not in indices:
            raise ProtocolMisuse(f"The members {indices} are not in order, or {self.me} is not in.")
        if not all(math.isfinite(one.weight) and one.weight >= 0.0 for one in self.members):
            raise ProtocolMisuse("The weights of an attempt are finite and not negative.")
        if not self.seconds >= 0.0:
            raise ProtocolMisuse(f"An attempt cannot take {self.seconds} seconds.")
        if not self.most_weight > 0.0:
            raise ProtocolMisuse(f"Nobody can count with a weight of {self.most_weight} at most.")
        if not 0.0 < self.total_weight < math.inf:
            raise ProtocolMisuse("Nobody who takes part in this attempt brings any data.")
        ends = (self.cuts[0], self.cuts[-1]) if self.cuts else ()
        if (
            len(self.cuts) != len(self.members) + 1
            or list(self.cuts) != sorted(self.cuts)
            or ends != (0, self.layout.values)
        ):
            raise ProtocolMisuse(f"The cuts {self.cuts} do not fit the members and the vector.")
        check_chunk_bytes(self.chunk_bytes)


@dataclass(frozen=True)
class ExchangeReport:
    """A finished exchange: the statements of the reducers, and what it took.

    - `statements`: one for each part that is not empty, in the order of the parts.
    - `result_digest`: equal at two members if and only if their results are.
    - `opened_seconds`, `reduced_seconds`, `received_seconds`, `seconds`: from the start until all
      transfers were open, our own part was reduced, all results were here, everything was closed.
    - `sending_seconds`: in which bytes of this node were on their way out, and `sending_bytes`:
      those that arrived meanwhile, of this exchange or not.
      `receiving_seconds`: in which any transfer was receiving.
    - `contradicted_by`: the members that say their result is another one. Then a reducer has sent
      different averages to different members.
    """

    statements: tuple[Statement, ...]
    result_digest: bytes
    bytes_sent: int
    bytes_received: int
    opened_seconds: float
    reduced_seconds: float
    received_seconds: float
    seconds: float
    sending_bytes: int
    sending_seconds: float
    receiving_seconds: float
    contradicted_by: tuple[int, ...] = ()


class ExchangeFailed(PotluckError):
    """The exchange ended without a result, because of the members that `suspicions` name.
    `awaited`: the members that this one was waiting for at that moment (attempt.py)."""

    def __init__(
        self, suspicions: tuple[Suspicion, ...], awaited: tuple[Suspicion, ...] = ()
    ) -> None:
        super().__init__(
            "The exchange failed: " + "; ".join(suspicion.text for suspicion in suspicions),
            why="A member went away, stopped, or broke the protocol.",
            advice="The round goes on without it, or is discarded as one.",
        )
        self.suspicions = suspicions
        self.awaited = awaited
