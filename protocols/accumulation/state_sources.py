"""Whose state to fetch: which digest, and in which order to ask those who have it. Pure.

    choice = choose(sources, me, at_least_epoch=7)

The up-to-date peers are the largest set that says to be at the same epoch with the same history;
the digest is the one that most of them name. Newcomers that have taken a state and made no step
with it serve it, and are not counted where others are: many of them would be the largest set, a
step or more behind the run. Where unlike hardware makes digests differ, there is no majority, and
one of them is taken whole, from those who have it.

Each newcomer asks in an order of its own (the hash of both peers), so that many newcomers spread
over all donors.

Easy to get wrong: what a source says of itself is a claim. A lone peer that claims a later epoch
does not outweigh the others, and what anybody claims is checked against the digest afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from blake3 import blake3

from protocols.identity import PeerId


@dataclass(frozen=True)
class StateSource:
    """A peer that serves state, as its progress slot says."""

    peer: PeerId
    epoch: int
    history: bytes
    digest: bytes = b""  # not computed yet
    signature: bytes = b""
    torch: str = ""
    follows: bool = False
    """It has taken this state from others, and has made no step with it."""


@dataclass(frozen=True)
class Choice:
    """A state, and who may have it, in the order in which this newcomer asks.

    `is_majority`: more than half of the up-to-date peers that name a digest name this one.
    """

    epoch: int
    history: bytes
    digest: bytes
    sources: tuple[StateSource, ...]
    is_majority: bool


def choose(
    sources: Iterable[StateSource],
    me: PeerId,
    *,
    at_least_epoch: int = 0,
    history: bytes | None = None,
    without: Container[PeerId] = (),
) -> Choice | None:
    """The state to fetch; None if nobody names one. `history`: only states of this one."""
    groups: dict[tuple[int, bytes], list[StateSource]] = defaultdict(list)
    for one in sources:
        fits = one.epoch >= at_least_epoch and history in (None, one.history)
        if fits and one.peer != me and one.peer not in without:
            groups[one.epoch, one.history].append(one)
    for group in sorted(groups.values(), key=_support, reverse=True):
        ordered = sorted(group, key=lambda one: (one.follows, rank(one.peer, me)))
        by_digest: dict[bytes, list[StateSource]] = defaultdict(list)
        for one in ordered:
            if one.digest:
                by_digest[one.digest].append(one)
        if not by_digest:
            continue
        voices = {name: _voices(named) for name, named in by_digest.items()}
        best = max(voices, key=lambda name: voices[name])  # of equals the first in the order
        chosen = by_digest[best]
        silent = [one for one in ordered if not one.digest]
        return Choice(
            epoch=group[0].epoch,
            history=group[0].history,
            digest=chosen[0].digest,
            sources=(*chosen, *silent),
            is_majority=_is_majority(chosen, [one for one in ordered if one.digest]),
        )
    return None


def rank(peer: PeerId, me: PeerId) -> bytes:
    """Where a donor stands in the order of a newcomer."""
    return blake3(f"{me} {peer}".encode()).digest()


def _is_majority(chosen: list[StateSource], named: list[StateSource]) -> bool:
    """Of those who have made steps of the run; of all, where there are none."""
    counted = [one for one in named if not one.follows] or named
    return 2 * sum(one in chosen for one in counted) > len(counted)


def _voices(sources: list[StateSource]) -> tuple[int, int]:
    """How many have made steps of the run, and how many there are."""
    return sum(not one.follows for one in sources), len(sources)


def _support(group: list[StateSource]) -> tuple[int, int, int, bytes]:
    return *_voices(group), group[0].epoch, group[0].history
