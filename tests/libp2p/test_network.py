"""The real network beyond the contract: addresses, identity, identify, many streams, IPv6."""

from __future__ import annotations

import math
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from node.net.libp2p import identify, introductions
from node.net.libp2p.addresses import parse
from node.net.libp2p.identify import Description
from node.net.libp2p.introductions import COUNTED_SECONDS, MOST_HEARD, MOST_TOLD, FewTimes
from node.net.libp2p.listener import NodeCannotListen, open_listeners
from node.net.libp2p.own_addresses import CannotAnnounce, InterfaceAddresses
from node.net.libp2p.swarm import MOST_CONNECTIONS_OF_A_PEER
from node.net.network import Libp2pNetwork, Libp2pSettings, open_libp2p_network
from protocols.errors import ProtocolMisuse, RemoteMisbehaviour, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import Reach, Stream
from tests.libp2p.nodes import (
    LOOPBACK,
    echo,
    networks,
    open_descriptors,
    read_to_end,
    running_tasks,
)
from tests.ports import held_port
from tests.waiting import PATIENCE_SECONDS, until

ECHO = "/potluck/echo/1.0.0"
SOMEBODY = Identity.from_seed(bytes(32)).peer_id


async def answers(caller: Libp2pNetwork, called: Libp2pNetwork) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        stream = await caller.open(called.peer_id, ECHO)
        await stream.send_all(b"hello")
        await stream.send_eof()
        assert await read_to_end(stream) == b"hello"
        await stream.aclose()


# -- where we are


async def test_port_zero_and_all_interfaces_become_addresses_that_can_be_dialled() -> None:
    everywhere = Libp2pSettings()
    async with open_libp2p_network(Identity.generate(), everywhere) as far:
        far.serve(ECHO, echo)
        interfaces = InterfaceAddresses()
        hosts = [*interfaces.of_family(4), *interfaces.of_family(6)]
        assert len(far.addresses()) == len(hosts)
        assert all(address.endswith(f"/p2p/{far.peer_id}") for address in far.addresses())
        assert not any("/tcp/0/" in address for address in far.addresses())
        assert "/127.0.0.1/" in far.addresses()[-1] or "/::1/" in far.addresses()[-1]
        for address in far.addresses():
            async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
                near.learn_addresses(far.peer_id, [address])
                await answers(near, far)


async def test_several_addresses_of_both_families_are_listened_on() -> None:
    addresses = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.2/tcp/0", "/ip6/::1/tcp/0")
    async with open_libp2p_network(Identity.generate(), Libp2pSettings(addresses)) as far:
        far.serve(ECHO, echo)
        hosts = [address.split("/")[2] for address in far.addresses()]
        assert hosts == ["127.0.0.1", "127.0.0.2", "::1"]
        for address in far.addresses():
            async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
                near.learn_addresses(far.peer_id, [address])
                await answers(near, far)
                link = near.link(far.peer_id)
                assert link is not None
                assert address.startswith(link.remote_address)
                theirs = far.link(near.peer_id)
                assert theirs is not None
                assert theirs.remote_address.startswith(address[:5])


async def test_announced_addresses_come_first_and_name_us() -> None:
    identity = Identity.generate()
    announced = ("/dns4/node.example.org/tcp/4001", f"/ip4/192.0.2.7/tcp/1/p2p/{identity.peer_id}")
    settings = replace(LOOPBACK, announce_addresses=announced)
    async with open_libp2p_network(identity, settings) as network:
        assert network.addresses()[:2] == (
            f"/dns4/node.example.org/tcp/4001/p2p/{identity.peer_id}",
            f"/ip4/192.0.2.7/tcp/1/p2p/{identity.peer_id}",
        )
        assert network.addresses()[2].startswith("/ip4/127.0.0.1/")


@pytest.mark.parametrize("announced", ["garbage", f"/ip4/192.0.2.7/tcp/1/p2p/{SOMEBODY}"])
async def test_an_announce_address_that_cannot_be_ours_is_refused_with_advice(
    announced: str,
) -> None:
    settings = replace(LOOPBACK, announce_addresses=(announced,))
    with pytest.raises(CannotAnnounce):
        async with open_libp2p_network(Identity.generate(), settings):
            pass


