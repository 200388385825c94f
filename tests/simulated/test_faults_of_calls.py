"""The named faults, met by calls and transfers, in exact virtual time.

The same faults on real processes are in tests/processes.
"""

from __future__ import annotations

import random
import struct
from contextlib import suppress

import pytest
import trio

from protocols.errors import (
    DeadlineExceeded,
    HandlerFailed,
    LimitExceeded,
    MalformedMessage,
    ProtocolNotServed,
    Unreachable,
)
from protocols.network import Stream
from protocols.rpc import BulkMethod, Empty, encode, open_rpc
from protocols.rpc.frames import CHUNK, OPEN, REQUEST, RESPONSE, message_frame
from protocols.rpc.messages import OpenHead, RequestHead
from protocols.rpc.ping import ECHO, EchoRequest
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.chunks import next_chunk
from tests.simulated.peers import (
    BREAK,
    CALL_SECONDS,
    HANG,
    LISTEN,
    POUR,
    PROTOCOL,
    SOAK_UP,
    STALL_SECONDS,
    Pattern,
    Server,
    chunk,
    client_and_server,
    drain,
    is_served,
    outcome_of,
    send_chunks,
)
from tests.simulated.worlds import LATENCY_SECONDS, ROUND_TRIP_SECONDS, simulated
from tests.waiting import until

FOUR_GIGABYTES = 0xFFFF_FFFF


# The other side dies


