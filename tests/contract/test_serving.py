"""Serving protocols: which handler runs, what becomes of its stream, what does not spread."""

from __future__ import annotations

import pytest
import trio

from protocols.errors import ProtocolMisuse, ProtocolNotServed
from protocols.network import Stream
from tests.contract.neighbourhood import (
    PROTOCOL,
    Neighbourhood,
    joined,
    on_both,
    read_exactly,
    read_to_end,
    reading_breaks,
)
from tests.waiting import PATIENCE_SECONDS, until

CALLS_CANCELLED = 100


async def _echo(stream: Stream) -> None:
    while part := await stream.receive_some():
        await stream.send_all(part)


@on_both
async def test_each_stream_gets_a_task_of_its_own(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    arrived = []
    all_here = trio.Event()

    async def meet(stream: Stream) -> None:
        arrived.append(await stream.receive_some())
        if len(arrived) == 3:
            all_here.set()
        await all_here.wait()

    acceptor.serve(PROTOCOL, meet)
    streams = [await opener.open(acceptor.peer_id, PROTOCOL) for _ in range(3)]
    for number, stream in enumerate(streams):
        await stream.send_all(bytes([number]))
    for stream in streams:
        assert await read_to_end(stream) == b""
    assert sorted(arrived) == [b"\0", b"\1", b"\2"]


@on_both
async def test_each_protocol_has_its_own_handler(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def one(stream: Stream) -> None:
        await stream.send_all(b"one")

    async def two(stream: Stream) -> None:
        await stream.send_all(b"two")

    acceptor.serve("/potluck/one/1.0.0", one)
    acceptor.serve("/potluck/two/1.0.0", two)
    second = await opener.open(acceptor.peer_id, "/potluck/two/1.0.0")
    first = await opener.open(acceptor.peer_id, "/potluck/one/1.0.0")
    assert await read_to_end(first) == b"one"
    assert await read_to_end(second) == b"two"


@on_both
async def test_the_dialled_side_may_open_streams_too(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    opener.serve(PROTOCOL, _echo)
    await opener.connect(acceptor.peer_id)
    stream = await acceptor.open(opener.peer_id, PROTOCOL)
    await stream.send_all(b"hello back")
    assert await read_exactly(stream, 10) == b"hello back"


@on_both
async def test_a_handler_that_returns_has_its_stream_closed(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def answer_and_go(stream: Stream) -> None:
        await stream.send_all(b"bye")

    acceptor.serve(PROTOCOL, answer_and_go)
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    assert await read_to_end(stream) == b"bye"


@on_both
async def test_a_handler_may_close_or_reset_its_stream_itself(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def close(stream: Stream) -> None:
        await stream.aclose()

    async def reset(stream: Stream) -> None:
        await stream.receive_some()  # a reset at once may be met by the opening itself
        stream.reset()

    acceptor.serve("/potluck/close/1.0.0", close)
    acceptor.serve("/potluck/reset/1.0.0", reset)
    closed = await opener.open(acceptor.peer_id, "/potluck/close/1.0.0")
    assert await read_to_end(closed) == b""
    was_reset = await opener.open(acceptor.peer_id, "/potluck/reset/1.0.0")
    await was_reset.send_all(b"x")
    await reading_breaks(was_reset)


@on_both
async def test_a_handler_that_raises_has_its_stream_reset_and_nothing_else_harmed(
    place: Neighbourhood, caplog: pytest.LogCaptureFixture
) -> None:
    opener, acceptor = await place.pair()

    async def fail(stream: Stream) -> None:
        await stream.receive_some()
        raise RuntimeError("a bug in a handler")

    acceptor.serve("/potluck/buggy/1.0.0", fail)
    near, far = await joined(opener, acceptor)
    for _ in range(3):
        buggy = await opener.open(acceptor.peer_id, "/potluck/buggy/1.0.0")
        await buggy.send_all(b"x")
        await reading_breaks(buggy)
    await near.send_all(b"unharmed")
    assert await read_exactly(far, 8) == b"unharmed"
    assert "a bug in a handler" in caplog.text


@on_both
async def test_a_handler_that_fails_with_a_group_harms_nothing_else(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()

    async def fail_twice(stream: Stream) -> None:
        await stream.receive_some()
        raise ExceptionGroup("two bugs", [ValueError("one"), KeyError("two")])

    acceptor.serve("/potluck/buggy/1.0.0", fail_twice)
    near, far = await joined(opener, acceptor)
    buggy = await opener.open(acceptor.peer_id, "/potluck/buggy/1.0.0")
    await buggy.send_all(b"x")
    await reading_breaks(buggy)
    await near.send_all(b"unharmed")
    assert await read_exactly(far, 8) == b"unharmed"


@on_both
async def test_a_protocol_that_is_not_served_is_refused_by_name(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    acceptor.serve(PROTOCOL, _echo)
    with pytest.raises(ProtocolNotServed, match=r"/potluck/contract/2\.0\.0"):
        await opener.open(acceptor.peer_id, "/potluck/contract/2.0.0")
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    await stream.send_all(b"1.0.0 is there")
    assert await read_exactly(stream, 14) == b"1.0.0 is there"


@on_both
async def test_serving_a_protocol_twice_is_a_misuse(place: Neighbourhood) -> None:
    network = await place.network()
    network.serve(PROTOCOL, _echo)
    with pytest.raises(ProtocolMisuse):
        network.serve(PROTOCOL, _echo)


@on_both
async def test_a_protocol_that_is_no_longer_served_is_refused_and_its_running_handlers_go_on(
    place: Neighbourhood,
) -> None:
    opener, acceptor = await place.pair()
    acceptor.serve(PROTOCOL, _echo)
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    await stream.send_all(b"before")
    assert await read_exactly(stream, 6) == b"before"
    acceptor.stop_serving(PROTOCOL)
    acceptor.stop_serving(PROTOCOL)
    with pytest.raises(ProtocolNotServed):
        await opener.open(acceptor.peer_id, PROTOCOL)
    await stream.send_all(b"after")
    assert await read_exactly(stream, 5) == b"after"
    acceptor.serve(PROTOCOL, _echo)
    again = await opener.open(acceptor.peer_id, PROTOCOL)
    await again.send_all(b"again")
    assert await read_exactly(again, 5) == b"again"


@on_both
async def test_cancelled_openings_leave_no_stream_behind(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    acceptor.serve(PROTOCOL, _echo)
    await opener.connect(acceptor.peer_id)
    started = trio.current_time()
    (await opener.open(acceptor.peer_id, PROTOCOL)).reset()
    opening_seconds = trio.current_time() - started
    for number in range(CALLS_CANCELLED):
        with trio.move_on_after(1.5 * opening_seconds * number / CALLS_CANCELLED):
            stream = await opener.open(acceptor.peer_id, PROTOCOL)
            stream.reset()

    def none_left() -> bool:
        links = [*opener.links(), *acceptor.links()]
        return all(link.open_streams == 0 for link in links)

    await until(none_left, PATIENCE_SECONDS)
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    await stream.send_all(b"sound")
    assert await read_exactly(stream, 5) == b"sound"


@on_both
async def test_handlers_are_cancelled_when_their_network_ends(place: Neighbourhood) -> None:
    opener, acceptor = await place.pair()
    cancelled = trio.Event()

    async def linger(stream: Stream) -> None:
        try:
            await stream.send_all(b"here")
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.set()
            raise

    acceptor.serve(PROTOCOL, linger)
    stream = await opener.open(acceptor.peer_id, PROTOCOL)
    assert await read_exactly(stream, 4) == b"here"
    await place.end(acceptor)
    await cancelled.wait()
    await reading_breaks(stream)
