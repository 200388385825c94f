"""The setups of the DeDLOC paper scaled down, and the three ways in which each is averaged. Pure.

One Gb/s of the paper is `MBPS_PER_GIGABIT` here, or half of it, so that two cores can encrypt what
all links carry together. The vector is as long as the plan's round shall take seconds.

A round asks nobody how it should be cut: every member plans from the speeds that all declare. To
have a given cut w, declare speeds whose best cut it is: upload_i(w) and download_i(w) themselves
(plan_shares.py). With them all members would be busy for exactly one unit of time, and since each
one's time grows with its share, any other cut keeps somebody busy for longer.

Easy to get wrong: parts are multiples of CUT_VALUES values, which in a vector this short is a good
piece of a small share. What is predicted is the round with the parts as they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.moshpit.layout import CUT_VALUES
from protocols.moshpit.plan import predicted_seconds
from protocols.moshpit.plan_shares import (
    Members,
    best_shares,
    equal_shares,
    seconds_of,
    shortest_seconds,
)

MBPS_PER_GIGABIT = 48.0
"""Two cores encrypt for setups A, B and D what links carry that are about twenty times slower."""

BYTES_PER_MEGABIT = 125_000.0
BYTES_PER_VALUE = 4  # float32, as the paper's averaging times are
DECLARED_UNIT = 1e9  # bytes per second: entries hold whole numbers

# Gb/s of those that compute, and of those that do not.
SETUPS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "A": ((1.0,) * 8, ()),
    "B": ((0.2,) * 16, ()),
    "C": ((1.0,) * 8 + (0.2,) * 16, ()),
    "D": ((0.2,) * 16, (2.5,)),
}
WAYS = ("plan", "allreduce", "parameter_server")


@dataclass(frozen=True)
class Declared:
    """What one peer says of itself in a round."""

    up: float  # bytes per second
    down: float
    weight: float


@dataclass(frozen=True)
class Setup:
    """One setup in the lab. `members` has the real speeds of its links, in bytes per second."""

    name: str
    members: Members
    values: int

    @property
    def peers(self) -> int:
        return len(self.members.up)

    @property
    def vector_bytes(self) -> int:
        return self.values * BYTES_PER_VALUE

    def mbps(self, peer: int) -> float:
        return self.members.up[peer] / BYTES_PER_MEGABIT

    def fractions(self, way: str) -> tuple[float, ...]:
        """Who reduces how much."""
        if way == "plan":
            return best_shares(self.members)
        if way == "allreduce":
            return equal_shares(self.members.reduces)
        single = [tuple(float(i == j) for j in range(self.peers)) for i in range(self.peers)]
        return min(single, key=lambda fractions: seconds_of(fractions, self.members))

    def declared(self, way: str) -> list[Declared]:
        """What each peer declares so that the round is cut in this way."""
        n, m = self.peers, sum(self.members.contributes)
        return [
            Declared(
                up=DECLARED_UNIT * (c * (1 - w) + (n - 1) * w),
                down=DECLARED_UNIT * ((m - c) * w + (1 - w)),
                weight=float(c),
            )
            for w, c in zip(self.fractions(way), self.members.contributes, strict=True)
        ]

    def predicted_seconds(self, way: str, efficiency: float) -> float:
        """How long it takes if so much of the links' rate is left for the vector's bytes."""
        return predicted_seconds(
            self.cut_fractions(way),
            [up * efficiency for up in self.members.up],
            [down * efficiency for down in self.members.down],
            self.members.contributes,
            self.vector_bytes,
        )

    def cut_fractions(self, way: str) -> list[float]:
        """The same as `fractions`, in whole blocks: at least what each reducer gets."""
        fractions = self.fractions(way)
        largest = fractions.index(max(fractions))
        blocks = [round(one * self.values / CUT_VALUES) for one in fractions]
        blocks[largest] += self.values // CUT_VALUES - sum(blocks)
        return [one * CUT_VALUES / self.values for one in blocks]


def setup_of(name: str, seconds: float, mbps_per_gigabit: float = MBPS_PER_GIGABIT) -> Setup:
    """The setup in which the plan's round takes so many seconds over links of that scale."""
    computing, helping = SETUPS[name]
    speeds = [
        gigabits * mbps_per_gigabit * BYTES_PER_MEGABIT for gigabits in (*computing, *helping)
    ]
    contributes = [True] * len(computing) + [False] * len(helping)
    members = Members(speeds, speeds, contributes, [True] * len(speeds))
    vector_bytes = seconds / shortest_seconds(members)
    each = len(speeds) * CUT_VALUES  # so that equal shares are whole blocks
    return Setup(name, members, each * max(1, round(vector_bytes / BYTES_PER_VALUE / each)))


def ratios(seconds: Sequence[float]) -> tuple[float, float]:
    """All-reduce / ours and parameter server / ours, of the seconds in the order of WAYS."""
    ours, all_reduce, server = seconds
    return all_reduce / ours, server / ours
