"""Which connection is the link, on both sides alike, and who is told of changes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import trio

from node.net.libp2p.link_table import EVENTS_KEPT, LinkTable
from protocols.identity import Identity, PeerId
from protocols.network import LinkEvent, Reach

SMALLER, LARGER = sorted(Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))


@dataclass(eq=False)
class Connection:
    """One end of a connection, as the table sees it."""

    peer: PeerId
    inbound: bool
    reach: Reach = Reach.DIRECT
    alive: bool = True


def both_ends(*, dialled_by: PeerId, reach: Reach = Reach.DIRECT) -> dict[PeerId, Connection]:
    """The two ends of one connection, by the peer that holds the end."""
    return {
        SMALLER: Connection(LARGER, inbound=dialled_by == LARGER, reach=reach),
        LARGER: Connection(SMALLER, inbound=dialled_by == SMALLER, reach=reach),
    }


def other(peer: PeerId) -> PeerId:
    return LARGER if peer == SMALLER else SMALLER


@pytest.mark.parametrize("orders", list(itertools.product([(0, 1), (1, 0)], repeat=2)))
def test_both_sides_choose_the_same_of_two_simultaneous_dials(
    orders: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """The two connections may come up in any order on either side."""
    connections = [both_ends(dialled_by=SMALLER), both_ends(dialled_by=LARGER)]
    chosen = set()
    for side, order in zip((SMALLER, LARGER), orders, strict=True):
        table: LinkTable[Connection] = LinkTable(side)
        for index in order:
            table.add(connections[index][side])
        best = table.best(other(side))
        chosen.add(next(i for i, ends in enumerate(connections) if ends[side] is best))
    assert chosen == {0}  # the one that the smaller peer id dialled


def test_of_two_dials_by_the_same_side_the_newer_is_the_link() -> None:
    for side in (SMALLER, LARGER):
        table: LinkTable[Connection] = LinkTable(side)
        older, newer = (both_ends(dialled_by=LARGER)[side] for _ in range(2))
        table.add(older)
        table.add(newer)
        assert table.best(other(side)) is newer


def test_a_direct_connection_comes_before_a_relayed_one() -> None:
    table: LinkTable[Connection] = LinkTable(SMALLER)
    direct = both_ends(dialled_by=LARGER)[SMALLER]
    table.add(direct)
    table.add(both_ends(dialled_by=SMALLER, reach=Reach.RELAYED)[SMALLER])
    assert table.best(LARGER) is direct


def test_a_connection_without_a_sign_of_life_comes_last_even_if_direct() -> None:
    table: LinkTable[Connection] = LinkTable(SMALLER)
    direct = both_ends(dialled_by=SMALLER)[SMALLER]
    relayed = both_ends(dialled_by=LARGER, reach=Reach.RELAYED)[SMALLER]
    with table.events() as events:
        table.add(direct)
        table.add(relayed)
        table.mark(direct, alive=False)
        assert table.best(LARGER) is relayed
        table.mark(direct, alive=True)
        assert table.best(LARGER) is direct
        assert [events.receive_nowait().reach for _ in range(3)] == [
            Reach.DIRECT,
            Reach.RELAYED,
            Reach.DIRECT,
        ]


def test_events_tell_of_changes_only() -> None:
    table: LinkTable[Connection] = LinkTable(SMALLER)
    first, second = (both_ends(dialled_by=LARGER)[SMALLER] for _ in range(2))
    with table.events() as events:
        for change in (table.add, table.remove):
            change(first)
            change(second)
        table.remove(second)  # twice is once
        assert [events.receive_nowait(), events.receive_nowait()] == [
            LinkEvent(LARGER, Reach.DIRECT, was=Reach.NONE),
            LinkEvent(LARGER, Reach.NONE, was=Reach.DIRECT),
        ]
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()
    assert table.peers() == ()


def test_a_subscriber_far_behind_misses_the_oldest_events() -> None:
    table: LinkTable[Connection] = LinkTable(SMALLER)
    connection = both_ends(dialled_by=LARGER)[SMALLER]
    with table.events() as events:
        for _ in range(EVENTS_KEPT):
            table.add(connection)
            table.remove(connection)
        table.add(connection)
        kept = [events.receive_nowait().reach for _ in range(EVENTS_KEPT)]
        with pytest.raises(trio.WouldBlock):
            events.receive_nowait()
    assert kept[-1] is Reach.DIRECT


async def test_subscriptions_end_with_the_network() -> None:
    table: LinkTable[Connection] = LinkTable(SMALLER)
    with table.events() as events:
        table.add(both_ends(dialled_by=LARGER)[SMALLER])
        table.end_subscriptions()
        assert [event.reach async for event in events] == [Reach.DIRECT]
