"""Peers that break the protocol can do little harm to us, and less each time."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest
import trio

from protocols.errors import (
    DeadlineExceeded,
    LimitExceeded,
    MalformedMessage,
    ProtocolNotServed,
    RemoteMisbehaviour,
    Unreachable,
)
from protocols.guard import Caller
from protocols.network import Stream
from protocols.rpc import decode, encode
from protocols.rpc.calls import MOST_UNKNOWN_CANCELLED
from protocols.rpc.frames import (
    BATCH_BYTES,
    CANCEL,
    CHUNK,
    CONGESTED_BYTES,
    ERROR,
    FRAME_HEADER_BYTES,
    MOST_AT_ONCE,
    REQUEST,
    RESPONSE,
    message_frame,
    split_payload,
)
from protocols.rpc.messages import CancelHead, ErrorBody, ErrorHead, RequestHead, ResponseHead
from protocols.rpc.state import RpcLimits
from tests.protocols.pair import (
    BLOB,
    DOUBLE,
    PROTOCOL,
    SLEEP,
    Blob,
    Number,
    Pair,
    between_two,
)


def request(call_id: int, method: str = "double", body: bytes | None = None) -> bytes:
    encoded = encode(Number(1)) if body is None else body
    return message_frame(REQUEST, encode(RequestHead(call_id, method, 60_000)), encoded)


def response(call_id: int, body: bytes | None = None) -> bytes:
    encoded = encode(Number(1)) if body is None else body
    return message_frame(RESPONSE, encode(ResponseHead(call_id)), encoded)


def frame(kind: int, payload: bytes, declared: int | None = None) -> bytes:
    length = len(payload) if declared is None else declared
    return length.to_bytes(4, "big") + bytes([kind]) + payload


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def everything_from(stream: Stream) -> tuple[bytes, bool]:
    """The bytes that came until the end, and whether the end was a reset."""
    data = b""
    try:
        while more := await stream.receive_some(65_536):
            data += more
    except trio.BrokenResourceError:
        return data, True
    return data, False


def errors_in(data: bytes) -> list[tuple[int, str]]:
    """(call id, code) of the ERROR frames in an answer."""
    found = []
    while data:
        length, kind = int.from_bytes(data[:4], "big"), data[4]
        payload, data = data[5 : 5 + length], data[FRAME_HEADER_BYTES + length :]
        head, body = split_payload(kind, payload)
        if kind == ERROR:
            found.append((decode(ErrorHead, head).id, decode(ErrorBody, body).code))
    return found


# A stranger's messages to a node that serves

ATTACKS = {
    "garbage": b"\x16\x03\x01 GET / HTTP/1.1\r\n\r\n" * 10,
    "4 GB declared": frame(REQUEST, b"", declared=0xFFFFFFFF),
    "unknown kind": frame(99, b"hello"),
    "a chunk among calls": request(1) + frame(CHUNK, b"x"),
    "a response to nobody": frame(RESPONSE, response(1)[5:]),
    "a head that is no head": frame(REQUEST, b"\x00\x01\xc0" + encode(Number(1))),
    "a head longer than its frame": frame(REQUEST, b"\x00\xff\x93"),
    "deeply nested head": frame(REQUEST, b"\x0f\xa0" + b"\x91" * 4000),
    "deeply nested body": request(1, "blob", b"\x91" * 60_000),
    "a body of another type": request(1, body=encode("text")),
    "a body with more behind it": request(1, body=encode(Number(1)) + b"\x00"),
    "the id 0": request(0),
    "a request larger than its method allows": request(1, body=bytes(69_000)),
    "a truncated frame": request(1)[:-1],
    "a truncated header": request(1) + b"\x00\x00",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_stranger_who_breaks_the_protocol_is_told_why_and_named_once_and_avoided(
    attack: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve(BLOB, _echo_blob)
        for attempt in range(3):
            stream = await pair.alice.open(pair.bob_id, PROTOCOL)
            await stream.send_all(attack)
            await stream.send_eof()
            data, _was_reset = await everything_from(stream)
            stream.reset()
            assert pair.answering.statistics().misbehaviours == attempt + 1
            told = {code for _, code in errors_in(data)}
            assert told
            assert told <= {"malformed-message", "limit-exceeded"}
            assert pair.answering.avoided_for(pair.alice.peer_id) > 0
            await trio.sleep(2**attempt + 0.5)
        statistics = pair.answering.statistics()
        assert (statistics.served_streams, statistics.requests_in_flight) == (0, 0)

    between_two(scenario)
    named = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(named) == 1
    assert PROTOCOL in named[0].getMessage()


async def _echo_blob(_caller: Caller, request: Blob) -> Blob:
    return request


def test_while_a_peer_is_avoided_its_streams_are_reset_and_it_is_not_called() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(frame(99, b"hello"))
        await everything_from(stream)
        with pytest.raises(Unreachable):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        with pytest.raises(Unreachable, match="is avoided for another") as error:
            await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(1), timeout=5)
        assert error.value.surely_not_executed
        await trio.sleep(1)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5) == Number(2)

    between_two(scenario)


def test_a_request_with_the_id_of_one_in_hand_breaks_the_protocol() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, _sleep_for_ever)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(request(7, "sleep") + request(7, "sleep"))
        data, _ = await everything_from(stream)
        assert errors_in(data) == [(0, "malformed-message")]
        assert pair.answering.statistics().requests_in_flight == 0

    between_two(scenario)


async def _sleep_for_ever(_caller: Caller, _request: Number) -> Number:
    await trio.sleep_forever()
    raise AssertionError


def test_cancelling_an_unknown_call_is_harmless() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(message_frame(CANCEL, encode(CancelHead(9)), b"") + request(1))
        await stream.send_eof()
        data, was_reset = await everything_from(stream)
        assert data == message_frame(RESPONSE, encode(ResponseHead(1)), encode(Number(2)))
        assert not was_reset

    between_two(scenario)


def test_a_flood_of_cancelled_calls_that_were_never_made_breaks_the_protocol() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        cancel = message_frame(CANCEL, encode(CancelHead(9)), b"")
        await stream.send_all(request(1) + 2 * MOST_UNKNOWN_CANCELLED * cancel)
        await everything_from(stream)
        assert pair.answering.statistics().misbehaviours == 1

    between_two(scenario)


def test_thousands_of_requests_that_come_together_are_all_answered() -> None:
    count = 2 * MOST_AT_ONCE + 1

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(b"".join(request(number + 1) for number in range(count)))
        await stream.send_eof()
        data, was_reset = await everything_from(stream)
        assert not was_reset
        assert len(errors_in(data)) + pair.answering.statistics().requests_served == count

    between_two(scenario)


async def _trickle(stream: Stream, data: bytes) -> None:
    for byte in data:
        await stream.send_all(bytes([byte]))
        await trio.sleep(1)


def test_one_byte_a_second_is_cut_off_after_the_stall_time() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        start = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await _trickle(stream, request(1, body=bytes(5000)))
        assert 30 <= trio.current_time() - start <= 40
        assert pair.answering.statistics().served_streams == 0

    between_two(scenario)


def test_a_stream_on_which_nothing_is_ever_said_is_reset() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        start = trio.current_time()
        assert await everything_from(stream) == (b"", True)
        assert trio.current_time() - start == pytest.approx(30, abs=1)

    between_two(scenario)


def test_a_peer_that_opens_more_streams_than_allowed_gets_them_reset() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        streams = [await pair.alice.open(pair.bob_id, PROTOCOL) for _ in range(6)]
        for stream in streams[4:]:
            assert await everything_from(stream) == (b"", True)
        await streams[0].send_all(request(1))
        assert await streams[0].receive_some(1000)

    between_two(scenario, bobs_limits=RpcLimits(streams_per_peer=4))


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["async handler", "plain function"])
def test_a_peer_that_does_not_read_its_answers_is_not_read_either_and_then_reset(
    waits: bool,
) -> None:
    async def scenario(pair: Pair) -> None:
        made = 0

        def big(_caller: Caller, _request: Blob) -> Blob:
            nonlocal made
            made += 1
            return Blob(bytes(60_000))

        async def big_later(caller: Caller, request: Blob) -> Blob:
            return big(caller, request)

        pair.answering.serve(BLOB, big_later if waits else big)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        calls = b"".join(request(n, "blob", encode(Blob(b""))) for n in range(1, 5000))
        start = trio.current_time()
        tracemalloc.start()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(calls * 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        window = pair.world.settings.window_bytes
        limit = 2 * window + CONGESTED_BYTES + 2 * BATCH_BYTES + 256 * 60_000 + 21 * len(calls)
        assert peak < limit
        assert made < 600
        assert trio.current_time() - start == pytest.approx(30, abs=3)
        await pair.settle()
        assert pair.answering.statistics().served_streams == 0
        assert pair.answering.statistics().requests_in_flight == 0

    between_two(scenario)


def test_an_answer_that_is_given_up_half_way_ends_with_a_reset_for_which_nobody_is_blamed() -> None:
    """An end inside a frame would be our fault in the eyes of the peer that was slow."""

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(BLOB, _echo_blob)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        large = [request(n, "blob", encode(Blob(bytes(60_000)))) for n in range(1, 20)]
        with trio.move_on_after(40):
            for one in large:
                await stream.send_all(one)
        data, was_reset = await everything_from(stream)
        assert data
        assert was_reset

    between_two(scenario)


# Answers of a node that serves

Answer = Callable[[Stream], Awaitable[None]]


async def _read_request(stream: Stream) -> None:
    await stream.receive_some(65_536)


def answering_with(data: bytes, *, then_wait: bool = True) -> Answer:
    async def answer(stream: Stream) -> None:
        await _read_request(stream)
        await stream.send_all(data)
        if then_wait:
            await trio.sleep_forever()

    return answer


LIES: dict[str, tuple[bytes, type[RemoteMisbehaviour]]] = {
    "garbage": (b"HTTP/1.1 400 Bad Request\r\n\r\n", MalformedMessage),
    "4 GB declared": (frame(RESPONSE, b"", declared=0xFFFFFFFF), LimitExceeded),
    "unknown kind": (frame(99, b"hello"), MalformedMessage),
    "a request": (request(1), MalformedMessage),
    "an answer to a call that was not made": (response(2), MalformedMessage),
    "an error for a call that was not made": (
        message_frame(ERROR, encode(ErrorHead(77)), encode(ErrorBody("busy"))),
        MalformedMessage,
    ),
    "a response to call 0": (response(0), MalformedMessage),
    "a response of another type": (response(1, encode("text")), MalformedMessage),
    "a response larger than its method allows": (response(1, bytes(69_000)), LimitExceeded),
    "an error without a code": (
        message_frame(ERROR, encode(ErrorHead(1)), encode([])),
        MalformedMessage,
    ),
}


@pytest.mark.parametrize(("lie", "error"), LIES.values(), ids=LIES.keys())
def test_a_serving_peer_that_breaks_the_protocol_fails_the_call_and_is_avoided(
    lie: bytes, error: type[RemoteMisbehaviour], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(pair: Pair) -> None:
        pair.bob.serve("/potluck/lies/1.0.0", answering_with(lie))
        lying = type(DOUBLE)("/potluck/lies/1.0.0", "double", Number, Number)
        with pytest.raises(error):
            await pair.asking.call(pair.bob_id, lying, Number(1), timeout=20)
        assert pair.asking.avoided_for(pair.bob_id) > 0
        await pair.settle()
        statistics = pair.asking.statistics()
        assert (statistics.call_streams, statistics.calls_in_flight) == (0, 0)
        assert statistics.misbehaviours == 1

    between_two(scenario)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_lie_to_one_call_ends_the_others_on_the_stream_too() -> None:
    async def scenario(pair: Pair) -> None:
        pair.bob.serve("/potluck/lies/1.0.0", answering_with(frame(99, b"hello")))
        lying = type(DOUBLE)("/potluck/lies/1.0.0", "double", Number, Number)
        ended = []

        async def ask() -> None:
            with pytest.raises(MalformedMessage):
                await pair.asking.call(pair.bob_id, lying, Number(1), timeout=20)
            ended.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert len(ended) == 5
        assert len(set(ended)) == 1

    between_two(scenario)


def test_an_answer_that_is_cut_short_makes_the_peer_unreachable_or_malformed() -> None:
    async def scenario(pair: Pair) -> None:
        pair.bob.serve("/potluck/lies/1.0.0", answering_with(response(1)[:-1], then_wait=False))
        lying = type(DOUBLE)("/potluck/lies/1.0.0", "double", Number, Number)
        with pytest.raises(MalformedMessage, match="in the middle of a message"):
            await pair.asking.call(pair.bob_id, lying, Number(1), timeout=20)

    between_two(scenario)


def test_an_answer_at_one_byte_a_second_costs_the_deadline_and_then_the_stream() -> None:
    async def scenario(pair: Pair) -> None:
        async def trickle(stream: Stream) -> None:
            await _read_request(stream)
            await _trickle(stream, response(1, bytes(5000)))

        pair.bob.serve("/potluck/lies/1.0.0", trickle)
        slow = type(BLOB)("/potluck/lies/1.0.0", "blob", Blob, Blob)
        with pytest.raises(DeadlineExceeded):
            await pair.asking.call(pair.bob_id, slow, Blob(), timeout=5)
        with pytest.raises(DeadlineExceeded, match="inside a message"):
            await pair.asking.call(pair.bob_id, slow, Blob(), timeout=100)
        assert pair.asking.statistics().call_streams == 0

    between_two(scenario)


def test_a_peer_that_says_goodbye_with_a_reason_is_quoted_and_not_blamed() -> None:
    async def scenario(pair: Pair) -> None:
        goodbye = message_frame(
            ERROR, encode(ErrorHead(0)), encode(ErrorBody("malformed-message", "I do not follow."))
        )
        pair.bob.serve("/potluck/lies/1.0.0", answering_with(goodbye))
        strict = type(DOUBLE)("/potluck/lies/1.0.0", "double", Number, Number)
        with pytest.raises(MalformedMessage, match="I do not follow"):
            await pair.asking.call(pair.bob_id, strict, Number(1), timeout=20)
        assert pair.asking.avoided_for(pair.bob_id) == 0
        assert pair.asking.statistics().misbehaviours == 0

    between_two(scenario)


def test_a_late_answer_to_a_cancelled_call_is_dropped() -> None:
    async def scenario(pair: Pair) -> None:
        async def late(stream: Stream) -> None:
            await _read_request(stream)
            await trio.sleep(5)
            await stream.send_all(response(1) + response(2))
            await trio.sleep_forever()

        pair.bob.serve("/potluck/lies/1.0.0", late)
        slow = type(DOUBLE)("/potluck/lies/1.0.0", "double", Number, Number)
        with pytest.raises(DeadlineExceeded):
            await pair.asking.call(pair.bob_id, slow, Number(1), timeout=3)
        assert await pair.asking.call(pair.bob_id, slow, Number(1), timeout=9) == Number(1)
        assert pair.asking.statistics().misbehaviours == 0

    between_two(scenario)


@pytest.mark.slow
def test_a_peer_that_never_reads_makes_callers_wait_within_bounds_and_their_deadline() -> None:
    async def scenario(pair: Pair) -> None:
        async def deaf(_stream: Stream) -> None:
            await trio.sleep_forever()

        pair.bob.serve("/potluck/deaf/1.0.0", deaf)
        method = type(BLOB)("/potluck/deaf/1.0.0", "blob", Blob, Blob)
        ended: list[str] = []

        async def ask() -> None:
            try:
                await pair.asking.call(pair.bob_id, method, Blob(bytes(60_000)), timeout=20)
            except DeadlineExceeded:
                ended.append("deadline")

        tracemalloc.start()
        async with trio.open_nursery() as nursery:
            for _ in range(500):
                nursery.start_soon(ask)
            await trio.sleep(10)
            peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert ended == ["deadline"] * 500
        # each caller holds its request, and encoded in a buffer that msgspec leaves half again as
        # large; beside them only the queue and the window
        window = pair.world.settings.window_bytes
        assert peak < 500 * 2.5 * 61_500 + CONGESTED_BYTES + 2 * BATCH_BYTES + 2 * window
        assert pair.asking.statistics().calls_in_flight == 0

    between_two(scenario)


def test_a_retired_stream_with_half_a_request_on_it_ends_with_a_reset() -> None:
    """An end inside the request would make the peer, which was only slow, avoid us."""
    ends: list[bool] = []

    async def scenario(pair: Pair) -> None:
        async def slow(stream: Stream) -> None:
            await trio.sleep(25)
            ends.append((await everything_from(stream))[1])

        pair.bob.serve("/potluck/slow/1.0.0", slow)
        method = type(BLOB)("/potluck/slow/1.0.0", "blob", Blob, Blob)

        async def ask() -> None:
            with pytest.raises(DeadlineExceeded):
                await pair.asking.call(pair.bob_id, method, Blob(bytes(60_000)), timeout=3)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
        await trio.sleep(24)

    between_two(scenario, limits=RpcLimits(idle_seconds=5))
    assert ends == [True]


def test_a_peer_that_does_not_serve_the_protocol_is_not_blamed() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(ProtocolNotServed):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        assert pair.asking.statistics().misbehaviours == 0

    between_two(scenario)
