"""Strangers at the port: nonsense, silence and crowds cost us nothing for long."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import trio
from libp2p.crypto import secp256k1
from libp2p.transport.upgrader import TransportUpgrader

from node.net.libp2p.host import library_id, speed_up
from node.net.libp2p.negotiation import HEADER, encode
from node.net.libp2p.upgrading import HANDSHAKE_ERRORS, upgrade
from node.net.network import Libp2pNetwork, Libp2pSettings, open_libp2p_network
from node.net.transport import YamuxSettings, security_options
from node.net.transport.keep_alive import Beats
from node.net.transport.packets import SMALL_BUFFER_BYTES
from node.net.transport.plugin import YamuxNegotiation
from node.net.transport.settings import INITIAL_WINDOW_BYTES, MIB
from node.net.transport.traffic import Traffic
from protocols.errors import Unreachable
from protocols.identity import Identity
from protocols.network import Stream
from tests.libp2p.nodes import (
    LOOPBACK,
    echo,
    networks,
    open_descriptors,
    read_to_end,
    running_tasks,
)
from tests.waiting import PATIENCE_SECONDS, until

ECHO = "/potluck/echo/1.0.0"
SINK = "/potluck/sink/1.0.0"
HURRIED = replace(LOOPBACK, handshake_seconds=0.3, negotiation_seconds=0.3)


def port_of(network: Libp2pNetwork) -> int:
    return int(network.addresses()[0].split("/")[4])


@asynccontextmanager
async def calling(network: Libp2pNetwork) -> AsyncIterator[trio.SocketStream]:
    async with await trio.open_tcp_stream("127.0.0.1", port_of(network)) as stream:
        yield stream


async def is_hung_up_on(stream: trio.SocketStream) -> None:
    """Returns when the other side has closed the connection."""
    with trio.fail_after(PATIENCE_SECONDS):
        try:
            while await stream.receive_some(4096):
                pass
        except trio.BrokenResourceError:
            pass


async def still_serves(network: Libp2pNetwork) -> None:
    """An honest peer can still call."""
    async with open_libp2p_network(Identity.generate(), LOOPBACK) as caller:
        caller.learn_addresses(network.peer_id, network.addresses())
        with trio.fail_after(PATIENCE_SECONDS):
            stream = await caller.open(network.peer_id, ECHO)
            await stream.send_all(b"decent")
            await stream.send_eof()
            assert await read_to_end(stream) == b"decent"


@asynccontextmanager
async def host_to_strangers(settings: Libp2pSettings = HURRIED) -> AsyncIterator[Libp2pNetwork]:
    """A network to misbehave towards; it must serve afterwards, and hold nothing of it."""
    async with open_libp2p_network(Identity.generate(), settings) as network:
        network.serve(ECHO, echo)
        await still_serves(network)
        await until(lambda: not network.links(), within_seconds=PATIENCE_SECONDS)
        tasks, descriptors = running_tasks(), open_descriptors()
        yield network
        await until(lambda: network._inbound.open == 0, within_seconds=PATIENCE_SECONDS)
        await until(lambda: running_tasks() <= tasks, within_seconds=PATIENCE_SECONDS)
        assert open_descriptors() <= descriptors
        await still_serves(network)


GREETINGS = {
    "nothing": b"",
    "random bytes": random.Random(1).randbytes(10_000),
    "zeros": bytes(10_000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + random.Random(2).randbytes(500),
    "a header only": encode(HEADER),
    "another security": encode(HEADER) + encode(b"/plaintext/2.0.0"),
    "not UTF-8": encode(HEADER) + encode(b"\xff\xfe\xfd"),
    "a declared 4 GB message": b"\xff\xff\xff\xff\x0f",
    "Noise, then nonsense": encode(HEADER) + encode(b"/noise") + b"\x00\x20" + bytes(32) * 40,
    "Noise, cut off": encode(HEADER) + encode(b"/noise") + b"\x00\x20" + bytes(7),
    "Noise, a frame of no bytes": encode(HEADER) + encode(b"/noise") + b"\x00\x00",
    "Noise, a frame of 64 KiB": encode(HEADER) + encode(b"/noise") + b"\xff\xff" + bytes(65_535),
}


async def test_a_key_of_another_kind_is_refused() -> None:
    """Its peer id has no place in the directory, which ended with it."""
    async with host_to_strangers() as network:
        upgrader = TransportUpgrader(security_options(secp256k1.create_new_key_pair()), {})
        timeout = upgrader.muxer_multistream.negotiate_timeout
        upgrader.muxer_multistream = YamuxNegotiation(timeout, YamuxSettings(), Beats(1.0))
        speed_up(upgrader)
        events = network.link_events()
        with events as seen:
            async with calling(network) as stream:
                upgraded = upgrade(
                    upgrader, stream, Traffic(), initiator=True, peer=library_id(network.peer_id)
                )
                with suppress(*HANDSHAKE_ERRORS, trio.ClosedResourceError):
                    await upgraded
                with suppress(trio.ClosedResourceError):
                    await is_hung_up_on(stream)
            await still_serves(network)
            async for event in seen:
                assert event.peer.startswith("12D3KooW")
                break


@pytest.mark.slow
@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=list(GREETINGS))
@pytest.mark.parametrize(
    "hangs_up",
    [
        pytest.param(True, id="and hangs up"),
        pytest.param(False, id="and waits"),
    ],
)
async def test_nonsense_at_the_port_ends_that_connection_only(
    greeting: bytes, hangs_up: bool
) -> None:
    async with host_to_strangers() as network, calling(network) as stranger:
        try:
            await stranger.send_all(greeting)
            if not hangs_up:
                await is_hung_up_on(stranger)
        except trio.BrokenResourceError:
            pass  # it hung up on us while we were still talking


@pytest.mark.slow
async def test_one_byte_a_second_is_not_a_handshake() -> None:
    """The deadline is for the whole handshake, so slowness does not extend it."""
    settings = replace(LOOPBACK, handshake_seconds=0.5)
    async with host_to_strangers(settings) as network, calling(network) as stranger:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def drip() -> None:
                for byte in encode(HEADER) * 10:
                    await stranger.send_all(bytes([byte]))
                    await trio.sleep(0.05)

            nursery.start_soon(drip)
            await is_hung_up_on(stranger)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - started < 5


@pytest.mark.slow
async def test_five_times_as_many_connections_over_time_as_the_limit() -> None:
    limit = 4
    async with host_to_strangers(replace(LOOPBACK, inbound_connections=limit)) as popular:
        for _ in range(5 * limit):
            await still_serves(popular)
            await until(lambda: not popular.links(), within_seconds=PATIENCE_SECONDS)


async def test_over_the_limit_a_connection_is_refused_and_a_place_that_frees_up_is_given() -> None:
    settings = replace(LOOPBACK, inbound_connections=2)
    async with networks(4, settings) as (popular, first, second, third):
        await first.connect(popular.peer_id)
        await second.connect(popular.peer_id)
        with pytest.raises(Unreachable):
            await third.connect(popular.peer_id)
        await first.disconnect(popular.peer_id)
        await until(lambda: len(popular.links()) == 1, within_seconds=PATIENCE_SECONDS)
        await until(lambda: popular._inbound.open == 1, within_seconds=PATIENCE_SECONDS)
        await third.connect(popular.peer_id)


@pytest.mark.slow
async def test_a_crowd_that_says_nothing_does_not_keep_others_out_for_long() -> None:
    settings = replace(HURRIED, inbound_connections=8)
    async with host_to_strangers(settings) as network, trio.open_nursery() as nursery:

        async def loiter() -> None:
            async with calling(network) as stranger:
                await is_hung_up_on(stranger)

        for _ in range(40):
            nursery.start_soon(loiter)


async def test_a_stranger_who_names_a_protocol_in_other_bytes_than_utf8_gets_nothing() -> None:
    async with networks(2) as (victim, stranger):
        victim.serve(ECHO, echo)
        await stranger.connect(victim.peer_id)
        link = stranger._links.best(victim.peer_id)
        assert link is not None
        muxed = await link.open_muxed()
        await muxed.send_all(encode(HEADER) + encode(b"\xff\xfe"))
        assert await muxed.receive_some(20) == encode(HEADER)
        assert await muxed.receive_some(4) == encode(b"na")
        await muxed.aclose()
        stream = await stranger.open(victim.peer_id, ECHO)
        await stream.send_all(b"still here")
        assert await stream.receive_some() == b"still here"


async def test_a_stream_on_which_nothing_is_proposed_is_reset_in_time() -> None:
    async with networks(2, HURRIED) as (host, stranger):
        await stranger.connect(host.peer_id)
        link = stranger._links.best(host.peer_id)
        assert link is not None
        muxed = await link.open_muxed()
        await muxed.send_all(encode(HEADER)[:5])
        assert await muxed.receive_some(20) == encode(HEADER)
        with trio.fail_after(PATIENCE_SECONDS), pytest.raises(trio.BrokenResourceError):
            await muxed.receive_some(100)
        assert host.link(stranger.peer_id) is not None


async def test_a_stranger_that_reads_nothing_holds_no_negotiation_for_long() -> None:
    poured, opened = 0, 100

    async def pour(stream: Stream) -> None:
        nonlocal poured
        poured += 1
        await stream.send_all(bytes(INITIAL_WINDOW_BYTES))
        await trio.sleep_forever()

    async with networks(2, HURRIED) as (host, stranger):
        host.serve(ECHO, pour)
        await stranger.connect(host.peer_id)
        link = stranger._links.best(host.peer_id)
        assert link is not None
        link.muxed_conn.secured_conn.receive = trio.sleep_forever  # type: ignore[method-assign]
        (inside,) = host._links.connections_to(stranger.peer_id)
        for _ in range(opened):
            muxed = await link.open_muxed()
            await muxed.send_all(encode(HEADER) + encode(ECHO.encode()))
        await until(lambda: inside._answering > poured, PATIENCE_SECONDS)
        await until(lambda: inside._answering == poured, PATIENCE_SECONDS)
        assert poured < opened


async def test_a_handler_that_raises_costs_its_stream_and_one_line_of_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def stumble(_: Stream) -> None:
        raise ValueError("a fault in one protocol")

    async def stumble_in_a_group(_: Stream) -> None:
        raise ExceptionGroup("a nursery's", [ValueError("a fault in one protocol")])

    async with networks(2) as (near, far):
        far.serve(ECHO, echo)
        far.serve("/potluck/stumble/1.0.0", stumble)
        far.serve("/potluck/group/1.0.0", stumble_in_a_group)
        sound = await near.open(far.peer_id, ECHO)
        caplog.set_level(logging.WARNING)
        for protocol in ("/potluck/stumble/1.0.0", "/potluck/group/1.0.0"):
            caplog.clear()
            stream = await near.open(far.peer_id, protocol)
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
            (line,) = caplog.messages
            assert protocol in line
            assert near.peer_id in line
            assert "\n" not in line
        await sound.send_all(b"untouched")
        assert await sound.receive_some() == b"untouched"


async def test_more_streams_than_a_peer_may_open_are_reset_and_the_others_go_on() -> None:
    settings = replace(LOOPBACK, inbound_streams_per_connection=3)
    async with networks(2, settings) as (near, far):
        far.serve(ECHO, echo)
        kept = [await near.open(far.peer_id, ECHO) for _ in range(3)]
        with pytest.raises(Unreachable):
            await near.open(far.peer_id, ECHO)
        for stream in kept:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"
        await kept[0].aclose()
        with trio.fail_after(PATIENCE_SECONDS):
            while True:
                try:
                    await near.open(far.peer_id, ECHO)
                except Unreachable:
                    continue  # its handler over there is still ending
                break


async def test_what_nobody_has_read_of_all_connections_stays_within_the_limit_of_the_node() -> None:
    """Strangers lose their streams, and a peer of which much was read keeps its own."""
    limit, lazy = 2 * MIB + 64 * 1024, "/potluck/lazy/1.0.0"  # identify has streams, too
    full = INITIAL_WINDOW_BYTES - 100  # the negotiation has used some
    settings = replace(LOOPBACK, yamux=YamuxSettings(node_unread_limit_bytes=limit))
    lost = 0

    async def sleep(_: Stream) -> None:
        await trio.sleep_forever()

    async def fill(stranger: Libp2pNetwork) -> None:
        nonlocal lost
        stream = await stranger.open(host.peer_id, lazy)
        with suppress(trio.BrokenResourceError):
            await stream.send_all(bytes(2 * INITIAL_WINDOW_BYTES))
        lost += 1

    def unread() -> list[int]:
        return [one.muxed_conn.unread_bytes for one in host._links.every_connection()]

    async with networks(5, settings) as (host, friend, *strangers):
        host.serve(ECHO, echo)
        host.serve(lazy, sleep)
        stream = await friend.open(host.peer_id, ECHO)
        for _ in range(64):
            await stream.send_all(bytes(64 * 1024))
            missing = 64 * 1024
            while missing:
                missing -= len(await stream.receive_some(missing))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, friend)
            await until(lambda: sum(unread()) > full, PATIENCE_SECONDS)
            (kept,) = host._links.connections_to(friend.peer_id)
            for stranger in strangers:
                for _ in range(8):
                    nursery.start_soon(fill, stranger)
            # of 25 windows, 8 fit into the limit
            await until(lambda: lost == 17, PATIENCE_SECONDS)
            assert limit / 2 < sum(unread()) <= limit
            assert kept.muxed_conn.unread_bytes > full
            nursery.cancel_scope.cancel()


async def test_the_read_buffers_of_all_connections_have_a_limit_and_are_free_in_silence() -> None:
    """Each was a mebibyte, for as long as a stranger that had sent much once said nothing more."""
    limit, taken = 16 * MIB, 0
    settings = replace(LOOPBACK, yamux=YamuxSettings(node_unread_limit_bytes=limit))

    async def pour(stranger: Libp2pNetwork) -> None:
        stream = await stranger.open(host.peer_id, SINK)
        await stream.send_all(bytes(4 * MIB))

    async def take(stream: Stream) -> None:
        nonlocal taken
        while data := await stream.receive_some():
            taken += len(data)
            most.append(sum(buffers()))

    def buffers() -> list[int]:
        links = host._links.every_connection()
        return [one.muxed_conn.secured_conn._opener.buffer_bytes for one in links]

    most: list[int] = []
    async with networks(11, settings) as (host, *strangers), trio.open_nursery() as nursery:
        host.serve(SINK, take)
        for stranger in strangers:
            nursery.start_soon(pour, stranger)
        await until(lambda: taken == len(strangers) * 4 * MIB, PATIENCE_SECONDS)
        small = len(strangers) * SMALL_BUFFER_BYTES
        assert small < max(most) <= small + limit // 4
        await until(lambda: sum(buffers()) == small, PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
