# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""One connection: its life and end, its pings, and what a peer without manners can do to it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import pytest
import trio
import trio.testing
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from node.net.transport import YamuxConnection, YamuxSettings, YamuxStream
from node.net.transport.frames import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    INTERNAL_ERROR,
    NORMAL_END,
    PING,
    PROTOCOL_ERROR,
    RST,
    SYN,
    WINDOW_UPDATE,
    encode_header,
)
from node.net.transport.incoming import MOST_EMPTY_FRAMES_PER_SECOND
from node.net.transport.keep_alive import STUCK_SECONDS
from node.net.transport.outgoing import REFUSALS_AT_ONCE
from node.net.transport.settings import INITIAL_WINDOW_BYTES
from node.net.transport.window import NodeBudget
from tests.transport.links import (
    MEBIBYTE,
    HostilePeer,
    hostile_pair,
    joined_pair,
    read_exactly,
    read_to_end,
    session_pair,
    stream_pair,
    wire_pair,
)
from tests.waiting import PATIENCE_SECONDS

# ---- life and end


async def test_closing_ends_both_ends_and_every_wait_on_them() -> None:
    async with joined_pair() as (near, far):
        near_stream, far_stream = await stream_pair(near, far)
        unread, _ = await stream_pair(near, far)
        woken: list[str] = []

        async def wait(name: str, operation: Callable[[], object], error: type[Exception]) -> None:
            with pytest.raises(error):
                await operation()  # type: ignore[misc]
            woken.append(name)

        async def fill(stream: YamuxStream) -> None:
            while True:
                await stream.send_all(bytes(MEBIBYTE))

        async with trio.open_nursery() as nursery:
            broken = trio.BrokenResourceError
            nursery.start_soon(wait, "receiver", near_stream.receive_some, broken)
            nursery.start_soon(wait, "sender", lambda: fill(unread), broken)
            nursery.start_soon(wait, "far receiver", far_stream.receive_some, broken)
            nursery.start_soon(wait, "acceptor", near.accept_stream, MuxedConnUnavailable)
            nursery.start_soon(wait, "far acceptor", far.accept_stream, MuxedConnUnavailable)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await near.close()
        assert near.event_closed.is_set()
        assert len(woken) == 5
        await far.event_closed.wait()
        assert near.is_closed
        assert far.is_closed
        assert not near.is_established
        with pytest.raises(MuxedConnUnavailable):
            await near.open_stream()
        with pytest.raises(trio.BrokenResourceError):
            await near.ping()


async def test_closing_flushes_what_was_queued() -> None:
    async with joined_pair() as (near, far):
        sender, receiver = await stream_pair(near, far)
        await sender.send_all(bytes(200_000))
        await sender.send_eof()
        await near.close()
        assert await read_to_end(receiver) == bytes(200_000)


async def test_closing_towards_a_peer_that_reads_nothing_takes_a_moment_and_no_longer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with hostile_pair(YamuxSettings(close_flush_seconds=0.5)) as (connection, _):
        streams = [await connection.open_stream() for _ in range(4)]
        for stream in streams:
            await stream.send_all(bytes(INITIAL_WINDOW_BYTES))
        began = trio.current_time()
        await connection.close()
        assert trio.current_time() - began <= 0.6
        assert connection.event_closed.is_set()


async def test_closing_twice_and_from_several_tasks_is_harmless() -> None:
    async with joined_pair() as (near, _):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(near.close)
        await near.close()


async def test_a_close_that_is_cancelled_still_closes() -> None:
    async with joined_pair() as (near, far):
        with trio.CancelScope() as scope:
            scope.cancel()
            await near.close()
        await near.event_closed.wait()
        await far.event_closed.wait()


async def test_a_connection_closed_before_it_was_started_never_starts() -> None:
    near_session, _ = await session_pair(*wire_pair())
    connection = YamuxConnection(near_session, near_session.get_remote_peer())
    await connection.close()
    assert connection.is_closed
    await connection.start()
    with pytest.raises(MuxedConnUnavailable):
        await connection.accept_stream()


