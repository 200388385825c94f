"""One stream: its two faces, its ends, its back-pressure. On a wire in memory, encrypted."""
# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock

from __future__ import annotations

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from node.net.transport import YamuxConnection, YamuxSettings, YamuxStream
from tests.transport.links import (
    MEBIBYTE,
    joined_pair,
    read_exactly,
    read_to_end,
    stream_pair,
    wire_pair,
)
from tests.waiting import PATIENCE_SECONDS

# ---- bytes


async def test_bytes_arrive_whole_and_in_order_both_ways_at_once() -> None:
    data = bytes(range(256)) * 20_000

    async def send(stream: YamuxStream) -> None:
        for start in range(0, len(data), 777_777):
            await stream.send_all(data[start : start + 777_777])
        await stream.send_eof()

    received: list[bytes] = []

    async def read(stream: YamuxStream) -> None:
        received.append(await read_to_end(stream))

    async with joined_pair() as (near, far):
        streams = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(send, stream)
                nursery.start_soon(read, stream)
        assert received == [data, data]
        assert near.open_stream_count == far.open_stream_count == 0


async def test_receive_into_fills_a_buffer_without_gathering_first() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.send_all(bytes(range(100)))
        await sender.send_eof()
        buffer = bytearray(64)
        assert await receiver.receive_into(buffer) == 64
        assert await receiver.receive_into(memoryview(buffer)[60:]) == 4
        assert bytes(buffer) == bytes(range(60)) + bytes(range(64, 68))
        assert await receiver.receive_into(buffer) == 32
        assert await receiver.receive_into(buffer) == 0
        with pytest.raises(ValueError, match="empty"):
            await receiver.receive_into(bytearray())
        with pytest.raises(ValueError, match="nothing"):
            await receiver.receive_some(0)


async def test_receive_now_takes_what_is_there_and_never_waits() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        buffer = bytearray(4)
        assert receiver.receive_now(buffer) == 0
        await sender.send_all(b"abcdef")
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.receive_now(buffer) == 4
        assert receiver.receive_now(buffer) == 2
        assert buffer == b"efcd"
        await sender.send_eof()
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.receive_now(buffer) == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.receive_some)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                sender.receive_now(buffer)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("first", [0, 5, 65_507, 65_508, 200_000])
async def test_two_parts_go_out_as_one(first: int) -> None:
    data = bytes(range(256)) * 1000
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, data[:first], memoryview(data)[first:])
            assert await read_exactly(receiver, len(data)) == data
        assert near.bytes_sent < len(data) + 1000


async def test_the_library_face_reads_and_writes_and_raises_at_the_end() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.write(b"hello")
        assert await receiver.read(2) == b"he"
        assert await receiver.read() == b"llo"
        assert await receiver.read(0) == b""
        await sender.close()
        with pytest.raises(MuxedStreamEOF):
            await receiver.read()
        with pytest.raises(MuxedStreamClosed):
            await sender.write(b"x")
        await receiver.write(b"a half close leaves the other direction open")
        assert await sender.read(-1) == b"a half close leaves the other direction open"
        assert not sender.is_closed()
        await receiver.close()
        with pytest.raises(MuxedStreamEOF):
            await sender.read()
        assert sender.is_closed()
        assert receiver.is_closed()


async def test_the_library_face_tells_of_a_reset() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.write(b"lost")
        await sender.reset()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(MuxedStreamReset):
            await receiver.read()
        with pytest.raises(MuxedStreamReset):
            await receiver.write(b"x")


# ---- ends


async def test_a_half_close_lets_the_answer_through() -> None:
    async with joined_pair() as (near, far):
        caller, server = await stream_pair(near, far)
        await caller.send_all(b"question")
        await caller.send_eof()
        assert await read_to_end(server) == b"question"
        await server.send_all(b"answer")
        await server.aclose()
        assert await read_to_end(caller) == b"answer"
        assert near.open_stream_count == far.open_stream_count == 0


async def test_unread_bytes_survive_the_end_and_even_the_connection() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.send_all(b"last words")
        await sender.aclose()
        await near.close()
        await far.event_closed.wait()
        assert await read_to_end(receiver) == b"last words"


async def test_a_reset_drops_unread_bytes_at_the_other_end() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.send_all(bytes(1000))
        assert await receiver.receive_some(1) == b"\0"
        sender.reset_now()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError):
            await receiver.receive_some()
        assert far.unread_bytes == 0


