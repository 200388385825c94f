"""Bulk transfers: both ways at once, straight into buffers, limited by progress alone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
import trio

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    HandlerFailed,
    LimitExceeded,
    MalformedMessage,
    PotluckError,
    ProtocolMisuse,
    ProtocolNotServed,
    Refused,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.guard import Caller
from protocols.network import Stream
from protocols.rpc import BulkMethod, Empty, Transfer, chunk_header, encode
from protocols.rpc.frames import ACCEPT, CHUNK, CLOSE, ERROR, OPEN, message_frame
from protocols.rpc.messages import AcceptHead, CloseHead, ErrorBody, ErrorHead, OpenHead
from protocols.rpc.state import RpcLimits
from protocols.rpc.transfers import MOST_ALIVE_SECONDS
from protocols.tensors import raw_bytes
from tests.chunks import next_chunk
from tests.protocols.pair import (
    LATENCY_SECONDS,
    PROTOCOL,
    ROUND_TRIP,
    Number,
    Pair,
    Text,
    between_two,
)

CHUNK_LIMIT = 100_000

Upload = BulkMethod[Text, Number, Number, Number]

UPLOAD: Upload = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, CHUNK_LIMIT, stall_seconds=10
)
HASHED: Upload = BulkMethod(
    PROTOCOL, "hashed", Text, Number, Number, Number, CHUNK_LIMIT, stall_seconds=10, hashed=True
)

Handler = Callable[[Caller, Transfer[Number, Number, Number], Text], Awaitable[None]]


async def count_bytes(
    _caller: Caller, transfer: Transfer[Number, Number, Number], opening: Text
) -> None:
    await transfer.accept(Number(len(opening.text)))
    buffer = bytearray(CHUNK_LIMIT)
    while await transfer.receive_chunk_into(buffer) is not None:
        pass
    await transfer.finish(Number(transfer.bytes_received))


async def give_back(
    _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
) -> None:
    """Each chunk comes back with every byte one higher."""
    await transfer.accept(Number(0))
    while (chunk := await next_chunk(transfer)) is not None:
        await transfer.send_chunk(bytes((byte + 1) % 256 for byte in chunk))
    await transfer.finish(Number(transfer.bytes_received))


@pytest.mark.parametrize("bulk", [UPLOAD, HASHED], ids=["plain", "hashed"])
def test_chunks_arrive_whole_and_in_order_and_both_sides_close(bulk: Upload) -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(bulk, count_bytes)
        async with pair.asking.open_bulk(pair.bob_id, bulk, Text("hello"), timeout=5) as transfer:
            assert transfer.accepted == Number(5)
            assert transfer.peer == pair.bob_id
            for size in (1, 16 << 10, (16 << 10) + 1, CHUNK_LIMIT):
                await transfer.send_chunk(bytes(size))
            assert await transfer.finish(Number(0)) == Number(132_770)
            assert transfer.finished
        await pair.settle()
        mine, his = pair.asking.statistics(), pair.answering.statistics()
        assert mine.chunk_bytes_sent == his.chunk_bytes_received == 132_770
        assert (mine.transfers_opened, his.transfers_served, his.transfers_open) == (1, 1, 0)
        link = pair.alice.link(pair.bob_id)
        assert link is not None
        assert link.open_streams == 0

    between_two(scenario)


@pytest.mark.parametrize("bulk", [UPLOAD, HASHED], ids=["plain", "hashed"])
def test_parts_go_out_while_results_come_back_on_the_same_stream(bulk: Upload) -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(bulk, give_back)
        received = []
        async with pair.asking.open_bulk(pair.bob_id, bulk, Text(), timeout=5) as transfer:

            async def send() -> None:
                for number in range(50):
                    await transfer.send_chunk(bytes([number]) * 70_000)
                await transfer.send_closing(Number(0))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while (chunk := await next_chunk(transfer)) is not None:
                    received.append(chunk)
            assert await transfer.finish(Number(0)) == Number(50 * 70_000)
        assert received == [bytes([number + 1]) * 70_000 for number in range(50)]

    between_two(scenario)


def test_a_chunk_lands_in_the_memory_of_a_tensor() -> None:
    async def scenario(pair: Pair) -> None:
        landed = torch.zeros(20_000)

        async def take(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            assert await transfer.next_chunk_bytes() == 80_000
            assert await transfer.receive_chunk_into(raw_bytes(landed)) == 80_000
            assert await transfer.receive_chunk_into(bytearray(1)) is None
            await transfer.finish(Number(1))

        pair.answering.serve_bulk(UPLOAD, take)
        sent = torch.arange(20_000.0)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            await transfer.send_chunk(raw_bytes(sent))
            await transfer.finish(Number(0))
        assert torch.equal(landed, sent)

    between_two(scenario)


def test_a_chunk_larger_than_the_buffer_is_refused_and_can_go_into_a_larger_one() -> None:
    async def scenario(pair: Pair) -> None:
        async def take(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            with pytest.raises(LimitExceeded, match="1,000 bytes where 999"):
                await transfer.receive_chunk_into(bytearray(999))
            assert await transfer.receive_chunk_into(bytearray(1000)) == 1000
            assert await next_chunk(transfer) is None
            await transfer.finish(Number(1))

        pair.answering.serve_bulk(UPLOAD, take)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            await transfer.send_chunk(bytes(1000))
            assert await transfer.finish(Number(0)) == Number(1)

    between_two(scenario)


class StaleEpoch(PotluckError):
    """An error of somebody's own protocol."""