@pytest.mark.slow
async def test_a_port_that_is_taken_is_an_error_for_people_and_leaves_nothing_open() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as first:
        taken = first.addresses()[0].partition("/p2p/")[0]
        before = open_descriptors()
        settings = Libp2pSettings(("/ip4/127.0.0.1/tcp/0", taken))
        with pytest.raises(NodeCannotListen) as refusal:
            async with open_libp2p_network(Identity.generate(), settings):
                pass
        assert taken in refusal.value.what
        assert "running already" in refusal.value.why
        assert open_descriptors() == before


@pytest.mark.parametrize(
    "address", ["garbage", "/dns4/example.org/tcp/1", "/ip4/192.0.2.99/tcp/0", "/ip4/1.2.3.4/udp/1"]
)
async def test_an_address_that_cannot_be_listened_on_is_an_error_for_people(address: str) -> None:
    with pytest.raises(NodeCannotListen) as refusal:
        async with open_libp2p_network(Identity.generate(), Libp2pSettings((address,))):
            pass
    assert refusal.value.advice


async def test_a_node_that_does_not_listen_can_still_dial() -> None:
    async with (
        open_libp2p_network(Identity.generate(), LOOPBACK) as far,
        open_libp2p_network(Identity.generate(), Libp2pSettings(())) as near,
    ):
        assert near.addresses() == ()
        far.serve(ECHO, echo)
        near.learn_addresses(far.peer_id, far.addresses())
        await answers(near, far)


async def test_we_can_dial_from_the_port_we_listen_on_and_nobody_else_can_take_it() -> None:
    """Hole punching needs the first; the second is what SO_REUSEPORT alone would give away."""
    (listener,) = open_listeners(("/ip4/127.0.0.1/tcp/0",))
    async with listener:
        ours = listener.socket.getsockname()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(ours)
        with socket.create_server(("127.0.0.1", 0)) as remote, socket.socket() as dialling:
            dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            dialling.bind(ours)
            dialling.connect(remote.getsockname())
            accepted, seen_from = remote.accept()
            accepted.close()
            assert seen_from == ours


# -- who we are


async def test_it_closes_and_comes_back_with_the_same_identity_and_is_met_again() -> None:
    identity = Identity.generate()
    with held_port() as port:
        settings = Libp2pSettings((f"/ip4/127.0.0.1/tcp/{port}",))
        async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
            for _ in range(3):
                async with open_libp2p_network(identity, settings) as far:
                    far.serve(ECHO, echo)
                    near.learn_addresses(far.peer_id, far.addresses())
                    await answers(near, far)
                await until(lambda: not near.links(), within_seconds=PATIENCE_SECONDS)


async def test_it_comes_back_while_its_old_link_is_still_believed_in() -> None:
    """It lost power: no goodbye, and our side of the old connection is dead without knowing."""
    identity = Identity.generate()
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
        near.serve(ECHO, echo)
        async with open_libp2p_network(identity, LOOPBACK) as before:
            before.learn_addresses(near.peer_id, near.addresses())
            await before.connect(near.peer_id)
            await until(lambda: bool(near.links()), within_seconds=PATIENCE_SECONDS)
            async with open_libp2p_network(identity, LOOPBACK) as after:
                after.serve(ECHO, echo)
                after.learn_addresses(near.peer_id, near.addresses())
                await answers(after, near)
                await answers(near, after)


async def test_a_peer_that_proves_another_identity_is_not_connected() -> None:
    async with networks(2) as (near, far):
        near.learn_addresses(SOMEBODY, [far.addresses()[0].partition("/p2p/")[0]])
        with pytest.raises(Unreachable, match="another node"):
            await near.connect(SOMEBODY)
        assert near.links() == ()
        await until(lambda: not far.links(), within_seconds=PATIENCE_SECONDS)


# -- identify


