"""Peers to plan for: the setups of the DeDLOC paper, and random ones for properties."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from protocols.moshpit.plan import Members
from protocols.moshpit.plan_strategy import Computes, PlannedPeer, PlannedPeers

GIGABIT = 125e6  # bytes per second
VECTOR_BYTES = 102.4e6  # ResNet-50 in float32

# Speeds in Gb/s of those that compute, and of those that do not.
SETUPS: dict[str, tuple[list[float], list[float]]] = {
    "A": ([1.0] * 8, []),
    "B": ([0.2] * 16, []),
    "C": ([1.0] * 8 + [0.2] * 16, []),
    "D": ([0.2] * 16, [2.5]),
}


def setup(name: str) -> Members:
    """One of the paper's setups, in bytes per second."""
    computing, helping = SETUPS[name]
    speeds = [gigabits * GIGABIT for gigabits in (*computing, *helping)]
    contributes = [True] * len(computing) + [False] * len(helping)
    return Members(speeds, speeds, contributes, [True] * len(speeds))


def collaboration_of(members: Members, batch: float = 32_768.0) -> PlannedPeers:
    """The same as the input of a plan: contributors compute 40 samples per second."""
    peers = [
        PlannedPeer(
            name=f"peer {i:03}",
            samples_per_s=40.0 if contributes else 0.0,
            up=up,
            down=down,
            computes=Computes.ALWAYS if contributes else Computes.NEVER,
            dial_out_only=not reduces,
        )
        for i, (up, down, contributes, reduces) in enumerate(zip(*members, strict=True))
    ]
    return PlannedPeers(VECTOR_BYTES, batch, peers)


def permuted(members: Members, order: Sequence[int]) -> Members:
    return Members(*([column[i] for i in order] for column in members))


speeds = st.one_of(st.sampled_from([0.2, 1.0, 2.5]), st.floats(min_value=0.05, max_value=50.0))


@st.composite
def all_contribute(draw: st.DrawFn, most: int = 7) -> Members:
    """All members have data; some can only dial out."""
    n = draw(st.integers(2, most))
    reduces = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    up = draw(st.lists(speeds, min_size=n, max_size=n))
    down = draw(st.lists(speeds, min_size=n, max_size=n))
    return Members(up, down, [True] * n, reduces)


@st.composite
def some_contribute(draw: st.DrawFn, most: int = 7) -> Members:
    """The same with helpers that have no data."""
    members = draw(all_contribute(most))
    n = len(members.up)
    contributes = draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    return members._replace(contributes=contributes)


@st.composite
def limits_between(draw: st.DrawFn, n: int) -> dict[tuple[int, int], float]:
    """Some directions between n members that carry little."""
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=4, unique=True))
    return {pair: draw(st.floats(min_value=0.05, max_value=3.0)) for pair in chosen}


@st.composite
def collaborations(draw: st.DrawFn, most: int = 7) -> PlannedPeers:
    """Peers that may, must or must not compute, with and without a GPU."""
    members = draw(some_contribute(most))
    peers = [
        PlannedPeer(
            name=f"peer {i}",
            samples_per_s=draw(st.sampled_from([0.0, 1.0, 4.0, 20.0, 33.0])),
            up=up,
            down=down,
            computes=draw(st.sampled_from([Computes.AUTO, Computes.AUTO, *Computes])),
            dial_out_only=not reduces,
        )
        for i, (up, down, _, reduces) in enumerate(zip(*members, strict=True))
    ]
    batch = draw(st.sampled_from([1.0, 10.0, 100.0, 1000.0]))
    return PlannedPeers(2.0, batch, peers)
