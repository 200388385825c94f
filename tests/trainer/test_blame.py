"""If nobody answers, the message says what was tried, and whose fault it probably is."""

from __future__ import annotations

import pytest

from node.training.network_watch import blame_of
from protocols.dht import BootstrapState, Joined
from protocols.dht.bootstrap import AddressState

PEER = "12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"
FIRST, SECOND = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}", f"/dns4/x.example/tcp/4001/p2p/{PEER}"


def state(*failures: tuple[str, str], cached: int = 0) -> BootstrapState:
    addresses = tuple(AddressState(at, attempts=1, failure=why) for at, why in failures)
    return BootstrapState(Joined.TRYING, addresses, cached)


def failure(address: str, detail: str) -> tuple[str, str]:
    place = address.partition("/p2p/")[0]
    return address, f"{PEER} cannot be reached at its address. {place}: {detail}. Do something."


@pytest.mark.parametrize(
    ("details", "whose"),
    [
        (("connection refused", "timed out"), "at the other end"),
        (("connection refused",), "The run may be over"),
        (("no route to that address", "the name does not resolve"), "this machine's connection"),
        (("no route to that address", "timed out"), "may be off"),
        (("timed out", "timed out"), "may be off"),
        (
            ("another node answers there", "a program answers there, but no potluck node"),
            "a new invite",
        ),
        (("another node answers there", "connection refused"), "where no node is running"),
        ((), "may be offline"),
    ],
)
def test_it_says_whose_fault_it_probably_is(details: tuple[str, ...], whose: str) -> None:
    places = zip((FIRST, SECOND), details, strict=False)
    assert whose in blame_of(state(*(failure(at, detail) for at, detail in places)))


def test_every_place_is_named_with_how_it_failed() -> None:
    words = blame_of(
        state(failure(FIRST, "connection refused"), failure(SECOND, "timed out"), cached=3)
    )
    assert "none of 2 known addresses answers, nor any of 3 peers known from before" in words
    assert "/ip4/192.0.2.7/tcp/4001: connection refused" in words
    assert "/dns4/x.example/tcp/4001: timed out" in words


def test_of_a_long_story_the_first_sentence_is_told() -> None:
    lost = f"The link to {PEER} was lost. The node over there ended. Try again."
    words = blame_of(state((FIRST, lost)))
    assert "(/ip4/192.0.2.7/tcp/4001: The link to it was lost). They may be off" in words


def test_where_all_refuse_it_does_not_say_that_they_are_off() -> None:
    refused = AddressState(FIRST, False, 1, "Your request was refused. It has expired.", True)
    words = blame_of(BootstrapState(Joined.TRYING, (refused,), 0))
    assert "the only known address does not let this node in" in words
    assert "from the auth server" in words
    assert "off" not in words


def test_a_peers_answer_is_cut_to_a_bearable_length() -> None:
    assert len(blame_of(state((FIRST, "no " * 10_000)))) < 400
