"""Streams between strangers and us carry every byte, end, break and wait as they should.

Each test runs with either side having dialled (which decides who numbers streams odd) and either
side opening the streams.
"""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import trio
from trio.abc import HalfCloseableStream

from tests.strangers.conversations import (
    DIGEST,
    DIGEST_BYTES,
    ECHO,
    SINK,
    SOURCE,
    digest,
    download,
    echo,
    exchange,
    expect_end,
    pattern,
    receive_exactly,
    receive_pattern,
    send_pattern,
    sink,
    source,
    upload,
)
from tests.strangers.sides import Who, linked
from tests.strangers.stranger import Stranger
from tests.waiting import PATIENCE_SECONDS, until

MEBIBYTE = 1 << 20
# Past every window that either side starts with (256 KiB) and grows to (16 MiB)
LARGE = 32 * MEBIBYTE
STREAMS_AT_ONCE = 100
STREAMS_IN_TURN = 300

# A sender may be this far ahead of a reader that does not read: the largest window, our own
# queues, and the buffers of the sockets between the stranger and the test, in both processes.
AHEAD_LIMIT = 48 * MEBIBYTE
STOPPED_TRANSFER = 128 * MEBIBYTE
STEP = MEBIBYTE // 16


async def test_a_mebibyte_comes_back_as_it_went(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(ECHO, echo):
            stream = await opening.open(ECHO)
            with trio.fail_after(PATIENCE_SECONDS):
                await exchange(stream, MEBIBYTE)
            await stream.aclose()


async def test_a_transfer_larger_than_every_window_arrives_whole(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(SINK, sink), serving.serving(SOURCE, source):
            with trio.fail_after(PATIENCE_SECONDS):
                sending = await opening.open(SINK)
                await upload(sending, LARGE)
                await sending.aclose()
                receiving = await opening.open(SOURCE)
                await download(receiving, LARGE)
                await receiving.aclose()


async def test_large_transfers_both_ways_at_once_do_not_stop_each_other(
    stranger: Stranger, dialler: Who
) -> None:
    async with (
        linked(stranger, dialler) as link,
        link.ours.serving(SINK, sink),
        link.theirs.serving(SINK, sink),
    ):
        with trio.fail_after(PATIENCE_SECONDS):
            sending = await link.ours.open(SINK)
            receiving = await link.theirs.open(SINK)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(upload, sending, LARGE)
                nursery.start_soon(upload, receiving, LARGE)
        await sending.aclose()
        await receiving.aclose()


async def test_an_answer_can_follow_a_half_close(
    javascript: Stranger, dialler: Who, opener: Who
) -> None:
    """Not with p2pd, which closes both directions of a stream when one is closed."""
    async with linked(javascript, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(DIGEST, digest):
            stream = await opening.open(DIGEST)
            with trio.fail_after(PATIENCE_SECONDS):
                await send_pattern(stream, 3 * MEBIBYTE)
                await stream.send_eof()

                answer = await receive_exactly(stream, DIGEST_BYTES)

                expected = hashlib.sha256()
                for at in range(0, 3 * MEBIBYTE, MEBIBYTE):
                    expected.update(pattern(MEBIBYTE, at))
                assert answer == expected.digest()
                await expect_end(stream)
            await stream.aclose()


async def test_a_half_close_arrives_after_the_last_byte(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    arrived = trio.Event()

    async def read_to_the_end(stream: HalfCloseableStream) -> None:
        await receive_pattern(stream, 2 * MEBIBYTE)
        await expect_end(stream)
        arrived.set()

    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(SINK, read_to_the_end):
            stream = await opening.open(SINK)
            with trio.fail_after(PATIENCE_SECONDS):
                await send_pattern(stream, 2 * MEBIBYTE)
                await stream.send_eof()
                await arrived.wait()
            await stream.aclose()


async def test_a_reset_ends_the_stream_and_not_the_link(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    """Through p2pd a reset looks like an end at the local socket: either will do there."""
    ended = trio.Event()

    async def read_until_broken(stream: HalfCloseableStream) -> None:
        try:
            async for chunk in stream:
                await stream.send_all(chunk)
        except trio.BrokenResourceError:
            pass
        else:
            assert opener == "we", "a stranger's reset reached us as a polite end"
        ended.set()

    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(SINK, read_until_broken), serving.serving(ECHO, echo):
            stream = await opening.open(SINK)
            with trio.fail_after(PATIENCE_SECONDS):
                await exchange(stream, 1000)
                opening.reset(stream)
                await ended.wait()

                other = await opening.open(ECHO)
                await exchange(other, MEBIBYTE)
                await other.aclose()


async def test_a_reset_by_the_serving_side_reaches_the_one_that_opened(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)

        async def reset_after_a_byte(stream: HalfCloseableStream) -> None:
            await stream.receive_some(1)
            serving.reset(stream)

        async with serving.serving(SINK, reset_after_a_byte), serving.serving(ECHO, echo):
            stream = await opening.open(SINK)
            with trio.fail_after(PATIENCE_SECONDS):
                await stream.send_all(b"x")
                if opener == "we":
                    with pytest.raises(trio.BrokenResourceError):
                        await stream.receive_some(1)
                else:
                    with contextlib.suppress(trio.BrokenResourceError):
                        assert await stream.receive_some(1) == b""
                await trio.aclose_forcefully(stream)

                other = await opening.open(ECHO)
                await exchange(other, MEBIBYTE)
                await other.aclose()


async def test_a_hundred_streams_at_once_from_each_side_keep_their_bytes_apart(
    stranger: Stranger, dialler: Who
) -> None:
    async with (
        linked(stranger, dialler) as link,
        link.ours.serving(ECHO, echo),
        link.theirs.serving(ECHO, echo),
    ):

        async def one(side: Who, number: int) -> None:
            opening, _ = link.sides(side)
            stream = await opening.open(ECHO)
            await exchange(stream, 10_000 + 251 * number + number)
            await stream.aclose()

        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                for number in range(STREAMS_AT_ONCE):
                    nursery.start_soon(one, "we", number)
                    nursery.start_soon(one, "they", number)


async def test_hundreds_of_streams_one_after_another_leave_none_behind(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(ECHO, echo):
            before = link.network.link(link.ours.other)
            assert before is not None
            with trio.fail_after(PATIENCE_SECONDS):
                for number in range(STREAMS_IN_TURN):
                    stream = await opening.open(ECHO)
                    await exchange(stream, number)
                    if stranger.answers_after_half_close:
                        await stream.send_eof()
                        await expect_end(stream)
                    await stream.aclose()

            def none_left() -> bool:  # their end of the last stream may still be on its way
                facts = link.network.link(link.ours.other)
                assert facts is not None
                return facts.open_streams <= before.open_streams

            await until(none_left, PATIENCE_SECONDS)


async def test_a_reader_that_stops_holds_the_sender_back_and_loses_nothing(
    stranger: Stranger, dialler: Who, opener: Who
) -> None:
    """F10: stops reading."""
    go_on = trio.Event()
    arrived = trio.Event()

    async def read_when_told(stream: HalfCloseableStream) -> None:
        await receive_pattern(stream, 1)
        await go_on.wait()
        await receive_pattern(stream, STOPPED_TRANSFER - 1, at=1)
        arrived.set()

    async with linked(stranger, dialler) as link:
        opening, serving = link.sides(opener)
        async with serving.serving(SINK, read_when_told), serving.serving(ECHO, echo):
            stream = await opening.open(SINK)
            sent = 0

            async def send() -> None:
                nonlocal sent
                while sent < STOPPED_TRANSFER:
                    chunk = pattern(STEP, sent)
                    await stream.send_all(chunk)
                    sent += len(chunk)

            with trio.fail_after(PATIENCE_SECONDS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    stopped_at = 0
                    while sent == 0 or stopped_at != sent:  # a whole half second without progress
                        stopped_at = sent
                        await trio.sleep(0.5)

                    assert 0 < sent < AHEAD_LIMIT

                    # and the link is not held up by one stream that waits
                    other = await opening.open(ECHO)
                    await exchange(other, MEBIBYTE)
                    await other.aclose()

                    go_on.set()
                await arrived.wait()
            await stream.aclose()