async def test_no_task_outlives_start() -> None:
    near_session, far_session = await session_pair(*wire_pair())
    connection = YamuxConnection(near_session, far_session.get_local_peer())
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.start)
        await connection.event_started.wait()
        assert trio.lowlevel.current_statistics().tasks_living > before
        nursery.cancel_scope.cancel()
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert connection.event_closed.is_set()


async def test_a_peer_that_hangs_up_ends_the_connection_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with hostile_pair() as (connection, peer):
        stream = await connection.open_stream()
        await peer.session.close()
        with trio.fail_after(5):
            await connection.event_closed.wait()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


# ---- goodbye


async def test_a_peer_that_says_goodbye_gets_its_streams_finished() -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(WINDOW_UPDATE, SYN, 1, 0)
        stream = await connection.accept_stream()
        await peer.send_frame(GO_AWAY, 0, 0, NORMAL_END)
        await peer.send_frame(DATA, 0, 1, 4, b"more")
        assert await read_exactly(stream, 4) == b"more"
        assert not connection.is_established
        with pytest.raises(MuxedConnUnavailable):
            await connection.open_stream()
        await peer.send_frame(DATA, FIN, 1, 0)
        await stream.aclose()
        await connection.event_closed.wait()


async def test_a_peer_that_says_goodbye_in_error_ends_the_connection() -> None:
    async with hostile_pair() as (connection, peer):
        await connection.open_stream()
        await peer.send_frame(GO_AWAY, 0, 0, INTERNAL_ERROR)
        await connection.event_closed.wait()


async def test_we_say_goodbye() -> None:
    async with hostile_pair() as (connection, peer), trio.open_nursery() as nursery:
        nursery.start_soon(connection.close)
        assert await peer.next_of(GO_AWAY) == (GO_AWAY, 0, 0, NORMAL_END)


# ---- pings and silence


async def test_a_ping_measures_the_round_trip(autojump_clock: trio.testing.MockClock) -> None:
    async with joined_pair(wire_pair(0.05)) as (near, far):
        assert await near.ping() == pytest.approx(0.1)
        assert await far.ping() == pytest.approx(0.1)
        assert near.round_trip_seconds == pytest.approx(0.1)