@pytest.mark.parametrize("accepted_before", [False, True])
@pytest.mark.parametrize(
    ("raised", "arrives"),
    [(Refused("Not today."), Refused), (ValueError("secret"), HandlerFailed)],
)
def test_a_handler_that_raises_ends_the_transfer_with_its_error(
    accepted_before: bool,
    raised: Exception,
    arrives: type[PotluckError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(pair: Pair) -> None:
        async def refuse(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            if accepted_before:
                await transfer.accept(Number(0))
                await next_chunk(transfer)
            raise raised

        async def use() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                await transfer.send_chunk(b"x")
                with pytest.raises(arrives):
                    await next_chunk(transfer)
                await next_chunk(transfer)

        pair.answering.serve_bulk(UPLOAD, refuse)
        with pytest.raises(arrives) as error:
            await use()
        assert pair.asking.statistics().misbehaviours == 0
        assert "secret" not in str(error.value)
        await pair.settle()
        assert pair.answering.statistics().transfers_open == 0

    between_two(scenario)
    assert bool(caplog.records) == (arrives is HandlerFailed)


def test_a_sender_who_does_not_listen_still_learns_why_the_other_side_gave_up() -> None:
    async def scenario(pair: Pair) -> None:
        async def enough(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            for _ in range(3):
                await next_chunk(transfer)
            raise Refused("Three chunks are enough.")

        async def send_for_ever() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                while True:
                    await transfer.send_chunk(bytes(CHUNK_LIMIT))

        pair.answering.serve_bulk(UPLOAD, enough)
        with pytest.raises(Refused, match="enough"):
            await send_for_ever()

    between_two(scenario)


def test_a_transfer_that_nobody_serves_or_has_room_for_is_said_to_be_so() -> None:
    async def scenario(pair: Pair) -> None:
        async def hold(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await next_chunk(transfer)

        async def use(bulk: Upload) -> None:
            async with pair.asking.open_bulk(pair.bob_id, bulk, Text(), timeout=5):
                pass

        pair.answering.serve_bulk(UPLOAD, hold)
        with pytest.raises(ProtocolNotServed):
            await use(HASHED)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5):
            with pytest.raises(Busy):
                await use(UPLOAD)
        await pair.settle()
        await use(UPLOAD)

    between_two(scenario, bobs_limits=RpcLimits(transfers_per_peer=1))


def test_a_transfer_that_is_never_accepted_ends_with_the_deadline_on_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        ended: list[float] = []

        async def ponder(_caller: Caller, _transfer: Any, _opening: Text) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())

        pair.answering.serve_bulk(UPLOAD, ponder)
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=3):
                pass
        assert trio.current_time() == start + 3
        await pair.settle()
        assert ended == pytest.approx([start + 3 + LATENCY_SECONDS], abs=0.01)

    between_two(scenario)


def test_accepting_lifts_the_opening_deadline() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=2) as transfer:
            for _ in range(10):
                await trio.sleep(5)
                await transfer.send_chunk(b"still here")
            assert await transfer.finish(Number(0)) == Number(100)

    between_two(scenario)


def test_leaving_the_block_early_resets_the_stream_and_the_handler_learns_of_it() -> None:
    async def scenario(pair: Pair) -> None:
        ended: list[BaseException | None] = []

        async def listen(
            caller: Caller, transfer: Transfer[Number, Number, Number], opening: Text
        ) -> None:
            try:
                await count_bytes(caller, transfer, opening)
            except BaseException as error:
                ended.append(error)
                raise

        pair.answering.serve_bulk(UPLOAD, listen)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            await transfer.send_chunk(b"x")
        await pair.settle()
        with trio.move_on_after(1):
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                await trio.sleep_forever()
        await pair.settle()
        assert [type(error) for error in ended] == [Unreachable, Unreachable]
        assert pair.answering.statistics().transfers_open == 0
        assert pair.answering.statistics().misbehaviours == 0

    between_two(scenario)


def test_cancelling_a_send_or_receive_in_the_middle_of_a_chunk_resets_the_stream() -> None:
    async def scenario(pair: Pair) -> None:
        async def deaf(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await trio.sleep(1000)

        pair.answering.serve_bulk(UPLOAD, deaf)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            with trio.move_on_after(1):
                while True:
                    await transfer.send_chunk(bytes(CHUNK_LIMIT))
            with pytest.raises(Unreachable):
                await transfer.send_chunk(b"x")

        async def slow(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await transfer.send_chunk(bytes(CHUNK_LIMIT))
            await trio.sleep(1000)

        pair.answering.serve_bulk(HASHED, slow)
        pair.world.throttle(pair.bob, upload_bytes_per_second=CHUNK_LIMIT / 2)
        async with pair.asking.open_bulk(pair.bob_id, HASHED, Text(), timeout=5) as transfer:
            with trio.move_on_after(1):
                await next_chunk(transfer)
            with pytest.raises(Unreachable):
                await next_chunk(transfer)

    between_two(scenario)


def test_cancelling_the_wait_for_a_chunk_loses_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        async def late(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await trio.sleep(2)
            await transfer.send_chunk(b"late")
            await transfer.finish(Number(0))

        pair.answering.serve_bulk(UPLOAD, late)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            for _ in range(3):
                with trio.move_on_after(0.5):
                    await next_chunk(transfer)
            assert await next_chunk(transfer) == b"late"
            await transfer.finish(Number(0))

    between_two(scenario)


def test_a_peer_that_dies_in_mid_transfer_ends_it_at_once_on_the_other_side() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)

        async def send_for_ever() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                pair.world.nursery.start_soon(kill_bob_in_a_second, pair)
                while True:
                    await transfer.send_chunk(bytes(CHUNK_LIMIT))

        start = trio.current_time()
        with pytest.raises(Unreachable):
            await send_for_ever()
        assert trio.current_time() - start < 1 + 10 * ROUND_TRIP

    between_two(scenario)


async def kill_bob_in_a_second(pair: Pair) -> None:
    await trio.sleep(1)
    pair.world.crash(pair.bob)


def test_a_reader_that_stops_holds_the_sender_within_the_window_until_it_stalls() -> None:
    async def scenario(pair: Pair) -> None:
        async def deaf(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await trio.sleep(1000)

        pair.answering.serve_bulk(UPLOAD, deaf)
        start = trio.current_time()
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            with pytest.raises(DeadlineExceeded, match="took nothing for 10 seconds"):
                await send_without_end(transfer)
            assert transfer.bytes_sent <= 3 * pair.world.settings.window_bytes
        assert 10 <= trio.current_time() - start < 12

    between_two(scenario)


async def send_without_end(transfer: Transfer[Any, Any, Any]) -> None:
    while True:
        await transfer.send_chunk(bytes(CHUNK_LIMIT))


def test_waiting_for_bytes_that_crawl_over_a_slow_uplink_is_not_a_stall() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        pair.world.throttle(pair.alice, upload_bytes_per_second=2000)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=10) as transfer:
            start = trio.current_time()
            await transfer.send_chunk(bytes(CHUNK_LIMIT))
            assert await transfer.finish(Number(0)) == Number(CHUNK_LIMIT)
            assert trio.current_time() - start > 49

    between_two(scenario)


def test_a_handler_that_waits_for_something_else_can_say_that_it_is_alive() -> None:
    async def scenario(pair: Pair) -> None:
        async def wait(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            for _ in range(20):
                await trio.sleep(3)
                await transfer.say_alive()
            await transfer.send_chunk(b"at last")
            assert await next_chunk(transfer) is None
            await transfer.finish(Number(1))

        pair.answering.serve_bulk(UPLOAD, wait)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            assert await next_chunk(transfer) == b"at last"
            await transfer.finish(Number(0))

    between_two(scenario)


async def wait_and_look_up_now_and_then(transfer: Transfer[Any, Any, Any]) -> None:
    with trio.fail_after(2 * MOST_ALIVE_SECONDS):
        while True:
            with trio.move_on_after(20):
                await transfer.receive_closing()


def test_saying_that_one_is_alive_and_nothing_else_keeps_no_transfer_open_for_ever() -> None:
    async def scenario(pair: Pair) -> None:
        async def wait(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            while True:
                await trio.sleep(3)
                await transfer.say_alive()

        pair.answering.serve_bulk(UPLOAD, wait)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            start = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="and nothing else"):
                await wait_and_look_up_now_and_then(transfer)
            assert MOST_ALIVE_SECONDS < trio.current_time() - start < MOST_ALIVE_SECONDS + 10

    between_two(scenario)


def test_a_receiver_may_say_nothing_else_as_long_as_chunks_come() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        async with (
            pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(transfer.receive_closing)
            for _ in range(int(2 * MOST_ALIVE_SECONDS / 5)):
                await trio.sleep(5)
                await transfer.send_chunk(b"x")
            await transfer.send_closing(Number(0))

    between_two(scenario)


def test_silence_is_a_stall() -> None:
    async def scenario(pair: Pair) -> None:
        async def brood(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            await transfer.accept(Number(0))
            await trio.sleep(1000)

        pair.answering.serve_bulk(UPLOAD, brood)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            start = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="Nothing came"):
                await next_chunk(transfer)
            assert trio.current_time() == pytest.approx(start + 10)

    between_two(scenario)


# Peers that break the protocol

OPENING = message_frame(OPEN, encode(OpenHead("upload", 60_000)), encode(Text()))
ACCEPTING = message_frame(ACCEPT, encode(AcceptHead()), encode(Number(0)))


def closing(chunks: int, chunk_bytes: int, digest: bytes = b"") -> bytes:
    head = CloseHead(chunks, chunk_bytes, digest)
    return message_frame(CLOSE, encode(head), encode(Number(0)))


BAD_ENDINGS: dict[str, bytes] = {
    "a chunk that declares 4 GB": b"\xff\xff\xff\xff" + bytes([CHUNK]),
    "a chunk over the limit": chunk_header(CHUNK_LIMIT + 1),
    "an empty chunk": chunk_header(0),
    "an unknown kind": b"\x00\x00\x00\x01\x63x",
    "a second opening": OPENING,
    "an end without closing": b"",
    "an end within a chunk": chunk_header(100) + b"half",
    "an end within a header": b"\x00\x00",
    "a closing with one chunk too many": chunk_header(3) + b"abc" + closing(2, 3),
    "a closing with another size": chunk_header(3) + b"abc" + closing(1, 4),
    "a closing with a hash that was not agreed": closing(0, 0, b"h" * 32),
    "a closing of another type": message_frame(CLOSE, encode(CloseHead(0, 0)), encode("text")),
    "a closing whose head is garbage": message_frame(CLOSE, b"\xc1", encode(Number(0))),
}


@pytest.mark.parametrize("ending", BAD_ENDINGS.values(), ids=BAD_ENDINGS.keys())
def test_an_opener_who_breaks_the_protocol_is_told_named_and_avoided(ending: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(OPENING + ending)
        await stream.send_eof()
        data = b""
        while more := await stream.receive_some(10_000):
            data += more
        assert data.startswith(ACCEPTING)
        assert data[len(ACCEPTING) + 4] == ERROR
        assert pair.answering.avoided_for(pair.alice.peer_id) > 0
        assert pair.answering.statistics().transfers_open == 0

    between_two(scenario)


@pytest.mark.parametrize("ending", BAD_ENDINGS.values(), ids=BAD_ENDINGS.keys())
def test_a_server_that_breaks_the_protocol_is_blamed_and_avoided(ending: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        async def lie(stream: Stream) -> None:
            await stream.receive_some(10_000)
            await stream.send_all(ACCEPTING + ending)

        async def use() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                while await next_chunk(transfer) is not None:
                    pass

        pair.bob.serve(PROTOCOL, lie)
        with pytest.raises(RemoteMisbehaviour):
            await use()
        assert pair.asking.avoided_for(pair.bob_id) > 0

    between_two(scenario)


@pytest.mark.parametrize(
    "opening",
    [
        message_frame(OPEN, b"\xc1", encode(Text())),
        message_frame(OPEN, encode(OpenHead("upload", 60_000)), b"\xc1"),
        message_frame(OPEN, encode(OpenHead("upload", 60_000)), encode(Text("x" * 66_000))),
        b"\xff\xff\xff\xff" + bytes([OPEN]),
        b"\x00\x00\x00\x01" + bytes([OPEN]) + b"x",
        OPENING[:-1],
    ],
    ids=["bad head", "bad body", "body over the limit", "4 GB", "no head", "truncated"],
)
def test_a_bad_opening_is_answered_with_an_error_and_remembered(opening: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(opening)
        await stream.send_eof()
        data = await stream.receive_some(10_000)
        assert data[4] == ERROR
        assert pair.answering.avoided_for(pair.alice.peer_id) > 0

    between_two(scenario)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff\xff\xff\xff" + bytes([ACCEPT]), LimitExceeded),
        (chunk_header(5) + b"hello", MalformedMessage),
        (message_frame(ACCEPT, encode(AcceptHead()), encode("text")), MalformedMessage),
        (message_frame(ACCEPT, b"\xc1", encode(Number())), MalformedMessage),
        (b"", MalformedMessage),
        (ACCEPTING[:-1], MalformedMessage),
        (message_frame(ERROR, encode(ErrorHead(0)), encode(ErrorBody("busy", "Later."))), Busy),
    ],
    ids=["4 GB", "a chunk", "another type", "bad head", "nothing", "truncated", "busy"],
)
def test_a_bad_answer_to_an_opening_is_an_error_of_ours(
    answer: bytes, error: type[PotluckError]
) -> None:
    async def scenario(pair: Pair) -> None:
        async def lie(stream: Stream) -> None:
            await stream.receive_some(10_000)
            await stream.send_all(answer)

        pair.bob.serve(PROTOCOL, lie)
        with pytest.raises(error):
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5):
                pass
        blamed = pair.asking.avoided_for(pair.bob_id) > 0
        assert blamed == issubclass(error, RemoteMisbehaviour)

    between_two(scenario)


def test_a_chunk_at_one_byte_a_second_is_a_stall() -> None:
    async def scenario(pair: Pair) -> None:
        async def trickle(stream: Stream) -> None:
            await stream.receive_some(10_000)
            await stream.send_all(ACCEPTING + chunk_header(5000))
            while True:
                await stream.send_all(b"x")
                await trio.sleep(1)

        pair.bob.serve(PROTOCOL, trickle)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            start = trio.current_time()
            with pytest.raises(DeadlineExceeded):
                await next_chunk(transfer)
            assert trio.current_time() - start == pytest.approx(10, abs=0.5)
        assert pair.asking.avoided_for(pair.bob_id) == 0

    between_two(scenario)


def test_a_chunk_changed_on_the_way_is_found_by_the_running_hash() -> None:
    async def scenario(pair: Pair) -> None:
        async def change(stream: Stream) -> None:
            """A man in the middle would have to break Noise; a broken sender does this as well."""
            await stream.receive_some(10_000)
            await stream.send_all(ACCEPTING + chunk_header(3) + b"abc" + closing(1, 3, b"h" * 32))
            await trio.sleep_forever()

        pair.bob.serve(PROTOCOL, change)
        async with pair.asking.open_bulk(pair.bob_id, HASHED, Text(), timeout=5) as transfer:
            assert await next_chunk(transfer) == b"abc"
            with pytest.raises(MalformedMessage, match="hash"):
                await next_chunk(transfer)

    between_two(scenario)


def test_misuse_on_this_side_is_said_to_be_misuse(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(pair: Pair) -> None:
        async def forget(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
        ) -> None:
            with pytest.raises(ProtocolMisuse):
                await transfer.send_chunk(b"before accepting")
            with pytest.raises(ProtocolMisuse):
                _ = transfer.accepted
            await transfer.accept(Number(0))
            with pytest.raises(ProtocolMisuse):
                await transfer.accept(Number(0))
            await transfer.send_chunk(b"unread")
            await trio.sleep(1)

        pair.answering.serve_bulk(UPLOAD, forget)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            for chunk in (b"", bytes(CHUNK_LIMIT + 1)):
                with pytest.raises(ProtocolMisuse):
                    await transfer.send_chunk(chunk)
            with pytest.raises(ProtocolMisuse, match="must be received"):
                await transfer.receive_closing()
            await transfer.send_closing(Number(0))
            with pytest.raises(ProtocolMisuse):
                await transfer.send_chunk(b"after closing")
        await trio.sleep(2)

    between_two(scenario)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "did not finish" in caplog.text


def test_two_tasks_cannot_receive_from_one_transfer_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count_bytes)
        async with (
            pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(next_chunk, transfer)
            await trio.sleep(0.01)
            with pytest.raises(trio.BusyResourceError):
                await next_chunk(transfer)
            nursery.cancel_scope.cancel()

    between_two(scenario)


def test_empty_is_a_message() -> None:
    assert encode(Empty()) == b"\x90"
