"""The settings of an averager: its run, its limits, and the rates of this peer's connection.

Easy to get wrong: `up_bytes_per_second` and its sibling go into the signed entry of every round,
and all members plan with what everybody declared. 0 does not mean "nothing" but "not known yet":
then what earlier rounds measured is declared (bandwidth.py), and before any round the planner
takes the median of those who know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nat.kinds import Nat
from protocols.errors import ProtocolMisuse
from protocols.moshpit.group import check_group_size, check_matchmaking_seconds, check_run
from protocols.moshpit.layout import check_chunk_bytes

MATCHMAKING_SECONDS = 10.0
"""How long at most a group forms. A warm group of known size is complete in a tenth of a second."""

ROUND_SECONDS = 300.0
"""How long at most one round may exchange values, with all its attempts; agreeing that there is no
result may take 8 s more (member_state.py, `Timing`). The first attempt gets half of it: enough for
ninety megabytes over a home connection of 5 Mb/s."""

GROUP_SIZE = 64
"""The most members of one group: every member of a group of M opens M - 1 transfers, and one death
costs the whole group an attempt. A run with more peers averages by cohorts (cohorts.py)."""

CHUNK_BYTES = 512 << 10
"""Encoded bytes of one chunk. Each costs about a tenth of a millisecond whatever its size; twice
as many of half the size cost a tenth more processor time in a round of 4 x 10 million values."""


@dataclass(frozen=True)
class AveragerSettings:
    """How this peer takes part in the averaging of one run.

    - `run`: the name of the run; it is part of every group's key.
    - `group_size`: the most members of a group that this peer leads, or takes part in.
    - `matchmaking_seconds`: how long a group may take to form.
    - `round_seconds`: how long a round may exchange values; one attempt may take half of what is
      left of it. It travels in no message: all members of a run should say the same, and each
      gives up by its own.
    - `up_bytes_per_second`, `down_bytes_per_second`: what the plan may count on where the owner
      has set limits (0.6 of them: node/core/caps/settings.py), or 0: as measured.
    - `reduces`: False for a peer that can only dial out; it sends and gets results, reduces no
      part, and never leads. Asked at each round, as a node may be found out to be one, or no more.
    - `router`: the kind of this node's router (nat/kinds.py), asked at each round as well.
    - `chunk_bytes`: encoded bytes of a chunk; all members of a round must say the same.

    ProtocolMisuse where a value makes no sense: it would only show in the middle of a round.
    """

    run: str
    group_size: int = GROUP_SIZE
    matchmaking_seconds: float = MATCHMAKING_SECONDS
    round_seconds: float = ROUND_SECONDS
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    reduces: Callable[[], bool] = lambda: True
    router: Callable[[], Nat] = lambda: Nat.UNKNOWN
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        check_run(self.run)
        check_group_size(self.group_size)
        check_matchmaking_seconds(self.matchmaking_seconds)
        check_chunk_bytes(self.chunk_bytes)
        if not 0.0 < self.round_seconds < math.inf:
            raise ProtocolMisuse(f"A round cannot take {self.round_seconds} seconds.")
        for rate in (self.up_bytes_per_second, self.down_bytes_per_second):
            if not 0.0 <= rate < math.inf:
                raise ProtocolMisuse(f"A connection does not bear {rate} bytes per second.")
