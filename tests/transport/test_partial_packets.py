# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""The bytes of an incomplete packet count as a sign that the other side lives."""

from __future__ import annotations

import itertools
import socket
import sys

import pytest
import trio

from node.net.transport.wires import SocketWire
from tests.transport.links import PipeConnection, joined_pair, stream_pair, wire_pair

SENT_BYTES = 16_384
READ_BYTES = 1_024  # at a time, one a second


class Trickle(PipeConnection):
    """Reads few of the bytes that have come, and waits once it trickles.

    It reads few from the beginning, or else a read that began earlier would take them all.
    """

    trickles = False

    async def read(self, n: int | None = None) -> bytes:
        if self.trickles:
            await trio.sleep(1.0)
        return await super().read(min(n or READ_BYTES, READ_BYTES))


async def test_every_byte_of_a_slow_packet_counts_when_it_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    near_wire, far_pipes = wire_pair()
    far_wire = Trickle(far_pipes.incoming, far_pipes.outgoing, is_initiator=False)
    async with joined_pair((near_wire, far_wire)) as (near, far):
        opened, accepted = await stream_pair(near, far)
        far_wire.trickles = True
        await opened.send_all(bytes(SENT_BYTES))
        counts = []
        for _ in range(SENT_BYTES // READ_BYTES // 2):
            await trio.sleep(2.0)
            counts.append(far.bytes_received)
        assert all(later > earlier for earlier, later in itertools.pairwise(counts))
        received = 0
        while received < SENT_BYTES:
            received += len(await accepted.receive_some())


@pytest.mark.skipif(sys.platform == "win32", reason="there they are not counted")
async def test_unread_bytes_in_a_socket_are_counted() -> None:
    near, far = socket.socketpair()
    async with (
        trio.SocketStream(trio.socket.from_stdlib_socket(near)) as sender,
        trio.SocketStream(trio.socket.from_stdlib_socket(far)) as receiver,
    ):
        wire = SocketWire(receiver)
        assert wire.unread_bytes() == 0
        await sender.send_all(bytes(100))
        await trio.lowlevel.wait_readable(receiver.socket)
        assert wire.unread_bytes() == 100
        assert await wire.receive_into(memoryview(bytearray(70)), 1) == 70
        assert wire.unread_bytes() == 30
    assert wire.unread_bytes() == 0
