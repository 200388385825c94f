"""What one exchange is told, and what it tells: the plan, the report, and why it failed.

Easy to get wrong: a member is a place in the *roster* of the round. `participants` of one attempt
are some of these places; `cuts[k]` up to `cuts[k + 1]` is the part of `participants[k]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from protocols.errors import PotluckError, ProtocolMisuse
from protocols.identity import PeerId
from protocols.moshpit.ballots import Ballot, Statement, Suspicion
from protocols.moshpit.layout import (
    SMALLEST_CHUNK_BYTES,
    Chunk,
    Layout,
    check_chunk_bytes,
    chunks_of,
)

SMALL_PART = 8  # times as long is the largest part of an attempt, or longer
CHUNKS_OF_SMALL_PART = 32
"""At least, unless they would be smaller than the smallest: only in pieces does a small part go as
evenly beside a large one as a plan takes for granted (pacing.py)."""


@dataclass(frozen=True)
class Participant:
    """One member of an attempt. `index` is its place in the roster; weight 0: brings no data. The
    rates are those that it has declared; 0: not known."""

    index: int
    peer: PeerId
    weight: float
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class ExchangePlan:
    """One attempt at a round, as all of its participants know it.

    - `me` is our place in the roster (one of the participants' `index`).
    - `members` in ascending order of index.
    - `cuts` has len(members) + 1 boundaries in values; an empty part needs no reducer.
    - `most_weight`: with which a member counts, whatever more it has signed.
    - `seconds`: when these are over, the exchange fails and names who is furthest behind.
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
        """How much of the average the values of each member are; 1 in all."""
        counted = {one.index: min(one.weight, self.most_weight) for one in self.members}
        total = math.fsum(counted.values())
        return {index: weight / total for index, weight in counted.items()}

    @property
    def my_place(self) -> int:
        """Where we are among the members."""
        return self.place_of(self.me)

    @property
    def total_weight(self) -> float:
        return math.fsum(member.weight for member in self.members)

    def place_of(self, index: int) -> int:
        """Where the member with this place in the roster is among the members."""
        for place, member in enumerate(self.members):
            if member.index == index:
                return place
        raise ProtocolMisuse(f"Member {index} does not take part in this attempt.")

    def chunks_at(self, place: int) -> list[Chunk]:
        """How the part of the member at this place is cut into chunks, by everybody alike."""
        lengths = [stop - start for start, stop in pairwise(self.cuts)]
        chunk_bytes = self.chunk_bytes
        if lengths[place] * SMALL_PART < max(lengths):
            share = lengths[place] * self.layout.value_bytes // CHUNKS_OF_SMALL_PART
            whole = -(-share // SMALLEST_CHUNK_BYTES) * SMALLEST_CHUNK_BYTES
            chunk_bytes = min(chunk_bytes, max(SMALLEST_CHUNK_BYTES, whole))
        return chunks_of(self.layout, self.cuts[place], self.cuts[place + 1], chunk_bytes)

    def member_of(self, index: int) -> Participant:
        return self.members[self.place_of(index)]

    def check(self) -> None:
        """ProtocolMisuse for a plan that nobody can carry out."""
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
class LinkUse:
    """What one link carried. Busy is the time in which bytes of that direction were under way."""

    peer: PeerId
    bytes_sent: int
    bytes_received: int
    sending_seconds: float
    receiving_seconds: float


@dataclass(frozen=True)
class ExchangeReport:
    """A finished exchange: what everybody signed, and what it took.

    `statements`: one for each part that is not empty, in the order of the parts.
    `result_digest`: equal at two members if and only if their results are. The phases are seconds
    from the start: all transfers open, our own part reduced, all results here, everything closed.
    The two busy times are those in which any transfer was sending (or receiving).
    `contradicted_by`: who says that its result is another. Then some reducer told two stories.
    """

    statements: tuple[Statement, ...]
    result_digest: bytes
    bytes_sent: int
    bytes_received: int
    opened_seconds: float
    reduced_seconds: float
    received_seconds: float
    seconds: float
    sending_seconds: float
    receiving_seconds: float
    links: tuple[LinkUse, ...]
    contradicted_by: tuple[int, ...] = ()


class ExchangeFailed(PotluckError):
    """The exchange ended without a result, because of whom `suspicions` name. `awaited`: for whom
    this member was waiting just then (lateness.py)."""

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
