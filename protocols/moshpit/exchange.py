"""What one exchange is told, and what it tells: the plan, the report, and why it failed.

Easy to get wrong: a member is a place in the *roster* of the round. `participants` of one attempt
are some of these places; `cuts[k]` up to `cuts[k + 1]` is the part of `participants[k]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.layout import Layout

if TYPE_CHECKING:
    from protocols.moshpit.ballots import Ballot, Statement, Suspicion


@dataclass(frozen=True)
class Participant:
    """One member of an attempt. `index` is its place in the roster; weight 0: brings no data."""

    index: int
    peer: PeerId
    weight: float


@dataclass(frozen=True)
class ExchangePlan:
    """One attempt at a round, as all of its participants know it.

    - `me` is our place in the roster (one of the participants' `index`).
    - `members` in ascending order of index.
    - `cuts` has len(members) + 1 boundaries in values; an empty part needs no reducer.
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


class ExchangeFailed(PotluckError):
    """The exchange ended without a result, because of whom `suspicions` name."""

    def __init__(self, suspicions: tuple[Suspicion, ...]) -> None:
        super().__init__(
            "The exchange failed: " + "; ".join(suspicion.text for suspicion in suspicions),
            why="A member went away, stopped, or broke the protocol.",
            advice="The round goes on without it, or is discarded as one.",
        )
        self.suspicions = suspicions