async def described_by(asking: Libp2pNetwork, peer: PeerId) -> Description:
    """What a peer says of itself."""
    stream = await asking.open(peer, identify.IDENTIFY)
    return await identify.read(stream)


async def test_a_peer_is_told_and_heard_a_few_times_in_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(introductions, "COUNTED_SECONDS", math.inf)  # on a machine of any speed
    async with networks(2) as (near, far):
        await near.connect(far.peer_id)
        for _ in range(MOST_TOLD - 1):  # it has asked once by itself, or will
            await described_by(near, far.peer_id)
        answered = 0
        for _ in range(5):
            with suppress(trio.BrokenResourceError, RemoteMisbehaviour):
                await described_by(near, far.peer_id)
                answered += 1
        assert answered <= 1
        heard = []
        far._introductions._learn = lambda _connection, said: heard.append(said)
        said = Description("somebody/1", ("/ip4/192.0.2.9/tcp/4001",), (), "")
        message = identify.encode(said, near._introductions._public_key)
        for _ in range(MOST_HEARD + 3):
            stream = await near.open(far.peer_id, identify.IDENTIFY_PUSH)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(message)
                await stream.send_eof()
                await stream.receive_some()
        assert len(heard) == MOST_HEARD


def test_after_some_seconds_a_peer_may_again() -> None:
    few, one, other = FewTimes(2), PeerId("one"), PeerId("other")
    assert [few.take(one, 0.0) for _ in range(3)] == [True, True, False]
    assert few.take(other, 0.0)
    assert not few.take(one, COUNTED_SECONDS - 0.1)
    assert few.take(one, COUNTED_SECONDS)


async def test_one_peer_cannot_take_the_places_of_all_others() -> None:
    async with networks(1) as (popular,), AsyncExitStack() as stack:
        identity = Identity.generate()
        for _ in range(MOST_CONNECTIONS_OF_A_PEER + 4):
            again = await stack.enter_async_context(open_libp2p_network(identity, LOOPBACK))
            again.learn_addresses(popular.peer_id, popular.addresses())
            with suppress(Unreachable):
                await again.connect(popular.peer_id)
        await until(
            lambda: popular._inbound.open <= MOST_CONNECTIONS_OF_A_PEER,
            within_seconds=PATIENCE_SECONDS,
        )
        (link,) = popular.links()
        assert link.peer == identity.peer_id


async def test_peers_learn_what_they_are_and_where_without_being_asked() -> None:
    settings = replace(LOOPBACK, announce_addresses=("/ip4/192.0.2.7/tcp/4001",))
    async with networks(2, settings) as (near, far):
        far._book = near._book.__class__(peers=4, addresses_per_peer=4)
        far.serve(ECHO, echo)
        await near.connect(far.peer_id)
        announced = f"/ip4/192.0.2.7/tcp/4001/p2p/{far.peer_id}"
        await until(
            lambda: announced in near.addresses_of(far.peer_id), within_seconds=PATIENCE_SECONDS
        )
        description = await described_by(near, far.peer_id)
        assert description.agent_version.startswith("potluck/")
        assert ECHO in description.protocols
        link = far.link(near.peer_id)
        assert link is not None
        assert description.observed_address == link.remote_address


async def test_knowledge_of_a_peer_is_dropped_when_it_disconnects() -> None:
    async with networks(2) as (near, far):
        await near.connect(far.peer_id)
        known = near.host.peerstore.peer_data_map
        await described_by(near, far.peer_id)
        await near.disconnect(far.peer_id)
        assert len(known) == 1  # ourselves


async def test_the_library_identifies_us_and_we_identify_it() -> None:
    loopback = Multiaddr("/ip4/127.0.0.1/tcp/0")
    stock = new_host(key_pair=create_new_key_pair(), sec_opt=None)
    async with stock.run([loopback]), open_libp2p_network(Identity.generate(), LOOPBACK) as ours:
        address = Multiaddr(ours.addresses()[0].partition("/p2p/")[0])
        our_id = ours.host.get_id()
        await stock.connect(PeerInfo(our_id, [address]))
        stream = await stock.new_stream(our_id, ["/ipfs/id/1.0.0"])
        heard = b""
        try:
            while chunk := await stream.read(4096):
                heard += chunk
        except IOException:
            pass
        assert parse_identify_response(heard).agent_version.startswith("potluck/")
        described = await described_by(ours, ours.links()[0].peer)
        assert "libp2p" in described.agent_version


