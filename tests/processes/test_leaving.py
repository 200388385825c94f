"""Ctrl-C or SIGTERM at any moment: out within two seconds, and nothing left on the disk. (F22)

The processes here are the real command line. Each has a home of its own, so that what it leaves
behind can be listed: its key may be there, whole; nothing else may.

Easy to get wrong: a signal in the first milliseconds meets Python itself and not yet us. Python
then dies of the signal or shows where it was; nothing was begun by then, and nothing can be left.
"""

from __future__ import annotations

import itertools
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import pytest
import trio

from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.rpc import Empty
from protocols.rpc.ping import ping
from tests.processes.children import START_SECONDS, PeerProcess, running_peer
from tests.processes.commands import (
    SIGNALS,
    leaves_in_time,
    nothing_on_disk_but_a_key,
    running_command,
    running_listener,
)
from tests.processes.generous import CHUNK_BYTES, TAKE
from tests.processes.peer import ONLY_TOLD_BY_SOCKETS, TestPeer, open_test_peer
from tests.waiting import PATIENCE_SECONDS, until

CALL_SECONDS: Final = 2 * PATIENCE_SECONDS
PINGED_BEFORE: Final = 3
FULL_PIPE_BYTES: Final = 60_000  # Linux gives a pipe 64 KiB; the last line may not fit in

# From before Python is up to well after the node listens; every millisecond is swept in tests/soak
START_DELAYS_SECONDS: Final = [  # every third for everybody
    pytest.param(seconds, marks=[pytest.mark.soak] if place % 3 else [])
    for place, seconds in enumerate([0.0, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.3])
]


def _that_knows(node: PeerProcess) -> AbstractAsyncContextManager[TestPeer]:
    """A peer that calls the node, and hears of its end only from the node or from the kernel."""
    return open_test_peer(knows=[node], yamux=ONLY_TOLD_BY_SOCKETS)


@pytest.mark.usefixtures("really_started")
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("delay_seconds", START_DELAYS_SECONDS)
async def test_a_node_that_is_told_to_stop_while_it_starts_leaves_at_once(
    tmp_path: Path, delay_seconds: float, number: signal.Signals
) -> None:
    """F22"""
    async with running_command(tmp_path, "listen", "--listen", "/ip4/127.0.0.1/tcp/0") as node:
        await trio.sleep(delay_seconds)
        await leaves_in_time(node, number)
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_node_that_is_told_to_stop_when_idle_leaves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22"""
    async with running_listener(tmp_path) as node:
        await leaves_in_time(node, number)
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_node_that_is_told_to_stop_during_calls_leaves_and_its_callers_know(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22"""
    async with running_listener(tmp_path) as node, _that_knows(node) as us:
        await us.network.connect(node.peer)
        async with trio.open_nursery() as nursery:

            async def call_until_it_is_gone() -> None:
                while True:
                    try:
                        await ping(us.rpc, node.peer, timeout=CALL_SECONDS)
                    except Unreachable:
                        return

            for _ in range(8):
                nursery.start_soon(call_until_it_is_gone)
            await trio.sleep(0.3)
            await leaves_in_time(node, number)
            nursery.cancel_scope.deadline = trio.current_time() + PATIENCE_SECONDS
        assert not nursery.cancel_scope.cancelled_caught
    nothing_on_disk_but_a_key(tmp_path)


async def upload_slowly(us: TestPeer, peer: PeerId, under_way: trio.Event) -> None:
    """A transfer that can only be interrupted: some 100 MB/s, without an end."""
    async with us.rpc.open_bulk(peer, TAKE, Empty(), timeout=CALL_SECONDS) as transfer:
        for number in itertools.count():
            await transfer.send_chunk(bytes(CHUNK_BYTES))
            await trio.sleep(0.01)
            if number == 20:
                under_way.set()


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_node_that_is_told_to_stop_while_it_takes_a_transfer_leaves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22"""
    async with (
        running_listener(tmp_path, program="tests.processes.generous") as node,
        _that_knows(node) as us,
    ):
        async with trio.open_nursery() as nursery:
            under_way = trio.Event()

            async def upload() -> None:
                with pytest.raises(Unreachable):
                    await upload_slowly(us, node.peer, under_way)

            nursery.start_soon(upload)
            await under_way.wait()
            await leaves_in_time(node, number)
            nursery.cancel_scope.deadline = trio.current_time() + PATIENCE_SECONDS
        assert not nursery.cancel_scope.cancelled_caught
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_node_that_is_told_to_stop_while_it_sends_to_a_stopped_peer_leaves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22 with F3: nothing that it has queued can leave, and nobody will answer its farewell."""
    async with (
        running_listener(tmp_path, program="tests.processes.generous") as node,
        running_peer("--exchange-with", node.addresses[0]) as reader,
    ):
        await reader.read_line()  # nothing more fits between the two
        reader.send_signal(signal.SIGSTOP)
        await leaves_in_time(node, number)
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("delay_seconds", [0.1, 0.5, 0.8, 1.1, 1.5])
async def test_a_caller_that_is_told_to_stop_leaves_at_once_whatever_it_waits_for(
    tmp_path: Path, delay_seconds: float, number: signal.Signals
) -> None:
    """F22: during its start, its dial, its calls."""
    async with running_peer() as other:
        arguments = ("ping", "--count", "100000", "--interval", "0.001", other.addresses[0])
        async with (
            running_command(tmp_path, *arguments) as caller,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(caller.read_rest)  # a terminal that keeps up
            await trio.sleep(delay_seconds)
            await leaves_in_time(caller, number)
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_caller_that_waits_for_a_stopped_peer_leaves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22 with F3: an answer that does not come must not keep anybody."""
    async with running_peer() as other:
        arguments = ("ping", "--count", "100000", "--interval", "0.001", other.addresses[0])
        async with running_command(tmp_path, *arguments) as caller:
            for _ in range(PINGED_BEFORE):
                await caller.read_line()
            other.send_signal(signal.SIGSTOP)
            await trio.sleep(0.2)
            await leaves_in_time(caller, number)
    nothing_on_disk_but_a_key(tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_caller_whose_output_nobody_reads_leaves_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22: a paused pager, a full pipe."""
    async with running_peer() as other:
        arguments = ("ping", "--count", "100000", "--interval", "0.0001", other.addresses[0])
        async with running_command(tmp_path, *arguments) as caller:
            await until(lambda: caller.unread_output_bytes() >= FULL_PIPE_BYTES, START_SECONDS)
            await leaves_in_time(caller, number)
    nothing_on_disk_but_a_key(tmp_path)


async def test_an_impatient_second_signal_changes_nothing(tmp_path: Path) -> None:
    """F22"""
    async with running_listener(tmp_path) as node:
        node.send_signal(signal.SIGINT)
        await leaves_in_time(node, signal.SIGINT)
    nothing_on_disk_but_a_key(tmp_path)
