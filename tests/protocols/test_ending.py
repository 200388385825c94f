"""Ending everything with one peer at once, with the reason, and what that peer may do then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from auth.refusals import Reason
from protocols.errors import PotluckError, Unreachable
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.not_allowed import NotAllowed
from protocols.rpc import BulkMethod, Transfer
from protocols.rpc.peers import LET_IN_EVERY_SECONDS, MOST_PEERS, ShutOut
from tests.chunks import next_chunk
from tests.protocols.pair import (
    DOUBLE,
    FIRST_CALL_SECONDS,
    PROTOCOL,
    SLEEP,
    Number,
    Pair,
    Text,
    between_two,
)

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number
)


def revoked() -> NotAllowed:
    return NotAllowed("No more of this.", advice="Ask.", reason=Reason.REVOKED)


class Failures:
    """Runs things that should fail, and keeps how and when they did."""

    def __init__(self) -> None:
        self.errors: list[tuple[float, PotluckError]] = []

    async def keep(self, ask: Callable[[], Awaitable[object]]) -> None:
        try:
            await ask()
        except PotluckError as error:
            self.errors.append((trio.current_time(), error))
        else:
            pytest.fail("it did not fail")


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def never(_caller: Caller, _request: Number) -> Number:
    await trio.sleep_forever()
    raise AssertionError


async def take(_caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text) -> None:
    await transfer.accept(Number(0))
    while await next_chunk(transfer) is not None:
        pass
    await transfer.finish(Number(1))


async def wait_in_vain(
    _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
) -> None:
    await transfer.accept(Number(0))
    await trio.sleep_forever()


def test_our_calls_and_transfers_with_the_peer_raise_the_reason_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, never)
        pair.answering.serve_bulk(UPLOAD, take)
        failures = Failures()

        async def transfer(
            work: Callable[[Transfer[Number, Number, Number]], Awaitable[object]],
        ) -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as opened:
                await work(opened)

        async def look_away(_transfer: Transfer[Number, Number, Number]) -> None:
            await trio.sleep_forever()

        async def call() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=60)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(failures.keep, call)
            nursery.start_soon(failures.keep, call)
            nursery.start_soon(failures.keep, lambda: transfer(lambda it: next_chunk(it)))
            nursery.start_soon(failures.keep, lambda: transfer(look_away))
            await pair.settle()
            await pair.settle()
            ended_at = trio.current_time()
            assert await pair.asking.end_all_with(pair.bob_id, revoked()) == 3, (
                "a stream of calls and two transfers"
            )
        assert len(failures.errors) == 4
        for when, error in failures.errors:
            assert when == ended_at
            assert isinstance(error, NotAllowed)
            assert error.reason is Reason.REVOKED
        await pair.settle()
        assert pair.answering.statistics().requests_in_flight == 0, "they are cancelled over there"
        assert pair.answering.statistics().transfers_open == 0
        assert pair.answering.statistics().misbehaviours == 0

    between_two(scenario)


def test_open_calls_and_transfers_of_the_peer_are_cancelled_and_it_is_told_why() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, never)
        pair.answering.serve_bulk(UPLOAD, take)
        failures = Failures()

        async def call() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=60)

        async def upload() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                for _ in range(1000):
                    await transfer.send_chunk(bytes(1000))
                    await trio.sleep(0.1)

        async def download() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
                await next_chunk(transfer)

        async with trio.open_nursery() as nursery:
            for ask in (call, call, upload, download):
                nursery.start_soon(failures.keep, ask)
            await pair.settle()
            await pair.settle()
            before = trio.current_time()
            ended = await pair.answering.end_all_with(pair.alice.peer_id, revoked())
            assert ended == 3
            assert trio.current_time() - before <= 1.0
            assert pair.answering.statistics().requests_in_flight == 0
            assert pair.answering.statistics().transfers_open == 0
        assert [type(error) for _, error in failures.errors] == [NotAllowed] * 4
        for _, error in failures.errors:
            assert isinstance(error, NotAllowed)
            assert (error.reason, error.by_peer) == (Reason.REVOKED, True)
            assert (error.what, error.advice) == ("No more of this.", "Ask.")
        assert pair.asking.statistics().misbehaviours == 0

    between_two(scenario)


def test_a_call_that_has_only_just_begun_is_ended_as_well() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, never)
        failures = Failures()

        async def call() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=60)

        for steps in range(4):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(failures.keep, call)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                await pair.asking.end_all_with(pair.bob_id, revoked())
            pair.asking.readmit(pair.bob_id)
        assert [type(error) for _, error in failures.errors] == [NotAllowed] * 4
        assert all(when == 0.0 for when, _ in failures.errors)
        assert pair.asking.statistics().calls_in_flight == 0

    between_two(scenario)


def test_a_transfer_that_fails_by_itself_while_it_is_ended_leaves_no_stream() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, wait_in_vain)

        async def fail_on_the_way_out() -> None:
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5):
                try:
                    await trio.sleep_forever()
                finally:
                    failed.append(True)
                    raise KeyError

        async def run() -> None:
            with pytest.raises(KeyError):
                await fail_on_the_way_out()

        failed: list[bool] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(2 * FIRST_CALL_SECONDS)
            await pair.asking.end_all_with(pair.bob_id, revoked())
        await pair.settle()
        assert failed
        link = pair.alice.link(pair.bob_id)
        assert link is not None
        assert link.open_streams == 0

    between_two(scenario)


def test_the_others_are_not_touched() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        carol = pair.world.add_node("carol")
        assert await pair.answering.end_all_with(carol.peer_id, revoked()) == 0
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)

    between_two(scenario)


def test_a_peer_that_is_shut_out_is_not_called_and_its_streams_are_reset() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.asking.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        await pair.answering.end_all_with(pair.alice.peer_id, revoked())
        assert pair.answering.statistics().peers_shut_out == 1
        for _ in range(2):
            with pytest.raises(NotAllowed, match="No more") as refused:
                await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(4), timeout=5)
            assert refused.value.surely_not_executed
        with pytest.raises(NotAllowed, match="No more"):
            async with pair.answering.open_bulk(pair.alice.peer_id, UPLOAD, Text(), timeout=5):
                pass
        await pair.settle()
        with pytest.raises(Unreachable):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        pair.answering.readmit(pair.alice.peer_id)
        assert pair.answering.shut_out(pair.alice.peer_id) is None
        await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(4), timeout=5)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)

    between_two(scenario)


def test_a_peer_that_does_not_read_cannot_hold_up_the_ending() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, never)
        pair.answering.serve_bulk(UPLOAD, wait_in_vain)
        failures = Failures()

        async def call() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=600)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(failures.keep, call)
            await pair.settle()
            await pair.settle()
            pair.world.cut([pair.bob], [pair.alice])
            before = trio.current_time()
            await pair.answering.end_all_with(pair.alice.peer_id, revoked())
            assert trio.current_time() - before <= 1.0
            await trio.sleep(2)
            assert pair.answering.statistics().requests_in_flight == 0
            nursery.cancel_scope.cancel()

    between_two(scenario)


def test_one_stream_is_let_in_now_and_then() -> None:
    shut_out = ShutOut()
    peer = PeerId("peer")
    shut_out.shut(peer, revoked(), 100.0)
    tries = [100.0 + seconds for seconds in range(1, 12)]
    let_in = [now for now in tries if shut_out.lets_in(peer, now)]
    assert let_in == [100 + LET_IN_EVERY_SECONDS, 100 + 2 * LET_IN_EVERY_SECONDS]


def test_the_memory_of_peers_shut_out_is_bounded() -> None:
    shut_out = ShutOut()
    for number in range(MOST_PEERS + 10):
        shut_out.shut(PeerId(str(number)), revoked(), 0.0)
    assert len(shut_out) == MOST_PEERS
    assert shut_out.reason(PeerId("9")) is None
    assert shut_out.reason(PeerId("10")) is not None
