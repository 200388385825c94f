"""Bytes that wait to be sent are bounded, for a stream and for all streams of a node together."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import trio
import trio.testing

from protocols.errors import DeadlineExceeded
from protocols.rpc.frames import (
    BATCH_BYTES,
    CONGESTED_BYTES,
    CROWDED_BYTES,
    LEAST_SLICE_BYTES,
    FrameSender,
    QueuedBytes,
)

STALL_SECONDS = 30.0
FRAME = bytes(8 << 10)
STREAMS = 50


def push_while_there_is_room(sender: FrameSender) -> None:
    while not sender.congested:
        sender.push(FRAME)


async def test_one_stream_alone_may_hold_a_megabyte() -> None:
    sender = FrameSender(STALL_SECONDS, QueuedBytes(64 << 20))
    push_while_there_is_room(sender)
    assert CONGESTED_BYTES <= sender.queued_bytes < CONGESTED_BYTES + len(FRAME)


async def test_many_streams_whose_peers_do_not_read_share_what_there_is() -> None:
    of_node = QueuedBytes(4 << 20)
    for _ in range(STREAMS):
        push_while_there_is_room(FrameSender(STALL_SECONDS, of_node))
    most = of_node.limit_bytes + len(FRAME) + STREAMS * (CROWDED_BYTES + len(FRAME))
    assert of_node.limit_bytes <= of_node.total <= most


async def test_in_a_crowd_a_peer_that_reads_still_gets_everything() -> None:
    of_node = QueuedBytes(1 << 20)
    push_while_there_is_room(FrameSender(STALL_SECONDS, of_node))
    assert of_node.is_crowded
    sender = FrameSender(STALL_SECONDS, of_node)
    near, far = trio.testing.lockstep_stream_pair()

    async def produce() -> None:
        for _ in range(100):
            if sender.congested:
                await sender.room()
            sender.push(FRAME)
            assert sender.queued_bytes <= CROWDED_BYTES + len(FRAME)
        sender.finish()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run, near)
            nursery.start_soon(produce)
            received = 0
            while some := await far.receive_some(1 << 20):
                received += len(some)
    assert received == 100 * len(FRAME)


async def test_a_stream_that_ends_gives_back_what_it_held_and_takes_no_more() -> None:
    of_node = QueuedBytes(64 << 20)
    sender = FrameSender(STALL_SECONDS, of_node)
    near, _far = trio.testing.lockstep_stream_pair()
    push_while_there_is_room(sender)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run, near)
        await trio.testing.wait_all_tasks_blocked()
        assert of_node.total >= CONGESTED_BYTES
        nursery.cancel_scope.cancel()
    assert of_node.total == 0
    assert not sender.was_sent(sender.push(FRAME))
    assert of_node.total == 0


def sends_of(sizes: list[int], seconds_of: Callable[[int], float] = lambda _size: 0.0) -> list[int]:
    """What is sent at once if frames of these sizes are pushed one after the other."""
    seen: list[int] = []

    async def note() -> None:
        seen.append(len(sending.get_data_nowait()))
        await trio.sleep(seconds_of(seen[-1]))

    sending = trio.testing.MemorySendStream(note)
    near = trio.StapledStream(sending, trio.testing.MemoryReceiveStream())

    async def send() -> None:
        sender = FrameSender(STALL_SECONDS, QueuedBytes(64 << 20))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run, near)
            for size in sizes:
                sender.push(bytes(size))
                while sender.queued_bytes:  # noqa: ASYNC110  it tells nobody, and time is virtual
                    await trio.sleep(1)
            sender.finish()
        assert sender.finished

    trio.run(send, clock=trio.testing.MockClock(autojump_threshold=0))
    return seen


KIB = 1 << 10


@pytest.mark.parametrize(
    ("size", "sends"),
    [
        (BATCH_BYTES, [BATCH_BYTES]),
        (BATCH_BYTES + 100, [BATCH_BYTES + 100]),
        (BATCH_BYTES + BATCH_BYTES // 4, [BATCH_BYTES, BATCH_BYTES // 4]),
        (2 * BATCH_BYTES + 1, [BATCH_BYTES, BATCH_BYTES + 1]),
    ],
)
def test_a_large_frame_is_sent_in_parts_of_which_none_is_short(size: int, sends: list[int]) -> None:
    assert sends_of([2 * BATCH_BYTES, size])[-len(sends) :] == sends


def test_the_first_parts_are_small() -> None:
    assert sends_of([600 * KIB]) == [size * KIB for size in (16, 32, 64, 128, 256, 104)]


def test_a_line_that_carries_little_is_no_stall() -> None:
    """Ten streams of full windows on a line of 1 Mb/s that something else fills too."""
    one_kilobyte_a_second = sends_of([320 * KIB], lambda size: size / 1000)
    assert set(one_kilobyte_a_second) == {LEAST_SLICE_BYTES}


def test_parts_become_smaller_when_the_line_becomes_slow() -> None:
    def seconds_of(size: int) -> float:
        return size / (1e6 if trio.current_time() < 5 else 10e3)

    sends = sends_of([8 << 20], seconds_of)
    assert BATCH_BYTES in sends
    assert sends[-5:-1] == [LEAST_SLICE_BYTES] * 4


def test_a_stream_that_takes_nothing_is_given_up() -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(DeadlineExceeded, match="none of 16,384 bytes for 30")
    ):
        sends_of([320 * KIB], lambda _size: math.inf)
