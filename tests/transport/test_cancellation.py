"""Cancelling at every checkpoint, one after another: nothing breaks, nothing leaks, nothing lies.

Each test runs an operation again and again, cancelling it at its first checkpoint, then at its
second, and so on until it comes through uncancelled. After each run the same connection must still
carry a fresh stream.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from node.net.transport import YamuxConnection, YamuxStream
from tests.transport.links import (
    joined_pair,
    read_exactly,
    read_to_end,
    session_pair,
    stream_pair,
    wire_pair,
)
from tests.waiting import PATIENCE_SECONDS


class CancelAtCheckpoint(trio.abc.Instrument):
    """Cancels a scope when one task has been scheduled for the n-th time."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, count: int) -> None:
        self._task = task
        self._scope = scope
        self._left = count

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self._left -= 1
            if self._left == 0:
                self._scope.cancel()


async def cancelled_at(count: int, operation: Callable[[], Awaitable[object]]) -> bool:
    """Run and cancel at the count-th step; whether it came through before that."""
    with trio.CancelScope() as scope:
        instrument = CancelAtCheckpoint(trio.lowlevel.current_task(), scope, count)
        trio.lowlevel.add_instrument(instrument)
        try:
            await operation()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return scope.cancelled_caught


async def still_works(near: YamuxConnection, far: YamuxConnection) -> None:
    ours, theirs = await stream_pair(near, far)
    with trio.fail_after(PATIENCE_SECONDS):
        await ours.send_all(b"still there?")
        assert await read_exactly(theirs, 12) == b"still there?"
        await theirs.send_all(b"yes")
        assert await read_exactly(ours, 3) == b"yes"
    await ours.aclose()
    await theirs.aclose()


async def test_a_send_may_be_cancelled_anywhere() -> None:
    size = 900_000
    async with joined_pair() as (near, far):
        cancelled, count = True, 0
        while cancelled:
            count += 1
            sender, receiver = await stream_pair(near, far)
            received: list[bytes] = []

            async def read(receiver: YamuxStream, into: list[bytes]) -> None:
                into.append(await read_to_end(receiver))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, receiver, received)
                cancelled = await cancelled_at(count, lambda: sender.send_all(b"a" * size))  # noqa: B023
                await sender.send_all(b"b")
                await sender.send_eof()
            assert received[0].endswith(b"b")
            assert set(received[0][:-1]) <= {ord("a")}
            assert cancelled or len(received[0]) == size + 1
            await receiver.aclose()
            await still_works(near, far)
        assert count > 3
        assert near.open_stream_count == far.open_stream_count == 0
        assert near.outgoing.queued_bytes == 0


@pytest.mark.parametrize("operation", ["receive_some", "receive_into", "read"])
async def test_a_receive_may_be_cancelled_anywhere_and_loses_nothing(operation: str) -> None:
    async with joined_pair() as (near, far):
        for count in range(1, 8):
            sender, receiver = await stream_pair(near, far)
            received = bytearray()

            async def receive() -> None:
                if operation == "receive_into":
                    buffer = bytearray(1000)
                    size = await receiver.receive_into(buffer)  # noqa: B023
                    received.extend(buffer[:size])  # noqa: B023
                elif operation == "read":
                    received.extend(await receiver.read(1000))  # noqa: B023
                else:
                    received.extend(await receiver.receive_some(1000))  # noqa: B023

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send_all, bytes(range(250)) * 20)
                for _ in range(5):
                    await cancelled_at(count, receive)
            received += await read_exactly(receiver, 5000 - len(received))
            assert received == bytes(range(250)) * 20
            sender.reset_now()
            receiver.reset_now()
        await still_works(near, far)


