"""Peers that no longer answer: when it is whose turn to be tried again."""

from __future__ import annotations

import random

from protocols.dht import Contact, contact_of
from protocols.dht.routing import LONGEST_RETRY_SECONDS, LostPeers
from protocols.identity import Identity

HOUR_SECONDS = 3600.0


def contacts(count: int) -> list[Contact]:
    peers = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(count)]
    return [contact_of(peer, ("/ip4/10.0.0.1/tcp/4001",)) for peer in peers]


def tried_for_an_hour(lost: LostPeers) -> float:
    """The time when that is over."""
    now = 0.0
    while now < HOUR_SECONDS:
        lost.due(now, at_most=1)
        now += 1.0
    return now


def test_every_lost_peer_is_tried_again_when_it_may_be_back() -> None:
    long_gone = contacts(3)
    lost = LostPeers(random.Random(0))
    for one in long_gone:
        lost.add(one)
    now = tried_for_an_hour(lost)
    lost.due(now, at_most=3)
    assert lost.due(now + 1.0, at_most=3) == []
    lost.all_may_be_back(now + 1.0)
    assert lost.due(now + 1.0, at_most=3) == long_gone
    assert lost.due(now + 2.0, at_most=3) == []
    assert lost.due(now + 2.0 + LONGEST_RETRY_SECONDS, at_most=3) == long_gone


def test_the_peer_that_was_lost_last_is_tried_first() -> None:
    *long_gone, newest = contacts(4)
    lost = LostPeers(random.Random(0))
    for one in long_gone:
        lost.add(one)
    now = tried_for_an_hour(lost)
    lost.add(newest)
    lost.all_may_be_back(now)
    assert lost.due(now, at_most=1) == [newest]
