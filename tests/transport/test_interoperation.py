"""Ours and py-libp2p's own Noise and Yamux, each at either end of real TCP connections."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.network.stream.exceptions import StreamEOF, StreamError, StreamReset
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from node.net.transport import YamuxConnection, install_muxer, security_options
from node.net.transport.noise import NoiseSession
from node.net.transport.wires import SocketWire
from tests.waiting import PATIENCE_SECONDS, until

ECHO = "/test/echo/1.0.0"
DIGEST = "/test/digest/1.0.0"
SOURCE = "/test/source/1.0.0"
SOURCE_BYTES = 3_000_000
PIECE = b"0123456789abcdef" * 4096


def our_host() -> IHost:
    key_pair = create_new_key_pair()
    host = new_host(key_pair=key_pair, sec_opt=security_options(key_pair))
    install_muxer(host)
    return host


def library_host() -> IHost:
    key_pair = create_new_key_pair()
    noise = Transport(key_pair, noise_privkey=create_x25519_key_pair().private_key)
    return new_host(key_pair=key_pair, sec_opt={PROTOCOL_ID: noise})


MAKERS = {"ours": our_host, "library": library_host}

every_pairing = pytest.mark.parametrize(
    ("dialler", "listener"), [("ours", "library"), ("library", "ours"), ("ours", "ours")]
)


async def read_all(stream: INetStream) -> bytes:
    data = bytearray()
    while True:
        try:
            data += await stream.read(65_536)
        except StreamEOF:
            return bytes(data)


async def read_for_ever(stream: INetStream) -> None:
    while True:
        await stream.read(65_536)


async def serve_echo(stream: INetStream) -> None:
    try:
        while True:
            await stream.write(await stream.read(65_536))
    except StreamEOF:
        await stream.close()
    except StreamError:
        await stream.reset()


async def serve_digest(stream: INetStream) -> None:
    data = await read_all(stream)
    await stream.write(hashlib.sha256(data).digest())
    await stream.close()


async def serve_source(stream: INetStream) -> None:
    left = SOURCE_BYTES
    while left:
        piece = PIECE[: min(left, len(PIECE))]
        await stream.write(piece)
        left -= len(piece)
    await stream.close()


@asynccontextmanager
async def joined_hosts(dialler: str, listener: str) -> AsyncIterator[tuple[IHost, IHost]]:
    calling, serving = MAKERS[dialler](), MAKERS[listener]()
    for host in (calling, serving):
        host.set_stream_handler(ECHO, serve_echo)
        host.set_stream_handler(DIGEST, serve_digest)
        host.set_stream_handler(SOURCE, serve_source)
    loopback = Multiaddr("/ip4/127.0.0.1/tcp/0")
    async with calling.run(listen_addrs=[]), serving.run(listen_addrs=[loopback]):
        await calling.connect(PeerInfo(serving.get_id(), serving.get_addrs()))
        with trio.fail_after(PATIENCE_SECONDS):
            yield calling, serving
        # The library's own muxer leaves its socket open when its host ends.
        for host in (calling, serving):
            for connection in host.get_network().get_connections():
                await connection.close()


@pytest.mark.slow
@every_pairing
async def test_the_intended_classes_are_under_test(dialler: str, listener: str) -> None:
    async with joined_hosts(dialler, listener) as hosts:
        for host, kind in zip(hosts, (dialler, listener), strict=True):
            (connection,) = host.get_network().get_connections()
            muxed = connection.muxed_conn
            assert type(muxed) is (YamuxConnection if kind == "ours" else Yamux)
            if kind == "ours":
                assert isinstance(muxed.secured_conn, NoiseSession)
                assert isinstance(muxed.secured_conn._wire, SocketWire)


@pytest.mark.slow
@every_pairing
async def test_bytes_go_there_and_back(dialler: str, listener: str) -> None:
    async with joined_hosts(dialler, listener) as (calling, serving):
        stream = await calling.new_stream(serving.get_id(), [ECHO])
        for size in (1, 12, 65_507, 65_519, 65_520, 200_000):
            data = bytes(range(256)) * (size // 256 + 1)
            await stream.write(data[:size])
            answer = b""
            while len(answer) < size:
                answer += await stream.read(size - len(answer))
            assert answer == data[:size]
        await stream.close()


@pytest.mark.slow
@every_pairing
async def test_megabytes_go_up_and_the_answer_comes_after_the_half_close(
    dialler: str, listener: str
) -> None:
    data = PIECE * 50
    async with joined_hosts(dialler, listener) as (calling, serving):
        stream = await calling.new_stream(serving.get_id(), [DIGEST])
        await stream.write(data)
        await stream.close_write()
        assert await read_all(stream) == hashlib.sha256(data).digest()


@pytest.mark.slow
@every_pairing
async def test_megabytes_come_down_and_then_the_end(dialler: str, listener: str) -> None:
    async with joined_hosts(dialler, listener) as (calling, serving):
        stream = await calling.new_stream(serving.get_id(), [SOURCE])
        assert len(await read_all(stream)) == SOURCE_BYTES


@pytest.mark.slow
@every_pairing
async def test_the_side_that_was_dialled_may_open_streams_too(dialler: str, listener: str) -> None:
    async with joined_hosts(dialler, listener) as (calling, serving):
        stream = await serving.new_stream(calling.get_id(), [DIGEST])
        await stream.write(b"hello")
        await stream.close_write()
        assert await read_all(stream) == hashlib.sha256(b"hello").digest()


@pytest.mark.slow
@every_pairing
async def test_a_reset_reaches_the_other_side(dialler: str, listener: str) -> None:
    told = trio.Event()

    async def wait_for_reset(stream: INetStream) -> None:
        # The library's own muxer may have forgotten the stream already, and says that it ended.
        with pytest.raises(StreamReset if listener == "ours" else (StreamReset, StreamEOF)):
            await read_for_ever(stream)
        told.set()

    async with joined_hosts(dialler, listener) as (calling, serving):
        serving.set_stream_handler("/test/reset/1.0.0", wait_for_reset)
        stream = await calling.new_stream(serving.get_id(), ["/test/reset/1.0.0"])
        await stream.write(b"x")
        await stream.reset()
        await told.wait()


@pytest.mark.slow
@every_pairing
async def test_many_streams_at_once(dialler: str, listener: str) -> None:
    async with joined_hosts(dialler, listener) as (calling, serving):

        async def call(number: int) -> None:
            stream = await calling.new_stream(serving.get_id(), [DIGEST])
            data = number.to_bytes(2, "big") * 30_000
            await stream.write(data)
            await stream.close_write()
            assert await read_all(stream) == hashlib.sha256(data).digest()

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)


@pytest.mark.slow
@pytest.mark.parametrize("listener", ["library", "ours"])
async def test_our_ping_is_answered_and_theirs_is_too(listener: str) -> None:
    async with joined_hosts("ours", listener) as (calling, serving):
        (connection,) = calling.get_network().get_connections()
        began = trio.current_time()
        measured = await connection.muxed_conn.ping()
        assert 0 < measured <= trio.current_time() - began
        if listener == "library":
            (theirs,) = serving.get_network().get_connections()
            # It measures half a second after its start.
            await until(lambda: theirs.muxed_conn.rtt() > 0, within_seconds=PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("listener", ["library", "ours"])
async def test_closing_is_noticed_at_the_other_end(listener: str) -> None:
    async with joined_hosts("ours", listener) as (calling, serving):
        (theirs,) = serving.get_network().get_connections()
        await calling.disconnect(serving.get_id())
        await theirs.event_closed.wait()
        assert not calling.get_network().get_connections()


@pytest.mark.slow
async def test_a_reader_that_pauses_longer_than_the_library_allows_loses_nothing() -> None:
    """Ours at both ends: the library's muxer gives up after five seconds without window."""
    async with joined_hosts("ours", "ours") as (calling, serving):
        stream = await calling.new_stream(serving.get_id(), [SOURCE])
        await trio.sleep(5.5)
        assert len(await read_all(stream)) == SOURCE_BYTES
