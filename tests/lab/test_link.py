"""One direction of a delayed and limited link: exact times, under a virtual clock."""

# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock

from __future__ import annotations

from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from lab.bench.link_proxy import READ_BYTES, LinkConditions, LinkDirection, LinkSchedule

MEGABIT_100 = 12_500_000.0  # bytes per second


def test_without_a_bottleneck_everything_takes_the_delay() -> None:
    schedule = LinkSchedule(LinkConditions(delay_seconds=0.05))
    assert schedule.arrival(1.0, 10**9) == 1.05
    assert schedule.room_at() == float("-inf")


def test_the_bottleneck_passes_one_after_the_other() -> None:
    schedule = LinkSchedule(LinkConditions(delay_seconds=0.5, bytes_per_second=1000.0))
    assert schedule.arrival(0.0, 1000) == 1.5
    assert schedule.arrival(0.0, 500) == 2.0
    assert schedule.arrival(10.0, 1000) == 11.5, "a pause is not saved up"


def test_a_burst_passes_at_once_and_is_earned_again_by_waiting() -> None:
    conditions = LinkConditions(bytes_per_second=1000.0, burst_bytes=500)
    schedule = LinkSchedule(conditions)
    assert schedule.arrival(0.0, 500) == 0.0
    assert schedule.arrival(0.0, 500) == 0.5
    assert schedule.arrival(0.5, 250) == 0.75, "nothing was earned without a pause"
    assert schedule.arrival(1.0, 250) == 1.0, "a quarter of a second earned 250 bytes"


def test_the_queue_has_room_when_less_than_its_size_waits_for_the_bottleneck() -> None:
    schedule = LinkSchedule(LinkConditions(bytes_per_second=1000.0, queue_bytes=200))
    schedule.arrival(0.0, 1000)
    assert schedule.room_at() == pytest.approx(0.8)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 100_000)), max_size=50),
    st.integers(0, 50_000),
)
def test_arrivals_keep_order_and_never_beat_the_rate(
    pieces: list[tuple[float, int]], burst: int
) -> None:
    rate, delay = 10_000.0, 0.1
    schedule = LinkSchedule(LinkConditions(delay, rate, burst_bytes=burst))
    now, last, total = 0.0, 0.0, 0
    for pause, size in pieces:
        now += pause
        arrival = schedule.arrival(now, size)
        total += size
        assert arrival >= now + delay
        assert arrival >= last
        assert total <= burst + rate * (arrival - delay) + 1e-6
        last = arrival


async def test_the_last_byte_arrives_after_the_time_that_rate_and_delay_say(
    autojump_clock: MockClock,
) -> None:
    payload = bytes(range(256)) * 4883  # 1.25 MB: a tenth of a second at 100 Mbit/s
    sender, source = memory_stream_pair()
    sink, receiver = memory_stream_pair()
    way = LinkDirection(LinkConditions(delay_seconds=0.05, bytes_per_second=MEGABIT_100))
    got = bytearray()
    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(way.run, source, sink)
        await sender.send_all(payload)
        await sender.send_eof()
        first = await receiver.receive_some()
        assert trio.current_time() - began == pytest.approx(0.05 + READ_BYTES / MEGABIT_100)
        got += first
        async for piece in receiver:
            got += piece
        assert trio.current_time() - began == pytest.approx(0.05 + len(payload) / MEGABIT_100)
    assert got == payload
    assert way.bytes_taken == way.bytes_delivered == len(payload)


async def test_the_delay_costs_no_throughput(autojump_clock: MockClock) -> None:
    """A long pipe holds many bytes: doubling the delay delays, and does not slow down."""
    for delay in (0.01, 1.0):
        sender, source = memory_stream_pair()
        sink, receiver = memory_stream_pair()
        way = LinkDirection(LinkConditions(delay_seconds=delay, bytes_per_second=MEGABIT_100))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(way.run, source, sink)
            began = trio.current_time()
            await sender.send_all(bytes(2_500_000))
            await sender.send_eof()
            async for _ in receiver:
                pass
            assert trio.current_time() - began == pytest.approx(delay + 0.2)


async def test_a_full_queue_stops_reading(autojump_clock: MockClock) -> None:
    sender, source = memory_stream_pair()
    sink, _receiver = memory_stream_pair()
    conditions = LinkConditions(bytes_per_second=MEGABIT_100, queue_bytes=100_000)
    way = LinkDirection(conditions)
    async with trio.open_nursery() as nursery:
        await sender.send_all(bytes(10_000_000))
        nursery.start_soon(way.run, source, sink)
        await trio.sleep(0.4)  # virtual seconds: five million bytes have passed the bottleneck
        waiting = way.bytes_taken - 0.4 * MEGABIT_100
        assert 0 <= waiting <= 100_000 + READ_BYTES
        nursery.cancel_scope.cancel()


async def test_a_reader_that_does_not_read_stops_the_link_in_bounded_memory(
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.bench.link_proxy.MOST_UNDERWAY_BYTES", 10 * READ_BYTES)
    sender, source = memory_stream_pair()
    sink, receiver = memory_stream_pair()
    way = LinkDirection(LinkConditions())
    way.stall()
    async with trio.open_nursery() as nursery:
        await sender.send_all(bytes(100 * READ_BYTES))
        nursery.start_soon(way.run, source, sink)
        await wait_all_tasks_blocked()
        assert way.bytes_taken == 10 * READ_BYTES
        way.resume()
        await sender.send_eof()
        assert sum([len(piece) async for piece in receiver]) == 100 * READ_BYTES


async def test_bytes_held_back_by_a_stall_arrive_in_order(autojump_clock: MockClock) -> None:
    sender, source = memory_stream_pair()
    sink, receiver = memory_stream_pair()
    way = LinkDirection(LinkConditions(delay_seconds=0.1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(way.run, source, sink)
        await sender.send_all(b"one ")
        await trio.sleep(0.05)
        way.stall()
        await sender.send_all(b"two")
        with trio.move_on_after(60) as waiting:
            await receiver.receive_some()
        assert waiting.cancelled_caught
        way.resume()
        await sender.send_eof()
        assert b"".join([bytes(piece) async for piece in receiver]) == b"one two"


async def test_swallowed_bytes_never_arrive(autojump_clock: MockClock) -> None:
    sender, source = memory_stream_pair()
    sink, receiver = memory_stream_pair()
    way = LinkDirection(LinkConditions(delay_seconds=0.1))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(way.run, source, sink)
        await sender.send_all(b"underway")
        await wait_all_tasks_blocked()
        way.swallow()
        await trio.sleep(1)
        await sender.send_all(b"lost")
        await trio.sleep(1)
        assert way.bytes_delivered == 0
        assert way.bytes_taken == len(b"underwaylost")
        way.resume()
        await sender.send_all(b"heard")
        assert await receiver.receive_some() == b"heard"
        nursery.cancel_scope.cancel()


async def test_a_half_close_arrives_after_the_bytes_before_it(autojump_clock: MockClock) -> None:
    sender, source = memory_stream_pair()
    sink, receiver = memory_stream_pair()
    way = LinkDirection(LinkConditions(delay_seconds=0.25))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(way.run, source, sink))
        began = trio.current_time()
        await sender.send_all(b"last words")
        await sender.send_eof()
        assert await receiver.receive_some() == b"last words"
        assert await receiver.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(0.25)
