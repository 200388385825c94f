"""Act on revocations: whoever is refused now loses everything that is open between us, at once.

The guard refuses the next message of a revoked peer by itself. What it cannot do is end what is
under way (a transfer of an hour, a handler that waits) and the link beneath; that is done here,
each time that a newer list or keyring has come in.

Easy to get wrong: a person who is let in again comes with a new token, over a new link. So links
of a peer that is shut out are not refused at the door; they are closed when nothing better was
shown on them within SHUT_OUT_SECONDS.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from auth.refusals import Reason
from protocols.identity import PeerId
from protocols.network import Network, Reach
from protocols.not_allowed import NotAllowed
from protocols.revoking import end_refused
from protocols.rpc import Rpc

if TYPE_CHECKING:
    from node.access.membership import Membership

# A peer that was let in again has a call of its own each 5 s to show so.
SHUT_OUT_SECONDS = 10.0
# When an auth key is withdrawn, all need a new token at once; a thousand are 200 a second.
EVERYBODY_RENEWS_WITHIN_SECONDS = 5.0
HANGING_UP_AT_ONCE = 64  # links that wait for their end; further ones are closed without waiting

log = logging.getLogger("potluck.access")


async def enforce(membership: Membership, network: Network, rpc: Rpc) -> None:
    """After each change: end everything with those who are refused now. For ever."""
    while True:
        changed = membership.following.changed
        if membership.is_revoked:
            log.warning("this node's own token was revoked; the auth server is asked for another")
            membership.renew_within(0.0)
        elif membership.key_was_withdrawn:
            log.warning("the auth key behind this node's token was withdrawn; it gets a new token")
            membership.renew_within(EVERYBODY_RENEWS_WITHIN_SECONDS)
        refused = await end_refused(rpc, membership.access)
        async with trio.open_nursery() as nursery:
            for peer in refused:
                nursery.start_soon(network.disconnect, peer)
        for peer in refused:
            if not _was_revoked(rpc, peer):
                rpc.readmit(peer)
        await changed.wait()


def _was_revoked(rpc: Rpc, peer: PeerId) -> bool:
    """Whether it was for the peer's own sake, and not for the auth key behind its token.

    When a key is withdrawn everybody needs a new token. If all shut out all others until they show
    one, nobody has anybody to show it to.
    """
    error = rpc.shut_out(peer)
    return isinstance(error, NotAllowed) and error.reason is Reason.REVOKED


async def hang_up_on_the_refused(network: Network, rpc: Rpc) -> None:
    """Close new links of peers that are shut out, if they stay so. For ever."""
    waiting: set[PeerId] = set()

    async def hang_up_later(peer: PeerId) -> None:
        await trio.sleep(SHUT_OUT_SECONDS)
        waiting.discard(peer)
        if rpc.shut_out(peer) is not None:
            await network.disconnect(peer)

    with network.link_events() as events:
        async with trio.open_nursery() as nursery:
            async for event in events:
                peer = event.peer
                if event.reach is Reach.NONE or peer in waiting or rpc.shut_out(peer) is None:
                    continue
                if len(waiting) >= HANGING_UP_AT_ONCE:
                    nursery.start_soon(network.disconnect, peer)
                else:
                    waiting.add(peer)
                    nursery.start_soon(hang_up_later, peer)
