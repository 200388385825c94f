"""More peers under one key than a group may have: they become several groups. Pure.

As few groups as can be, of sizes that differ by one at most, each of peers that follow each other
in the hash order, so that nobody chooses its group. Peers that can only dial out are dealt to the
groups in turn: every group needs somebody who can be dialled, and one of those to lead it.

Easy to get wrong: with too few that can be dialled not everybody can be placed. Who is left over
is so by the order as well, and waits for the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Member = TypeVar("Member")


def split(
    reducers: Sequence[Member], clients: Sequence[Member], largest: int
) -> list[list[Member]]:
    """Groups of at most `largest` members, each beginning with a reducer. Both sequences are in
    hash order. A group of one is never made of several: its reducer is placed elsewhere."""
    total = len(reducers) + len(clients)
    count = min(-(-total // largest), len(reducers))
    if count < 1:
        return []
    groups = _in_order(reducers, count)
    waiting = list(clients)
    while waiting:
        smallest = min(groups, key=len)
        if len(smallest) >= largest:
            break
        smallest.append(waiting.pop(0))
    return groups


def _in_order(members: Sequence[Member], count: int) -> list[list[Member]]:
    """`count` runs of members, whose lengths differ by one at most."""
    shortest, longer = divmod(len(members), count)
    groups: list[list[Member]] = []
    start = 0
    for number in range(count):
        stop = start + shortest + (number < longer)
        groups.append(list(members[start:stop]))
        start = stop
    return groups
