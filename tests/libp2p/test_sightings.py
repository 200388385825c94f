"""From where a peer sees us come, over the version of IP that is asked for."""

from __future__ import annotations

import errno
from functools import partial

import pytest
import trio

from nat.addresses import host_of
from node.net.libp2p import negotiation, traversal
from node.net.libp2p.addresses import parse
from node.net.libp2p.dial_failure import DialFailure
from node.net.network import Libp2pSettings, open_libp2p_network
from node.net.transport import YamuxConnection
from protocols.errors import Unreachable
from protocols.identity import Identity
from protocols.network import LinkEvent, TraversableNetwork
from tests.waiting import PATIENCE_SECONDS

BOTH = Libp2pSettings(("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"))
IPV6_ALONE = Libp2pSettings(("/ip6/::1/tcp/0",))


async def linked_over_ipv6(we: TraversableNetwork, they: TraversableNetwork) -> None:
    we.learn_addresses(they.peer_id, [one for one in they.addresses() if "/ip6/" in one])
    await we.connect(they.peer_id)
    link = we.link(they.peer_id)
    assert link is not None
    assert host_of(link.remote_address) == "::1"


@pytest.mark.parametrize(("ipv4", "seen"), [(False, "::1"), (True, "127.0.0.1")])
async def test_a_peer_that_is_linked_over_ipv6_sees_us_over_ipv4_if_we_want_that(
    ipv4: bool, seen: str
) -> None:
    async with (
        open_libp2p_network(Identity.generate(), BOTH) as we,
        open_libp2p_network(Identity.generate(), BOTH) as they,
    ):
        await linked_over_ipv6(we, they)
        we.learn_addresses(they.peer_id, they.addresses())
        assert host_of((await we.sighting(they.peer_id, ipv4=ipv4)).address) == seen


async def test_over_ipv6_alone_the_link_is_followed_whatever_is_wanted() -> None:
    async with (
        open_libp2p_network(Identity.generate(), IPV6_ALONE) as alone,
        open_libp2p_network(Identity.generate(), BOTH) as they,
        open_libp2p_network(Identity.generate(), BOTH) as we,
    ):
        await linked_over_ipv6(alone, they)
        alone.learn_addresses(they.peer_id, they.addresses())
        assert host_of((await alone.sighting(they.peer_id, ipv4=True)).address) == "::1"
        await linked_over_ipv6(we, alone)
        nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{alone.peer_id}"
        we.learn_addresses(alone.peer_id, [nobody])
        assert host_of((await we.sighting(alone.peer_id, ipv4=True)).address) == "::1"


@pytest.mark.parametrize("said", ["", "/dns4/x.example/tcp/1", "/ip4/1.2.3.4/udp/1/quic-v1"])
async def test_a_peer_that_names_no_tcp_address_of_ours_is_no_witness(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name ended the node that had asked."""

    async def observed_by(_muxed: object) -> str:
        return said

    monkeypatch.setattr(traversal, "observed_by", observed_by)
    async with (
        open_libp2p_network(Identity.generate(), BOTH) as we,
        open_libp2p_network(Identity.generate(), BOTH) as they,
    ):
        await linked_over_ipv6(we, they)
        with pytest.raises(Unreachable, match="does not say from where"):
            await we.sighting(they.peer_id)


async def test_on_a_connection_of_a_stranger_of_ours_the_other_side_opens_no_streams(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Nobody takes them, and nobody looks after what they hold."""
    tried = trio.Event()
    taken: list[int] = []

    async def observed_by(muxed: YamuxConnection) -> str:
        await tried.wait()
        taken.append(len(muxed._streams))
        return "/ip4/127.0.0.1/tcp/1"

    monkeypatch.setattr(traversal, "observed_by", observed_by)
    async with (
        open_libp2p_network(Identity.generate(), BOTH) as we,
        open_libp2p_network(Identity.generate(), BOTH) as they,
    ):
        await linked_over_ipv6(we, they)

        async def open_streams_to_strangers(events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
            async for event in events:
                for _ in range(3):
                    with pytest.raises((Unreachable, trio.BrokenResourceError)):
                        await they.open(event.peer, "/anything/1")
                tried.set()

        with they.link_events() as events:
            nursery.start_soon(open_streams_to_strangers, events)
            with trio.fail_after(PATIENCE_SECONDS):
                await we.sighting(they.peer_id)
    assert taken == [0]


async def test_without_a_descriptor_a_punch_fails_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(trio.socket, "socket", none_left)
    with pytest.raises(DialFailure):
        await traversal.connect_from(parse("/ip4/127.0.0.1/tcp/1"), 0)


class Raw:
    """A connection as a stream to negotiate on."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def receive_some(self, most: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(most))

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)


async def nonsense(connection: trio.SocketStream) -> None:
    """Answer the first message of the handshake with bytes that mean nothing."""
    stream = Raw(connection)
    await negotiation.answer(stream, (b"/noise",))
    length = await negotiation.read_exactly(stream, 2)
    await negotiation.read_exactly(stream, int.from_bytes(length, "big"))
    await stream.send_all((200).to_bytes(2, "big") + bytes(range(200)))
    await stream.receive_some()


async def test_a_helper_that_answers_with_nonsense_has_no_sighting_and_ends_nothing(
    nursery: trio.Nursery,
) -> None:
    listeners = await nursery.start(partial(trio.serve_tcp, nonsense, 0, host="127.0.0.1"))
    port = listeners[0].socket.getsockname()[1]
    helper = Identity.generate().peer_id
    async with open_libp2p_network(Identity.generate(), BOTH) as we:
        address = f"/ip4/127.0.0.1/tcp/{port}"
        with pytest.raises(Unreachable, match="did not say from where"):
            await we._sighting_at(helper, parse(address), 0)
        with pytest.raises(Unreachable, match="handshake"):
            async with we.dial_back(helper, address, "/nothing/1"):
                raise AssertionError("it was reached")
