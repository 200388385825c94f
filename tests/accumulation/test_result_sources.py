"""The order in which peers are asked for results."""

from __future__ import annotations

from protocols.accumulation.state_download import MOST_KNOWN, Paces, StateSource
from protocols.identity import PeerId

SOURCES = [StateSource(PeerId(name), 1, b"h" * 16) for name in "abc"]


def order(paces: Paces) -> str:
    return "".join(one.peer for one in paces.ordered(SOURCES))


def test_unknown_peers_are_asked_first_and_then_the_fastest() -> None:
    paces = Paces()
    assert order(paces) == "abc"
    paces.sent(PeerId("a"), 1000, 0.2)
    assert order(paces) == "bca"
    paces.sent(PeerId("b"), 1000, 0.1)
    paces.sent(PeerId("c"), 10_000, 0.5)
    assert order(paces) == "cba"


def test_a_peer_that_failed_once_is_asked_again_if_the_others_are_less_than_half_as_fast() -> None:
    paces = Paces()
    for name, seconds in zip("abc", (0.1, 0.15, 0.3), strict=True):
        paces.sent(PeerId(name), 1000, seconds)
    paces.failed(PeerId("a"))
    assert order(paces) == "bac"
    paces.failed(PeerId("a"))
    assert order(paces) == "bca"
    paces.sent(PeerId("a"), 1000, 0.1)
    assert order(paces) == "abc"


def test_an_unknown_peer_that_had_nothing_is_asked_after_other_unknown_ones() -> None:
    paces = Paces()
    paces.lacked(PeerId("a"))
    assert order(paces) == "bca"
    paces.sent(PeerId("b"), 1000, 0.1)
    paces.lacked(PeerId("b"))
    assert order(paces) == "cab", "what is known of it stays"


def test_the_number_of_remembered_peers_is_bounded() -> None:
    paces = Paces()
    paces.sent(PeerId("a"), 1, 1.0)
    for number in range(MOST_KNOWN):
        paces.failed(PeerId(f"other {number}"))
    paces.sent(PeerId("b"), 1, 0.1)
    assert order(paces) == "acb"