@pytest.mark.parametrize("operation", ["send_eof", "aclose", "close", "close_write", "reset"])
async def test_ending_a_stream_may_be_cancelled_anywhere_and_ends_it_all_the_same(
    operation: str,
) -> None:
    async with joined_pair() as (near, far):
        cancelled, count = True, 0
        while cancelled:
            count += 1
            ours, theirs = await stream_pair(near, far)
            await ours.send_all(b"x")
            cancelled = await cancelled_at(count, getattr(ours, operation))
            if operation == "reset":
                with pytest.raises(trio.BrokenResourceError):
                    await read_to_end(theirs)
            else:
                assert await read_to_end(theirs) == b"x"
            ours.reset_now()
            theirs.reset_now()
            await still_works(near, far)
        await trio.testing.wait_all_tasks_blocked()
        assert near.open_stream_count == far.open_stream_count == 0


async def test_opening_a_stream_may_be_cancelled_anywhere() -> None:
    async with joined_pair() as (near, far):
        for count in range(1, 4):
            cancelled = await cancelled_at(count, near.open_stream)
            assert near.open_stream_count == (0 if cancelled else 1)
            if not cancelled:
                (await far.accept_stream()).reset_now()
                await trio.testing.wait_all_tasks_blocked()
        await still_works(near, far)


async def test_accepting_may_be_cancelled_anywhere_and_loses_no_stream() -> None:
    async with joined_pair() as (near, far):
        for count in range(1, 4):
            opened = await near.open_stream()
            accepted: list[YamuxStream] = []

            async def accept() -> None:
                accepted.append(await far.accept_stream())  # noqa: B023

            if await cancelled_at(count, accept):
                accepted.append(await far.accept_stream())
            assert [stream.stream_id for stream in accepted] == [opened.stream_id]


async def test_the_whole_connection_may_be_cancelled_anywhere() -> None:
    """A transfer is under way; `start` is cancelled at its n-th step. Nothing outlives it."""
    for count in (*range(1, 12), 20, 50, 100):
        near_session, far_session = await session_pair(*wire_pair())
        near = YamuxConnection(near_session, far_session.get_local_peer())
        far = YamuxConnection(far_session, near_session.get_local_peer())
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            nursery.start_soon(far.start)

            async def transfer(stream: YamuxStream) -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await stream.send_all(bytes(100_000_000))

            async def read(stream: YamuxStream) -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await read_to_end(stream)

            await far.event_started.wait()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(near.start)
                    await near.event_started.wait()
                    sender, receiver = await stream_pair(near, far)
                    nursery.start_soon(transfer, sender)
                    nursery.start_soon(read, receiver)
                    for _ in range(count):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert near.event_closed.is_set()
        assert far.event_closed.is_set()
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before


@pytest.mark.slow
async def test_streams_cancelled_at_random_never_mix_their_bytes() -> None:
    chance = random.Random(7)
    async with joined_pair() as (near, far):
        checked = 0

        async def serve() -> None:
            async with trio.open_nursery() as nursery:
                while True:
                    nursery.start_soon(check, await far.accept_stream())

        async def check(stream: YamuxStream) -> None:
            nonlocal checked
            try:
                data = await read_to_end(stream)
            except trio.BrokenResourceError:
                return
            digest, body = data[:32], data[32:]
            assert hashlib.sha256(body).digest() == digest
            checked += 1
            await stream.aclose()

        async def call(number: int) -> None:
            body = number.to_bytes(2, "big") * chance.randrange(1, 200_000)
            stream = await near.open_stream()
            finished = not await cancelled_at(
                chance.randrange(1, 30),
                lambda: stream.send_all(hashlib.sha256(body).digest() + body),
            )
            if finished:
                await stream.aclose()
            else:
                stream.reset_now()

        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                async with trio.open_nursery() as callers:
                    for number in range(200):
                        callers.start_soon(call, number)
                await still_works_by_itself(near)
                nursery.cancel_scope.cancel()
        assert checked > 10
        assert near.outgoing.queued_bytes == 0


async def still_works_by_itself(near: YamuxConnection) -> None:
    body = b"the end"
    stream = await near.open_stream()
    await stream.send_all(hashlib.sha256(body).digest() + body)
    await stream.send_eof()
    assert await read_to_end(stream) == b""