async def test_protocols_built_on_the_librarys_host_run_over_our_connections() -> None:
    """As relay and hole punching will: its dial, its handlers, its streams and notifications."""
    heard: list[bytes] = []
    seen: list[str] = []

    class Watcher(INotifee):
        async def connected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
            seen.append(f"connected {conn.get_connection_type().name}")

        async def disconnected(self, network: Any, conn: Any) -> None:  # noqa: ARG002
            seen.append("disconnected")

        async def opened_stream(self, network: Any, stream: Any) -> None: ...
        async def closed_stream(self, network: Any, stream: Any) -> None: ...
        async def listen(self, network: Any, multiaddr: Any) -> None: ...
        async def listen_close(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_in(stream: Any) -> None:
        heard.append(await stream.read(5))
        await stream.write(b"heard")
        await stream.close()

    async with (
        open_libp2p_network(Identity.generate(), LOOPBACK) as near,
        open_libp2p_network(Identity.generate(), LOOPBACK) as far,
    ):
        near.host.get_network().register_notifee(Watcher())
        far.host.set_stream_handler("/library/1.0.0", listen_in)
        whole = [Multiaddr(address) for address in far.addresses()]
        await near.host.connect(PeerInfo(far.host.get_id(), whole))
        stream = await near.host.new_stream(far.host.get_id(), ["/library/1.0.0"])
        await stream.write(b"hello")
        assert await stream.read(5) == b"heard"
        await stream.close()
        await until(lambda: seen == ["connected DIRECT"], within_seconds=PATIENCE_SECONDS)
        (connection,) = far._links.every_connection()
        await until(lambda: not connection.streams, within_seconds=PATIENCE_SECONDS)
        await near.host.disconnect(far.host.get_id())
        assert near.links() == ()
        await until(lambda: seen[1:] == ["disconnected"], within_seconds=PATIENCE_SECONDS)
        elsewhere = ID.from_base58(SOMEBODY)
        with pytest.raises(SwarmException, match="no known address"):
            await near.host.connect(PeerInfo(elsewhere, []))
    assert heard == [b"hello"]


# -- links


async def test_dialling_each_other_at_once_ends_with_the_same_link_on_both_sides() -> None:
    async with networks(2) as (first, second):
        first.serve(ECHO, echo)
        second.serve(ECHO, echo)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.connect, second.peer_id)
            nursery.start_soon(second.connect, first.peer_id)
        await answers(first, second)
        await answers(second, first)

        def agreed() -> bool:
            one, other = first.link(second.peer_id), second.link(first.peer_id)
            return one is not None and other is not None and one.inbound != other.inbound

        await until(agreed, within_seconds=PATIENCE_SECONDS)


async def test_links_come_and_go_in_events_on_both_sides() -> None:
    async with networks(2) as (near, far):
        with near.link_events() as ours, far.link_events() as theirs:
            await near.connect(far.peer_id)
            await near.disconnect(far.peer_id)
            for events, peer in ((ours, far.peer_id), (theirs, near.peer_id)):
                with trio.fail_after(PATIENCE_SECONDS):
                    up, down = await events.receive(), await events.receive()
                assert (up.peer, up.reach, up.was) == (peer, Reach.DIRECT, Reach.NONE)
                assert (down.peer, down.reach, down.was) == (peer, Reach.NONE, Reach.DIRECT)


async def test_the_names_that_the_network_answers_itself_are_taken() -> None:
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as network:
        for protocol in ("/ipfs/id/1.0.0", "/ipfs/ping/1.0.0"):
            with pytest.raises(ProtocolMisuse):
                network.serve(protocol, echo)
            network.stop_serving(protocol)
            assert protocol in network._swarm.protocol_names()


