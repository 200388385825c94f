"""How streams end: closed politely, reset, or broken under us; and what each side is told."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from protocols.network import Stream
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    joined,
    on_both,
    read_to_end,
    reading_breaks,
    send_for_ever,
    sending_breaks,
)
from tests.waiting import PATIENCE_SECONDS, until


async def _use_every_operation(stream: Stream, error: type[Exception]) -> None:
    with pytest.raises(error):
        await stream.send_all(b"x")
    with pytest.raises(error):
        await stream.send_all(b"")
    with pytest.raises(error):
        await stream.receive_some()
    with pytest.raises(error):
        await stream.receive_into(bytearray(1))


@on_both
async def test_our_own_close_closes_every_operation(place: Neighbourhood) -> None:
    near, _ = await place.joined()
    await near.aclose()
    await _use_every_operation(near, trio.ClosedResourceError)


@on_both
async def test_our_own_reset_closes_every_operation(place: Neighbourhood) -> None:
    near, _ = await place.joined()
    near.reset()
    await _use_every_operation(near, trio.ClosedResourceError)


@on_both
async def test_closing_and_resetting_may_be_repeated_in_any_order(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.aclose()
    await near.aclose()
    near.reset()
    near.reset()
    await near.aclose()
    far.reset()
    far.reset()
    await far.aclose()


@on_both
async def test_closing_delivers_what_was_sent_and_then_the_end(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await near.send_all(bytes(100_000))
    await near.aclose()
    assert await read_to_end(far) == bytes(100_000)


@on_both
async def test_an_answer_is_read_whole_though_part_of_the_request_never_was(
    place: Neighbourhood,
) -> None:
    near, far = await place.joined()
    await near.send_all(bytes(10_000))
    assert await far.receive_some(1) == b"\0"
    await far.send_all(b"enough, here is your answer")
    await far.aclose()
    assert await read_to_end(near) == b"enough, here is your answer"


@on_both
async def test_a_sender_to_a_closed_stream_is_told(place: Neighbourhood) -> None:
    near, far = await place.joined()
    await far.aclose()
    await sending_breaks(near)


@on_both
async def test_a_sender_that_waits_for_a_reader_is_told_when_it_closes(
    place: Neighbourhood,
) -> None:
    near, far = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sending_breaks, near)
        assert await far.receive_some(1) == b"\0"
        await place.settle()
        await far.aclose()


@on_both
async def test_a_reset_breaks_both_directions_of_the_other_end(place: Neighbourhood) -> None:
    near, far = await place.joined()
    near.reset()
    await reading_breaks(far)
    with pytest.raises(trio.BrokenResourceError):
        await far.send_all(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await far.send_eof()


@on_both
async def test_a_reset_wakes_a_reader_at_the_other_end(place: Neighbourhood) -> None:
    near, far = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading_breaks, far)
        await trio.testing.wait_all_tasks_blocked()
        near.reset()


@on_both
async def test_a_reset_wakes_a_sender_at_the_other_end(place: Neighbourhood) -> None:
    near, far = await place.joined()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sending_breaks, near)
        assert await far.receive_some(1) == b"\0"
        far.reset()


@on_both
async def test_our_own_reset_wakes_our_own_reader_and_sender(place: Neighbourhood) -> None:
    near, _ = await place.joined()

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await read_to_end(near)

    async def send() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await send_for_ever(near)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(send)
        await place.settle()
        near.reset()


@on_both
async def test_our_own_close_wakes_our_own_reader(place: Neighbourhood) -> None:
    near, _ = await place.joined()

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await read_to_end(near)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()


@on_both
async def test_a_close_that_is_cancelled_still_closes(place: Neighbourhood) -> None:
    near, far = await place.joined()
    with trio.CancelScope() as scope:
        scope.cancel()
        await near.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await near.send_all(b"x")
    await _ends_somehow(far)


@on_both
async def test_when_the_link_goes_streams_break_at_both_ends(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    near, far = await joined(opener, acceptor)
    await opener.disconnect(acceptor.peer_id)
    await reading_breaks(near)
    with pytest.raises(trio.BrokenResourceError):
        await near.send_all(b"x")
    await reading_breaks(far)
    with pytest.raises(trio.BrokenResourceError):
        await far.send_all(b"x")
    near.reset()
    await far.aclose()


@on_both
async def test_when_the_link_goes_a_reader_at_either_end_wakes(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    near, far = await joined(opener, acceptor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reading_breaks, near)
        nursery.start_soon(reading_breaks, far)
        await trio.testing.wait_all_tasks_blocked()
        await opener.disconnect(acceptor.peer_id)


@on_both
async def test_streams_that_ended_are_no_longer_counted(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def echo(stream: Stream) -> None:
        await stream.send_all(await read_to_end(stream))

    acceptor.serve(PROTOCOL, echo)
    for number in range(50):
        stream = await opener.open(acceptor.peer_id, PROTOCOL)
        if number % 3 == 0:
            stream.reset()
        else:
            await stream.send_all(b"x")
            await stream.send_eof()
            assert await read_to_end(stream) == b"x"
            await stream.aclose()

    def none_left() -> bool:
        links = [*opener.links(), *acceptor.links()]
        return len(links) == 2 and all(link.open_streams == 0 for link in links)

    await until(none_left, PATIENCE_SECONDS)


async def _ends_somehow(stream: Stream) -> None:
    with suppress(trio.BrokenResourceError):
        assert await read_to_end(stream) == b""
