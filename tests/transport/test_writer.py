"""On a slow link the writer keeps little in the kernel, where small messages wait behind it; and
the kernel spreads it over the round trip. A busy machine does not make a link slow."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import cast

import pytest
import trio
import trio.testing

from node.net.transport.frames import DATA, encode_header
from node.net.transport.noise import SEND_BATCH_BYTES, NoiseSession
from node.net.transport.outgoing import StreamQueue
from node.net.transport.settings import YamuxSettings
from node.net.transport.traffic import Traffic
from node.net.transport.wires import SocketWire
from node.net.transport.writer import (
    SLOW_BATCH_SECONDS,
    SMALLEST_BATCH_BYTES,
    ConnectionWriter,
)

KERNEL_BYTES = 4 << 20  # what it takes without a limit


class Kernel:
    """A session whose bytes leave at a rate, after they have waited in a buffer."""

    def __init__(self, bytes_per_second: float, busy_seconds: float = 0.0) -> None:
        """`busy_seconds`: how long the processor does something else before each batch leaves."""
        self.traffic = Traffic()
        self.rate = bytes_per_second
        self.largest_batch = 0
        self._busy_seconds = busy_seconds
        self._limit = KERNEL_BYTES
        self._empty_at = 0.0
        self.is_paced = False

    @property
    def waiting_seconds(self) -> float:
        """How long a byte that is given to it now waits."""
        return max(0.0, self._empty_at - trio.current_time())

    async def send_frames(self, frames: Sequence[bytes]) -> float:
        await trio.sleep(self._busy_seconds)
        now, size = trio.current_time(), sum(map(len, frames))
        self.largest_batch = max(self.largest_batch, size)
        self._empty_at = max(self._empty_at, now) + size / self.rate
        await trio.sleep_until(max(now, self._empty_at - self._limit / self.rate))
        return trio.current_time() - now

    def limit_unsent(self, limit_bytes: int | None) -> None:
        self._limit = KERNEL_BYTES if limit_bytes is None else limit_bytes

    def pace(self) -> None:
        self.is_paced = True


async def pour(bytes_per_second: float, piece_bytes: int, pieces: int) -> tuple[float, bool]:
    """Send bulk in pieces that keep the link busy for half of the time. How long a small message
    waits at most in the kernel, after the first second; and whether the connection is paced."""
    kernel = Kernel(bytes_per_second)
    writer = ConnectionWriter(cast(NoiseSession, kernel), YamuxSettings(), is_over=lambda: False)
    queue = StreamQueue(1, lambda: None)
    longest = 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for _ in range(pieces):
            size = writer.outgoing.frame_bytes
            for _ in range(piece_bytes // size):
                writer.outgoing.add_data(queue, encode_header(DATA, 0, 1, size) + bytes(size))
            until = trio.current_time() + 2 * piece_bytes / kernel.rate
            while trio.current_time() < until:
                await trio.sleep(SLOW_BATCH_SECONDS / 4)
                if trio.current_time() > 1.0:
                    longest = max(longest, kernel.waiting_seconds)
        nursery.cancel_scope.cancel()
    return longest, kernel.is_paced


@pytest.mark.slow
@pytest.mark.parametrize("megabytes_per_second", [0.5, 1.5, 5.0])
def test_on_a_slow_link_nothing_waits_long_in_the_kernel_after_a_pause(
    megabytes_per_second: float,
) -> None:
    rate = megabytes_per_second * 1e6
    clock = trio.testing.MockClock(autojump_threshold=0)
    longest, is_paced = trio.run(pour, rate, SEND_BATCH_BYTES, 40, clock=clock)
    # one batch that was just given to the kernel, and as much that it held already
    timely = max(2 * SLOW_BATCH_SECONDS, SMALLEST_BATCH_BYTES / rate)
    assert longest <= 2 * timely + SLOW_BATCH_SECONDS / 4
    assert is_paced


def test_a_fast_link_is_not_paced() -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    _, is_paced = trio.run(pour, 500e6, 16 * SEND_BATCH_BYTES, 40, clock=clock)
    assert not is_paced


async def test_a_busy_machine_is_not_taken_for_a_slow_link(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - an argument, or it is not used
) -> None:
    kernel = Kernel(500e6, busy_seconds=2 * SLOW_BATCH_SECONDS)
    writer = ConnectionWriter(cast(NoiseSession, kernel), YamuxSettings(), is_over=lambda: False)
    queue = StreamQueue(1, lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for _ in range(8 * SEND_BATCH_BYTES // writer.outgoing.frame_bytes):
            writer.outgoing.add_data(queue, bytes(writer.outgoing.frame_bytes))
        await writer.flush()
        nursery.cancel_scope.cancel()
    assert kernel.largest_batch >= SEND_BATCH_BYTES
    assert not kernel.is_paced
    assert writer.sent.bytes_per_second is None  # the link was never full


@pytest.mark.skipif(sys.platform == "win32", reason="waits in the library's stream there")
async def test_a_send_waits_for_room_only_while_the_kernel_has_none() -> None:
    near, far = [trio.SocketStream(one) for one in await connected_sockets()]
    wire, full = SocketWire(near), memoryview(bytearray(4 * KERNEL_BYTES))
    assert await wire.send(full[:SMALLEST_BATCH_BYTES]) == 0.0

    async def read_later() -> None:
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(SLOW_BATCH_SECONDS)
        left = SMALLEST_BATCH_BYTES + len(full)
        while left:
            left -= len(await far.receive_some())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_later)
        assert await wire.send(full) >= SLOW_BATCH_SECONDS
    for stream in (near, far):
        await stream.aclose()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
async def test_bulk_on_a_slow_link_leaves_without_bursts() -> None:
    max_pacing_rate = 47  # asm-generic/socket.h
    ends = [trio.SocketStream(one) for one in await connected_sockets()]
    slow, fast = ends

    def is_paced(stream: trio.SocketStream) -> bool:
        return stream.socket.getsockopt(socket.SOL_SOCKET, max_pacing_rate) not in (-1, 2**32 - 1)

    SocketWire(slow).pace()
    SocketWire(fast).limit_unsent(SMALLEST_BATCH_BYTES)
    assert (is_paced(slow), is_paced(fast)) == (True, False)
    for stream in ends:
        await stream.aclose()


async def connected_sockets() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        connecting = trio.socket.socket()
        await connecting.connect(listener.getsockname())
        return connecting, (await listener.accept())[0]
