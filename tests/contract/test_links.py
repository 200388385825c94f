"""Links: what is known of them, how they come and go, and what a network that ended answers."""

from __future__ import annotations

import math

import pytest
import trio

from protocols.errors import ProtocolMisuse, Unreachable
from protocols.identity import Identity
from protocols.network import LITTLE_BYTES, LinkEvent, Network, Reach, Stream
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    introduce,
    joined,
    on_both,
    read_exactly,
    read_to_end,
)
from tests.waiting import PATIENCE_SECONDS, until

MEBIBYTE = 1_048_576
# One peer may tell us thousands of addresses; a home has two or three.
MOST_ADDRESSES_PER_PEER = 64


def _address(number: int) -> str:
    return f"/ip4/192.0.2.{number % 256}/tcp/{1024 + number}"


@on_both
async def test_before_connecting_there_is_no_link(place: Neighbourhood) -> None:
    near, far = await place.pair()
    assert near.link(far.peer_id) is None
    assert near.links() == ()


@on_both
async def test_both_ends_of_a_link_agree_on_its_facts(place: Neighbourhood) -> None:
    near, far = await place.pair()
    before = trio.current_time()
    facts = await near.connect(far.peer_id)
    await until(lambda: far.link(near.peer_id) is not None, PATIENCE_SECONDS)
    theirs = far.link(near.peer_id)
    assert theirs is not None
    assert (facts.peer, facts.reach, facts.inbound) == (far.peer_id, Reach.DIRECT, False)
    assert (theirs.peer, theirs.reach, theirs.inbound) == (near.peer_id, Reach.DIRECT, True)
    assert facts.remote_address.startswith("/ip4/")
    assert before <= facts.connected_at <= trio.current_time()
    assert [link.peer for link in near.links()] == [far.peer_id]
    assert [link.peer for link in far.links()] == [near.peer_id]


@on_both
async def test_connecting_twice_keeps_the_one_link(place: Neighbourhood) -> None:
    near, far = await place.pair()
    first = await near.connect(far.peer_id)
    second = await near.connect(far.peer_id)
    assert second.connected_at == first.connected_at
    assert len(near.links()) == 1


@on_both
async def test_connecting_many_times_at_once_makes_one_link(place: Neighbourhood) -> None:
    near, far = await place.pair()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(near.connect, far.peer_id)
    assert len(near.links()) == 1


@on_both
async def test_dialling_each_other_at_once_ends_in_a_link_that_works(place: Neighbourhood) -> None:
    near, far = await place.pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.connect, far.peer_id)
        nursery.start_soon(far.connect, near.peer_id)
    await place.settle()
    assert len(near.links()) == len(far.links()) == 1
    first, second = await joined(near, far)
    await first.send_all(b"one way")
    assert await read_exactly(second, 7) == b"one way"
    back, forth = await joined(far, near)
    await back.send_all(b"the other")
    assert await read_exactly(forth, 9) == b"the other"


@on_both
async def test_opening_connects_first(place: Neighbourhood) -> None:
    near, far = await place.pair()
    await joined(near, far)
    assert near.link(far.peer_id) is not None


@on_both
async def test_bytes_and_streams_are_counted(place: Neighbourhood) -> None:
    near, far = await place.pair()
    first, second = await joined(near, far)
    await first.send_all(bytes(100_000))
    assert await read_exactly(second, 100_000) == bytes(100_000)
    sending, receiving = near.link(far.peer_id), far.link(near.peer_id)
    assert sending is not None
    assert receiving is not None
    assert sending.open_streams == receiving.open_streams == 1
    assert sending.bytes_sent >= 100_000
    assert receiving.bytes_received >= 100_000
    assert receiving.bytes_sent < 50_000
    assert sending.bytes_received < 50_000


