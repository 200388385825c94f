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


def test_a_peer_that_takes_every_link_and_never_answers_is_tried_ever_more_seldom() -> None:
    (peer,) = contacts(1)
    lost = LostPeers(random.Random(0))
    lost.add(peer)
    now, tries = tried_for_an_hour(lost), 0
    for _ in range(1000):
        now += 0.1
        lost.reached(peer.node_id, now)  # each try makes a link again, which it closes
        tries += len(lost.due(now, at_most=1))
    assert 5 <= tries <= 8


def test_a_link_to_a_peer_that_is_not_lost_changes_nothing() -> None:
    here, gone = contacts(2)
    lost = LostPeers(random.Random(0))
    lost.add(gone)
    assert not lost.reached(here.node_id, 0.0)
    assert lost.due(0.0, at_most=2) == []
