"""Lists of members without signatures, for tests of the steps after matchmaking."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.identity import PeerId
from protocols.moshpit.group import Group
from protocols.moshpit.roster import Entry, Roster, Terms

ROUND = b"r" * 32
TERMS = Terms("group/run/3/0/all", 3, bytes(32))


def unsigned_list(members: Sequence[PeerId]) -> Roster:
    entries = tuple(Entry(peer, 1.0, 0, 0, True, 0, 1, 0, bytes(16), bytes(64)) for peer in members)
    return Roster(TERMS, members[0], 0, bytes(16), entries, bytes(64))


def unsigned_group(members: Sequence[PeerId], me: int = 0) -> Group:
    """A group that its first member leads. Its round id is not that of its list."""
    return Group(unsigned_list(members), me, ROUND)
