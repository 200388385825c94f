"""Unary calls between two nodes that behave: order, time, cancellation, errors, counts."""

from __future__ import annotations

import logging
import math

import pytest
import trio
import trio.lowlevel

from protocols.errors import (
    Busy,
    DeadlineExceeded,
    HandlerFailed,
    PotluckError,
    ProtocolMisuse,
    ProtocolNotServed,
    Refused,
    Unreachable,
)
from protocols.guard import Caller
from protocols.identity import Identity
from protocols.network import LinkEvent, Reach
from protocols.rpc import Method, open_rpc
from protocols.rpc.state import RpcLimits
from tests.protocols.pair import (
    BLOB,
    DOUBLE,
    FIRST_CALL_SECONDS,
    LATENCY_SECONDS,
    PROTOCOL,
    ROUND_TRIP,
    SLEEP,
    Blob,
    Number,
    Pair,
    Text,
    between_two,
)


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


class Sleeper:
    """A handler that sleeps for as many milliseconds as it is asked to, and says how it ended."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled_at: list[float] = []
        self.finished = 0

    async def __call__(self, _caller: Caller, request: Number) -> Number:
        self.running += 1
        try:
            await trio.sleep(request.value / 1000)
            self.finished += 1
        except trio.Cancelled:
            self.cancelled_at.append(trio.current_time())
            raise
        finally:
            self.running -= 1
        return request


def serve_sleep(pair: Pair) -> Sleeper:
    sleeper = Sleeper()

    async def sleep(caller: Caller, request: Number) -> Number:
        return await sleeper(caller, request)

    pair.answering.serve(SLEEP, sleep)
    return sleeper


def test_a_call_is_answered_and_knows_who_asks() -> None:
    async def scenario(pair: Pair) -> None:
        async def who(caller: Caller, _request: Number) -> Text:
            return Text(caller.peer)

        method = Method(PROTOCOL, "who", Number, Text)
        pair.answering.serve(method, who)
        answer = await pair.asking.call(pair.bob_id, method, Number(), timeout=5)
        assert answer == Text(pair.alice.peer_id)

    between_two(scenario)


def test_the_first_call_connects_and_later_ones_take_one_round_trip() -> None:
    async def scenario(pair: Pair) -> list[float]:
        pair.answering.serve(DOUBLE, double)
        times = []
        for _ in range(3):
            start = trio.current_time()
            assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)
            times.append(trio.current_time() - start)
        return times

    assert between_two(scenario) == pytest.approx([FIRST_CALL_SECONDS, ROUND_TRIP, ROUND_TRIP])


def test_calls_share_one_stream_and_are_in_flight_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        answers = {}

        async def ask(value: int) -> None:
            answers[value] = await pair.asking.call(pair.bob_id, DOUBLE, Number(value), timeout=5)

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for value in range(100):
                nursery.start_soon(ask, value)
        assert trio.current_time() - start == pytest.approx(FIRST_CALL_SECONDS)
        assert answers == {value: Number(2 * value) for value in range(100)}
        assert pair.asking.statistics().call_streams_opened == 1
        assert pair.asking.statistics().call_streams == 1

    between_two(scenario)


def test_answers_come_in_the_order_in_which_they_are_ready() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        order = []

        async def ask(milliseconds: int) -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(milliseconds), timeout=9)
            order.append(milliseconds)

        async with trio.open_nursery() as nursery:
            for milliseconds in (3000, 1000, 2000):
                nursery.start_soon(ask, milliseconds)
        assert order == [1000, 2000, 3000]

    between_two(scenario)


def test_a_plain_function_answers_too() -> None:
    async def scenario(pair: Pair) -> None:
        def halve(_caller: Caller, request: Number) -> Number:
            if request.value % 2:
                raise Refused("odd")
            return Number(request.value // 2)

        pair.answering.serve(DOUBLE, halve)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(8), timeout=5) == Number(4)
        with pytest.raises(Refused, match="odd"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(7), timeout=5)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(6), timeout=5) == Number(3)

    between_two(scenario)


def test_cancelling_a_call_cancels_its_handler_one_latency_later() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_for_long, pair)
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
        await pair.settle()
        assert sleeper.cancelled_at == pytest.approx([start + 2 + LATENCY_SECONDS])
        assert sleeper.running == 0
        assert pair.asking.statistics().calls_cancelled == 1
        assert pair.answering.statistics().requests_cancelled == 1

    between_two(scenario)


def test_the_deadline_ends_the_call_here_and_the_handler_there_even_through_a_cut() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def cut() -> None:
                await trio.sleep(1)  # the request is there; a CANCEL will not get through
                pair.world.cut([pair.alice], [pair.bob])

            with pytest.raises(DeadlineExceeded, match="within 3 seconds"):
                await pair.asking.call(pair.bob_id, SLEEP, Number(60_000), timeout=3)
            assert trio.current_time() == pytest.approx(start + 3)
            await trio.sleep(0.5)
            assert sleeper.running == 0
            assert sleeper.cancelled_at == pytest.approx([start + 3 + LATENCY_SECONDS], abs=0.002)
            assert pair.asking.statistics().calls_timed_out == 1

    between_two(scenario)


def test_a_nearer_deadline_of_the_caller_itself_travels_too() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        start = trio.current_time()
        with trio.move_on_after(1):
            await pair.asking.call(pair.bob_id, SLEEP, Number(60_000), timeout=100)
        pair.world.cut([pair.alice], [pair.bob])  # before the CANCEL can arrive
        await trio.sleep(1)
        assert sleeper.running == 0
        assert sleeper.cancelled_at[0] - start < 1.1

    between_two(scenario)


@pytest.mark.slow
def test_a_thousand_cancelled_calls_leave_nothing_behind() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        await pair.settle()
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        links = pair.alice.link(pair.bob_id)
        assert links is not None

        async def ask() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(600_000), timeout=1000)

        for moment in (0.0, 0.01, LATENCY_SECONDS, ROUND_TRIP):
            with trio.move_on_after(moment):
                async with trio.open_nursery() as nursery:
                    for _ in range(250):
                        nursery.start_soon(ask)
        await pair.settle()
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before
        assert sleeper.running == 0
        now = pair.alice.link(pair.bob_id)
        assert now is not None
        assert now.open_streams == links.open_streams
        mine, his = pair.asking.statistics(), pair.answering.statistics()
        assert mine.calls_in_flight == 0
        assert mine.calls_cancelled == 1000
        assert his.requests_in_flight == 0
        assert his.misbehaviours == mine.misbehaviours == 0
        assert await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=5) == Number(1)
        assert pair.asking.statistics().call_streams_opened == 1

    between_two(scenario)


def test_cancelling_calls_while_the_stream_is_being_opened_leaves_nothing_behind() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        for milliseconds in range(0, 800, 50):
            with trio.move_on_after(milliseconds / 1000):
                await pair.asking.call(pair.bob_id, DOUBLE, Number(), timeout=100)
            await pair.settle()
            await pair.alice.disconnect(pair.bob_id)
            await pair.settle()
            assert trio.lowlevel.current_statistics().tasks_living == tasks_before
        assert pair.asking.statistics().calls_in_flight == 0

    between_two(scenario)


def test_own_errors_and_bugs_of_a_handler_end_only_their_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class StaleEpoch(PotluckError):
        pass

    method = Method(PROTOCOL, "step", Number, Number, errors={"stale-epoch": StaleEpoch})

    async def scenario(pair: Pair) -> None:
        async def step(_caller: Caller, request: Number) -> Number:
            await trio.lowlevel.checkpoint()
            match request.value:
                case 1:
                    raise StaleEpoch("Epoch 7 is over.", why="You were away.", advice="Catch up.")
                case 2:
                    raise ValueError("the password is swordfish")
                case 3:
                    async with trio.open_nursery():
                        raise Busy("inside a nursery")
            return request

        pair.answering.serve(method, step)
        with pytest.raises(StaleEpoch) as stale:
            await pair.asking.call(pair.bob_id, method, Number(1), timeout=5)
        assert str(stale.value) == "Epoch 7 is over. You were away. Catch up."
        with pytest.raises(HandlerFailed) as failed:
            await pair.asking.call(pair.bob_id, method, Number(2), timeout=5)
        assert "swordfish" not in str(failed.value)
        with pytest.raises(Busy, match="inside a nursery"):
            await pair.asking.call(pair.bob_id, method, Number(3), timeout=5)
        assert await pair.asking.call(pair.bob_id, method, Number(4), timeout=5) == Number(4)
        assert pair.asking.statistics().call_streams_opened == 1

    between_two(scenario)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "swordfish" in caplog.text


def test_a_method_or_protocol_that_is_not_served_is_said_to_be_so() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        with pytest.raises(ProtocolNotServed, match="sleep") as unknown_method:
            await pair.asking.call(pair.bob_id, SLEEP, Number(), timeout=5)
        assert unknown_method.value.surely_not_executed
        newer = Method("/potluck/test/2.0.0", "double", Number, Number)
        with pytest.raises(ProtocolNotServed) as unknown_version:
            await pair.asking.call(pair.bob_id, newer, Number(), timeout=5)
        assert unknown_version.value.surely_not_executed
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5) == Number(2)
        assert pair.answering.statistics().misbehaviours == 0

    between_two(scenario)


def test_an_unreachable_peer_is_said_to_be_so_and_surely_did_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        nobody = Identity.from_seed(b"n" * 32).peer_id
        with pytest.raises(Unreachable) as error:
            await pair.asking.call(nobody, DOUBLE, Number(), timeout=60)
        assert error.value.surely_not_executed

    between_two(scenario)


def test_a_peer_that_dies_in_mid_call_is_unreachable_at_once_and_may_have_acted() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        start = trio.current_time()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def kill() -> None:
                await trio.sleep(1)
                pair.world.crash(pair.bob)

            with pytest.raises(Unreachable) as error:
                await pair.asking.call(pair.bob_id, SLEEP, Number(60_000), timeout=100)
        assert trio.current_time() - start == pytest.approx(1 + LATENCY_SECONDS)
        assert not error.value.surely_not_executed
        await pair.settle()
        assert pair.asking.statistics().call_streams == 0

    between_two(scenario)


def test_calls_go_on_by_themselves_after_the_link_was_lost() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        for _ in range(3):
            assert await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5) == Number(2)
            pair.world.break_link(pair.alice, pair.bob)
            await pair.settle()
        assert pair.asking.statistics().call_streams_opened == 3

    between_two(scenario)


def test_a_peer_that_comes_back_with_the_same_identity_is_called_again() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        pair.world.crash(pair.bob)
        await pair.settle()
        async with open_rpc(pair.world.restart(pair.bob)) as back:
            back.serve(DOUBLE, double)
            assert await pair.asking.call(pair.bob_id, DOUBLE, Number(2), timeout=5) == Number(4)

    between_two(scenario)


def test_a_stopped_peer_costs_the_caller_its_deadline_and_no_more() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        pair.world.stop(pair.bob)
        start = trio.current_time()
        with pytest.raises(DeadlineExceeded) as error:
            await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=2)
        assert trio.current_time() == start + 2
        assert not error.value.surely_not_executed

    between_two(scenario)


def test_calls_beyond_what_a_peer_allows_are_refused_as_busy() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        results: list[str] = []

        async def ask() -> None:
            try:
                await pair.asking.call(pair.bob_id, SLEEP, Number(5000), timeout=20)
                results.append("answered")
            except Busy as error:
                results.append("busy" if error.surely_not_executed else "maybe")

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
            await trio.sleep(3)
            assert sleeper.running == 4
        assert results == ["busy"] * 6 + ["answered"] * 4
        assert pair.answering.statistics().requests_refused_busy == 6

    between_two(scenario, bobs_limits=RpcLimits(served_per_peer=4))


def test_own_calls_beyond_the_limit_wait_for_their_turn_within_their_deadline() -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        most = 0
        outcomes: list[str] = []

        async def ask(timeout: float) -> None:
            nonlocal most
            try:
                await pair.asking.call(pair.bob_id, SLEEP, Number(1000), timeout=timeout)
                outcomes.append("answered")
            except DeadlineExceeded:
                outcomes.append("late")
            most = max(most, sleeper.running)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, 100 if number % 5 else 1.5)
        assert outcomes.count("answered") >= 8
        assert most <= 3
        assert pair.asking.statistics().calls_in_flight == 0

    between_two(scenario, limits=RpcLimits(calls_per_peer=3))


def test_a_node_with_too_many_calls_in_flight_refuses_its_own() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask_for_long, pair)
            await trio.sleep(1)
            with pytest.raises(Busy):
                await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=5)
            nursery.cancel_scope.cancel()

    between_two(scenario, limits=RpcLimits(calls_in_total=2))


async def ask_for_long(pair: Pair) -> None:
    await pair.asking.call(pair.bob_id, SLEEP, Number(100_000), timeout=1000)


def test_messages_larger_than_declared_are_refused_on_the_side_that_makes_them() -> None:
    async def scenario(pair: Pair) -> None:
        async def grow(_caller: Caller, request: Blob) -> Blob:
            return Blob(bytes(len(request.data) * 10))

        pair.answering.serve(BLOB, grow)
        with pytest.raises(ProtocolMisuse, match="request of blob"):
            await pair.asking.call(pair.bob_id, BLOB, Blob(bytes(70_000)), timeout=5)
        with pytest.raises(HandlerFailed):
            await pair.asking.call(pair.bob_id, BLOB, Blob(bytes(60_000)), timeout=5)
        answer = await pair.asking.call(pair.bob_id, BLOB, Blob(bytes(6_000)), timeout=5)
        assert len(answer.data) == 60_000

    between_two(scenario)


def test_an_unused_stream_is_closed_and_the_next_call_opens_another() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        await trio.sleep(100)
        assert pair.asking.statistics().call_streams == 1
        await trio.sleep(40)
        assert pair.asking.statistics().call_streams == 0
        link = pair.alice.link(pair.bob_id)
        assert link is not None
        assert link.open_streams == 0
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5) == Number(2)

    between_two(scenario, limits=RpcLimits(idle_seconds=120))


def test_a_stream_with_a_long_call_on_it_is_not_idle() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        answer = await pair.asking.call(pair.bob_id, SLEEP, Number(1_000_000), timeout=2000)
        assert answer == Number(1_000_000)

    between_two(scenario)


def test_the_answering_side_ends_a_stream_that_nobody_uses_or_closes() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
        await trio.sleep(700)
        link = pair.bob.link(pair.alice.peer_id)
        assert link is not None
        assert link.open_streams == 0

    between_two(scenario, limits=RpcLimits(idle_seconds=math.inf))


def test_calls_move_to_a_direct_link_and_those_in_flight_finish_where_they_are() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        pair.answering.serve(DOUBLE, double)
        send, receive = trio.open_memory_channel[LinkEvent](1)
        answers = []

        async def ask() -> None:
            answers.append(await pair.asking.call(pair.bob_id, SLEEP, Number(9000), timeout=20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.asking.follow_links, receive)
            nursery.start_soon(ask)
            await trio.sleep(2)
            await send.send(LinkEvent(pair.bob_id, Reach.DIRECT, Reach.RELAYED))
            await trio.lowlevel.checkpoint()
            await pair.asking.call(pair.bob_id, DOUBLE, Number(1), timeout=5)
            statistics = pair.asking.statistics()
            assert statistics.call_streams_opened == 2
            assert statistics.call_streams == 2
            send.close()
        assert answers == [Number(9000)]
        await pair.settle()
        assert pair.asking.statistics().call_streams == 1

    between_two(scenario)


def test_errors_of_the_block_come_out_of_open_rpc_as_they_are() -> None:
    async def scenario(pair: Pair) -> None:
        carol = pair.world.add_node("carol")
        with pytest.raises(ZeroDivisionError):
            async with open_rpc(carol):
                raise ZeroDivisionError
        with trio.move_on_after(1) as scope:
            async with open_rpc(carol):
                await trio.sleep_forever()
        assert scope.cancelled_caught

    between_two(scenario)


def test_ending_an_rpc_ends_its_calls_its_handlers_and_its_services() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        carol = pair.world.add_node("carol")
        pair.world.introduce(carol, pair.alice)
        sleeper = Sleeper()

        async def sleep(caller: Caller, request: Number) -> Number:
            return await sleeper(caller, request)

        outcomes: list[str] = []

        async def ask() -> None:
            try:
                await pair.asking.call(carol.peer_id, SLEEP, Number(60_000), timeout=100)
            except Unreachable:
                outcomes.append("unreachable")

        async with trio.open_nursery() as nursery:
            async with open_rpc(carol) as hers:
                hers.serve(SLEEP, sleep)
                nursery.start_soon(ask)
                await trio.sleep(2)
                assert sleeper.running == 1
            assert sleeper.running == 0
        assert outcomes == ["unreachable"]
        with pytest.raises(ProtocolNotServed):
            await pair.asking.call(carol.peer_id, SLEEP, Number(1), timeout=5)

    between_two(scenario)


def test_the_statistics_count_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        for value in range(5):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(value), timeout=5)
        with pytest.raises(ProtocolNotServed):
            await pair.asking.call(pair.bob_id, SLEEP, Number(), timeout=5)
        mine, his = pair.asking.statistics(), pair.answering.statistics()
        assert (mine.calls_made, mine.calls_answered, mine.calls_failed) == (6, 5, 1)
        assert (his.requests_served, his.requests_failed) == (5, 1)
        assert (mine.call_streams, his.served_streams) == (1, 1)

    between_two(scenario)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_cancelled_or_lost_in_whatever_order_nothing_is_left_behind(seed: int) -> None:
    async def scenario(pair: Pair) -> None:
        sleeper = serve_sleep(pair)
        pair.answering.serve(DOUBLE, double)
        chance = pair.alice.random
        tasks_before = trio.lowlevel.current_statistics().tasks_living
        ends: list[str] = []

        async def ask() -> None:
            await trio.sleep(chance.uniform(0, 20))
            with trio.move_on_after(chance.choice([0.0, 0.1, 1.0, 100.0])) as scope:
                milliseconds = chance.randrange(3000)
                timeout = chance.choice([0.001, 0.15, 1.0, 50.0])
                try:
                    await pair.asking.call(
                        pair.bob_id, SLEEP, Number(milliseconds), timeout=timeout
                    )
                    ends.append("answered")
                except DeadlineExceeded:
                    ends.append("late")
                except Unreachable:
                    ends.append("lost")
            if scope.cancelled_caught:
                ends.append("cancelled")

        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(ask)
            for _ in range(10):
                await trio.sleep(chance.uniform(0, 3))
                pair.world.break_link(pair.alice, pair.bob)
        assert len(ends) == 300
        assert set(ends) == {"answered", "late", "lost", "cancelled"}
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)
        await trio.sleep(5)
        assert sleeper.running == 0
        mine, his = pair.asking.statistics(), pair.answering.statistics()
        assert (mine.calls_in_flight, mine.call_streams, mine.misbehaviours) == (0, 1, 0)
        assert (his.requests_in_flight, his.served_streams, his.misbehaviours) == (0, 1, 0)
        await pair.alice.disconnect(pair.bob_id)
        await pair.settle()
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before

    between_two(scenario, seed=seed)


@pytest.mark.slow
def test_a_caller_that_cancels_and_calls_again_at_once_is_not_refused_as_busy() -> None:
    async def scenario(pair: Pair) -> None:
        serve_sleep(pair)
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        for _ in range(8):  # each time as many as one peer may have in hand
            async with trio.open_nursery() as nursery:
                for _ in range(RpcLimits().calls_per_peer):
                    nursery.start_soon(ask_for_long, pair)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        assert pair.answering.statistics().requests_refused_busy == 0

    between_two(scenario, bobs_limits=RpcLimits(served_per_peer=RpcLimits().calls_per_peer))
