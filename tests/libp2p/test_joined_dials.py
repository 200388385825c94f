"""A call that joins a dial under way, which may have begun with fewer addresses."""

from __future__ import annotations

import pytest
import trio

from node.net.network import open_libp2p_network
from protocols.errors import Unreachable
from protocols.identity import Identity
from tests.libp2p.nodes import LOOPBACK

CLOSES_SECONDS = 0.5


async def close_later(stream: trio.SocketStream) -> None:
    await trio.sleep(CLOSES_SECONDS)
    await stream.aclose()


async def test_a_call_that_knows_more_addresses_than_the_dial_it_joins_is_not_failed_with_it(
    nursery: trio.Nursery,
) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, close_later, [listener])
    port = listener.socket.getsockname()[1]
    failed = trio.Event()
    async with (
        open_libp2p_network(Identity.generate(), LOOPBACK) as we,
        open_libp2p_network(Identity.generate(), LOOPBACK) as they,
    ):

        async def dial_in_vain() -> None:
            with pytest.raises(Unreachable):
                await we.connect(they.peer_id)
            failed.set()

        we.learn_addresses(they.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        nursery.start_soon(dial_in_vain)
        await trio.sleep(CLOSES_SECONDS / 5)
        we.learn_addresses(they.peer_id, they.addresses())
        link = await we.connect(they.peer_id)
        assert link.peer == they.peer_id
        await failed.wait()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("later", range(6))
async def test_a_dial_that_begins_while_another_is_called_off_leads_to_the_peer(
    nursery: trio.Nursery, later: int
) -> None:
    """It begins so many turns of the loop after the call that was waiting was cancelled."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, close_later, [listener])
    port = listener.socket.getsockname()[1]
    async with (
        open_libp2p_network(Identity.generate(), LOOPBACK) as we,
        open_libp2p_network(Identity.generate(), LOOPBACK) as they,
    ):
        we.learn_addresses(they.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        first = trio.CancelScope()

        async def dial() -> None:
            with first:
                await we.connect(they.peer_id)

        nursery.start_soon(dial)
        await trio.sleep(CLOSES_SECONDS / 5)
        we.learn_addresses(they.peer_id, they.addresses())
        first.cancel()
        for _ in range(later):
            await trio.lowlevel.checkpoint()
        assert (await we.connect(they.peer_id)).peer == they.peer_id
    nursery.cancel_scope.cancel()
