"""Known addresses: bounded in peers and in addresses, newest first, what works outlives hearsay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.net.libp2p.address_book import CUT_SECONDS, AddressBook
from node.net.libp2p.addresses import LONGEST_ADDRESS, parse
from protocols.identity import Identity, PeerId

PEERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(8)]
PEER, STRANGER = PEERS[0], PEERS[1]


def address(number: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{number}"


def whole(number: int, peer: PeerId = PEER) -> str:
    return f"{address(number)}/p2p/{peer}"


def test_addresses_are_remembered_in_the_order_of_learning_and_name_their_peer() -> None:
    book = AddressBook(peers=4, addresses_per_peer=4)
    book.learn(PEER, [address(1), whole(2)])
    book.learn(PEER, [address(1)])
    assert book.addresses_of(PEER) == (whole(2), whole(1))


def test_the_newest_addresses_of_a_peer_are_kept() -> None:
    book = AddressBook(peers=4, addresses_per_peer=3)
    book.learn(PEER, [address(number) for number in range(1, 10)])
    assert book.addresses_of(PEER) == (whole(7), whole(8), whole(9))


def test_an_address_that_worked_outlives_any_flood_of_hearsay() -> None:
    book = AddressBook(peers=4, addresses_per_peer=3)
    book.learn(PEER, [address(1)])
    book.worked(PEER, parse(address(1)))
    book.learn(PEER, [address(number) for number in range(2, 100)])
    assert whole(1) in book.addresses_of(PEER)
    assert book.to_try(PEER)[0].text == address(1)
    assert [each.text for each in book.to_try(PEER)] == [address(1), address(99), address(98)]


def test_when_all_have_worked_the_oldest_goes() -> None:
    book = AddressBook(peers=4, addresses_per_peer=2)
    for number in (1, 2, 3):
        book.worked(PEER, parse(address(number)))
    assert book.addresses_of(PEER) == (whole(2), whole(3))


def test_a_circuit_that_was_cut_off_is_tried_after_those_of_other_relays_for_a_while() -> None:
    book = AddressBook(peers=4, addresses_per_peer=4)
    first, second, third = (
        parse(f"/ip4/192.0.2.7/tcp/{number}/p2p/{relay}/p2p-circuit")
        for number, relay in enumerate(PEERS[2:5], start=1)
    )
    direct = parse(address(1))
    everything = [direct, first, second, third]
    book.cut_off(PEER, second.text, 100.0)
    book.cut_off(PEER, first.text, 101.0)
    assert book.to_try_later(PEER, everything, 102.0) == [second, first]
    assert book.to_try_later(PEER, [direct, first], 102.0) == [], "it is the only one"
    assert book.to_try_later(STRANGER, everything, 102.0) == []
    assert book.to_try_later(PEER, everything, 100.5 + CUT_SECONDS) == [first]
    for number in range(100):
        book.cut_off(PeerId(str(number)), first.text, 103.0)
    assert len(book._cut) == 4


def test_a_known_address_is_the_newest_again_without_being_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = AddressBook(peers=4, addresses_per_peer=4)
    book.learn(PEER, [whole(1), whole(2)])
    monkeypatch.delattr("node.net.libp2p.addresses.Multiaddr")
    book.learn(PEER, [whole(1), whole(3)])
    assert book.addresses_of(PEER) == (whole(2), whole(1))


def test_garbage_and_addresses_of_others_are_left_out() -> None:
    book = AddressBook(peers=4, addresses_per_peer=4)
    book.learn(PEER, ["", "garbage", whole(1, STRANGER), "/ip4/300.0.0.1/tcp/1"])
    assert book.addresses_of(PEER) == ()
    assert len(book) == 0


def test_an_address_that_would_be_too_long_with_its_peer_is_left_out() -> None:
    """Others would refuse the whole message in which it is passed on."""
    name = ".".join(["x" * 60] * 4)
    circuit = f"/dns/{name}/tcp/4001/p2p/{STRANGER}/p2p-circuit"
    padding = "/tcp/1" * ((LONGEST_ADDRESS - len(circuit)) // len("/tcp/1"))
    assert len(circuit + padding) <= LONGEST_ADDRESS < len(f"{circuit}{padding}/p2p/{PEER}")
    assert parse(circuit + padding)
    book = AddressBook(peers=4, addresses_per_peer=4)
    book.learn(PEER, [circuit + padding, address(1)])
    assert book.addresses_of(PEER) == (whole(1),)


def test_the_peer_not_heard_of_for_longest_is_forgotten_but_never_a_linked_one() -> None:
    book = AddressBook(peers=2, addresses_per_peer=2)
    book.learn(PEERS[0], [address(1)])
    book.keep(PEERS[0])
    book.learn(PEERS[1], [address(1)])
    book.learn(PEERS[2], [address(1)])
    assert book.addresses_of(PEERS[0])
    assert not book.addresses_of(PEERS[1])
    book.release(PEERS[0])
    book.learn(PEERS[3], [address(1)])
    assert not book.addresses_of(PEERS[0])


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.integers(1, 20), st.booleans())))
def test_the_book_never_grows_past_its_limits(calls: list[tuple[PeerId, int, bool]]) -> None:
    book = AddressBook(peers=3, addresses_per_peer=4)
    for peer, number, works in calls:
        if works:
            book.worked(peer, parse(address(number)))
        else:
            book.learn(peer, [address(number)])
        assert len(book) <= 3
        assert all(len(book.addresses_of(each)) <= 4 for each in PEERS)
        assert whole(number, peer) in book.addresses_of(peer)
