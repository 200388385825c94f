"""When a second connection to a peer comes up: find out which are alive, and end the surplus.

Two cases look the same at first. Both sides dialled at once: both connections are good, and one is
enough. Or the peer lost power, came back and dialled again, while our old connection to it is dead
and nobody has told us. So each older connection is asked for a sign of life: until it gives one,
new streams go over the newcomer, and if it gives none, it is closed. The answer to a ping is one,
and so is any other byte: on a link that is full, the answer waits behind these.

Of two that live, the link table's rule names the same one on both sides. The other is closed by
the side that dialled it, when no stream has been on it for a while.
"""

from __future__ import annotations

import logging

import trio

from node.libp2p.connection import PeerConnection
from node.libp2p.link_table import LinkTable
from node.libp2p.settings import Libp2pSettings

log = logging.getLogger(__name__)


async def settle(
    links: LinkTable[PeerConnection], newcomer: PeerConnection, settings: Libp2pSettings
) -> None:
    """Run as a task when `newcomer` has come up beside others to the same peer."""
    older = [each for each in links.connections_to(newcomer.peer) if each is not newcomer]
    for connection in older:
        links.mark(connection, alive=False)
    async with trio.open_nursery() as nursery:
        for connection in older:
            nursery.start_soon(_ask_for_life, links, connection, settings.sign_of_life_seconds)
    while (surplus := _dialled_surplus(links, newcomer)) is not None:
        await trio.sleep(settings.surplus_idle_seconds)
        if surplus is _dialled_surplus(links, newcomer) and not surplus.open_stream_count:
            log.debug("Closing %r, which another link has made surplus", surplus)
            await surplus.close()


async def _ask_for_life(
    links: LinkTable[PeerConnection], connection: PeerConnection, patience_seconds: float
) -> None:
    received = connection.muxed_conn.bytes_received
    try:
        with trio.fail_after(patience_seconds):
            await connection.ping()
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
        if not connection.ended.is_set() and connection.muxed_conn.bytes_received > received:
            links.mark(connection, alive=True)
            return
        log.info("%r gives no sign of life, and the peer has a newer link", connection)
        await connection.close()
    else:
        links.mark(connection, alive=True)


def _dialled_surplus(
    links: LinkTable[PeerConnection], newcomer: PeerConnection
) -> PeerConnection | None:
    """A connection to the same peer that we dialled and that is not the link."""
    best = links.best(newcomer.peer)
    for connection in links.connections_to(newcomer.peer):
        if connection is not best and not connection.inbound:
            return connection
    return None