@on_both
async def test_rates_are_unknown_until_measured_and_then_believable(place: Neighbourhood) -> None:
    near, far = await place.pair()
    first, second = await joined(near, far)
    idle = near.link(far.peer_id)
    assert idle is not None
    assert idle.send_bytes_per_second is idle.receive_bytes_per_second is None

    async def send() -> None:
        await first.send_all(bytes(32 * MEBIBYTE))
        await first.send_eof()

    before = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        assert len(await read_to_end(second)) == 32 * MEBIBYTE
    lowest = 32 * MEBIBYTE / (trio.current_time() - before) / 2
    sending, receiving = near.link(far.peer_id), far.link(near.peer_id)
    assert sending is not None
    assert receiving is not None
    for rate in (sending.send_bytes_per_second, receiving.receive_bytes_per_second):
        assert rate is None or lowest < rate < math.inf


@on_both
async def test_a_node_counts_its_traffic_and_for_how_long_it_was_sending(
    place: Neighbourhood,
) -> None:
    near, far = await place.pair()
    first, second = await joined(near, far)
    before, began = near.traffic(), trio.current_time()
    await first.send_all(bytes(100_000))
    assert len(await read_exactly(second, 100_000)) == 100_000
    now, passed = near.traffic(), trio.current_time() - began
    assert now.sent_bytes - before.sent_bytes >= 100_000
    assert 0.0 <= now.sending_seconds - before.sending_seconds <= passed + 0.1
    expected = before.sending_bytes + 100_000 - LITTLE_BYTES  # the last ones may have come alone
    await until(lambda: near.traffic().sending_bytes >= expected, PATIENCE_SECONDS)
    assert near.traffic().sending_bytes <= near.traffic().sent_bytes
    assert far.traffic().received_bytes >= 100_000