# -- many streams


@pytest.mark.slow
async def test_more_than_256_streams_are_open_at_once() -> None:
    """The library's muxer has 256 places for outgoing streams and then waits for ever."""
    async with networks(2) as (near, far):
        far.serve(ECHO, echo)
        streams = [await near.open(far.peer_id, ECHO) for _ in range(400)]
        for stream in streams:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
            stream.reset()


@pytest.mark.slow
async def test_streams_leave_nothing_behind() -> None:
    await many_streams_leave_nothing(1_000)


@pytest.mark.soak
async def test_ten_thousand_streams_leave_nothing_behind() -> None:
    await many_streams_leave_nothing(10_000)


async def many_streams_leave_nothing(count: int) -> None:
    """Closed, reset, refused or left to the other side, in turn."""

    async def hang_up(stream: Stream) -> None:
        stream.reset()

    async with networks(2) as (near, far):
        far.serve(ECHO, echo)
        far.serve("/potluck/hang-up/1.0.0", hang_up)
        await near.connect(far.peer_id)
        await until(lambda: open_streams(near, far) == 0, within_seconds=PATIENCE_SECONDS)
        tasks, descriptors = running_tasks(), open_descriptors()
        for number in range(count):
            if number % 4 == 0:
                await answers(near, far)
            elif number % 4 == 1:
                stream = await near.open(far.peer_id, ECHO)
                stream.reset()
            elif number % 4 == 2:
                stream = await near.open(far.peer_id, "/potluck/hang-up/1.0.0")
                await stream.aclose()
            else:
                stream = await near.open(far.peer_id, ECHO)
                await stream.send_eof()
                assert await stream.receive_some() == b""
        await until(lambda: open_streams(near, far) == 0, within_seconds=PATIENCE_SECONDS)
        await until(lambda: running_tasks() <= tasks, within_seconds=PATIENCE_SECONDS)
        assert open_descriptors() <= descriptors
        for network in (near, far):
            for connection in network._links.every_connection():
                assert not connection.streams
                assert connection._answering == 0


def open_streams(*of: Libp2pNetwork) -> int:
    return sum(link.open_streams for network in of for link in network.links())


# -- the end


async def test_an_error_in_the_body_comes_out_unchanged() -> None:
    async def raise_within() -> None:
        async with networks(2) as (near, far):
            await near.connect(far.peer_id)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await raise_within()


async def test_the_end_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    async def never_read(_: Stream) -> None:
        await trio.sleep_forever()

    async with open_libp2p_network(Identity.generate(), LOOPBACK) as far:
        far.serve("/potluck/never-read/1.0.0", never_read)
        with trio.CancelScope() as leaving:
            async with open_libp2p_network(Identity.generate(), LOOPBACK) as near:
                near.learn_addresses(far.peer_id, far.addresses())
                stream = await near.open(far.peer_id, "/potluck/never-read/1.0.0")
                with trio.move_on_after(0.2):
                    while True:
                        await stream.send_all(bytes(1 << 20))
                leaving.deadline = trio.current_time() + PATIENCE_SECONDS
        assert not leaving.cancelled_caught


async def test_a_caller_with_a_copy_of_our_key_is_turned_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    identity = Identity.generate()
    async with (
        open_libp2p_network(identity, LOOPBACK) as original,
        open_libp2p_network(identity, LOOPBACK) as copy,
    ):
        (address,) = (parse(text) for text in original.addresses())
        upgraded = await copy._dialler.connect(address, copy.host.get_id(), lambda: None)
        await until(lambda: bool(caplog.messages), within_seconds=PATIENCE_SECONDS)
        await trio.aclose_forcefully(upgraded.below)
        assert "copy of this node's key" in caplog.messages[0]
        assert original.links() == ()


@pytest.mark.parametrize("wrong", [{"inbound_connections": 0}, {"dial_seconds": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(LOOPBACK, **wrong)  # type: ignore[arg-type]
