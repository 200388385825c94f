"""A peer sends arbitrary frames, well encrypted: the connection stands or is cut off, never fails.

The bytes go through the whole path: decryption, parser, streams, windows, queues. A fault of ours
would be logged as an error; memory that a peer can claim stays within the settings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.lowlevel
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from node.net.transport import YamuxConnection, YamuxSettings
from node.net.transport.frames import DATA, PING, SYN, encode_header
from node.net.transport.incoming import FRAMES_AT_ONCE, MOST_EMPTY_FRAMES_PER_SECOND
from node.net.transport.packets import PACKET_LIMIT_BYTES
from node.net.transport.settings import INITIAL_WINDOW_BYTES
from tests.transport.links import HostilePeer, hostile_pair

LIMITS = YamuxSettings(
    stream_window_limit_bytes=INITIAL_WINDOW_BYTES,
    connection_window_budget_bytes=2 * INITIAL_WINDOW_BYTES,
    inbound_stream_limit=8,
    accept_backlog=4,
)
LAST_PING = 0xC0FFEE


@contextmanager
def no_fault_of_ours() -> Iterator[None]:
    """Fails if the connection logs an error: those are our own mistakes, never a peer's."""
    faults: list[str] = []

    class Catcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            faults.append(self.format(record))

    catcher = Catcher(level=logging.ERROR)
    logger = logging.getLogger("node.net.transport")
    logger.addHandler(catcher)
    try:
        yield
    finally:
        logger.removeHandler(catcher)
    assert not faults


async def use_streams(connection: YamuxConnection) -> None:
    """A little life on our side: every second stream is read, some are answered, some reset."""
    async with trio.open_nursery() as nursery:
        while True:
            stream = await connection.accept_stream()
            if stream.stream_id % 4 == 1:
                nursery.start_soon(stream.receive_some, 3)
            if stream.stream_id % 8 == 3:
                stream.reset_now()
            if stream.stream_id % 8 == 7:
                await stream.aclose()


async def wait_for_the_end_of(peer: HostilePeer) -> None:
    """Until everything sent before was worked off, or the connection was cut off."""
    await peer.send_frame(PING, SYN, 0, LAST_PING)
    while (await peer.next_of(PING)).length != LAST_PING:
        pass


async def withstand(plaintexts: list[bytes]) -> None:
    with no_fault_of_ours(), trio.fail_after(60):
        async with hostile_pair(LIMITS) as (connection, peer), trio.open_nursery() as nursery:

            async def guarded_use() -> None:
                # How our own calls end when the connection does is tested elsewhere.
                try:
                    await use_streams(connection)
                except* (trio.BrokenResourceError, trio.ClosedResourceError, MuxedConnUnavailable):
                    await connection.event_closed.wait()

            nursery.start_soon(guarded_use)
            try:
                for plaintext in plaintexts:
                    await peer.send(plaintext)
                    assert connection.open_stream_count <= LIMITS.inbound_stream_limit
                    assert connection.unread_bytes <= LIMITS.connection_window_budget_bytes
                await wait_for_the_end_of(peer)
            except ConnectionClosedError:
                await connection.event_closed.wait()
            nursery.cancel_scope.cancel()


def run(plaintexts: list[bytes]) -> None:
    # Half a frame swallows the ping behind it; then it is the keep-alive that ends the wait.
    trio.run(withstand, plaintexts, clock=trio.testing.MockClock(autojump_threshold=0))


def frame(type: int, flags: int, stream_id: int, length: int) -> bytes:
    payload = bytes(min(length, 5000)) if type == DATA else b""
    return encode_header(type, flags, stream_id, len(payload) if type == DATA else length) + payload


plausible_frames = st.builds(
    frame,
    st.integers(0, 3),
    st.sampled_from([0, 0, 1, 1, 2, 4, 8, 5, 9, 15]),
    st.sampled_from([0, 1, 1, 3, 3, 5, 7, 9, 11, 13, 15, 17, 19, 2, 4]),
    st.one_of(st.integers(0, 5000), st.sampled_from([2**31, 2**32 - 1])),
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(plausible_frames, max_size=25), st.integers(1, 4000))
def test_any_sequence_of_frames_is_withstood(frames: list[bytes], step: int) -> None:
    data = b"".join(frames)
    run([data[start : start + step] for start in range(0, len(data), step)])


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_withstood(plaintexts: list[bytes]) -> None:
    run(plaintexts)


GOOD = b"".join(
    [
        frame(1, 1, 1, 0),
        frame(0, 0, 1, 300),
        frame(1, 1, 3, 70_000),
        frame(0, 5, 5, 100),
        frame(2, 1, 0, 9),
        frame(0, 4, 1, 0),
        frame(1, 8, 3, 0),
    ]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(1, 500),
)
def test_a_mutated_conversation_is_withstood(mutations: list[tuple[int, int]], step: int) -> None:
    data = bytearray(GOOD)
    for position, value in mutations:
        data[position] = value
    run([bytes(data[start : start + step]) for start in range(0, len(data), step)])


@pytest.mark.slow
async def test_a_flood_of_frames_with_a_byte_each_is_refused_and_lets_others_run(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Each costs its sender thirteen bytes, and us a walk through parser and tables."""
    flood = (encode_header(DATA, 0, 1, 1) + b"x") * 4000
    turns = 0

    async def all_of_it(peer: HostilePeer) -> None:
        await peer.send(encode_header(DATA, SYN, 1, 1) + b"x")
        for _ in range(2 * MOST_EMPTY_FRAMES_PER_SECOND // 4000):
            await peer.send(flood)
        await wait_for_the_end_of(peer)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(60):
        async with hostile_pair(LIMITS) as (connection, peer), trio.open_nursery() as nursery:
            nursery.start_soon(others)
            began = mock_clock.current_time()
            with pytest.raises(ConnectionClosedError):
                await all_of_it(peer)
            assert mock_clock.current_time() == began, "it was a flood on any machine"
            await connection.event_closed.wait()
            nursery.cancel_scope.cancel()
    assert turns > 5


@pytest.mark.parametrize("frames_per_packet", [1, 2000])
async def test_what_came_in_one_read_is_handled_a_few_frames_at_a_time(
    frames_per_packet: int,
) -> None:
    message = bytes(16)
    packet = frames_per_packet * (encode_header(DATA, 0, 1, len(message)) + message)
    most_in_a_turn = 0

    async def others(connection: YamuxConnection) -> None:
        nonlocal most_in_a_turn
        while True:
            before = connection.unread_bytes
            await trio.lowlevel.checkpoint()
            most_in_a_turn = max(most_in_a_turn, connection.unread_bytes - before)

    with trio.fail_after(60):
        async with hostile_pair(LIMITS) as (connection, peer), trio.open_nursery() as nursery:
            await peer.send(encode_header(DATA, SYN, 1, 0))
            nursery.start_soon(others, connection)
            sealed = memoryview(bytearray(PACKET_LIMIT_BYTES))
            seal = peer.session._sealer.seal_into
            packets = [
                sealed[: seal(packet, sealed)].tobytes() for _ in range(2000 // frames_per_packet)
            ]
            await peer.wire.write(b"".join(packets))
            await wait_for_the_end_of(peer)
            assert connection.unread_bytes == 2000 * len(message)
            nursery.cancel_scope.cancel()
    assert most_in_a_turn <= FRAMES_AT_ONCE * len(message)
