"""Closing the links of those who do not show that they may take part.

The network lets everybody connect and keeps a place for each link; there are some hundreds. The
guard refuses what a stranger asks, but a stranger who asks nothing, and only holds links, would
take the places of the members for ever. So in a run with tokens a link is for members: whoever has
shown no token that counts within STRANGER_SECONDS is hung up on, and of more than MOST_STRANGERS
the oldest at once.

Easy to get wrong: a peer that we asked something shows its token with its *answer*, which may take
long. While a call of ours to it is under way it is not hung up on. And a member whose token has
just run out, because the auth server is away, is no stranger yet (`Access.is_member`): if all hung
up on all in an outage, none would find the others behind it.
"""

from __future__ import annotations

import logging

import trio

from protocols.access import Access
from protocols.identity import PeerId
from protocols.network import Network
from protocols.rpc import Rpc

log = logging.getLogger("potluck.access")

STRANGER_SECONDS = 60.0  # a newcomer's first call takes some round trips
MOST_STRANGERS = 128  # a quarter of the links that others may have to a node
LOOK_SECONDS = 5.0


async def hang_up_on_strangers(network: Network, rpc: Rpc, access: Access) -> None:
    """Look through the links every few seconds. For ever."""
    met: dict[PeerId, float] = {}
    while True:
        await trio.sleep(LOOK_SECONDS)
        now = trio.current_time()
        strangers = [
            facts.peer
            for facts in network.links()
            if not access.is_member(facts.peer) and not rpc.waits_for(facts.peer)
        ]
        met = {peer: met.get(peer, now) for peer in strangers}
        strangers.sort(key=met.__getitem__)  # who was met first is the first
        surplus = max(0, len(strangers) - MOST_STRANGERS)
        async with trio.open_nursery() as nursery:
            for place, peer in enumerate(strangers):
                if place < surplus or now - met[peer] >= STRANGER_SECONDS:
                    log.debug("hanging up on %s, which shows no token that counts", peer)
                    nursery.start_soon(network.disconnect, peer)
