"""The stream as a byte channel: order, ends, sizes, who may use it when."""

from __future__ import annotations

import hashlib
import random

import pytest
import trio
import trio.testing

from protocols.network import FEW_BYTES, Stream
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    joined,
    on_both,
    read_exactly,
    read_to_end,
    send_for_ever,
)
from tests.waiting import PATIENCE_SECONDS, until

MEBIBYTE = 1_048_576
LARGE_BYTES = 24 * MEBIBYTE + 12_345  # more than any window, and not a round number


@on_both
async def test_bytes_arrive_in_order_in_both_directions(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"how ")
    await near.send_all(b"are you?")
    assert await read_exactly(far, 12) == b"how are you?"
    await far.send_all(b"well")
    assert await read_exactly(near, 4) == b"well"


@pytest.mark.slow
@on_both
async def test_many_small_pieces_that_had_to_wait_are_read_in_order(place: Neighbourhood) -> None:
    near, far = await place.joined()
    pieces = [number.to_bytes(2, "big") for number in range(1000)]
    for piece in pieces:
        await near.send_all(piece)
        if piece[1] % 50 == 0:
            await place.settle()
    await near.send_eof()
    received = bytearray()
    buffer = bytearray(7)
    while (size := await far.receive_into(buffer)) and (part := await far.receive_some(5)):
        received += buffer[:size] + part
    received += buffer[:size]
    assert received == b"".join(pieces)


@on_both
async def test_it_says_when_bytes_last_arrived_read_or_not(place: Neighbourhood) -> None:
    """A few bytes do not count: they may only say that the other side is alive."""
    near, far = await place.joined()
    began = trio.current_time()
    await near.send_all(bytes(FEW_BYTES))
    assert await read_exactly(far, FEW_BYTES) == bytes(FEW_BYTES)
    assert far.last_arrival < began
    await near.send_all(bytes(FEW_BYTES + 1))
    await until(lambda: far.last_arrival >= began, PATIENCE_SECONDS)
    arrived = far.last_arrival
    assert arrived <= trio.current_time()
    assert await read_exactly(far, FEW_BYTES + 1) == bytes(FEW_BYTES + 1)
    assert far.last_arrival == arrived


