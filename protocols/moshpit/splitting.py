"""More peers under one key than a group may have: they become several groups. Pure.

As few groups as can be, of sizes that differ by one at most, each of peers that follow each other
in the hash order, so that nobody chooses its group. Peers that can only dial out are dealt to the
groups in turn: every group needs somebody who can be dialled, and one of those to lead it.

Easy to get wrong: with too few that can be dialled, and where one is left that would be a group
by itself, not everybody can be placed. Who is left over waits for the next round.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeVar

Member = TypeVar("Member")


def split(
    reducers: Sequence[Member], clients: Sequence[Member], largest: int
) -> list[list[Member]]:
    """Groups of 2 to `largest` members, each beginning with a reducer, of more members than that.
    Both sequences are in hash order; whoever is first of all reducers is in the first group."""
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
    return [group for group in groups if len(group) > 1]


def split_around(
    reducers: Sequence[Member],
    clients: Sequence[Member],
    largest: int,
    awaited: Container[Member],
) -> list[list[Member]]:
    """The same, with those who are awaited in the first group, so that they average together, and
    whoever else there is room for. Where they do not fit into it, or nobody is, nobody goes first.
    """
    leader, *others = reducers
    first = [leader, *(one for one in (*others, *clients) if one in awaited)]
    if not 1 < len(first) <= largest:
        return split(reducers, clients, largest)
    more = [one for one in others if one not in first]
    waiting = [one for one in clients if one not in first]
    rest, room = [*more, *waiting], largest - len(first)
    own, left = [*first, *rest[:room]], set(rest[room:])
    more, waiting = [one for one in more if one in left], [one for one in waiting if one in left]
    return [own, *split(more, waiting, largest)]


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
