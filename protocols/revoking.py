"""Ending everything with those who may no longer take part.

To be called when a revocation list or the keyring has changed. The links are the network's, so
whoever calls this closes them afterwards:

    for peer in await end_refused(rpc, access):
        await network.disconnect(peer)

Easy to get wrong: new links of such a peer must not be refused for good. The person may be allowed
again and come with a new token, which can only be shown over a link.
"""

from __future__ import annotations

import logging

import trio

from protocols.access import Access
from protocols.identity import PeerId
from protocols.rpc import Rpc

log = logging.getLogger("potluck.access")


async def end_refused(rpc: Rpc, access: Access) -> tuple[PeerId, ...]:
    """End all calls and transfers with every refused party, all at once; who that was."""
    refused = {
        peer: error
        for peer, error in access.refused_parties().items()
        if rpc.shut_out(peer) is None
    }
    async with trio.open_nursery() as nursery:
        for peer, error in refused.items():
            log.warning("ending everything with %s", error.what)
            nursery.start_soon(rpc.end_all_with, peer, error)
    return tuple(refused)
