"""Back-pressure, cancellation, and many streams at once."""

from __future__ import annotations

import trio
import trio.testing

from protocols.network import Network, Stream
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    joined,
    on_both,
    read_exactly,
    read_to_end,
    send_for_ever,
)
from tests.waiting import PATIENCE_SECONDS

MEBIBYTE = 1_048_576
# Windows, queues and kernel buffers together. A sender that gets further than this would fill
# the memory of a node whose reader stands still.
MOST_UNREAD_BYTES = 32 * MEBIBYTE
PIECE_BYTES = 65_536
STREAMS_AT_ONCE = 100


@on_both
async def test_a_sender_waits_while_nobody_reads_and_goes_on_when_somebody_does(
    place: Neighbourhood,
) -> None:
    near, far = await place.joined()
    accepted = 0
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            nonlocal accepted
            while True:
                await near.send_all(bytes(PIECE_BYTES))
                accepted += PIECE_BYTES

        nursery.start_soon(send)
        before = -1
        while before != accepted:
            before = accepted
            assert accepted < MOST_UNREAD_BYTES
            await place.settle()
        stopped_at = accepted
        await read_exactly(far, stopped_at)
        with trio.fail_after(PATIENCE_SECONDS):
            await read_exactly(far, PIECE_BYTES)
        assert accepted > stopped_at
        nursery.cancel_scope.cancel()


@on_both
async def test_a_stream_that_nobody_reads_does_not_hold_up_another(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    stuck, _unread = await joined(opener, acceptor, "/potluck/stuck/1.0.0")
    near, far = await joined(opener, acceptor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_for_ever, stuck)
        await place.settle()
        await near.send_all(b"am I held up?")
        assert await read_exactly(far, 13) == b"am I held up?"
        await far.send_all(b"no")
        assert await read_exactly(near, 2) == b"no"
        nursery.cancel_scope.cancel()


@on_both
async def test_a_cancelled_receive_loses_no_bytes(place: Neighbourhood) -> None:
    near, far = await place.joined()
    pieces = [bytes([number]) * 100 for number in range(50)]
    received = bytearray()
    buffer = bytearray(64)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            for piece in pieces:
                await near.send_all(piece)
                await trio.sleep(0.001)
            await near.send_eof()

        nursery.start_soon(send)
        cancelled_already, into = False, False
        while True:
            cancelled_already, into = not cancelled_already, into ^ cancelled_already
            with trio.move_on_after(0 if cancelled_already else 0.001):
                if into:
                    size = await far.receive_into(buffer)
                    part = bytes(buffer[:size])
                else:
                    part = await far.receive_some(64)
                if not part:
                    break
                received += part
    assert received == b"".join(pieces)


@on_both
async def test_a_receive_cancelled_as_its_bytes_arrive_loses_none(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    near, far = await joined(opener, acceptor)
    trigger, triggered = await joined(opener, acceptor, "/potluck/trigger/1.0.0")
    received = bytearray()
    for number in range(100):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def receive(into: bool = number % 2 == 0) -> None:
                    if into:
                        buffer = bytearray(10)
                        size = await far.receive_into(buffer)
                        received.extend(buffer[:size])
                    else:
                        received.extend(await far.receive_some(10))

                async def cancel(scope: trio.CancelScope = scope) -> None:
                    await triggered.receive_some(1)
                    scope.cancel()

                nursery.start_soon(receive)
                nursery.start_soon(cancel)
                await trio.testing.wait_all_tasks_blocked()
                await near.send_all(bytes([number]))
                await trigger.send_all(b"!")
    await near.send_eof()
    received += await read_to_end(far)
    assert received == bytes(range(100))


@on_both
async def test_a_cancelled_send_leaves_the_stream_sound(place: Neighbourhood) -> None:
    near, far = await place.joined()
    with trio.move_on_after(0.2) as scope:
        while True:
            await near.send_all(b"a" * MEBIBYTE)
    assert scope.cancelled_caught
    received: list[bytes] = []
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            received.append(await read_to_end(far))

        nursery.start_soon(read)
        await near.send_all(b"b" * 1000)
        await near.send_eof()
    assert received[0].endswith(b"b" * 1000)
    assert received[0].count(b"a") == len(received[0]) - 1000


@on_both
async def test_a_cancelled_send_does_not_disturb_other_streams(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    stuck, _unread = await joined(opener, acceptor, "/potluck/stuck/1.0.0")
    near, far = await joined(opener, acceptor)
    with trio.move_on_after(0.2):
        await send_for_ever(stuck)
    stuck.reset()
    await near.send_all(b"fine")
    assert await read_exactly(far, 4) == b"fine"


@on_both
async def test_cancelling_before_anything_happened_sends_nothing(place: Neighbourhood) -> None:
    near, far = await place.joined()
    with trio.CancelScope() as scope:
        scope.cancel()
        await near.send_all(b"never")
    assert scope.cancelled_caught
    await near.send_all(b"this")
    await near.send_eof()
    assert await read_to_end(far) == b"this"


@on_both
async def test_many_streams_at_once_keep_their_bytes_apart(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def echo(stream: Stream) -> None:
        while part := await stream.receive_some():
            await stream.send_all(part)

    acceptor.serve(PROTOCOL, echo)
    answers: dict[int, bytes] = {}

    async def converse(number: int) -> None:
        stream = await opener.open(acceptor.peer_id, PROTOCOL)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(_send_and_end, stream, number)
            answers[number] = await read_to_end(stream)

    async with trio.open_nursery() as nursery:
        for number in range(STREAMS_AT_ONCE):
            nursery.start_soon(converse, number)
    assert answers == {number: _message(number) for number in range(STREAMS_AT_ONCE)}


@on_both
async def test_streams_may_be_opened_from_both_sides_at_once(place: Neighbourhood) -> None:
    first, second = await place.pair()
    answers = []

    async def echo(stream: Stream) -> None:
        await stream.send_all(await read_to_end(stream))

    async def call(mine: Network, theirs: Network) -> None:
        stream = await mine.open(theirs.peer_id, PROTOCOL)
        async with stream:
            await stream.send_all(b"x" * 1000)
            await stream.send_eof()
            answers.append(await read_to_end(stream))

    first.serve(PROTOCOL, echo)
    second.serve(PROTOCOL, echo)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call, first, second)
            nursery.start_soon(call, second, first)
    assert answers == [b"x" * 1000] * 40


async def _send_and_end(stream: Stream, number: int) -> None:
    await stream.send_all(_message(number))
    await stream.send_eof()


def _message(number: int) -> bytes:
    return number.to_bytes(2, "big") * (5000 + number)