@pytest.mark.slow
async def test_a_cancelled_ping_leaves_nothing_behind(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with joined_pair(wire_pair(0.05)) as (near, _):
        await trio.sleep(0.5)
        before = len(near._pings)
        for _ in range(1000):
            with trio.move_on_after(0.001):
                await near.ping()
        await trio.sleep(0.5)
        assert len(near._pings) <= before


@pytest.mark.parametrize("is_sending", [False, True])
async def test_a_link_that_swallows_everything_is_noticed_within_ten_odd_seconds(
    is_sending: bool, autojump_clock: trio.testing.MockClock
) -> None:
    wires = wire_pair(0.02)
    async with joined_pair(wires) as (near, far):
        stream, far_stream = await stream_pair(near, far)
        await trio.sleep(100)
        assert not near.is_closed
        wires[0].swallow_everything()
        began = trio.current_time()
        if is_sending:
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(bytes(10 * MEBIBYTE))
        with pytest.raises(trio.BrokenResourceError):
            await far_stream.receive_some()
        await near.event_closed.wait()
        assert 8 <= trio.current_time() - began <= 16


@pytest.mark.slow
async def test_a_peer_that_only_answers_pings_stays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with joined_pair(wire_pair(0.3)) as (near, far):
        await trio.sleep(3600)
        assert not near.is_closed
        assert not far.is_closed


async def test_an_idle_connection_says_little(autojump_clock: trio.testing.MockClock) -> None:
    async with joined_pair() as (near, _):
        await trio.sleep(10)
        before = near.bytes_sent
        await trio.sleep(600)
        assert (near.bytes_sent - before) / 600 < 12


# ---- hostile peers: what they send


async def expect_cut_off(connection: YamuxConnection, peer: HostilePeer) -> None:
    assert await peer.next_of(GO_AWAY) == (GO_AWAY, 0, 0, PROTOCOL_ERROR)
    with trio.fail_after(5):
        await connection.event_closed.wait()


BREACHES = {
    "a version that does not exist": bytes.fromhex("05 00 0000 00000001 00000000"),
    "a type that does not exist": bytes.fromhex("00 09 0000 00000001 00000000"),
    "data for stream 0": encode_header(DATA, 0, 0, 1) + b"x",
    "a stream number that is ours to give": encode_header(WINDOW_UPDATE, SYN, 2, 0),
    "four gigabytes declared": encode_header(DATA, SYN, 1, 2**32 - 1),
    "more than the window in one frame": encode_header(DATA, SYN, 1, INITIAL_WINDOW_BYTES + 1),
    "a window of more than 32 bits": encode_header(WINDOW_UPDATE, SYN, 1, 2**32 - 1),
    "a stream opened twice": encode_header(WINDOW_UPDATE, SYN, 1, 0) * 2,
    "data after the end": encode_header(DATA, SYN | FIN, 1, 0)
    + encode_header(DATA, 0, 1, 1)
    + b"x",
    "more than the window in many frames": encode_header(WINDOW_UPDATE, SYN, 1, 0)
    + (encode_header(DATA, 0, 1, 65_536) + bytes(65_536)) * 5,
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
async def test_a_peer_that_breaks_the_protocol_is_told_and_cut_off(
    breach: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send(breach)
        await expect_cut_off(connection, peer)


async def test_a_forged_packet_ends_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    async with hostile_pair() as (connection, peer):
        await peer.wire.write(b"\x00\x20" + bytes(32))
        with trio.fail_after(5):
            await connection.event_closed.wait()


async def test_data_for_a_stream_that_is_gone_is_dropped_and_answered_with_a_reset() -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(WINDOW_UPDATE, SYN, 1, 0)
        stream = await connection.accept_stream()
        await stream.aclose()
        for _ in range(50):
            await peer.send_frame(DATA, 0, 1, 60_000, bytes(60_000))
        while not (header := await peer.next_header()).flags & RST:
            pass
        assert (header.type, header.stream_id) == (WINDOW_UPDATE, 1)
        assert connection.unread_bytes == 0
        assert not connection.is_closed


async def test_a_stream_cut_short_in_the_middle_of_a_frame_does_not_disturb_the_next() -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(WINDOW_UPDATE, SYN, 1, 0)
        first = await connection.accept_stream()
        await peer.send(encode_header(DATA, 0, 1, 1000) + bytes(400))
        assert len(await first.receive_some()) == 400
        first.reset_now()
        await peer.send(bytes(600) + encode_header(DATA, SYN | FIN, 3, 5) + b"hello")
        second = await connection.accept_stream()
        assert await read_to_end(second) == b"hello"
        assert connection.unread_bytes == 0


async def test_a_stream_may_be_opened_by_data_and_ended_in_the_same_frame() -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(DATA, SYN | FIN, 7, 5, b"hello")
        stream = await connection.accept_stream()
        assert await read_to_end(stream) == b"hello"
        assert await peer.next_of(WINDOW_UPDATE) == (WINDOW_UPDATE, ACK, 7, 0)


async def test_a_window_larger_than_the_first_may_come_with_the_opening() -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(WINDOW_UPDATE, SYN, 1, MEBIBYTE - INITIAL_WINDOW_BYTES)
        stream = await connection.accept_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(MEBIBYTE))
            received = 0
            while received < MEBIBYTE:
                received += (await peer.next_of(DATA)).length
        assert received == MEBIBYTE


async def test_a_flood_of_pings_costs_nothing_that_lasts() -> None:
    async with hostile_pair() as (connection, peer):
        flood = b"".join(encode_header(PING, SYN, 0, value) for value in range(5000))
        for _ in range(MOST_EMPTY_FRAMES_PER_SECOND // 5000 - 1):
            await peer.send(flood)
        await peer.send_frame(PING, SYN, 0, 424_242)
        while (await peer.next_of(PING)).length != 424_242:
            pass
        assert not connection.outgoing
        assert not connection.is_closed


EMPTY_FRAMES = {
    "pings": encode_header(PING, SYN, 0, 7),
    "answers to pings that nobody sent": encode_header(PING, ACK, 0, 7),
    "credit for a stream that is not": encode_header(WINDOW_UPDATE, 0, 99, 1),
    "ends of a stream that is not": encode_header(WINDOW_UPDATE, RST, 99, 0),
    "data for a stream that is not": encode_header(DATA, 0, 99, 1) + b"x",
    "data that is none": encode_header(DATA, 0, 1, 0),
}


@pytest.mark.parametrize("frame", EMPTY_FRAMES.values(), ids=EMPTY_FRAMES.keys())
async def test_a_peer_that_floods_us_with_nothing_is_told_and_cut_off(
    frame: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    async with hostile_pair() as (connection, peer):
        await peer.send_frame(WINDOW_UPDATE, SYN, 1, 0)
        for _ in range(MOST_EMPTY_FRAMES_PER_SECOND // 1000):
            await peer.send(frame * 1000)
        await expect_cut_off(connection, peer)


async def test_a_flood_of_streams_is_refused_beyond_the_backlog() -> None:
    settings = YamuxSettings(accept_backlog=16)
    async with hostile_pair(settings) as (connection, peer):
        for number in range(100):
            await peer.send_frame(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
        answers = [await peer.next_of(WINDOW_UPDATE) for _ in range(100)]
        accepted = [header.stream_id for header in answers if header.flags & ACK]
        refused = [header.stream_id for header in answers if header.flags & RST]
        assert len(accepted) == connection.open_stream_count == 16
        assert len(refused) == 84


async def test_more_streams_than_the_limit_are_refused_until_some_have_ended() -> None:
    settings = YamuxSettings(inbound_stream_limit=3)
    async with hostile_pair(settings) as (connection, peer):
        streams = []
        for number in range(3):
            await peer.send_frame(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
            streams.append(await connection.accept_stream())
        await peer.send_frame(WINDOW_UPDATE, SYN, 7, 0)
        while not (header := await peer.next_of(WINDOW_UPDATE)).flags & RST:
            pass
        assert header.stream_id == 7
        streams[0].reset_now()
        await peer.send_frame(WINDOW_UPDATE, SYN, 9, 0)
        assert (await connection.accept_stream()).stream_id == 9


async def test_a_peer_that_opens_streams_and_never_reads_the_refusals_is_cut_off() -> None:
    wires = wire_pair(buffer_bytes=1)
    settings = YamuxSettings(accept_backlog=1)
    async with hostile_pair(settings, wires) as (connection, peer):
        # Nobody reads on the peer's side: once the wire is full, our writer stands still.
        frames = b"".join(
            encode_header(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
            for number in range(4 * REFUSALS_AT_ONCE)
        )
        for start in range(0, len(frames), 1200):
            if connection.event_shutting_down.is_set():
                break
            await peer.send(frames[start : start + 1200])
        with trio.fail_after(5):
            await connection.event_closed.wait()


async def test_a_peer_that_pings_and_takes_nothing_is_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wires = wire_pair(buffer_bytes=1)
    async with hostile_pair(wires=wires) as (connection, peer), trio.open_nursery() as nursery:

        async def say_something() -> None:
            with suppress(ConnectionClosedError):
                while True:
                    await trio.sleep(1)
                    await peer.send_frame(PING, SYN, 0, 7)

        nursery.start_soon(say_something)
        stream = await connection.open_stream()
        began = trio.current_time()
        with trio.fail_after(10 * STUCK_SECONDS):
            with pytest.raises(trio.BrokenResourceError, match="has taken nothing"):
                await stream.send_all(bytes(MEBIBYTE))
            await connection.event_closed.wait()
        assert STUCK_SECONDS <= trio.current_time() - began < STUCK_SECONDS + 5
        nursery.cancel_scope.cancel()


async def test_answers_to_streams_are_not_queued_for_a_peer_that_does_not_read() -> None:
    settings, answer = YamuxSettings(inbound_stream_limit=8), bytes(1000)
    wires = wire_pair(buffer_bytes=1)
    async with hostile_pair(settings, wires) as (connection, peer), trio.open_nursery() as nursery:

        async def serve() -> None:
            while True:
                stream = await connection.accept_stream()
                await stream.send_all(answer)
                await stream.aclose()

        nursery.start_soon(serve)
        for number in range(100):
            await peer.send_frame(WINDOW_UPDATE, SYN | FIN, 2 * number + 1, 0)
            await trio.testing.wait_all_tasks_blocked()
        assert connection.outgoing.queued_bytes <= 2 * 8 * len(answer)
        assert not connection.is_closed
        nursery.cancel_scope.cancel()


async def test_streams_that_are_reset_at_once_count_until_that_was_answered() -> None:
    """Each costs a queue until a batch leaves, which such a peer can delay for minutes."""
    settings = YamuxSettings(inbound_stream_limit=8)
    wires = wire_pair(buffer_bytes=1)
    async with hostile_pair(settings, wires) as (connection, peer):
        for number in range(50):
            await peer.send_frame(WINDOW_UPDATE, SYN, 2 * number + 1, 0)
            await peer.send_frame(WINDOW_UPDATE, RST, 2 * number + 1, 0)
            await trio.testing.wait_all_tasks_blocked()
        assert len(connection.outgoing._control) <= 8


@pytest.mark.parametrize("end", [FIN, FIN | RST])
async def test_what_a_peer_has_ended_can_be_dropped_while_nobody_reads_it(end: int) -> None:
    """It once counted, and was never found. So streams of others were dropped in its place."""
    settings = YamuxSettings(node_unread_limit_bytes=100_000)
    async with hostile_pair(settings) as (connection, peer):
        streams = []
        for stream_id, size in ((1, 60_000), (3, 50_000)):
            await peer.send_frame(DATA, SYN, stream_id, size, bytes(size))
            streams.append(await connection.accept_stream())
            await streams[-1].send_eof()
            for flag in (FIN, RST):
                if end & flag and stream_id == 1:
                    await peer.send_frame(WINDOW_UPDATE, flag, stream_id, 0)
            await trio.testing.wait_all_tasks_blocked()
        assert connection.unread_bytes == 50_000, "that of the first was dropped"
        with pytest.raises(trio.BrokenResourceError):
            await streams[0].receive_some()
        assert await streams[1].receive_some()


async def a_stream_that_outlives_its_connection(of_node: NodeBudget, size: int) -> YamuxStream:
    async with hostile_pair(of_node=of_node) as (connection, peer):
        await peer.send_frame(DATA, SYN, 1, size, bytes(size))
        stream = await connection.accept_stream()
        await trio.testing.wait_all_tasks_blocked()
    assert connection.is_closed
    return stream


async def test_what_is_unread_of_a_connection_that_has_ended_counts_until_it_is_read() -> None:
    of_node = NodeBudget(100_000)
    read, left = [await a_stream_that_outlives_its_connection(of_node, 40_000) for _ in range(2)]
    assert of_node.unread_bytes == 80_000
    assert len(await read_exactly(read, 40_000)) == 40_000
    assert of_node.unread_bytes == 40_000
    await left.aclose()
    assert of_node.unread_bytes == 0


async def test_what_is_unread_of_a_connection_that_has_ended_can_be_dropped() -> None:
    of_node = NodeBudget(100_000)
    held = await a_stream_that_outlives_its_connection(of_node, 60_000)
    live = await a_stream_that_outlives_its_connection(of_node, 50_000)
    assert (held.unread_bytes, live.unread_bytes, of_node.unread_bytes) == (0, 50_000, 50_000)


async def test_what_nobody_can_read_any_more_counts_no_longer() -> None:
    of_node = NodeBudget(100_000)
    await a_stream_that_outlives_its_connection(of_node, 60_000)
    gc.collect()
    live = await a_stream_that_outlives_its_connection(of_node, 50_000)
    assert of_node.unread_bytes == live.unread_bytes == 50_000


async def test_a_thousand_full_streams_that_nobody_reads_stay_within_the_budget() -> None:
    budget = 2 * MEBIBYTE
    settings = YamuxSettings(
        stream_window_limit_bytes=MEBIBYTE,
        connection_window_budget_bytes=budget,
        inbound_stream_limit=100,
    )
    async with hostile_pair(settings) as (connection, peer), trio.open_nursery() as nursery:

        async def accept() -> None:
            while True:
                await connection.accept_stream()

        nursery.start_soon(accept)
        piece = bytes(60_000)
        for number in range(60):
            stream_id = 2 * number + 1
            await peer.send_frame(WINDOW_UPDATE, SYN, stream_id, 0)
            for _ in range(4):
                await peer.send_frame(DATA, 0, stream_id, len(piece), piece)
        await trio.testing.wait_all_tasks_blocked()
        assert connection.unread_bytes <= budget + len(piece)
        assert not connection.is_closed
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_to_its_reader_a_stream_that_is_dropped_is_broken_and_not_closed_or_at_its_end(
    at_the_end: bool,
) -> None:
    """Nobody expects that a stream which he has not closed is closed."""
    settings = YamuxSettings(
        stream_window_limit_bytes=INITIAL_WINDOW_BYTES,
        connection_window_budget_bytes=2 * INITIAL_WINDOW_BYTES,
    )
    async with hostile_pair(settings) as (connection, peer):
        streams = []
        for stream_id in (1, 3, 5):
            await peer.send_frame(WINDOW_UPDATE, SYN, stream_id, 0)
            streams.append(await connection.accept_stream())
            flags = FIN if at_the_end else 0
            for last in (False, False, False, True):
                piece = bytes(60_000)
                await peer.send_frame(DATA, flags if last else 0, stream_id, len(piece), piece)
        await trio.testing.wait_all_tasks_blocked()
        dropped = [one for one in streams if one.is_closed()]
        assert dropped
        for stream in dropped:
            with pytest.raises(trio.BrokenResourceError, match="too much was unread"):
                await stream.receive_some()
            with pytest.raises(trio.BrokenResourceError, match="too much was unread"):
                await stream.send_all(b"answer")


@pytest.mark.slow
async def test_streams_leave_nothing_behind() -> None:
    async with joined_pair() as (near, far):
        left = []  # a table that grows once is no leak

        async def serve() -> None:
            while True:
                stream = await far.accept_stream()
                await stream.send_all(await read_to_end(stream))
                await stream.aclose()

        async def call(count: int) -> None:
            for _ in range(count):
                stream = await near.open_stream()
                await stream.send_all(b"x")
                await stream.send_eof()
                assert await read_to_end(stream) == b"x"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await call(100)
            tracemalloc.start()
            try:
                await call(100)
                for _ in range(3):
                    gc.collect()
                    before, _ = tracemalloc.get_traced_memory()
                    await call(400)
                    gc.collect()
                    after, _ = tracemalloc.get_traced_memory()
                    left.append(after - before)
            finally:
                tracemalloc.stop()
            nursery.cancel_scope.cancel()
        assert near.open_stream_count == far.open_stream_count == 0
        assert near.window_budget.promised_bytes == far.window_budget.promised_bytes == 0
        assert min(left) < 8_000


@pytest.mark.slow
async def test_a_thousand_outgoing_streams_may_be_open_at_once() -> None:
    async with joined_pair() as (near, far):
        pairs = [await stream_pair(near, far) for _ in range(1000)]
        for number, (stream, _) in enumerate(pairs):
            await stream.send_all(number.to_bytes(2, "big"))
        for number, (_, other) in enumerate(pairs):
            assert await read_exactly(other, 2) == number.to_bytes(2, "big")


@pytest.mark.slow
async def test_both_ends_may_fill_both_windows_while_both_open_streams() -> None:
    size = 3 * MEBIBYTE

    async def talk(connection: YamuxConnection) -> None:
        stream = await connection.open_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(size))
            assert len(await read_exactly(stream, size)) == size

    async def answer(connection: YamuxConnection) -> None:
        stream = await connection.accept_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, bytes(size))
            assert len(await read_exactly(stream, size)) == size

    async with joined_pair(wire_pair(buffer_bytes=1000)) as (near, far):
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                for connection in (near, far):
                    for _ in range(4):
                        nursery.start_soon(talk, connection)
                        nursery.start_soon(answer, connection)
