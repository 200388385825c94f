"""The ping protocol measures links and gives strangers nothing that they did not pay for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from protocols.bulk import Transfer
from protocols.errors import Busy, LimitExceeded, Refused
from protocols.messages import Empty
from protocols.ping import (
    CHUNK_BYTES,
    EXCHANGE,
    FOR_BENCHMARKS,
    LONGEST_ECHO_BYTES,
    SINK,
    SOURCE,
    Moved,
    PingLimits,
    SourceOpening,
    ping,
    serve_ping,
)
from tests.protocols.pair import FIRST_CALL_SECONDS, ROUND_TRIP, Pair, between_two


def test_a_ping_takes_the_round_trip_once_connected() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        first = await ping(pair.asking, pair.bob_id, timeout=5)
        assert first == pytest.approx(FIRST_CALL_SECONDS)
        assert await ping(pair.asking, pair.bob_id, bytes(4096), timeout=5) == pytest.approx(
            ROUND_TRIP
        )

    between_two(scenario)


def test_a_sink_says_how_much_it_took() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        async with pair.asking.open_bulk(pair.bob_id, SINK, Empty(), timeout=5) as transfer:
            for _ in range(3):
                await transfer.send_chunk(bytes(1000))
            assert await transfer.finish(Empty()) == Moved(3000)

    between_two(scenario)


def test_an_exchange_gives_back_each_chunk_while_more_are_sent() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        async with pair.asking.open_bulk(pair.bob_id, EXCHANGE, Empty(), timeout=5) as transfer:
            came: list[bytes] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_three, transfer)
                while (chunk := await transfer.receive_chunk()) is not None:
                    came.append(bytes(chunk))
            assert came == [bytes([n]) * 5000 for n in range(3)]
            assert await transfer.finish(Moved(0)) == Moved(15_000)

    between_two(scenario)


async def send_three(transfer: Transfer[Empty, Moved, Moved]) -> None:
    for number in range(3):
        await transfer.send_chunk(bytes([number]) * 5000)
    await transfer.send_closing(Moved(0))


def test_a_source_gives_what_was_asked_where_it_was_started_for_that() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering, FOR_BENCHMARKS)
        opening = SourceOpening(2500, chunk_bytes=1000)
        async with pair.asking.open_bulk(pair.bob_id, SOURCE, opening, timeout=5) as transfer:
            sizes = []
            while (chunk := await transfer.receive_chunk()) is not None:
                sizes.append(len(chunk))
            await transfer.finish(Moved(transfer.bytes_received))
        assert sizes == [1000, 1000, 500]

    between_two(scenario)


def test_a_stranger_cannot_make_a_node_spend_its_upload() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        with pytest.raises(Refused, match="does not send 1 bytes"):
            async with pair.asking.open_bulk(pair.bob_id, SOURCE, SourceOpening(1), timeout=5):
                pass

    between_two(scenario)


def test_a_measurement_ends_at_the_limit() -> None:
    async def scenario(pair: Pair) -> None:
        async def send_three_mebibytes() -> None:
            async with pair.asking.open_bulk(pair.bob_id, SINK, Empty(), timeout=5) as transfer:
                for _ in range(3):
                    await transfer.send_chunk(bytes(CHUNK_BYTES))
                await transfer.finish(Empty())

        serve_ping(pair.answering, PingLimits(bytes_per_transfer=2 * CHUNK_BYTES))
        with pytest.raises(LimitExceeded, match="2,097,152 bytes in one measurement"):
            await send_three_mebibytes()

    between_two(scenario)


def test_only_so_many_measurements_run_at_once() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering, PingLimits(transfers_at_once=1))
        async with pair.asking.open_bulk(pair.bob_id, SINK, Empty(), timeout=5) as first:
            with pytest.raises(Busy, match="being measured"):
                async with pair.asking.open_bulk(pair.bob_id, EXCHANGE, Empty(), timeout=5):
                    pass
            await first.finish(Empty())
        await pair.settle()
        async with pair.asking.open_bulk(pair.bob_id, SINK, Empty(), timeout=5) as second:
            await second.finish(Empty())

    between_two(scenario)


def test_an_echo_is_no_longer_than_its_request_and_bounded() -> None:
    async def scenario(pair: Pair) -> None:
        serve_ping(pair.answering)
        await ping(pair.asking, pair.bob_id, bytes(LONGEST_ECHO_BYTES), timeout=5)
        assert pair.asking.statistics().calls_answered == 1

    between_two(scenario)


def test_none_of_this_needs_torch_or_libp2p() -> None:
    program = (
        "import sys, protocols.ping, protocols.rpc\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'libp2p')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
