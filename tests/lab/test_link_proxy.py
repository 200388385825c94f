"""The link proxy on real loopback sockets, and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from lab.bench.link_proxy import LinkConditions, LinkProxy, open_link_proxy
from tests.ports import LOOPBACK, held_port
from tests.waiting import PATIENCE_SECONDS


@asynccontextmanager
async def echo_behind_a_link(conditions: LinkConditions) -> AsyncIterator[LinkProxy]:
    """A server that echoes and closes when its client half-closes, behind a link proxy."""

    async def echo(stream: trio.SocketStream) -> None:
        try:
            async for piece in stream:
                await stream.send_all(piece)
        except trio.BrokenResourceError:
            return  # some tests cut it

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    target = ("127.0.0.1", listeners[0].socket.getsockname()[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, echo, listeners)
        async with open_link_proxy(target, conditions) as proxy:
            yield proxy
        nursery.cancel_scope.cancel()


async def dial(proxy: LinkProxy) -> trio.SocketStream:
    return await trio.open_tcp_stream(proxy.host, proxy.port)


async def receive_exactly(stream: trio.SocketStream, size: int) -> bytes:
    got = bytearray()
    with trio.fail_after(PATIENCE_SECONDS):
        while len(got) < size:
            piece = await stream.receive_some(size - len(got))
            assert piece, "the connection ended early"
            got += piece
    return bytes(got)


async def test_bytes_pass_unchanged_both_ways_and_are_counted() -> None:
    payload = bytes(range(256)) * 4096
    async with echo_behind_a_link(LinkConditions()) as proxy, await dial(proxy) as stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, payload)
            assert await receive_exactly(stream, len(payload)) == payload
        counts = proxy.counts()
        assert (counts.connections, counts.open_connections) == (1, 1)
        assert counts.bytes_there == counts.bytes_back == len(payload)


async def test_a_round_trip_takes_at_least_both_delays() -> None:
    async with (
        echo_behind_a_link(LinkConditions(delay_seconds=0.05)) as proxy,
        await dial(proxy) as stream,
    ):
        began = trio.current_time()
        await stream.send_all(b"?")
        await receive_exactly(stream, 1)
        assert trio.current_time() - began >= 0.1


async def test_a_transfer_takes_at_least_the_time_that_the_rate_allows() -> None:
    size = 500_000
    async with (
        echo_behind_a_link(LinkConditions(bytes_per_second=1e6)) as proxy,
        await dial(proxy) as stream,
        trio.open_nursery() as nursery,
    ):
        began = trio.current_time()
        nursery.start_soon(stream.send_all, bytes(size))
        await receive_exactly(stream, size)
        assert trio.current_time() - began >= size / 1e6


async def test_a_half_close_passes() -> None:
    async with echo_behind_a_link(LinkConditions()) as proxy, await dial(proxy) as stream:
        await stream.send_all(b"whole")
        await stream.send_eof()
        assert await receive_exactly(stream, 5) == b"whole"
        with trio.fail_after(PATIENCE_SECONDS):
            assert await stream.receive_some() == b""


async def test_a_cut_resets_open_connections_and_lets_new_ones_in() -> None:
    async with echo_behind_a_link(LinkConditions()) as proxy:
        async with await dial(proxy) as stream:
            await stream.send_all(b"?")
            await receive_exactly(stream, 1)
            proxy.cut()
            with trio.fail_after(PATIENCE_SECONDS), pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        async with await dial(proxy) as stream:
            await stream.send_all(b"!")
            assert await receive_exactly(stream, 1) == b"!"
        assert proxy.counts().connections == 2


async def test_a_swallowing_link_keeps_connections_open_and_silent() -> None:
    async with echo_behind_a_link(LinkConditions()) as proxy, await dial(proxy) as stream:
        proxy.swallow()
        await stream.send_all(b"lost")
        with trio.move_on_after(0.2) as waiting:
            await stream.receive_some()
        assert waiting.cancelled_caught
        await wait_all_tasks_blocked(0.01)  # the proxy has read it, too, on however slow a machine
        proxy.resume()
        await stream.send_all(b"heard")
        assert await receive_exactly(stream, 5) == b"heard"


async def test_a_connection_made_during_a_stall_is_stalled_too() -> None:
    async with echo_behind_a_link(LinkConditions()) as proxy:
        proxy.stall()
        async with await dial(proxy) as stream:
            await stream.send_all(b"patience")
            with trio.move_on_after(0.2) as waiting:
                await stream.receive_some()
            assert waiting.cancelled_caught
            proxy.resume()
            assert await receive_exactly(stream, 8) == b"patience"


async def test_without_a_target_the_dialler_is_reset() -> None:
    with held_port() as port:
        async with open_link_proxy((LOOPBACK, port), LinkConditions()) as proxy:
            stream = await dial(proxy)
            with trio.fail_after(PATIENCE_SECONDS), pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
            await stream.aclose()


def test_as_a_process_it_says_its_port_obeys_and_ends_with_its_stdin() -> None:
    command = [sys.executable, "-m", "lab.bench.link_proxy", "--target", "127.0.0.1:1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["port"] > 0
        process.stdin.write("stall\nresume\ncut\ncounts\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {
            "connections": 0, "open_connections": 0, "bytes_there": 0, "bytes_back": 0,
        }  # fmt: skip
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_SECONDS) == 0
