"""A peer that is stopped says nothing and closes nothing: only the keep-alive can notice it.

Easy to get wrong: the kernel of a stopped process goes on acknowledging packets until its buffers
are full, so a send may still succeed for megabytes.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Final

import pytest
import trio

from node.net.transport import YamuxSettings
from protocols.errors import Unreachable
from protocols.network import LinkFacts
from protocols.rpc import Empty
from tests.processes.children import PeerProcess, running_peer
from tests.processes.methods import (
    CHUNK_BYTES,
    ECHO,
    LINGER,
    SINK,
    SOURCE,
    Amount,
    Content,
    Duration,
)
from tests.processes.peer import ONLY_TOLD_BY_SOCKETS, TestPeer, open_test_peer
from tests.waiting import PATIENCE_SECONDS, until

CALL_SECONDS: Final = 30.0

# The same as the defaults of 5 and 8 seconds, in a shorter life
YAMUX: Final = YamuxSettings(keep_alive_seconds=0.4, keep_alive_deadline_seconds=0.8)
# These settings are kept to, then: with the defaults, nobody is given up sooner than this
BY_DEFAULT_SECONDS: Final = YamuxSettings().keep_alive_deadline_seconds
CALLS_MEANWHILE: Final = 20
ANSWERED_SECONDS: Final = 0.5


async def a_call(us: TestPeer, other: PeerProcess) -> None:
    await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=CALL_SECONDS)


async def an_upload(us: TestPeer, other: PeerProcess) -> None:
    async with us.rpc.open_bulk(other.peer, SINK, Empty(), timeout=CALL_SECONDS) as upload:
        while True:
            await upload.send_chunk(bytes(CHUNK_BYTES))


async def a_download(us: TestPeer, other: PeerProcess) -> None:
    buffer = bytearray(CHUNK_BYTES)
    endless = Amount(1 << 30)
    async with us.rpc.open_bulk(other.peer, SOURCE, endless, timeout=CALL_SECONDS) as download:
        while True:
            await download.receive_chunk_into(buffer)


@pytest.mark.parametrize("interrupted", [a_call, an_upload, a_download])
async def test_a_peer_that_is_stopped_is_noticed_within_the_stated_deadline(
    interrupted: Callable[[TestPeer, PeerProcess], Awaitable[None]],
) -> None:
    """F3"""
    async with running_peer() as other, open_test_peer(knows=[other], yamux=YAMUX) as us:
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        stopped_at = 0.0

        async def stop_in_the_middle() -> None:
            nonlocal stopped_at
            await trio.sleep(0.3)
            other.send_signal(signal.SIGSTOP)
            stopped_at = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_in_the_middle)
            with pytest.raises(Unreachable):
                await interrupted(us, other)

        assert trio.current_time() - stopped_at < BY_DEFAULT_SECONDS
        await until(lambda: us.network.link(other.peer) is None, PATIENCE_SECONDS)
        statistics = us.rpc.statistics()
        assert statistics.calls_in_flight == 0
        assert statistics.transfers_open == 0


async def test_other_links_go_on_while_a_stopped_peer_is_waited_for() -> None:
    """F3: no keep-alive ends the waiting here, so whoever waits behind it waits for ever."""
    async with (
        running_peer() as stopped,
        running_peer() as other,
        open_test_peer(knows=[stopped, other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        for each in (stopped, other):
            await us.rpc.call(each.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        stopped.send_signal(signal.SIGSTOP)
        sent = 0
        seconds: list[float] = []  # of each call that was answered while no chunk got away

        async def fill_the_stopped_one() -> None:
            nonlocal sent
            upload = us.rpc.open_bulk(stopped.peer, SINK, Empty(), timeout=2 * PATIENCE_SECONDS)
            async with upload as transfer:
                while True:
                    await transfer.send_chunk(bytes(CHUNK_BYTES))
                    sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill_the_stopped_one)
            with trio.fail_after(PATIENCE_SECONDS):
                while len(seconds) < CALLS_MEANWHILE:
                    before, asked_at = sent, trio.current_time()
                    await us.rpc.call(other.peer, ECHO, Content(b"and you?"), timeout=CALL_SECONDS)
                    seconds.append(trio.current_time() - asked_at)
                    if sent != before:
                        seconds.clear()
            nursery.cancel_scope.cancel()

        # a machine that stops for a moment holds up one of them, and never half
        assert sorted(seconds)[CALLS_MEANWHILE // 2] < ANSWERED_SECONDS


async def test_a_peer_that_is_continued_in_time_goes_on_without_a_byte_lost() -> None:
    """F3, the half that must not look like a death."""
    yamux = YamuxSettings(keep_alive_seconds=1.0, keep_alive_deadline_seconds=10.0)
    async with running_peer() as other, open_test_peer(knows=[other], yamux=yamux) as us:
        link = await us.network.connect(other.peer)

        async def stop_and_go_on() -> None:
            for _ in range(3):
                await trio.sleep(0.2)
                other.send_signal(signal.SIGSTOP)
                await trio.sleep(1.0)
                other.send_signal(signal.SIGCONT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop_and_go_on)
            nursery.start_soon(us.upload, other.peer, 400)
            nursery.start_soon(us.download, other.peer, 400)

        assert _same_link(us.network.link(other.peer), link)


async def test_a_peer_that_is_continued_too_late_is_simply_met_again() -> None:
    """F3"""
    async with running_peer() as other, open_test_peer(knows=[other], yamux=YAMUX) as us:
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(Unreachable):
            await a_call(us, other)

        other.send_signal(signal.SIGCONT)

        answer = await us.rpc.call(other.peer, ECHO, Content(b"awake?"), timeout=CALL_SECONDS)
        assert answer == Content(b"awake?")


def _same_link(now: LinkFacts | None, before: LinkFacts) -> bool:
    return now is not None and now.connected_at == before.connected_at
