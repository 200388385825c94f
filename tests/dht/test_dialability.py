"""Whether a node can be dialled, by what others say, and which of its addresses they try."""

from __future__ import annotations

import pytest

from protocols.dht import dialability
from protocols.dht.dialability import Dialability, Dialled, addresses_to_try
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach


def heard(*verdicts: Dialled) -> Dialability:
    made = Dialability()
    for number, verdict in enumerate(verdicts):
        made.report(PeerId(f"peer-{number}"), verdict)
    return made


YES, NO = Dialled.ANSWERED, Dialled.FAILED


@pytest.mark.parametrize(
    ("verdicts", "is_dialable"),
    [
        ((), True),
        ((Dialled.UNKNOWN, Dialled.UNKNOWN), True),
        ((NO,), False),
        ((NO, NO, YES), True),
        ((NO, NO, NO, YES), False),
        ((YES, YES, NO, NO, NO, NO), True),
    ],
)
def test_more_than_two_to_one_that_tried_in_vain_count_a_node_out(
    verdicts: tuple[Dialled, ...], is_dialable: bool
) -> None:
    assert heard(*verdicts).is_dialable is is_dialable


def test_a_peer_has_one_verdict_the_latest() -> None:
    made = Dialability()
    assert made.report(PeerId("one"), NO), "that changed something"
    assert not made.report(PeerId("one"), NO)
    assert made.report(PeerId("one"), YES)
    assert made.is_dialable
    assert str(made) == "1 of 1 peers that tried could dial this node"


def test_numbers_of_newer_nodes_say_nothing() -> None:
    assert not Dialability().report(PeerId("one"), 77)


def test_no_more_verdicts_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialability, "PEERS_HEARD", 4)
    made = heard(YES, YES, YES, YES, NO, NO, NO, NO)
    assert not made.is_dialable
    assert str(made).startswith("0 of 4")


# Which addresses are tried

PUBLIC = "/ip4/93.184.216.34/tcp/4001"
SAME_NETWORK = "/ip4/93.184.216.99/tcp/5001"
ELSEWHERE = ["/ip4/8.8.8.8/tcp/80", "/dns4/victim.example.org/tcp/443", "/ip4/9.9.9.9/tcp/1"]
PRIVATE = ["/ip4/192.168.1.1/tcp/80", "/ip4/127.0.0.1/tcp/22"]


def link(address: str, reach: Reach = Reach.DIRECT) -> LinkFacts:
    return LinkFacts(PeerId("peer"), reach, True, address, 0.0)


def test_addresses_in_the_network_of_the_connection_come_first() -> None:
    claimed = [*PRIVATE, *ELSEWHERE, SAME_NETWORK, PUBLIC]
    assert addresses_to_try(claimed, link("/ip4/93.184.216.34/tcp/61234")) == [
        SAME_NETWORK,
        PUBLIC,
        ELSEWHERE[0],
    ]


def test_a_stranger_from_the_internet_makes_us_dial_one_third_party_and_nobody_at_home() -> None:
    claimed = [*PRIVATE, *ELSEWHERE]
    assert addresses_to_try(claimed, link("/ip4/93.184.216.34/tcp/61234")) == ELSEWHERE[:1]


def test_at_home_all_kinds_are_tried_the_likeliest_first() -> None:
    claimed = [PRIVATE[1], PUBLIC, PRIVATE[0], ELSEWHERE[0]]
    tried = addresses_to_try(claimed, link("/ip4/192.168.1.1/tcp/61234"))
    assert tried == [PRIVATE[0], PRIVATE[1], PUBLIC]


def test_a_peer_that_comes_through_a_relay_has_one_try() -> None:
    relayed = link("/ip4/8.8.4.4/tcp/4001/p2p/relay/p2p-circuit", Reach.RELAYED)
    assert addresses_to_try([PUBLIC, *ELSEWHERE], relayed) == [PUBLIC]
    assert addresses_to_try([PUBLIC, *ELSEWHERE], None) == [PUBLIC]
