"""The behaviour of plain py-libp2p: each test here is the reason for a part of our code.

When one of these fails, a newer version has mended that fault, and the piece that its docstring
names can be looked at again (negotiation, logging and identify have theirs beside our own tests).
"""

from __future__ import annotations

import gc
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from lab.bench.link_proxy import LinkConditions, open_link_proxy
from tests.ports import held_port
from tests.waiting import PATIENCE_SECONDS, until

ANY_PORT = Multiaddr("/ip4/127.0.0.1/tcp/0")
ECHO = "/potluck/echo/1.0.0"
# Narrow enough that a write stands in the middle of a Noise packet when it is cancelled.
NARROW = LinkConditions(bytes_per_second=400_000, queue_bytes=16_000)

# The library leaves sockets to the garbage collector.
pytestmark = [
    pytest.mark.slow,  # nothing that we change changes what the pinned library does
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _collect_what_the_library_leaves() -> Iterator[None]:
    yield
    gc.collect()


@asynccontextmanager
async def host(**options: Any) -> AsyncIterator[BasicHost]:
    made = new_host(key_pair=create_new_key_pair(), **options)
    async with made.run([ANY_PORT]):
        yield made


def whereabouts(of: BasicHost) -> PeerInfo:
    return PeerInfo(of.get_id(), of.get_transport_addrs())


async def test_the_inbound_limit_counts_the_dead() -> None:
    """inbound_limit: after as many connections in all as the limit, nobody gets in."""
    limit = 3
    config = ConnectionConfig(
        max_connections=limit, min_connections=0, low_watermark=0, high_watermark=limit
    )
    async with host(connection_config=config) as popular:
        for _ in range(limit):
            async with host() as visitor:
                await visitor.connect(whereabouts(popular))
                await visitor.disconnect(popular.get_id())
                await until(
                    lambda: not popular.get_connected_peers(), within_seconds=PATIENCE_SECONDS
                )
        async with host() as one_more:
            with pytest.raises(SwarmException):
                await one_more.connect(whereabouts(popular))


async def test_a_handler_that_raises_ends_the_host() -> None:
    """connection: the guarded answer to a stream."""

    async def raise_an_error(_: Any) -> None:
        raise RuntimeError("a fault in one protocol")

    async def call() -> None:
        async with host() as victim, host() as caller:
            victim.set_stream_handler(ECHO, raise_an_error)
            await caller.connect(whereabouts(victim))
            await caller.new_stream(victim.get_id(), [ECHO])
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as ending:
        await call()
    assert "a fault in one protocol" in str(_leaves(ending.value))


async def test_a_stranger_who_names_a_protocol_in_other_bytes_than_utf8_ends_the_host() -> None:
    """negotiation: a name is bytes, and is compared as bytes."""

    async def call() -> None:
        async with host() as victim, host() as stranger:
            await stranger.connect(whereabouts(victim))
            stream = await stranger.get_network().new_stream(victim.get_id())
            await stream.write(b"\x13/multistream/1.0.0\n\x03\xff\xfe\n")
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as ending:
        await call()
    assert "UnicodeDecodeError" in str(_leaves(ending.value))


async def test_reading_after_the_other_sides_half_close_raises() -> None:
    """stream: `receive_some` returns b"" there."""
    async with host() as near, host() as far:

        async def hang_up(stream: Any) -> None:
            await stream.close()

        far.set_stream_handler(ECHO, hang_up)
        await near.connect(whereabouts(far))
        stream = await near.new_stream(far.get_id(), [ECHO])
        with pytest.raises(StreamEOF):
            await stream.read(1)


async def test_the_default_offers_more_than_noise() -> None:
    """host: Noise alone."""
    upgrader = new_host(key_pair=create_new_key_pair()).get_network().upgrader
    offered = {str(name) for name in upgrader.security_multistream.transports}
    assert {"/plaintext/2.0.0", "/secio/1.0.0"} & offered


async def test_a_default_resource_manager_limits_what_nobody_limited() -> None:
    """swarm: no resource manager."""
    swarm: Any = new_host(key_pair=create_new_key_pair()).get_network()
    assert swarm._resource_manager is not None
    assert swarm._stream_semaphore is not None
    assert swarm._resource_manager.limits.max_streams < math.inf


async def test_the_auto_connector_dials_peers_that_nobody_asked_for() -> None:
    """swarm: never started. (Left alone it begins after ten seconds; here it is told to.)"""
    async with host() as near, host() as far:
        near.get_peerstore().add_addrs(far.get_id(), far.get_transport_addrs(), 60)
        assert not near.get_connected_peers()
        swarm: Any = near.get_network()
        await swarm.auto_connector.maybe_connect()
        await until(
            lambda: far.get_id() in near.get_connected_peers(), within_seconds=PATIENCE_SECONDS
        )


async def test_an_ipv6_connection_has_no_remote_address() -> None:
    """upgrading: TcpStream."""
    near = new_host(key_pair=create_new_key_pair())
    far = new_host(key_pair=create_new_key_pair())
    loopback = Multiaddr("/ip6/::1/tcp/0")
    async with near.run([loopback]), far.run([loopback]):
        await near.connect(whereabouts(far))
        (connection,) = near.get_network().get_connections(far.get_id())
        assert connection.muxed_conn.get_remote_address() is None


async def test_two_hosts_share_a_port_and_take_each_others_callers() -> None:
    """listening: the port is bound for us alone."""
    first = new_host(key_pair=create_new_key_pair())
    second = new_host(key_pair=create_new_key_pair())
    with held_port() as port:
        taken = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
        async with first.run([taken]), second.run([taken]):
            assert first.get_transport_addrs() == second.get_transport_addrs() == [taken]


async def test_one_dead_address_hides_the_good_one_and_then_the_peer_is_refused() -> None:
    """dialling: all addresses are tried, and a failure is forgotten."""
    async with host() as near, host() as far:
        good = far.get_transport_addrs()[0]
        with held_port() as port:
            dead = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
            with pytest.raises(SwarmException):
                await near.connect(PeerInfo(far.get_id(), [dead, good]))
        near.get_peerstore().clear_addrs(far.get_id())
        with pytest.raises(SwarmException, match="negative cache"):
            await near.connect(PeerInfo(far.get_id(), [good]))


async def test_connecting_waits_a_quarter_of_a_second_after_it_has_succeeded() -> None:
    """dialling: a race ends when it is won."""
    async with host() as near, host() as far:
        start = trio.current_time()
        await near.connect(whereabouts(far))
        assert trio.current_time() - start >= 0.25


async def test_a_257th_outgoing_stream_waits_for_ever() -> None:
    """node.net.transport, and no resource manager: our limits are counts that refuse."""
    async with host() as near, host() as far:
        await near.connect(whereabouts(far))
        (connection,) = near.get_network().get_connections(far.get_id())
        for _ in range(256):
            await connection.muxed_conn.open_stream()
        with trio.move_on_after(1) as waiting:
            await connection.muxed_conn.open_stream()
        assert waiting.cancelled_caught


async def test_a_cancelled_write_kills_the_connection_in_silence() -> None:
    """node.net.transport: see test_slow_links, where ours goes through the same."""

    async def read_all(stream: Any) -> None:
        with suppress(IOException):
            while await stream.read(1 << 16):
                pass

    async def answer(stream: Any) -> None:
        await stream.write(await stream.read(16))

    async with host() as near, host() as far:
        far.set_stream_handler("/potluck/sink/1.0.0", read_all)
        far.set_stream_handler(ECHO, answer)
        port = int(far.get_transport_addrs()[0].value_for_protocol("tcp"))
        async with open_link_proxy(("127.0.0.1", port), NARROW, LinkConditions()) as proxy:
            narrow = Multiaddr(f"/ip4/127.0.0.1/tcp/{proxy.port}")
            await near.connect(PeerInfo(far.get_id(), [narrow]))
            stream = await near.new_stream(far.get_id(), ["/potluck/sink/1.0.0"])
            with trio.move_on_after(0.2):
                await stream.write(bytes(8 << 20))
            with trio.move_on_after(3) as waiting:
                other = await near.new_stream(far.get_id(), [ECHO])
                await other.write(b"sound")
                await other.read(16)
            assert waiting.cancelled_caught
            assert far.get_id() in near.get_connected_peers()


async def test_a_reader_that_pauses_for_five_seconds_gets_its_stream_reset() -> None:
    """node.net.transport: a slow reader is waited for."""
    async with host() as near, host() as far:

        async def pause(_: Any) -> None:
            await trio.sleep_forever()

        far.set_stream_handler(ECHO, pause)
        await near.connect(whereabouts(far))
        stream = await near.new_stream(far.get_id(), [ECHO])
        with trio.fail_after(PATIENCE_SECONDS), pytest.raises(IOException):
            await stream.write(bytes(8 << 20))


def _leaves(error: BaseException) -> list[str]:
    """The errors within nested groups, as text."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [f"{type(error).__name__}: {error}", *_causes(error)]


def _causes(error: BaseException) -> list[str]:
    cause = error.__cause__ or error.__context__
    return [] if cause is None else _leaves(cause)
