# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""Many connections under one limit: their turns, their order, and that no turn is left over."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from node.net.transport import YamuxConnection
from node.net.transport.traffic import HEADERS_BYTES, SMALL_BYTES, Throttle, Traffic
from tests.transport.links import joined_pair_of, read_exactly, session_pair, stream_pair, wire_pair

RATE = 200_000.0


class Carrier:
    """Somebody who always has bulk, and notes when it was let go."""

    def __init__(self, throttle: Throttle) -> None:
        self.throttle = throttle
        self.carried = 0

    async def run(self) -> None:
        while True:
            await self.throttle.turn(is_small=False)
            self.throttle.charge(self.throttle.batch_bytes)
            self.carried += self.throttle.batch_bytes
            await trio.lowlevel.checkpoint()


async def test_connections_share_a_limit_evenly(autojump_clock: MockClock) -> None:
    throttle = Throttle(RATE, trio.current_time())
    carriers = [Carrier(throttle) for _ in range(5)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(throttle.run)
        for carrier in carriers:
            nursery.start_soon(carrier.run)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    carried = [carrier.carried for carrier in carriers]
    assert max(carried) - min(carried) <= 2 * throttle.batch_bytes
    assert 0.99 * 5 * RATE <= sum(carried) <= 1.07 * 5 * RATE


async def test_a_small_turn_comes_before_all_bulk(autojump_clock: MockClock) -> None:
    throttle = Throttle(RATE, trio.current_time())
    throttle.charge(2 * RATE)
    order: list[str] = []
    bulk = throttle.ask(10_000, lambda: order.append("bulk"))
    small = throttle.ask_small(lambda: order.append("small"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(throttle.run)
        await trio.sleep(3)
        nursery.cancel_scope.cancel()
    assert order == ["small", "bulk"]
    throttle.done(small)
    throttle.done(bulk)


async def test_a_turn_that_is_given_back_is_there_for_others(autojump_clock: MockClock) -> None:
    throttle = Throttle(RATE, trio.current_time())
    first = throttle.ask(30_000, lambda: None)
    second = throttle.ask(30_000, lambda: None)
    assert first.is_granted
    assert not second.is_granted
    throttle.done(first)
    throttle.done(first)
    throttle.done(second)
    assert throttle.ask(30_000, lambda: None).is_granted


async def test_cancelled_waiting_leaves_the_line(autojump_clock: MockClock) -> None:
    throttle = Throttle(RATE, trio.current_time())
    throttle.charge(RATE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(throttle.run)
        with trio.move_on_after(0.1):
            await throttle.turn(is_small=False)
        began = trio.current_time()
        await throttle.turn(is_small=False)
        assert trio.current_time() - began < 1.0
        nursery.cancel_scope.cancel()


async def test_headers_and_acknowledgements_count() -> None:
    traffic = Traffic()
    traffic.sent(14_480, 1448)
    assert (traffic.sent_bytes, traffic.received_bytes) == (
        14_480 + 10 * HEADERS_BYTES,
        5 * HEADERS_BYTES,
    )
    traffic.received(1, 1448)
    assert traffic.received_bytes == 6 * HEADERS_BYTES + 1


async def test_a_connection_keeps_to_the_limit_and_lets_small_things_through(
    autojump_clock: MockClock,
) -> None:
    near_session, far_session = await session_pair(*wire_pair(delay_seconds=0.01))
    near_session.traffic = Traffic(RATE)
    async with (
        joined_pair_of(near_session, far_session) as (near, far),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(near_session.traffic.run)
        bulk, bulk_far = await stream_pair(near, far)
        small, small_far = await stream_pair(near, far)
        began, charged = trio.current_time(), near_session.traffic.sent_bytes

        async def pour() -> None:
            await bulk.send_all(bytes(10_000_000))

        nursery.start_soon(pour)
        nursery.start_soon(read_exactly, bulk_far, 10_000_000)
        slowest = 0.0
        for _ in range(20):
            asked = trio.current_time()
            await small.send_all(bytes(200))
            await read_exactly(small_far, 200)
            slowest = max(slowest, trio.current_time() - asked)
            await trio.sleep(0.2)
        seconds = trio.current_time() - began
        carried = near_session.traffic.sent_bytes - charged
        nursery.cancel_scope.cancel()
    assert 0.95 * seconds * RATE <= carried <= (seconds + 0.3) * RATE
    assert slowest < 0.06


async def test_a_connection_that_ends_leaves_no_turn_behind(autojump_clock: MockClock) -> None:
    near_session, far_session = await session_pair(*wire_pair())
    traffic = near_session.traffic = Traffic(RATE)
    throttle = traffic.up
    assert throttle is not None
    async with (
        joined_pair_of(near_session, far_session) as (near, far),
        trio.open_nursery() as nursery,
    ):
        bulk, _ = await stream_pair(near, far)
        with trio.move_on_after(5):
            await bulk.send_all(bytes(1_000_000))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert isinstance(near, YamuxConnection)
    throttle.charge(-RATE)
    assert throttle.ask(int(0.2 * RATE) - SMALL_BYTES, lambda: None).is_granted