async def test_closing_a_stream_tells_a_sender_that_waits_for_window() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await fill(sender, [0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await receiver.aclose()
        assert near.open_stream_count == far.open_stream_count == 0
        assert far.unread_bytes == 0


async def test_a_stream_closed_by_the_library_and_left_alone_is_reset_after_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    settings = YamuxSettings(half_closed_seconds=30.0)
    async with joined_pair(near=settings) as (near, far):
        left_alone, other_end = await stream_pair(near, far)
        await left_alone.close()
        await trio.sleep(25)
        assert near.open_stream_count == 1
        await trio.sleep(10)
        assert near.open_stream_count == 0
        with pytest.raises(trio.BrokenResourceError):
            await other_end.send_all(b"is anybody there?")


async def test_bytes_queued_before_a_close_are_sent_although_the_stream_is_forgotten() -> None:
    data = bytes(200_000)
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.send_all(data)
        await sender.aclose()
        assert await read_to_end(receiver) == data


async def test_close_read_drops_what_comes_and_leaves_sending_alone() -> None:
    async with joined_pair() as (near, far):
        talker, deaf = await stream_pair(near, far)
        await deaf.close_read()
        await talker.send_all(bytes(50_000))
        await deaf.send_all(b"I am not listening")
        assert await read_exactly(talker, 18) == b"I am not listening"
        assert far.unread_bytes == 0
        with pytest.raises(trio.ClosedResourceError):
            await deaf.receive_some()


async def test_sending_nothing_to_a_stream_that_ended_still_raises() -> None:
    async with joined_pair() as (near, far):
        sender, _ = await stream_pair(near, far)
        await sender.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await sender.send_all(b"")


# ---- who may do what at once


async def test_two_tasks_cannot_send_or_receive_on_one_stream_at_once() -> None:
    async with joined_pair() as (near, far):
        stream, _ = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_some)
            nursery.start_soon(stream.send_all, bytes(MEBIBYTE))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.receive_some()
            with pytest.raises(trio.BusyResourceError):
                await stream.send_all(b"x")
            nursery.cancel_scope.cancel()


async def test_the_librarys_writers_wait_for_one_another() -> None:
    async with joined_pair() as (near, far):
        stream, receiver = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.write, b"a" * MEBIBYTE)
            nursery.start_soon(stream.write, b"b" * MEBIBYTE)
            data = await read_exactly(receiver, 2 * MEBIBYTE)
        assert data in (
            b"a" * MEBIBYTE + b"b" * MEBIBYTE,
            b"b" * MEBIBYTE + b"a" * MEBIBYTE,
        )


# ---- back-pressure


async def fill(stream: YamuxStream, counter: list[int]) -> None:
    while True:
        await stream.send_all(bytes(65_536))
        counter[0] += 65_536


@pytest.mark.slow
async def test_a_reader_that_stops_holds_the_sender_up_for_ever_at_a_bounded_cost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        accepted = [0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, sender, accepted)
            await trio.sleep(3600)
            stopped_at = accepted[0]
            assert stopped_at <= 256 * 1024
            assert far.unread_bytes <= 256 * 1024
            assert near.outgoing.queued_bytes == 0
            await read_exactly(receiver, stopped_at)
            with trio.fail_after(10):
                await read_exactly(receiver, 65_536)
            nursery.cancel_scope.cancel()


async def test_a_window_that_grew_still_bounds_a_reader_that_stops(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limit = 2 * MEBIBYTE
    settings = YamuxSettings(stream_window_limit_bytes=limit)
    async with joined_pair(wire_pair(0.05, 1e8), near=settings, far=settings) as (near, far):
        sender, receiver = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, sender, [0])
            await read_exactly(receiver, 20 * MEBIBYTE)
            assert receiver._receive_window.size_bytes == limit
            await trio.sleep(60)
            assert 0 < far.unread_bytes <= limit
            nursery.cancel_scope.cancel()


async def test_one_stream_that_nobody_reads_does_not_hold_up_another() -> None:
    async with joined_pair() as (near, far):
        stuck, _ = await stream_pair(near, far)
        free, free_end = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, stuck, [0])
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(free.send_all, b"x" * MEBIBYTE + b"done")
            with trio.fail_after(PATIENCE_SECONDS):
                data = await read_exactly(free_end, MEBIBYTE + 4)
            nursery.cancel_scope.cancel()
        assert data.endswith(b"done")


async def echo(connection: YamuxConnection) -> None:
    stream = await connection.accept_stream()
    while piece := await stream.receive_some():
        await stream.send_all(piece)


async def swallow(stream: YamuxStream) -> None:
    buffer = bytearray(MEBIBYTE)
    while await stream.receive_into(buffer):
        pass


@pytest.mark.slow
async def test_bulk_delays_a_small_stream_by_little_more_than_a_batch(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rate = 12_500_000  # 100 Mbit/s
    round_trip = 0.02
    wires = wire_pair(round_trip / 2, rate, buffer_bytes=32 * 1024)
    async with joined_pair(wires) as (near, far):
        bulk, bulk_end = await stream_pair(near, far)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, bulk, [0])
            nursery.start_soon(swallow, bulk_end)
            await trio.sleep(2)
            nursery.start_soon(echo, far)
            small = await near.open_stream()
            slowest = 0.0
            for _ in range(50):
                began = trio.current_time()
                await small.send_all(b"x" * 64)
                await read_exactly(small, 64)
                slowest = max(slowest, trio.current_time() - began)
                await trio.sleep(0.013)
            nursery.cancel_scope.cancel()
    # One batch that is being sent, one that the small frame shares, and the wire's own buffer.
    batch_seconds = 2 * 131_072 / rate
    assert slowest < round_trip + 2 * batch_seconds + 32 * 1024 / rate + 0.005


@pytest.mark.parametrize(("round_trip", "least"), [(0.1, 0.85), (0.05, 0.9)])
async def test_one_stream_fills_100_megabits_over_a_far_link(
    round_trip: float, least: float, autojump_clock: trio.testing.MockClock
) -> None:
    rate, seconds = 12_500_000, 4.0
    wires = wire_pair(round_trip / 2, rate)
    async with joined_pair(wires) as (near, far):
        sender, receiver = await stream_pair(near, far)
        received = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill, sender, [0])
            with trio.move_on_after(seconds):
                buffer = bytearray(MEBIBYTE)
                while True:
                    received += await receiver.receive_into(buffer)
            nursery.cancel_scope.cancel()
        assert received / (rate * seconds) >= least
        assert far.receive_bytes_per_second == pytest.approx(rate, rel=0.15)
        assert near.send_bytes_per_second == pytest.approx(rate, rel=0.25)
        assert near.round_trip_seconds == pytest.approx(round_trip, rel=0.1)
