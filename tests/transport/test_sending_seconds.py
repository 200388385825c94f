# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""For how long a node's bytes are on their way, as its sockets tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from node.net.transport.traffic import (
    LONGEST_LOOK_SECONDS,
    LOOK_SECONDS,
    UNTOLD_SECONDS,
    Carried,
    Traffic,
)
from node.net.transport.wires import SocketWire
from protocols.network import LITTLE_BYTES
from tests.waiting import PATIENCE_SECONDS, until

MUCH = 100_000


class Socket:
    """A socket with so many bytes under way; None: the system does not tell."""

    def __init__(self, count: int | None = MUCH) -> None:
        self.count = count
        self.arrived = 0
        self.looks = 0

    def carried(self) -> Carried:
        self.looks += 1
        return Carried(self.arrived, self.count)


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


@pytest.mark.parametrize("pause_ms", [17, 100])
@pytest.mark.parametrize("burst_ms", [5, 19, 21, 30, 39, 59, 99])
async def test_bursts_do_not_make_an_uplink_seem_fast(
    autojump_clock: MockClock, burst_ms: int, pause_ms: int
) -> None:
    """Whatever their length, although looks begin with the first byte of each."""
    rate, bursts = 1e6, 200
    size = int(rate * burst_ms / 1000)
    socket = Socket(0)
    async with running() as traffic:
        for _ in range(bursts):
            socket.count = size
            traffic.sends_on(socket)
            await trio.sleep(burst_ms / 1000)
            socket.count = 0
            socket.arrived += size
            await trio.sleep(pause_ms / 1000)
        await trio.sleep(1.0)
        assert traffic.sending_bytes == pytest.approx(bursts * size, rel=0.02)
        measured = traffic.sending_bytes / traffic.sending_seconds
        least = 0.8 if burst_ms > 10 else 0.4
        assert least * rate <= measured <= 1.1 * rate


@pytest.mark.parametrize("later", [0.0, 0.001])
async def test_a_look_that_is_late_does_not_make_a_burst_seem_fast(
    autojump_clock: MockClock, later: float
) -> None:
    """The loop was busy while the kernel sent."""
    socket = Socket()
    async with running() as traffic:
        await trio.sleep(1.0)
        traffic.sends_on(socket)
        if later:
            await trio.sleep(later)
        autojump_clock.jump(0.3)
        socket.count, socket.arrived = 0, MUCH
        await trio.sleep(1.0)
        assert traffic.sending_bytes == MUCH
        assert traffic.sending_seconds == pytest.approx(0.3, abs=LONGEST_LOOK_SECONDS)


async def test_a_send_that_waited_for_room_began_before_it_ended(
    autojump_clock: MockClock,
) -> None:
    """A look came before anything was written, and another when all was sent."""
    socket, waited, times = Socket(0), 0.01, 20
    async with running() as traffic:
        for _ in range(times):
            traffic.sends_on(socket)
            await trio.sleep(LONGEST_LOOK_SECONDS)
            autojump_clock.jump(waited)
            socket.arrived += 2 * LITTLE_BYTES
            traffic.sends_on(socket, waited)
            await trio.sleep(1.0)
        assert traffic.sending_bytes == times * 2 * LITTLE_BYTES
        assert traffic.sending_seconds >= times * waited / 2


async def test_small_messages_make_no_uplink_seem_fast(autojump_clock: MockClock) -> None:
    """They are no measure of it, alone; beside others they are carried."""
    socket, full = Socket(0), Socket(0)

    async def chatter() -> None:
        while True:
            traffic.sends_on(socket)
            socket.arrived += LITTLE_BYTES // 2
            await trio.sleep(LOOK_SECONDS)

    async with running() as traffic, trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        await trio.sleep(1.0)
        assert (traffic.sending_bytes, traffic.sending_seconds) == (0, 0.0)
        traffic.sends_on(full)
        full.count = MUCH
        await trio.sleep(1.0)
        full.count, full.arrived = 0, MUCH
        await trio.sleep(1.0)
        assert traffic.sending_seconds == pytest.approx(1.0, abs=2 * LOOK_SECONDS)
        carried = MUCH + LITTLE_BYTES / 2 / LOOK_SECONDS
        assert traffic.sending_bytes == pytest.approx(carried, rel=0.05)
        nursery.cancel_scope.cancel()


async def test_a_late_look_does_not_count_the_time_before_the_burst(
    autojump_clock: MockClock,
) -> None:
    """The loop was busy for a second, and then its socket was written to."""
    idle, socket = Socket(1), Socket()
    async with running() as traffic:
        traffic.sends_on(idle)
        await trio.sleep(10.5 * LOOK_SECONDS)
        autojump_clock.jump(1.0)
        traffic.sends_on(socket)
        await trio.sleep(10 * LOOK_SECONDS)
        socket.count = 0
        await trio.sleep(1.0)
        assert traffic.sending_seconds == pytest.approx(0.2, abs=2 * LOOK_SECONDS)


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


async def test_a_lost_link_has_carried_only_what_was_acknowledged(
    autojump_clock: MockClock,
) -> None:
    socket = Socket()
    async with running() as traffic:
        traffic.sends_on(socket)
        await trio.sleep(1.0)
        socket.arrived = MUCH
        await trio.sleep(1.0)
        socket.count, socket.arrived = 0, 0  # closed: nothing is known any more
        await trio.sleep(1.0)
        assert traffic.sending_bytes == MUCH


async def test_where_the_system_tells_nothing_all_that_was_sent_has_arrived(
    autojump_clock: MockClock,
) -> None:
    socket = Socket(None)
    async with running() as traffic:
        traffic.sends_on(socket)
        await trio.sleep(1.0)
        socket.arrived = MUCH
        await trio.sleep(2 * UNTOLD_SECONDS)
        assert traffic.sending_bytes == MUCH
        traffic.sends_on(socket)
        socket.arrived += MUCH
        await trio.sleep(2 * UNTOLD_SECONDS)
        assert traffic.sending_bytes == 2 * MUCH
        assert traffic.sending_seconds == pytest.approx(2 * UNTOLD_SECONDS, abs=1.0)


async def test_the_kernel_tells_what_has_arrived_and_what_has_not() -> None:
    size = 32 << 20
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        near = await trio.testing.open_stream_to_socket_listener(listeners[0])
        far = await listeners[0].accept()
        async with near, far, listeners[0]:
            wire = SocketWire(near)
            if wire.carried().on_their_way is None:
                pytest.skip("this system does not tell what is on its way")
            assert wire.carried() == Carried(0, 0)
            nursery.start_soon(wire.send, memoryview(bytes(size)))
            await until(lambda: (wire.carried().on_their_way or 0) > MUCH, PATIENCE_SECONDS)
            left = size
            while left:
                left -= len(await far.receive_some())
            await until(lambda: wire.carried() == Carried(size, 0), PATIENCE_SECONDS)
        assert wire.carried() == Carried(0, 0), "it is closed"
