"""The directory of a node: opened as its configuration says, with what it keeps on disk.

Every node keeps the peers that it has known; a backbone (`dht.keep_slots`) its slots as well.

Easy to get wrong: the keeper outlives the service. What the service hands over as it ends has to
find an open file, and a file that cannot be opened has to stop the start before anything runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from node.access.endpoints import usable_endpoints
from node.access.membership import Membership
from node.access.notice import REVOCATIONS
from node.configuration import Configuration
from node.peer_cache import PeerCache
from protocols.accumulation.progress_slot import PROGRESS
from protocols.dht.families import Families
from protocols.dht.keeper import Keeper
from protocols.dht.service import Dht, open_dht
from protocols.dht.settings import DhtSettings
from protocols.moshpit.matchmaking_messages import GROUP
from protocols.network import Network
from protocols.rpc import Rpc

# What potluck's nodes keep in the directory. A room that needs a family of its own declares it
# here, so that every node takes its slots.
FAMILIES = Families([REVOCATIONS, GROUP, PROGRESS])


@asynccontextmanager
async def open_directory(
    network: Network, rpc: Rpc, configuration: Configuration, member: Membership | None = None
) -> AsyncIterator[Dht]:
    """Serve the directory and join the swarm, in the background, until the block is left.

    A member of a run also joins at the places that its pass names, and keeps of revocations what
    the auth server has signed. One that may only look on keeps nothing for others.
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


@contextmanager
def open_keeper(configuration: Configuration) -> Iterator[Keeper]:
    """Where this node keeps peers, and slots if it is told to. Blocks for some milliseconds."""
    places = configuration.places
    if not configuration.keeps_slots:
        yield PeerCache(places.peers_file)
        return
    # Imported here: most nodes have no use for SQLite.
    from node.dht_store import DhtStore

    with DhtStore(places.dht_file) as store:
        yield store
