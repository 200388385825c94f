"""A peer that is killed is noticed at once, wherever it was; and may come back as who it was.

At once means: by the closing of its sockets, which the kernel sees to. No clock may have a part in
it, so the keep-alive is off here and calls have longer than a test waits. It takes the time of a
loopback packet and of a task being woken, on a machine that has time for them.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Final

import pytest
import trio

from protocols.errors import Unreachable
from protocols.identity import Identity
from protocols.network import Reach
from protocols.rpc import Empty
from tests.ports import held_port
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
from tests.processes.peer import ONLY_TOLD_BY_SOCKETS, TestPeer, chunk_of, open_test_peer
from tests.waiting import PATIENCE_SECONDS, until

CALL_SECONDS: Final = 2 * PATIENCE_SECONDS

ENDLESS: Final = 1 << 30  # chunks
KILLED_AT_CHUNK: Final = 50


async def kill_later(peer: PeerProcess, seconds: float) -> None:
    await trio.sleep(seconds)
    peer.send_signal(signal.SIGKILL)


async def test_a_call_to_a_peer_that_is_killed_fails_at_once() -> None:
    """F1"""
    async with (
        running_peer() as other,
        open_test_peer(knows=[other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_later, other, 0.2)

            with trio.fail_after(PATIENCE_SECONDS), pytest.raises(Unreachable):
                await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=CALL_SECONDS)


async def test_every_one_of_many_calls_in_flight_fails_when_the_peer_is_killed() -> None:
    """F1"""
    async with (
        running_peer() as other,
        open_test_peer(knows=[other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        failures = 0

        async def call() -> None:
            nonlocal failures
            with pytest.raises(Unreachable):
                await us.rpc.call(other.peer, LINGER, Duration(60.0), timeout=CALL_SECONDS)
            failures += 1

        await us.rpc.call(other.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(100):
                    nursery.start_soon(call)
                nursery.start_soon(kill_later, other, 0.2)

        assert failures == 100
        assert us.rpc.statistics().calls_in_flight == 0


async def upload_until_it_breaks(us: TestPeer, other: PeerProcess) -> None:
    """Kill the peer in the middle of the upload."""
    async with us.rpc.open_bulk(other.peer, SINK, Empty(), timeout=CALL_SECONDS) as upload:
        for number in range(ENDLESS):
            if number == KILLED_AT_CHUNK:
                other.send_signal(signal.SIGKILL)
            await upload.send_chunk(chunk_of(number))


async def download_until_it_breaks(us: TestPeer, other: PeerProcess) -> None:
    """Kill the peer in the middle of the download."""
    buffer = bytearray(CHUNK_BYTES)
    endless = Amount(ENDLESS)
    async with us.rpc.open_bulk(other.peer, SOURCE, endless, timeout=CALL_SECONDS) as download:
        for number in range(ENDLESS):
            if number == KILLED_AT_CHUNK:
                other.send_signal(signal.SIGKILL)
            await download.receive_chunk_into(buffer)


@pytest.mark.parametrize("transfer", [upload_until_it_breaks, download_until_it_breaks])
async def test_a_transfer_with_a_peer_that_is_killed_fails_at_once(
    transfer: Callable[[TestPeer, PeerProcess], Awaitable[None]],
) -> None:
    """F1, mid-stream."""
    async with (
        running_peer() as other,
        open_test_peer(knows=[other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        with trio.fail_after(PATIENCE_SECONDS), pytest.raises(Unreachable):
            await transfer(us, other)

        assert us.rpc.statistics().transfers_open == 0


async def test_the_death_of_one_peer_does_not_touch_a_transfer_with_another() -> None:
    """F1"""
    async with (
        running_peer() as doomed,
        running_peer() as other,
        open_test_peer(knows=[doomed, other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        await us.rpc.call(doomed.peer, ECHO, Content(b"up?"), timeout=CALL_SECONDS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(us.upload, other.peer, 200)
            nursery.start_soon(kill_later, doomed, 0.05)
            with pytest.raises(Unreachable):
                await us.rpc.call(doomed.peer, LINGER, Duration(60.0), timeout=CALL_SECONDS)


@pytest.mark.parametrize("last_words", [signal.SIGKILL, signal.SIGTERM])
async def test_a_peer_that_comes_back_with_its_identity_is_called_as_before(
    last_words: signal.Signals,
) -> None:
    """F4: closes, or is killed, and comes back at the same address."""
    identity = Identity.generate()
    with held_port() as port:
        async with open_test_peer(yamux=ONLY_TOLD_BY_SOCKETS) as us:
            for _ in range(3):
                async with running_peer(identity=identity, port=port) as other:
                    us.network.learn_addresses(other.peer, other.addresses)
                    answer = await us.rpc.call(
                        other.peer, ECHO, Content(b"again"), timeout=CALL_SECONDS
                    )
                    assert answer == Content(b"again")

                    other.send_signal(last_words)
                    await until(lambda: us.network.link(identity.peer_id) is None, PATIENCE_SECONDS)

                # While it is away the error comes at once, and is not held against it later.
                with trio.fail_after(PATIENCE_SECONDS), pytest.raises(Unreachable):
                    await us.rpc.call(
                        identity.peer_id, ECHO, Content(b"away"), timeout=CALL_SECONDS
                    )


async def test_a_peer_that_comes_back_at_another_address_is_found_there() -> None:
    """F8: address change."""
    identity = Identity.generate()
    async with open_test_peer(yamux=ONLY_TOLD_BY_SOCKETS) as us:
        for _ in range(2):
            async with running_peer(identity=identity) as other:
                us.network.learn_addresses(other.peer, other.addresses)
                answer = await us.rpc.call(
                    other.peer, ECHO, Content(b"again"), timeout=CALL_SECONDS
                )
                assert answer == Content(b"again")


async def test_a_peer_that_dials_us_again_before_we_noticed_its_death_replaces_its_old_link() -> (
    None
):
    """F21 in its harmless form: the same identity, the second time for good."""
    identity = Identity.generate()
    async with (
        open_test_peer(yamux=ONLY_TOLD_BY_SOCKETS) as us,
        running_peer("--dial", us.network.addresses()[0], identity=identity) as first,
    ):
        await until(lambda: us.network.link(identity.peer_id) is not None, PATIENCE_SECONDS)
        first.send_signal(signal.SIGSTOP)  # as good as a dead line: its socket stays open
        async with running_peer("--dial", us.network.addresses()[0], identity=identity):

            async def answered() -> bool:
                with trio.move_on_after(0.5):
                    await us.rpc.call(
                        identity.peer_id, ECHO, Content(b"which?"), timeout=CALL_SECONDS
                    )
                    return True
                return False

            await until(answered, PATIENCE_SECONDS)


async def test_a_link_event_tells_of_the_death() -> None:
    """F1"""
    async with (
        running_peer() as other,
        open_test_peer(knows=[other], yamux=ONLY_TOLD_BY_SOCKETS) as us,
    ):
        await us.network.connect(other.peer)
        with us.network.link_events() as events, trio.fail_after(PATIENCE_SECONDS):
            other.send_signal(signal.SIGKILL)
            async for event in events:
                if event.peer == other.peer and event.reach is Reach.NONE:
                    break
