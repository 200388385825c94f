"""Every reachable peer is reached: past dead addresses, however many came before."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.lowlevel

from node.net.libp2p.settings import Libp2pSettings
from protocols.errors import PotluckError, Unreachable
from protocols.identity import Identity, PeerId
from protocols.network import Reach
from tests.ports import held_port
from tests.processes.children import running_peer
from tests.processes.methods import ECHO, Content
from tests.processes.peer import open_test_peer
from tests.waiting import PATIENCE_SECONDS, until

CALL_SECONDS: Final = 10.0
INBOUND_LIMIT: Final = 8
# Longer than any test here waits: a peer that is held up by an address that does not answer, or
# relies on the timeout of a silent connection, is not done in time, however slow the machine.
FOREVER_SECONDS: Final = 10 * PATIENCE_SECONDS


@asynccontextmanager
async def silent_port() -> AsyncIterator[int]:
    """A port where a connection is never answered: its queue of waiting connections is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        await trio.lowlevel.checkpoint()
        yield port


async def test_a_peer_with_a_dead_and_a_good_address_is_reached_at_once() -> None:
    with held_port() as port:
        dead = f"/ip4/127.0.0.1/tcp/{port}"
        async with running_peer() as other, open_test_peer(dial_seconds=FOREVER_SECONDS) as us:
            us.network.learn_addresses(other.peer, [dead, *other.addresses])
            with trio.fail_after(PATIENCE_SECONDS):
                link = await us.network.connect(other.peer)
            assert link.reach is Reach.DIRECT


async def test_an_address_that_swallows_everything_does_not_hide_the_good_one() -> None:
    async with (
        silent_port() as port,
        running_peer() as other,
        open_test_peer(dial_seconds=FOREVER_SECONDS) as us,
    ):
        dead = f"/ip4/127.0.0.1/tcp/{port}"
        us.network.learn_addresses(other.peer, [dead, *other.addresses, dead])
        with trio.fail_after(PATIENCE_SECONDS):
            await us.network.connect(other.peer)


async def test_a_failed_dial_is_not_held_against_the_next_one() -> None:
    identity = Identity.generate()
    with held_port() as port:
        dead = f"/ip4/127.0.0.1/tcp/{port}"
        async with open_test_peer() as us:
            us.network.learn_addresses(identity.peer_id, [dead])
            with pytest.raises(Unreachable) as failed:
                await us.network.connect(identity.peer_id)
            assert dead in str(failed.value)  # it says which address failed

            async with running_peer(identity=identity) as other:
                us.network.learn_addresses(other.peer, other.addresses)
                with trio.fail_after(Libp2pSettings().dial_seconds):  # any dial has that long
                    await us.network.connect(other.peer)


async def test_five_times_the_inbound_limit_over_time_are_all_served() -> None:
    """The limit counts the living: a connection that closed gives its place back."""
    async with running_peer("--inbound-connections", str(INBOUND_LIMIT)) as other:
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for _ in range(INBOUND_LIMIT):
                    nursery.start_soon(_come_call_and_go, other.peer, other.addresses)


async def _come_call_and_go(peer: PeerId, addresses: tuple[str, ...]) -> None:
    async with open_test_peer() as visitor:
        visitor.network.learn_addresses(peer, addresses)

        async def served() -> bool:  # the places of the round before are given back in a moment
            try:
                answer = await visitor.rpc.call(peer, ECHO, Content(b"hello"), timeout=CALL_SECONDS)
            except PotluckError:
                return False
            return answer == Content(b"hello")

        await until(served, PATIENCE_SECONDS)


async def test_connections_above_the_inbound_limit_are_refused_and_then_forgotten() -> None:
    flags = ("--inbound-connections", str(INBOUND_LIMIT), "--handshake-seconds", FOREVER_SECONDS)
    async with (
        running_peer(*map(str, flags)) as other,
        open_test_peer(knows=[other]) as customer,
    ):
        before = await customer.census_of(other.peer)
        sockets = [
            await trio.open_tcp_stream("127.0.0.1", other.port) for _ in range(5 * INBOUND_LIMIT)
        ]
        refused = 0

        async def count_if_refused(one: trio.SocketStream) -> None:
            nonlocal refused
            try:
                while await one.receive_some(1024):
                    pass
            except trio.BrokenResourceError:
                pass
            refused += 1

        async with trio.open_nursery() as nursery:
            for one in sockets:
                nursery.start_soon(count_if_refused, one)
            await until(lambda: refused >= 4 * INBOUND_LIMIT, PATIENCE_SECONDS)
            nursery.cancel_scope.cancel()

        for one in sockets:
            await one.aclose()

        async def as_before() -> bool:
            return not (await customer.census_of(other.peer)).exceeds(before)

        await until(as_before, PATIENCE_SECONDS)