@on_both
async def test_bytes_that_wait_for_their_reader_are_not_on_their_way(place: Neighbourhood) -> None:
    near, far = await place.pair()
    first, second = await joined(near, far)
    await first.send_all(bytes(MEBIBYTE // 8))
    await until(lambda: second.last_arrival > -math.inf, PATIENCE_SECONDS)
    await trio.sleep(1.0)  # the last of them are acknowledged
    seconds = near.traffic().sending_seconds
    await trio.sleep(1.0)
    assert near.traffic().sending_seconds == seconds
    assert await read_exactly(second, MEBIBYTE // 8) == bytes(MEBIBYTE // 8)


@on_both
async def test_a_ping_measures_the_round_trip(place: Neighbourhood) -> None:
    near, far = await place.pair()
    await near.connect(far.peer_id)
    round_trip = await near.ping(far.peer_id)
    assert 0 < round_trip < 5
    facts = near.link(far.peer_id)
    assert facts is not None
    assert facts.round_trip_seconds is not None
    assert 0 < facts.round_trip_seconds <= 5


@on_both
async def test_a_ping_without_a_link_is_unreachable(place: Neighbourhood) -> None:
    near, far = await place.pair()
    with pytest.raises(Unreachable):
        await near.ping(far.peer_id)


@on_both
async def test_after_a_disconnect_neither_side_has_a_link_and_both_may_connect_again(
    place: Neighbourhood,
) -> None:
    near, far = await place.pair()
    await near.connect(far.peer_id)
    await until(lambda: bool(far.links()), PATIENCE_SECONDS)
    await near.disconnect(far.peer_id)
    assert near.link(far.peer_id) is None
    assert near.links() == ()
    await until(lambda: far.links() == (), PATIENCE_SECONDS)
    await far.connect(near.peer_id)
    first, second = await joined(near, far)
    await first.send_all(b"again")
    assert await read_exactly(second, 5) == b"again"


@on_both
async def test_disconnecting_without_a_link_is_harmless(place: Neighbourhood) -> None:
    near, far = await place.pair()
    await near.disconnect(far.peer_id)
    await near.connect(far.peer_id)
    await near.disconnect(far.peer_id)
    await near.disconnect(far.peer_id)


@on_both
async def test_link_events_tell_of_coming_and_going_at_both_ends(place: Neighbourhood) -> None:
    near, far = await place.pair()
    with near.link_events() as ours, far.link_events() as theirs:
        await near.connect(far.peer_id)
        up = LinkEvent(far.peer_id, reach=Reach.DIRECT, was=Reach.NONE)
        assert await ours.receive() == up
        assert await theirs.receive() == LinkEvent(near.peer_id, up.reach, up.was)
        await near.disconnect(far.peer_id)
        down = LinkEvent(far.peer_id, reach=Reach.NONE, was=Reach.DIRECT)
        assert await ours.receive() == down
        assert await theirs.receive() == LinkEvent(near.peer_id, down.reach, down.was)


@on_both
async def test_each_subscriber_gets_every_event_from_its_subscription_on(
    place: Neighbourhood,
) -> None:
    near, far = await place.pair()
    with near.link_events() as early:
        await near.connect(far.peer_id)
        with near.link_events() as late:
            await near.disconnect(far.peer_id)
            assert (await early.receive()).reach is Reach.DIRECT
            assert (await early.receive()).reach is Reach.NONE
            assert (await late.receive()).reach is Reach.NONE
            with pytest.raises(trio.WouldBlock):
                late.receive_nowait()


@pytest.mark.slow
@on_both
async def test_a_subscriber_that_reads_nothing_holds_nobody_up(place: Neighbourhood) -> None:
    near, far = await place.pair()
    with near.link_events() as events:
        for _ in range(150):
            await near.connect(far.peer_id)
            await near.disconnect(far.peer_id)
        newest = None
        count = 0
        while True:
            try:
                newest = events.receive_nowait()
            except trio.WouldBlock:
                break
            count += 1
    assert newest == LinkEvent(far.peer_id, reach=Reach.NONE, was=Reach.DIRECT)
    assert count < 300


@on_both
async def test_our_addresses_name_us(place: Neighbourhood) -> None:
    network = await place.network()
    addresses = network.addresses()
    assert addresses
    assert all(address.endswith(f"/p2p/{network.peer_id}") for address in addresses)
    assert network.peer_id == network.identity.peer_id


@on_both
async def test_learned_addresses_are_known_and_repeated_ones_not_doubled(
    place: Neighbourhood,
) -> None:
    network = await place.network()
    peer = Identity.generate().peer_id
    assert network.addresses_of(peer) == ()
    network.learn_addresses(peer, [_address(1), _address(2)])
    network.learn_addresses(peer, [_address(2)])
    known = network.addresses_of(peer)
    assert len(known) == 2
    assert all(any(address.startswith(_address(n)) for address in known) for n in (1, 2))


@on_both
async def test_of_too_many_addresses_the_newest_are_kept(place: Neighbourhood) -> None:
    network = await place.network()
    peer = Identity.generate().peer_id
    network.learn_addresses(peer, (_address(number) for number in range(5000)))
    network.learn_addresses(peer, [_address(9999)])
    known = network.addresses_of(peer)
    assert 2 <= len(known) <= MOST_ADDRESSES_PER_PEER
    assert any(address.startswith(_address(9999)) for address in known)
    assert any(address.startswith(_address(4999)) for address in known)
    assert not any(address.startswith(f"{_address(0)}/") for address in known)


@on_both
async def test_addresses_of_other_peers_are_left_out(place: Neighbourhood) -> None:
    network = await place.network()
    peer, stranger = Identity.generate().peer_id, Identity.generate().peer_id
    network.learn_addresses(
        peer, ["", "garbage", "\0\xff", "/", f"{_address(1)}/p2p/{stranger}", "/ip4/300.1.1.1/tcp"]
    )
    assert network.addresses_of(peer) == ()


@on_both
async def test_a_peer_without_addresses_is_unreachable(place: Neighbourhood) -> None:
    network = await place.network()
    with pytest.raises(Unreachable):
        await network.connect(Identity.generate().peer_id)
    with pytest.raises(Unreachable):
        await network.open(Identity.generate().peer_id, PROTOCOL)


@on_both
async def test_unreachable_names_every_address_that_failed(place: Neighbourhood) -> None:
    near, far = await place.pair()
    third = await place.network()
    peer = Identity.generate().peer_id
    theirs = far.addresses()[0].rpartition("/p2p/")[0]  # somebody else answers there
    near.learn_addresses(peer, [place.dead_address(), theirs])
    with pytest.raises(Unreachable) as caught:
        await near.connect(peer)
    assert place.dead_address() in str(caught.value)
    assert theirs in str(caught.value)
    assert near.link(peer) is None
    assert third.links() == ()


@on_both
async def test_a_dead_address_does_not_hide_a_good_one(place: Neighbourhood) -> None:
    for dead_first in (True, False):
        near, far = await place.network(), await place.network()
        addresses = [place.dead_address(), *far.addresses()]
        near.learn_addresses(far.peer_id, addresses if dead_first else reversed(addresses))
        facts = await near.connect(far.peer_id)
        assert facts.peer == far.peer_id


@on_both
async def test_a_failure_is_not_remembered(place: Neighbourhood) -> None:
    near, far = await place.network(), await place.network()
    near.learn_addresses(far.peer_id, [place.dead_address()])
    with pytest.raises(Unreachable):
        await near.connect(far.peer_id)
    near.learn_addresses(far.peer_id, far.addresses())
    assert (await near.connect(far.peer_id)).peer == far.peer_id


@on_both
async def test_cancelled_connecting_leaves_no_link_and_may_be_repeated(
    place: Neighbourhood,
) -> None:
    near, far = await place.pair()
    for number in range(20):
        with trio.move_on_after(0.001 * number):
            await near.connect(far.peer_id)
            break
        await place.settle()
        assert near.links() == ()
    await near.connect(far.peer_id)
    await place.settle()
    assert len(near.links()) == len(far.links()) == 1


@on_both
async def test_connecting_to_oneself_is_a_misuse(place: Neighbourhood) -> None:
    network = await place.network()
    with pytest.raises(ProtocolMisuse):
        await network.connect(network.peer_id)


@on_both
async def test_a_network_that_ended_is_closed_for_everything(place: Neighbourhood) -> None:
    near, far = await place.pair()
    stream, _ = await joined(near, far)
    with near.link_events() as events:
        await place.end(near)
        assert [event.reach async for event in events][-1:] == [Reach.NONE]
    with pytest.raises(trio.ClosedResourceError):
        await near.connect(far.peer_id)
    with pytest.raises(trio.ClosedResourceError):
        await near.open(far.peer_id, PROTOCOL)
    with pytest.raises(trio.ClosedResourceError):
        await near.ping(far.peer_id)
    with pytest.raises(trio.ClosedResourceError):
        near.serve(PROTOCOL, _never)
    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
        await stream.send_all(b"x")
    assert near.links() == ()


@on_both
async def test_the_peers_of_a_network_that_ended_learn_of_it(place: Neighbourhood) -> None:
    near, far = await place.pair()
    await near.connect(far.peer_id)
    await until(lambda: bool(far.links()), PATIENCE_SECONDS)
    await place.end(near)
    await until(lambda: far.links() == (), PATIENCE_SECONDS)
    with pytest.raises(Unreachable):
        await far.connect(near.peer_id)


@on_both
async def test_clock_and_chance_come_with_the_network(place: Neighbourhood) -> None:
    first, second = await place.network(), await place.network()
    assert first.wall_time() > 1_700_000_000
    assert first.wall_time() <= first.wall_time()
    assert first.random.random() != second.random.random()


@on_both
async def test_three_networks_keep_their_links_apart(place: Neighbourhood) -> None:
    networks = [await place.network() for _ in range(3)]
    for near in networks:
        for far in networks:
            if near is not far:
                introduce(near, far)
    streams = [await joined(near, far) for near in networks for far in networks if near is not far]
    for number, (first, _) in enumerate(streams):
        await first.send_all(bytes([number]))
    for number, (_, second) in enumerate(streams):
        assert await second.receive_some() == bytes([number])
    assert all(_linked_peers(network) == 2 for network in networks)


def _linked_peers(network: Network) -> int:
    return len({link.peer for link in network.links()})


async def _never(stream: Stream) -> None:
    raise AssertionError(f"nobody opens {stream.protocol}")
