# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""For how long a node's bytes are on their way, as its sockets tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from node.net.transport.traffic import LOOK_SECONDS, UNTOLD_SECONDS, Traffic
from node.net.transport.wires import SocketWire
from protocols.network import LITTLE_BYTES
from tests.waiting import PATIENCE_SECONDS, until

MUCH = 100_000


class Socket:
    """A socket with so many bytes under way; None: the system does not tell."""

    def __init__(self, count: int | None = MUCH) -> None:
        self.count = count
        self.looks = 0

    def on_their_way(self) -> int | None:
        self.looks += 1
        return self.count


@asynccontextmanager
async def running() -> AsyncIterator[Traffic]:
    traffic = Traffic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(traffic.run)
        yield traffic
        nursery.cancel_scope.cancel()


async def test_bytes_are_on_their_way_until_acknowledged(
    autojump_clock: MockClock,
) -> None:
    socket = Socket()
    async with running() as traffic:
        await trio.sleep(1.0)
        traffic.sends_on(socket)
        await trio.sleep(3.0)
        socket.count = 0
        await trio.sleep(1.0)
        assert traffic.sending_seconds == pytest.approx(3.0, abs=2 * LOOK_SECONDS)


async def test_time_that_sockets_share_counts_once(autojump_clock: MockClock) -> None:
    one, other = Socket(), Socket()
    async with running() as traffic:
        traffic.sends_on(one)
        await trio.sleep(1.0)
        traffic.sends_on(other)
        await trio.sleep(1.0)
        one.count = 0
        await trio.sleep(1.0)
        other.count = 0
        await trio.sleep(1.0)
        assert traffic.sending_seconds == pytest.approx(3.0, abs=2 * LOOK_SECONDS)


async def test_small_messages_do_not_make_an_uplink_busy(autojump_clock: MockClock) -> None:
    more, *sockets = [Socket(LITTLE_BYTES // 4) for _ in range(4)]
    async with running() as traffic:
        for socket in (more, *sockets):
            traffic.sends_on(socket)
        await trio.sleep(3.0)
        assert traffic.sending_seconds == 0.0
        more.count = LITTLE_BYTES // 4 + 1
        await trio.sleep(3.0)
        assert traffic.sending_seconds > 0.0


async def test_what_was_sent_counts_for_a_while_if_the_system_does_not_tell(
    autojump_clock: MockClock,
) -> None:
    socket = Socket(None)
    async with running() as traffic:
        for _ in range(3):
            traffic.sends_on(socket)
            await trio.sleep(UNTOLD_SECONDS / 2)
        await trio.sleep(2 * UNTOLD_SECONDS)
        assert traffic.sending_seconds == pytest.approx(2 * UNTOLD_SECONDS, abs=2 * LOOK_SECONDS)
        looks = socket.looks
        await trio.sleep(UNTOLD_SECONDS)
        assert socket.looks == looks


async def test_a_socket_is_looked_at_only_while_it_has_something_under_way(
    autojump_clock: MockClock,
) -> None:
    socket = Socket(0)
    async with running() as traffic:
        traffic.sends_on(socket)
        await trio.sleep(1.0)
        looks = socket.looks
        assert looks > 0
        await trio.sleep(1.0)
        assert socket.looks == looks


async def test_the_kernel_tells_what_the_other_side_has_not_acknowledged() -> None:
    """Its reader stops, so that the window is full, and then goes on."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        near = await trio.testing.open_stream_to_socket_listener(listeners[0])
        far = await listeners[0].accept()
        async with near, far, listeners[0]:
            wire = SocketWire(near)
            assert wire.on_their_way() == 0
            nursery.start_soon(wire.send, memoryview(bytes(32 << 20)))
            await until(lambda: (wire.on_their_way() or 0) > MUCH, PATIENCE_SECONDS)
            left = 32 << 20
            while left:
                left -= len(await far.receive_some())
            await until(lambda: not wire.on_their_way(), PATIENCE_SECONDS)
        assert wire.on_their_way() == 0, "it is closed"
