"""A thousand calls and transfers that were given up leave nothing behind, on either side."""

from __future__ import annotations

import random
from typing import Final

import pytest
import trio
import trio.testing

from protocols.errors import DeadlineExceeded
from protocols.identity import PeerId
from protocols.rpc import Empty
from protocols.rpc.state import RpcLimits
from tests.processes.children import running_peer
from tests.processes.methods import CHUNK_BYTES, ECHO, LINGER, SINK, Census, Content, Duration
from tests.processes.peer import TestPeer, open_test_peer
from tests.waiting import until

CALL_SECONDS: Final = 20.0
GONE_SECONDS: Final = RpcLimits().stall_seconds / 2  # by then no clock has cleared anything away
CALLS: Final = 1000
CALLS_AT_ONCE: Final = 100
TRANSFERS: Final = 200
TRANSFERS_AT_ONCE: Final = 10
MEMORY_BYTES: Final = 16 << 20


async def nothing_left_behind(
    us: TestPeer, ours: Census, peer: PeerId | None = None, theirs: Census | None = None
) -> None:
    """Insist that we, and the other side if it is named, soon hold no more than before."""

    async def gone() -> bool:
        if us.census().exceeds(ours):
            return False
        if peer is None or theirs is None:
            return True
        return not (await us.census_of(peer)).exceeds(theirs)

    try:
        await until(gone, GONE_SECONDS)
    except trio.TooSlowError:
        left = us.census(), None if peer is None else await us.census_of(peer)
        raise AssertionError(f"before: {ours}, {theirs}; now: {left}") from None


@pytest.mark.parametrize("longest_seconds", [0.0, 0.002, 0.05])
async def test_a_thousand_cancelled_calls_leave_no_task_no_stream_and_no_file(
    longest_seconds: float,
) -> None:
    """Cancelled before they were sent, while they were on the wire, and while they were served."""
    chance = random.Random(longest_seconds)
    async with running_peer() as other, open_test_peer(knows=[other]) as us:
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        theirs = await us.census_of(other.peer)
        ours = us.census()
        memory = other.memory_bytes()

        async def call_and_give_up() -> None:
            with trio.move_on_after(chance.uniform(0, longest_seconds)):
                await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=CALL_SECONDS)

        for _ in range(CALLS // CALLS_AT_ONCE):
            async with trio.open_nursery() as nursery:
                for _ in range(CALLS_AT_ONCE):
                    nursery.start_soon(call_and_give_up)

        await nothing_left_behind(us, ours, other.peer, theirs)
        assert us.rpc.statistics().calls_in_flight == 0
        assert other.memory_bytes() - memory < MEMORY_BYTES
        assert (
            await us.rpc.call(other.peer, ECHO, Content(b"well?"), timeout=CALL_SECONDS)
        ).content == b"well?"


async def test_calls_that_run_out_of_time_end_on_both_sides() -> None:
    async with running_peer() as other, open_test_peer(knows=[other]) as us:
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        theirs = await us.census_of(other.peer)
        ours = us.census()

        async def call_too_long() -> None:
            with pytest.raises(DeadlineExceeded):
                await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=0.1)

        async with trio.open_nursery() as nursery:
            for _ in range(CALLS_AT_ONCE):
                nursery.start_soon(call_too_long)

        await nothing_left_behind(us, ours, other.peer, theirs)


async def test_hundreds_of_cancelled_transfers_leave_nothing_either() -> None:
    chance = random.Random(7)
    async with running_peer() as other, open_test_peer(knows=[other]) as us:
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        theirs = await us.census_of(other.peer)
        ours = us.census()
        chunk = bytes(CHUNK_BYTES)

        async def upload_and_give_up() -> None:
            with trio.move_on_after(chance.uniform(0, 0.05)):
                async with us.rpc.open_bulk(
                    other.peer, SINK, Empty(), timeout=CALL_SECONDS
                ) as upload:
                    while True:
                        await upload.send_chunk(chunk)

        for _ in range(TRANSFERS // TRANSFERS_AT_ONCE):
            async with trio.open_nursery() as nursery:
                for _ in range(TRANSFERS_AT_ONCE):
                    nursery.start_soon(upload_and_give_up)

        await nothing_left_behind(us, ours, other.peer, theirs)
        assert us.rpc.statistics().transfers_open == 0
        await us.upload(other.peer, 20)


async def test_a_cancelled_dial_leaves_no_socket_behind() -> None:
    async with running_peer() as other, open_test_peer(knows=[other]) as us:
        await trio.testing.wait_all_tasks_blocked()  # all that serves has started
        ours = us.census()
        for number in range(100):
            with trio.move_on_after(0.0005 * number):
                await us.network.connect(other.peer)
            await us.network.disconnect(other.peer)

        await nothing_left_behind(us, ours)
