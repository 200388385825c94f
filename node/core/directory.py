"""The directory of a node, opened by its configuration, with the data that it keeps on disk.

Every node keeps the peers that it has known; a backbone (`dht.keep_slots`) also keeps its slots. A
member also joins at the addresses in its pass; an address that this version cannot read is logged
and left out.

The keeper must outlive the service, which hands over its last slots when it ends. And a file that
cannot be opened must stop the start before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from auth.refusals import Reason
from node.core.access.membership import Membership
from node.core.access.notice import REVOCATIONS
from node.core.configuration import Configuration
from node.core.peer_address import parse_peer_address
from node.core.peer_cache import PeerCache
from node.core.wrong_use import WrongUse
from protocols.accumulation.progress_slot import PROGRESS
from protocols.dht import Dht, DhtSettings, Families, Keeper, open_dht
from protocols.experts import EXPERTS
from protocols.moshpit.matchmaking_messages import GROUP
from protocols.network import Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc

log = logging.getLogger("potluck.access")

# The families in the directory of every node. Each is declared by its own package and listed here,
# so that every node accepts its slots.
FAMILIES = Families([REVOCATIONS, GROUP, PROGRESS, EXPERTS])


@asynccontextmanager
async def open_directory(
    network: Network, rpc: Rpc, configuration: Configuration, member: Membership | None = None
) -> AsyncIterator[Dht]:
    """Serve the directory and join the swarm, in the background, until the block ends.

    A member of a run also joins at the addresses in its pass, and only keeps revocations that the
    auth server has signed. A node that may only watch keeps nothing for others.
    """
    families, is_client = FAMILIES, configuration.is_client
    endpoints: tuple[str, ...] = ()
    if member is not None:
        others = [family for family in FAMILIES if family.name != REVOCATIONS.name]
        families = Families([*others, member.following.family])
        endpoints = usable_endpoints(member.endpoints)
        is_client = is_client or not member.may_train
    settings = DhtSettings(
        bootstrap=tuple(dict.fromkeys([*configuration.bootstrap_addresses, *endpoints])),
        client=is_client,
        save_seconds=configuration.save_seconds,
        tells_of_clock=member is None,
    )
    with open_keeper(configuration) as keeper:
        async with open_dht(
            network, rpc, families=families, settings=settings, keeper=keeper
        ) as dht:
            yield dht


NO_TOKEN_HELPS = frozenset(
    {
        Reason.TOKEN_MISSING,
        Reason.MALFORMED,
        Reason.WRONG_RUN,
        Reason.NOT_THE_PEER,
        Reason.ROLE,
    }
)


async def join_or_be_refused(dht: Dht, member: Membership | None = None) -> None:
    """Wait until a peer of the swarm has answered; NotAllowed if this node may not take part.

    A member whose token all refuse waits for another, because its membership asks the auth server
    for one when the token is over, or its key was withdrawn: the peers may be the ones that are
    wrong. The server's own refusal ends that, with MembershipEnded where the membership runs; and
    so does a reason that no token mends, as that this is another run.
    """
    refusals: list[NotAllowed] = []

    async def listen_for_a_refusal() -> None:
        refusal: NotAllowed | None = None
        while True:
            refusal = await dht.turned_away(refusal)
            if member is None or refusal.reason in NO_TOKEN_HELPS:
                break
        refusals.append(refusal)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen_for_a_refusal)
        await dht.joined()
        nursery.cancel_scope.cancel()
    if refusals:
        raise refusals[0]


@contextmanager
def open_keeper(configuration: Configuration) -> Iterator[Keeper]:
    """Open the file for peers, and for slots if configured. Blocks for some milliseconds."""
    places = configuration.places
    if not configuration.keeps_slots:
        yield PeerCache(places.peers_file)
        return
    # Imported here: most nodes do not use SQLite.
    from node.core.dht_store import DhtStore

    with DhtStore(places.dht_file) as store:
        yield store


def usable_endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    """The valid peer addresses, as this version spells them.

    Invalid ones are logged and left out: one bad line in the server's settings must not keep every
    node from starting.
    """
    usable = []
    for text in endpoints:
        try:
            usable.append(parse_peer_address(text).text)
        except WrongUse as error:
            log.warning("an address that the auth server gave cannot be used: %s", error)
    return tuple(usable)
