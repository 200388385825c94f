"""A node whose owner limits what it sends and receives, beside the kernel's own count of it."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from node.net.network import Libp2pNetwork, open_libp2p_network
from node.net.transport.traffic import BORROWED_SECONDS, BURST_SECONDS
from protocols.identity import Identity
from protocols.network import Stream
from tests.libp2p.nodes import LOOPBACK, echo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts per connection"),
]

RATE = 1_000_000.0
SECONDS = 2.0
PEERS = 2
LOOPBACK_BUFFER_BYTES = 2 * 65_536 * PEERS  # two segments for each connection, whatever the limit
SINK, ECHO = "/potluck/test/sink/1.0.0", "/potluck/test/echo/1.0.0"

_ACKED_AND_RECEIVED = 120  # of linux/tcp.h's tcp_info: tcpi_bytes_acked, tcpi_bytes_received


def kernel_counts(network: Libp2pNetwork) -> tuple[int, int]:
    """The bytes that the kernel has sent and received over all connections of a node."""
    sent = received = 0
    for connection in network._links.every_connection():
        assert connection._below is not None
        info = connection._below.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acked, came = struct.unpack_from("QQ", info, _ACKED_AND_RECEIVED)
        sent, received = sent + acked, received + came
    return sent, received


async def sink(stream: Stream) -> None:
    buffer = bytearray(1 << 20)
    while await stream.receive_into(buffer):
        pass


async def pour(stream: Stream) -> None:
    while True:
        await stream.send_all(bytes(1 << 20))


@asynccontextmanager
async def limited_among(
    up: float | None = None, down: float | None = None
) -> AsyncIterator[tuple[Libp2pNetwork, list[Libp2pNetwork], trio.Nursery]]:
    """A limited node that is connected to some without limits."""
    settings = replace(LOOPBACK, upload_bytes_per_second=up, download_bytes_per_second=down)
    async with (
        open_libp2p_network(Identity.generate(), settings) as limited,
        open_libp2p_network(Identity.generate(), LOOPBACK) as first,
        open_libp2p_network(Identity.generate(), LOOPBACK) as second,
        trio.open_nursery() as nursery,
    ):
        for network in (limited, first, second):
            network.serve(SINK, sink)
            network.serve(ECHO, echo)
        for other in (first, second):
            limited.learn_addresses(other.peer_id, other.addresses())
            await limited.connect(other.peer_id)
        yield limited, [first, second], nursery
        nursery.cancel_scope.cancel()


async def test_a_node_sends_no_more_than_its_owner_allows_and_small_things_at_once() -> None:
    async with limited_among(up=RATE) as (limited, others, nursery):
        small = await limited.open(others[0].peer_id, ECHO)
        streams = [await limited.open(other.peer_id, SINK) for other in others]
        began, before = trio.current_time(), kernel_counts(limited)[0]
        for stream in streams:
            nursery.start_soon(pour, stream)
        quickest = float("inf")
        while trio.current_time() - began < SECONDS:
            asked = trio.current_time()
            await small.send_all(b"are you there?")
            await small.receive_some()
            quickest = min(quickest, trio.current_time() - asked)
            await trio.sleep(0.1)
        sent = kernel_counts(limited)[0] - before
        seconds = trio.current_time() - began
    assert sent <= RATE * (seconds + BURST_SECONDS + BORROWED_SECONDS) + 4096
    assert sent >= 0.25 * RATE * seconds  # on a machine that is busy with other things
    # With two of these megabytes before it, it would have taken two seconds
    assert quickest < 0.5


async def test_a_node_receives_no_more_than_its_owner_allows() -> None:
    async with limited_among(down=RATE) as (limited, others, nursery):
        streams = [await other.open(limited.peer_id, SINK) for other in others]
        began, before = trio.current_time(), kernel_counts(limited)[1]
        for stream in streams:
            nursery.start_soon(pour, stream)
        await trio.sleep(SECONDS)
        received = kernel_counts(limited)[1] - before
        seconds = trio.current_time() - began
        counted = limited.traffic()
    assert received <= RATE * (seconds + 0.4) + LOOPBACK_BUFFER_BYTES
    assert received >= 0.25 * RATE * seconds
    assert counted.received_bytes >= received - LOOPBACK_BUFFER_BYTES


async def test_a_node_without_limits_counts_what_the_kernel_counts() -> None:
    async with limited_among() as (limited, others, _):
        stream = await limited.open(others[0].peer_id, ECHO)
        for _ in range(20):
            await stream.send_all(bytes(100_000))
            left = 100_000
            while left:
                left -= len(await stream.receive_some())
        sent, received = kernel_counts(limited)
        counted = limited.traffic()
    assert sent <= counted.sent_bytes <= 1.06 * sent + 20_000
    assert received <= counted.received_bytes <= 1.06 * received + 20_000


def worst_ten_seconds(readings: list[tuple[float, int]]) -> float:
    """The most bytes a second of any ten seconds; a shorter time counts as if it were ten."""
    return max(
        (later - earlier) / 10.0
        for at, earlier in readings
        for then, later in readings
        if 0 < then - at <= 10.0
    )


@pytest.mark.soak
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_no_ten_seconds_exceed_a_limit_by_a_twentieth_also_after_a_pause(
    direction: str,
) -> None:
    rate = 2_000_000.0
    is_up = direction == "up"
    readings: list[tuple[float, int]] = []
    async with limited_among(**{direction: rate}) as (limited, others, nursery):
        streams = [
            await (
                limited.open(other.peer_id, SINK) if is_up else other.open(limited.peer_id, SINK)
            )
            for other in others
        ]

        async def read_counters() -> None:
            while True:
                readings.append((trio.current_time(), kernel_counts(limited)[0 if is_up else 1]))
                await trio.sleep(0.1)

        nursery.start_soon(read_counters)
        for seconds_of_rest in (30.0, 3.0, 0.0):
            with trio.move_on_after(11.0):
                async with trio.open_nursery() as pouring:
                    for stream in streams:
                        pouring.start_soon(pour, stream)
            await trio.sleep(seconds_of_rest)
    assert worst_ten_seconds(readings) <= 1.05 * rate
    assert worst_ten_seconds(readings) >= 0.5 * rate