@simulated
async def test_a_peer_killed_during_a_call_ends_it_at_once(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (_, rpc, server), trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises(Unreachable) as caught:
                await rpc.call(server.network.peer_id, HANG, Empty(), timeout=3600)
            assert trio.current_time() - killed_at == pytest.approx(LATENCY_SECONDS)
            assert not caught.value.surely_not_executed

        nursery.start_soon(call)
        await until(lambda: server.hanging == 1, within_seconds=5)
        killed_at = trio.current_time()
        world.crash(server.network)


@simulated
async def test_a_peer_killed_during_a_transfer_ends_it_at_once(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (_, rpc, server):
        async with rpc.open_bulk(
            server.network.peer_id, POUR, Pattern(1000), timeout=CALL_SECONDS
        ) as transfer:
            for number in range(10):
                assert await next_chunk(transfer) == chunk(number)
            world.crash(server.network)
            killed_at = trio.current_time()
            with pytest.raises(Unreachable):
                await drain(transfer)
        assert trio.current_time() - killed_at <= ROUND_TRIP_SECONDS


@simulated
async def test_a_power_cut_during_a_call_costs_the_call_s_timeout(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (_, rpc, server):
        await is_served(rpc, server)
        world.crash(server.network, silently=True)
        error, seconds = await outcome_of(
            lambda: rpc.call(server.network.peer_id, ECHO, EchoRequest(), timeout=2.0)
        )
        assert (error, seconds) == (DeadlineExceeded, pytest.approx(2.0))


@simulated
async def test_a_peer_that_comes_back_is_called_as_if_nothing_had_been(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (client, rpc, server):
        await is_served(rpc, server)
        world.crash(server.network)
        await until(lambda: client.links() == (), within_seconds=1)
        again = Server(world, world.restart(server.network))
        await again.ready.wait()
        await is_served(rpc, again)
        await trio.sleep(1)
        await is_served(rpc, again)
        assert again.statistics().requests_served == 2


@simulated
async def test_a_peer_that_comes_back_unnoticed_is_called_as_if_nothing_had_been(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (_, rpc, server):
        await is_served(rpc, server)
        world.crash(server.network, silently=True)
        again = Server(world, world.restart(server.network))
        await again.ready.wait()
        # the request goes out on the old stream, so it may or may not have been acted on
        with suppress(Unreachable):
            await is_served(rpc, again)
        await is_served(rpc, again)


# The other side stops


@simulated
async def test_a_peer_that_stops_during_a_call_costs_its_timeout_and_no_more(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (_, rpc, server):
        await is_served(rpc, server)
        world.stop(server.network)
        error, seconds = await outcome_of(
            lambda: rpc.call(server.network.peer_id, ECHO, EchoRequest(), timeout=3.0)
        )
        assert (error, seconds) == (DeadlineExceeded, pytest.approx(3.0))
        world.resume(server.network)
        await is_served(rpc, server)


@simulated
async def test_a_short_stop_during_a_transfer_loses_nothing(world: SimulatedWorld) -> None:
    async with (
        client_and_server(world) as (_, rpc, server),
        rpc.open_bulk(server.network.peer_id, POUR, Pattern(100), timeout=CALL_SECONDS) as transfer,
    ):
        for number in range(100):
            if number == 10:
                world.stop(server.network)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_resume_later, world, server, STALL_SECONDS / 2)
            assert await next_chunk(transfer) == chunk(number)
        await transfer.finish(Empty())


@simulated
async def test_a_peer_that_stops_during_a_transfer_costs_the_stall_time(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (_, rpc, server):
        async with rpc.open_bulk(
            server.network.peer_id, SOAK_UP, Empty(), timeout=CALL_SECONDS
        ) as transfer:
            world.stop(server.network)
            stopped_at = trio.current_time()
            with pytest.raises(DeadlineExceeded):
                await send_chunks(transfer, 1000)
        assert trio.current_time() - stopped_at == pytest.approx(STALL_SECONDS)


async def _resume_later(world: SimulatedWorld, server: Server, seconds: float) -> None:
    await trio.sleep(seconds)
    world.resume(server.network)


# The other side is slow


@simulated
async def test_one_byte_a_second_costs_a_call_its_timeout_and_others_nothing(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (_, rpc, server):
        slow = world.add_node("slow")
        world.introduce(slow, server.network)
        async with open_rpc(slow) as slow_rpc:
            await is_served(slow_rpc, server)
            world.throttle(slow, upload_bytes_per_second=1.0)
            error, seconds = await outcome_of(
                lambda: slow_rpc.call(
                    server.network.peer_id, ECHO, EchoRequest(bytes(1000)), timeout=CALL_SECONDS
                )
            )
            assert (error, seconds) == (DeadlineExceeded, pytest.approx(CALL_SECONDS))
            await is_served(rpc, server)


@simulated
async def test_one_byte_a_second_is_no_progress_for_a_transfer(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (client, rpc, server):
        async with rpc.open_bulk(
            server.network.peer_id, POUR, Pattern(1000), timeout=CALL_SECONDS
        ) as transfer:
            assert await next_chunk(transfer) == chunk(0)
            world.throttle(client, download_bytes_per_second=1.0)
            error, seconds = await outcome_of(lambda: drain(transfer))
            assert error is DeadlineExceeded
            assert seconds <= 2 * STALL_SECONDS
        world.throttle(client)
        await is_served(rpc, server)


@pytest.mark.parametrize("bulk", [SOAK_UP, LISTEN], ids=lambda bulk: bulk.name)
def test_a_transfer_over_a_narrow_link_ends_whole_though_the_last_word_is_slow(
    bulk: BulkMethod[Empty, Empty, Empty, Empty],
) -> None:
    """The end is where a reset could overtake the closing message that it follows."""

    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        async with client_and_server(world) as (client, rpc, server):
            world.throttle(client, upload_bytes_per_second=20_000.0)
            async with rpc.open_bulk(
                server.network.peer_id, bulk, Empty(), timeout=CALL_SECONDS
            ) as transfer:
                await send_chunks(transfer, 3)
                await transfer.finish(Empty())
            await until(lambda: server.statistics().transfers_served == 1, within_seconds=60)
            assert server.chunks_taken == 3

    scenario()


# The other side breaks the protocol


async def _is_dropped(stream: Stream) -> None:
    with trio.fail_after(5):
        try:
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            return


HOSTILE_BYTES = {
    "a message of 4 GB": struct.pack(">IB", FOUR_GIGABYTES, REQUEST),
    "a chunk of 4 GB": (
        message_frame(OPEN, encode(OpenHead(SOAK_UP.name, 5000)), encode(Empty()))
        + struct.pack(">IB", FOUR_GIGABYTES, CHUNK)
    ),
    "a head longer than its frame": struct.pack(">IBH", 10, REQUEST, 0xFFFF) + bytes(8),
    "garbage": random.Random(1).randbytes(10_000),
    "an unknown kind of message": message_frame(99, b"", b""),
    "an answer without a question": message_frame(RESPONSE, encode((7,)), b""),
    "a body that is no message": message_frame(
        REQUEST, encode(RequestHead(1, HANG.name, 5000)), b"\xc1" * 100
    ),
}


@pytest.mark.parametrize("what", HOSTILE_BYTES)
def test_a_peer_that_breaks_the_protocol_is_dropped_named_and_avoided_and_others_are_not_affected(
    what: str,
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        async with client_and_server(world) as (_, rpc, server):
            await is_served(rpc, server)
            hostile = world.add_node("hostile")
            world.introduce(hostile, server.network)
            stream = await hostile.open(server.network.peer_id, PROTOCOL)
            await stream.send_all(HOSTILE_BYTES[what])
            await _is_dropped(stream)
            assert server.statistics().misbehaviours == 1
            assert server.rpc is not None
            assert server.rpc.avoided_for(hostile.peer_id) > 0
            assert server.rpc.avoided_for(rpc.network.peer_id) == 0
            await is_served(rpc, server)

    scenario()


@simulated
async def test_a_truncated_frame_ends_its_stream_and_nothing_else(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (_, rpc, server):
        hostile = world.add_node("hostile")
        world.introduce(hostile, server.network)
        stream = await hostile.open(server.network.peer_id, PROTOCOL)
        whole = message_frame(REQUEST, encode(RequestHead(1, HANG.name, 5000)), b"")
        await stream.send_all(whole[:-3])
        await stream.send_eof()
        await _is_dropped(stream)
        assert server.hung == 0
        await is_served(rpc, server)


@simulated
async def test_headers_and_then_nothing_cost_a_stream_its_patience(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (_, rpc, server):
        hostile = world.add_node("hostile")
        world.introduce(hostile, server.network)
        stream = await hostile.open(server.network.peer_id, PROTOCOL)
        await stream.send_all(struct.pack(">IB", 100, REQUEST))
        with trio.fail_after(60), suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""
        await is_served(rpc, server)


@simulated
async def test_an_unknown_protocol_version_is_an_error_of_its_own(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (client, rpc, server):
        with pytest.raises(ProtocolNotServed):
            await client.open(server.network.peer_id, PROTOCOL.replace("1.0.0", "9.0.0"))
        await is_served(rpc, server)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff" * 100, (MalformedMessage, LimitExceeded)),
        (struct.pack(">IB", FOUR_GIGABYTES, RESPONSE), LimitExceeded),
        (message_frame(99, b"", b""), MalformedMessage),
        (message_frame(RESPONSE, encode((1_000_000,)), b""), MalformedMessage),
        (b"", Unreachable),
    ],
)
def test_a_server_that_answers_nonsense_fails_the_call_and_is_avoided(
    answer: bytes, error: type[Exception]
) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        client, server = world.add_node("client"), world.add_node("server")
        world.introduce(client, server)

        async def nonsense(stream: Stream) -> None:
            await stream.receive_some()
            await stream.send_all(answer)

        server.serve(PROTOCOL, nonsense)
        async with open_rpc(client) as rpc:
            with pytest.raises(error):
                await rpc.call(server.peer_id, HANG, Empty(), timeout=60)
            if answer:
                with pytest.raises(Unreachable, match="avoided"):
                    await rpc.call(server.peer_id, HANG, Empty(), timeout=60)

    scenario()


@simulated
async def test_a_handler_that_raises_fails_its_call_and_tells_no_secrets(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (_, rpc, server):
        for _ in range(20):
            with pytest.raises(HandlerFailed) as caught:
                await rpc.call(server.network.peer_id, BREAK, Empty(), timeout=CALL_SECONDS)
            assert "secret" not in str(caught.value)
            await is_served(rpc, server)


# The way between is cut


@simulated
async def test_a_partition_that_heals_in_time_only_delays_a_call(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (client, rpc, server):
        await is_served(rpc, server)
        cuts = world.partition([client], [server.network])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_served, rpc, server)
            await trio.sleep(CALL_SECONDS / 2)
            world.heal(cuts)


@pytest.mark.parametrize("way", ["there", "back", "both"])
def test_a_long_cut_fails_calls_and_healing_mends_them(way: str) -> None:
    @simulated
    async def scenario(world: SimulatedWorld) -> None:
        async with client_and_server(world) as (client, rpc, server):
            await is_served(rpc, server)
            if way in ("there", "both"):
                world.cut([client], [server.network])
            if way in ("back", "both"):
                world.cut([server.network], [client])
            for _ in range(10):
                error, seconds = await outcome_of(lambda: is_served(rpc, server))
                assert error in (DeadlineExceeded, Unreachable)
                assert seconds <= CALL_SECONDS * 1.001
            world.heal()
            await is_served(rpc, server)

    scenario()


@simulated
async def test_clocks_ten_minutes_apart_disturb_no_deadline(world: SimulatedWorld) -> None:
    async with client_and_server(world) as (client, rpc, server):
        world.set_clock_skew(client, 600.0)
        world.set_clock_skew(server.network, -600.0)
        await is_served(rpc, server)
        error, seconds = await outcome_of(
            lambda: rpc.call(server.network.peer_id, HANG, Empty(), timeout=2.0)
        )
        assert (error, seconds) == (DeadlineExceeded, pytest.approx(2.0))


@simulated
async def test_five_times_as_many_callers_over_time_as_the_inbound_limit(
    world: SimulatedWorld,
) -> None:
    limit = 10
    settings = NodeSettings(inbound_links=limit)
    server = Server(world, world.add_node("server", settings))
    await server.ready.wait()

    async def visit(guest: SimulatedNetwork) -> None:
        async with open_rpc(guest) as rpc:
            await is_served(rpc, server)
        await guest.disconnect(server.network.peer_id)

    for _ in range(5):
        async with trio.open_nursery() as nursery:
            for _ in range(limit):
                guest = world.add_node()
                world.introduce(guest, server.network)
                nursery.start_soon(visit, guest)
        await trio.sleep(LATENCY_SECONDS)
    assert server.network.links() == ()
    assert server.statistics().requests_served == 5 * limit


# We change our mind


@pytest.mark.slow
@simulated
async def test_a_thousand_cancelled_calls_leave_no_task_stream_or_handler(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (client, rpc, server):
        await is_served(rpc, server)
        with suppress(DeadlineExceeded):
            await rpc.call(server.network.peer_id, HANG, Empty(), timeout=1.0)
        await trio.sleep(1)
        tasks = trio.lowlevel.current_statistics().tasks_living
        (link,) = client.links()

        async def call(patience: float) -> None:
            with trio.move_on_after(patience):
                await rpc.call(server.network.peer_id, HANG, Empty(), timeout=60)

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(call, 3 * ROUND_TRIP_SECONDS * number / 1000)
        await trio.sleep(1)
        assert server.hung > 100
        assert server.hanging == 0
        assert server.statistics().requests_in_flight == 0
        assert rpc.statistics().calls_in_flight == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert client.links()[0].open_streams == link.open_streams
        await is_served(rpc, server)


@simulated
async def test_cancelling_at_any_moment_of_a_transfer_leaves_nothing(
    world: SimulatedWorld,
) -> None:
    async with client_and_server(world) as (client, rpc, server):
        await is_served(rpc, server)
        await trio.sleep(1)
        tasks = trio.lowlevel.current_statistics().tasks_living
        streams = client.links()[0].open_streams
        for number in range(60):
            with trio.move_on_after(0.01 * number):
                async with rpc.open_bulk(
                    server.network.peer_id, POUR, Pattern(200), timeout=CALL_SECONDS
                ) as transfer:
                    await drain(transfer)
        await trio.sleep(1)
        assert server.statistics().transfers_open == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert client.links()[0].open_streams == streams
        await is_served(rpc, server)


@simulated
async def test_a_node_may_be_cancelled_at_any_moment_and_is_gone_within_two_seconds(
    world: SimulatedWorld,
) -> None:
    server = Server(world, world.add_node("server"))
    await server.ready.wait()
    tasks = trio.lowlevel.current_statistics().tasks_living
    for number in range(40):
        node = world.add_node()
        world.introduce(node, server.network)
        with trio.CancelScope() as scope:
            scope.deadline = trio.current_time() + 0.05 * number
            async with open_rpc(node) as rpc:
                await is_served(rpc, server)
                async with rpc.open_bulk(
                    server.network.peer_id, POUR, Pattern(10_000), timeout=CALL_SECONDS
                ) as transfer:
                    await drain(transfer)
        assert trio.current_time() - scope.deadline < 2.0
        await node.aclose()
    await trio.sleep(2)
    assert server.network.links() == ()
    assert server.statistics().transfers_open == 0
    assert trio.lowlevel.current_statistics().tasks_living == tasks