@on_both
async def test_both_ends_know_who_the_other_is_and_the_protocol(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    near, far = await joined(opener, acceptor)
    assert near.remote_peer == acceptor.peer_id
    assert far.remote_peer == opener.peer_id
    assert near.protocol == far.protocol == PROTOCOL


@on_both
async def test_the_acceptor_may_speak_first(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def greet(stream: Stream) -> None:
        await stream.send_all(b"welcome")

    acceptor.serve(PROTOCOL, greet)
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    assert await read_to_end(stream) == b"welcome"


@on_both
async def test_reading_after_the_end_gives_nothing_however_often(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"last words")
    await near.send_eof()
    assert await read_to_end(far) == b"last words"
    assert await far.receive_some() == b""
    assert await far.receive_some(10) == b""
    assert await far.receive_into(bytearray(10)) == 0


@on_both
async def test_after_a_half_close_the_other_direction_still_carries(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_eof()
    assert await far.receive_some() == b""
    await far.send_all(b"still here")
    await far.send_eof()
    assert await read_to_end(near) == b"still here"


@on_both
async def test_a_second_end_of_stream_is_harmless(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_eof()
    await near.send_eof()
    assert await far.receive_some() == b""


@on_both
async def test_sending_after_the_end_of_stream_is_refused(place: Neighbourhood) -> None:
    near, _ = await place.joined()
    await near.send_eof()
    with pytest.raises(trio.ClosedResourceError):
        await near.send_all(b"one more thing")


@on_both
async def test_sending_nothing_sends_nothing(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"")
    await near.send_all(b"a")
    await near.send_all(bytearray())
    await near.send_all(memoryview(b""))
    await near.send_all(b"b")
    await near.send_eof()
    assert await read_to_end(far) == b"ab"


@on_both
async def test_a_sent_buffer_may_be_overwritten_afterwards(place: Neighbourhood) -> None:
    near, far = await place.joined()
    buffer = bytearray(b"first")
    await near.send_all(memoryview(buffer))
    buffer[:] = b"wrong"
    assert await read_exactly(far, 5) == b"first"


@on_both
async def test_a_view_of_larger_items_is_sent_as_its_bytes(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(memoryview(bytearray(range(16))).cast("I"))
    assert await read_exactly(far, 16) == bytes(range(16))


@on_both
async def test_a_read_returns_at_most_what_was_asked_for(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"abcdefgh")
    await near.send_eof()
    parts = []
    while part := await far.receive_some(3):
        parts.append(part)
    assert b"".join(parts) == b"abcdefgh"
    assert max(map(len, parts)) <= 3


@on_both
async def test_a_small_buffer_is_filled_and_loses_nothing(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"abcdefgh")
    await near.send_eof()
    received = bytearray()
    buffer = bytearray(3)
    while size := await far.receive_into(buffer):
        assert size <= 3
        received += buffer[:size]
    assert received == b"abcdefgh"


@on_both
async def test_a_large_buffer_is_not_changed_beyond_the_received_bytes(
    place: Neighbourhood,
) -> None:
    near, far = await place.joined()
    await near.send_all(b"abc")
    buffer = bytearray(b"." * 100_000)
    size = await far.receive_into(memoryview(buffer)[10:])
    assert 1 <= size <= 3
    assert buffer == b"." * 10 + b"abc"[:size] + b"." * (100_000 - 10 - size)


@on_both
async def test_reading_into_no_room_at_all_is_a_value_error(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(b"abc")
    with pytest.raises(ValueError):  # noqa: PT011
        await far.receive_into(bytearray())
    with pytest.raises(ValueError):  # noqa: PT011
        await far.receive_some(0)
    assert await read_exactly(far, 3) == b"abc"


@on_both
async def test_a_large_transfer_is_exact_to_the_byte(place: Neighbourhood) -> None:
    near, far = await place.joined()
    data = random.Random(1).randbytes(LARGE_BYTES)
    received = hashlib.sha256()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_and_end, near, data)
        while part := await far.receive_some():
            received.update(part)
    assert received.digest() == hashlib.sha256(data).digest()


@on_both
async def test_a_large_transfer_read_in_place_is_exact_to_the_byte(place: Neighbourhood) -> None:
    near, far = await place.joined()
    data = random.Random(2).randbytes(LARGE_BYTES)
    destination = bytearray(len(data))
    position = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_and_end, near, data)
        view = memoryview(destination)
        while position < len(data) and (size := await far.receive_into(view[position:])):
            position += size
    assert destination == data
    assert await far.receive_some() == b""


@pytest.mark.slow
@on_both
async def test_large_transfers_both_ways_at_once_are_exact(place: Neighbourhood) -> None:
    near, far = await place.joined()
    there, back = random.Random(3).randbytes(LARGE_BYTES), random.Random(4).randbytes(LARGE_BYTES)
    received: dict[str, bytes] = {}

    async def read(name: str, stream: Stream) -> None:
        received[name] = await read_to_end(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_send_and_end, near, there)
        nursery.start_soon(_send_and_end, far, back)
        nursery.start_soon(read, "there", far)
        nursery.start_soon(read, "back", near)
    assert received["there"] == there
    assert received["back"] == back


@on_both
async def test_two_tasks_may_not_send_at_once(place: Neighbourhood) -> None:
    near, _ = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_for_ever, near)
        await place.settle()
        with pytest.raises(trio.BusyResourceError):
            await near.send_all(b"me too")
        nursery.cancel_scope.cancel()


@on_both
async def test_two_tasks_may_not_receive_at_once(place: Neighbourhood) -> None:
    near, _ = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.receive_some)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await near.receive_some()
        with pytest.raises(trio.BusyResourceError):
            await near.receive_into(bytearray(10))
        nursery.cancel_scope.cancel()


@on_both
async def test_one_task_may_send_while_another_receives(place: Neighbourhood) -> None:
    near, far = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_exactly, near, 4)
        await trio.testing.wait_all_tasks_blocked()
        await near.send_all(b"ping")
        assert await read_exactly(far, 4) == b"ping"
        await far.send_all(b"pong")


async def _send_and_end(stream: Stream, data: bytes) -> None:
    await stream.send_all(data)
    await stream.send_eof()
