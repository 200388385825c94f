"""One gathering and its events, without a network, for tests of its decisions."""

from __future__ import annotations

from collections.abc import Callable

from protocols.identity import PeerId
from protocols.moshpit.gathering import Gathering
from protocols.moshpit.gathering_effects import (
    Candidate,
    Effect,
    Lead,
)
from protocols.moshpit.group import Search
from protocols.moshpit.roster import Offer
from tests.moshpit.gathering_model import by_name

A, B, C, D, E = (PeerId(name) for name in "abcde")
SECONDS = 10.0


def gathering(
    me: PeerId = B,
    *,
    expected: int | None = None,
    group_size: int = 64,
    reduces: bool = True,
    awaited: tuple[PeerId, ...] = (),
    coming: tuple[PeerId, ...] = (),
    lost: tuple[PeerId, ...] = (),
    splits: bool = True,
    replaces: bool = False,
    missing: int = 0,
    for_more_seconds: float = 0.0,
    more_seconds: float = 0.0,
    seat_of: Callable[[PeerId], int] | None = None,
) -> Gathering:
    search = Search(
        "key",
        0,
        bytes(32),
        Offer(1.0, reduces=reduces),
        group_size,
        expected,
        SECONDS,
        awaited=frozenset(awaited),
        coming=frozenset(coming),
        lost=frozenset(lost),
        splits=splits,
        most_peers=2 if replaces else 1,
        fewest=1 + missing,
        for_more_seconds=for_more_seconds,
        more_seconds=more_seconds,
        seat_of=seat_of,
    )
    return Gathering(me, by_name, search, 0.0)


def sees(one: Gathering, *peers: PeerId, now: float = 0.0) -> list[Effect]:
    for peer in peers:
        one.saw_slot(Candidate(peer), 1, now)
    one.slots_were_read(now)
    return one.effects()


def joins(one: Gathering, *peers: PeerId, now: float = 0.0, **options: bool) -> list[Effect]:
    for peer in peers:
        one.join_came(Candidate(peer, **options), by_name(peer)[0], (), SECONDS, now)
    return one.effects()


def passes(one: Gathering, until: float) -> list[Effect]:
    """Let time pass, with a tick whenever one is due."""
    effects: list[Effect] = []
    while not one.ended and one.next_deadline < until:
        one.tick(one.next_deadline)
        effects += one.effects()
    one.tick(until)
    return effects + one.effects()


def ticket(peer: PeerId) -> int:
    return by_name(peer)[0]


def led(*peers: PeerId) -> Lead:
    return Lead({one: ticket(one) for one in peers})
