"""Circuits, dial backs, sightings and punches, as every network has to keep them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.lowlevel

from nat.addresses import port_of, without_peer
from nat.circuits import CircuitTaker
from nat.relay_limits import RelayLimits
from nat.relaying import HOP, STOP, Relay
from nat.reservations import reserve
from protocols.errors import ProtocolNotServed, RemoteMisbehaviour, Unreachable
from protocols.network import LinkEvent, Network, Reach, Stream, TraversableNetwork
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    introduce,
    on_both,
    read_exactly,
)
from tests.waiting import PATIENCE_SECONDS, until


async def echo(stream: Stream) -> None:
    while part := await stream.receive_some():
        await stream.send_all(part)


async def says(asker: Network, other: Network, words: bytes = b"hello") -> bytes:
    """What comes back from an echo."""
    async with await asker.open(other.peer_id, PROTOCOL) as stream:
        await stream.send_all(words)
        return await read_exactly(stream, len(words))


def reach_of(network: Network, other: Network) -> Reach:
    link = network.link(other.peer_id)
    return Reach.NONE if link is None else link.reach


async def traversable(place: Neighbourhood) -> TraversableNetwork:
    network = await place.network()
    assert isinstance(network, TraversableNetwork)
    return network


def circuit_to(other: Network, relay: Network) -> str:
    return f"{relay.addresses()[0]}/p2p-circuit/p2p/{other.peer_id}"


class Street:
    """A relay, and two nodes of which the second has a place there."""

    def __init__(self, place: Neighbourhood) -> None:
        self.place = place
        self.first: TraversableNetwork
        self.second: TraversableNetwork
        self.hub: TraversableNetwork
        self.relay: Relay
        self.taker: CircuitTaker

    async def open(self, nursery: trio.Nursery) -> None:
        self.hub = await traversable(self.place)
        self.first, self.second = await traversable(self.place), await traversable(self.place)
        self.relay = Relay(self.hub, RelayLimits())
        await nursery.start(self.relay.run)
        for one in (self.first, self.second):
            one.learn_addresses(self.hub.peer_id, self.hub.addresses())
            one.serve(PROTOCOL, echo)
        self.taker = CircuitTaker(self.second, lambda _: True)
        self.second.serve(STOP, self.taker.answer)
        await reserve(self.second, self.hub.peer_id)
        self.first.learn_addresses(self.second.peer_id, [circuit_to(self.second, self.hub)])


def on_a_street(test: Callable[[Street], Awaitable[None]]) -> Callable[..., None]:
    """A test with a relay and two nodes, on both networks."""

    async def run(place: Neighbourhood) -> None:
        here = Street(place)
        async with trio.open_nursery() as nursery:
            await here.open(nursery)
            await test(here)
            nursery.cancel_scope.cancel()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return on_both(run)


# ---- circuits


@on_a_street
async def test_a_circuit_address_is_dialled_through_its_relay(here: Street) -> None:
    link = await here.first.connect(here.second.peer_id)
    assert (link.peer, link.reach, link.inbound) == (here.second.peer_id, Reach.RELAYED, False)
    assert "p2p-circuit" in link.remote_address
    assert not link.punched
    theirs = here.second.link(here.first.peer_id)
    assert theirs is not None
    assert (theirs.reach, theirs.inbound) == (Reach.RELAYED, True)
    assert await says(here.first, here.second) == b"hello"
    assert await says(here.second, here.first) == b"hello"
    assert here.relay.counts().circuits == 1


@on_a_street
async def test_its_coming_and_its_end_are_told(here: Street) -> None:
    with here.second.link_events() as events:
        await here.first.connect(here.second.peer_id)
        peer = here.first.peer_id
        assert await events.receive() == LinkEvent(peer, Reach.RELAYED, Reach.NONE)
        await here.first.disconnect(here.second.peer_id)
        assert await events.receive() == LinkEvent(peer, Reach.NONE, Reach.RELAYED)


@on_a_street
async def test_the_end_of_a_relayed_link_gives_everything_back(here: Street) -> None:
    for _ in range(3):
        await here.first.connect(here.second.peer_id)
        await here.first.disconnect(here.second.peer_id)
        await until(lambda: here.relay.counts().circuits == 0, PATIENCE_SECONDS)
        await until(lambda: not here.taker.open, PATIENCE_SECONDS)
    for network in (here.first, here.second):
        await until(lambda network=network: _streams(network) == 0, PATIENCE_SECONDS)
    assert reach_of(here.first, here.hub) is reach_of(here.second, here.hub) is Reach.DIRECT


def _streams(network: Network) -> int:
    return sum(link.open_streams for link in network.links())


@on_a_street
async def test_the_end_of_the_relay_ends_the_link(here: Street) -> None:
    await here.first.connect(here.second.peer_id)
    with here.first.link_events() as events:
        await here.place.end(here.hub)
        async for event in events:
            if event == LinkEvent(here.second.peer_id, Reach.NONE, Reach.RELAYED):
                break
    await until(lambda: reach_of(here.second, here.first) is Reach.NONE, PATIENCE_SECONDS)


@on_a_street
async def test_without_a_place_at_the_relay_a_peer_is_unreachable(here: Street) -> None:
    await here.second.disconnect(here.hub.peer_id)
    await until(lambda: here.relay.counts().reservations == 0, PATIENCE_SECONDS)
    with pytest.raises(Unreachable):
        await here.first.connect(here.second.peer_id)
    assert reach_of(here.first, here.second) is Reach.NONE


@on_a_street
async def test_through_a_peer_that_is_no_relay_another_is_unreachable(here: Street) -> None:
    here.hub.stop_serving(HOP)
    with pytest.raises(Unreachable):
        await here.first.connect(here.second.peer_id)


@on_a_street
async def test_addresses_that_lead_round_in_a_circle_end(here: Street) -> None:
    """Two peers that nobody listens for, each through the other, and each through itself."""
    one, other = await here.place.network(), await here.place.network()
    await here.place.end(one)
    await here.place.end(other)
    dead = here.place.dead_address()
    ways = [
        (one, f"{dead}/p2p/{other.peer_id}/p2p-circuit/p2p/{one.peer_id}"),
        (other, f"{dead}/p2p/{one.peer_id}/p2p-circuit/p2p/{other.peer_id}"),
        (one, f"{dead}/p2p/{one.peer_id}/p2p-circuit/p2p/{one.peer_id}"),
        (one, f"{dead}/p2p/{here.first.peer_id}/p2p-circuit/p2p/{one.peer_id}"),
    ]
    for peer, address in ways:
        here.first.learn_addresses(peer.peer_id, [address])
    with trio.fail_after(60), pytest.raises(Unreachable):
        await here.first.connect(one.peer_id)


@on_a_street
async def test_a_dial_that_is_cancelled_leaves_no_link_and_no_stream(here: Street) -> None:
    await here.first.connect(here.hub.peer_id)
    for checkpoints in range(0, 60, 3):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.first.connect, here.second.peer_id)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        await here.first.disconnect(here.second.peer_id)  # where it came before the cancellation
    for network in (here.first, here.second, here.hub):
        await until(lambda network=network: _streams(network) == 0, PATIENCE_SECONDS)
    await until(lambda: here.relay.counts().circuits == 0, PATIENCE_SECONDS)
    await until(lambda: reach_of(here.second, here.first) is Reach.NONE, PATIENCE_SECONDS)
    assert await says(here.first, here.second) == b"hello"


# ---- dial backs


@on_both
async def test_a_dial_back_is_no_second_link_and_ends_with_its_block(
    place: Neighbourhood,
) -> None:
    judge, asker = await traversable(place), await traversable(place)
    asker.learn_addresses(judge.peer_id, judge.addresses())
    await asker.connect(judge.peer_id)
    await place.settle()
    before = asker.link(judge.peer_id), judge.link(asker.peer_id)
    over_their_dial = []

    async def echo_and_tell(stream: Stream) -> None:
        over_their_dial.append(stream.over_their_dial)
        await echo(stream)

    asker.serve(PROTOCOL, echo_and_tell)
    assert await says(judge, asker) == b"hello"
    assert over_their_dial == [False], "it is the asker's dial"
    address = without_peer(asker.addresses()[0])
    async with judge.dial_back(asker.peer_id, address, PROTOCOL) as stream:
        assert not stream.over_their_dial
        await stream.send_all(b"ring")
        assert await read_exactly(stream, 4) == b"ring"
        strangers = [link for link in asker.links() if link.peer != judge.peer_id]
        assert [(link.inbound, link.reach) for link in strangers] == [(True, Reach.DIRECT)]
        assert strangers[0].peer != judge.peer_id
        assert [link.peer for link in judge.links()] == [asker.peer_id]
    assert over_their_dial == [False, True]
    await until(lambda: len(asker.links()) == 1, PATIENCE_SECONDS)
    for link, network, peer in zip(before, (asker, judge), (judge, asker), strict=True):
        now = network.link(peer.peer_id)
        assert link is not None
        assert now is not None
        assert now.connected_at == link.connected_at


@on_both
async def test_a_dial_back_to_nobody_or_to_another_peer_fails(place: Neighbourhood) -> None:
    judge, asker, other = [await traversable(place) for _ in range(3)]
    for one in (asker, other):
        one.serve(PROTOCOL, echo)
    elsewhere = without_peer(other.addresses()[0])
    for address in (place.dead_address(), elsewhere):
        with trio.fail_after(30), pytest.raises(Unreachable):
            async with judge.dial_back(asker.peer_id, address, PROTOCOL):
                pytest.fail("it has opened a stream")
    with pytest.raises(ProtocolNotServed):
        async with judge.dial_back(other.peer_id, elsewhere, "/potluck/not-served"):
            pytest.fail("it has opened a stream")
    await until(lambda: not other.links() and not judge.links(), PATIENCE_SECONDS)


@on_both
async def test_an_error_in_the_block_of_a_dial_back_comes_out_as_it_is(
    place: Neighbourhood,
) -> None:
    judge, asker = await traversable(place), await traversable(place)
    asker.serve(PROTOCOL, echo)
    address = without_peer(asker.addresses()[0])
    for error in (RemoteMisbehaviour("nonsense"), trio.BrokenResourceError("lost"), KeyError("x")):
        with pytest.raises(type(error)) as raised:
            async with judge.dial_back(asker.peer_id, address, PROTOCOL):
                raise error
        assert raised.value is error
        await until(lambda: not asker.links(), PATIENCE_SECONDS)


@on_both
async def test_a_dial_back_that_is_cancelled_ends(place: Neighbourhood) -> None:
    judge, asker = await traversable(place), await traversable(place)
    asker.serve(PROTOCOL, echo)
    address = without_peer(asker.addresses()[0])
    with trio.CancelScope() as scope:
        async with judge.dial_back(asker.peer_id, address, PROTOCOL):
            scope.cancel()
            await trio.sleep_forever()
    await until(lambda: not asker.links(), PATIENCE_SECONDS)


# ---- sightings and announcements


@on_both
async def test_a_peer_that_we_have_dialled_says_from_where_we_come(place: Neighbourhood) -> None:
    seen, seer = await traversable(place), await traversable(place)
    seen.learn_addresses(seer.peer_id, seer.addresses())
    await seen.connect(seer.peer_id)
    free = await seen.sighting(seer.peer_id)
    assert port_of(free.address) == free.port != 0
    own = seen.listened_addresses()[0]
    bound = await seen.sighting(seer.peer_id, port=port_of(own))
    assert (bound.port, bound.address) == (port_of(own), own)
    await until(lambda: [link.peer for link in seer.links()] == [seen.peer_id], PATIENCE_SECONDS)
    assert [link.peer for link in seen.links()] == [seer.peer_id]


@on_both
async def test_without_a_link_that_we_have_dialled_there_is_no_sighting(
    place: Neighbourhood,
) -> None:
    seen, seer = await traversable(place), await traversable(place)
    introduce(seen, seer)
    with pytest.raises(Unreachable):
        await seen.sighting(seer.peer_id)
    await seer.connect(seen.peer_id)
    await place.settle()
    with pytest.raises(Unreachable):
        await seen.sighting(seer.peer_id)


@on_both
async def test_what_is_announced_comes_first_until_something_else_is(
    place: Neighbourhood,
) -> None:
    network = await traversable(place)
    before = network.addresses()
    assert {without_peer(one) for one in before} >= set(network.listened_addresses())
    router = "/ip4/192.0.2.7/tcp/4001"
    network.announce([router])
    assert network.addresses() == (f"{router}/p2p/{network.peer_id}", *before)
    network.announce([])
    assert network.addresses() == before


# ---- punches


@on_a_street
async def test_a_punch_makes_a_relayed_link_direct(here: Street) -> None:
    first, second = here.first, here.second
    await first.connect(second.peer_id)
    with first.link_events() as events, trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            for one, other, initiates in ((first, second, True), (second, first, False)):
                nursery.start_soon(_punch, one, other, initiates)
        assert await events.receive() == LinkEvent(second.peer_id, Reach.DIRECT, Reach.RELAYED)
    assert reach_of(first, second) is reach_of(second, first) is Reach.DIRECT
    assert await says(first, second) == b"hello"
    assert await says(second, first) == b"hello"


async def _punch(one: TraversableNetwork, other: TraversableNetwork, initiates: bool) -> None:
    link = await one.punch(other.peer_id, other.listened_addresses(), initiates=initiates)
    assert (link.peer, link.reach) == (other.peer_id, Reach.DIRECT)


@on_a_street
async def test_a_punch_that_meets_nobody_waits_and_leaves_nothing(here: Street) -> None:
    nobody = here.place.dead_address()
    await here.first.connect(here.second.peer_id)
    with trio.move_on_after(0.5):
        await here.first.punch(here.second.peer_id, [nobody], initiates=True)
        pytest.fail("it met somebody")
    assert reach_of(here.first, here.second) is Reach.RELAYED
    assert await says(here.first, here.second) == b"hello"


@on_both
async def test_a_punch_without_an_address_is_unreachable(place: Neighbourhood) -> None:
    network, other = await traversable(place), await traversable(place)
    with pytest.raises(Unreachable):
        await network.punch(other.peer_id, [], initiates=True)
