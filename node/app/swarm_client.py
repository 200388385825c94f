"""A client of the swarm for one question, as `potluck dht … --bootstrap ADDRESS` needs it.

It does not listen, keeps nothing, and no other node remembers it. It uses this machine's own key if
there is one and no node runs with it; then the slots that it writes are this node's. Otherwise it
has a new key, and nobody can change its slots before they expire.

If there is an access pass, it takes part in that run with it, and renews an expired one first. The
pass is not valid for another key, so if a node runs here, `potluck dht` asks that node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from node.core.access.membership import Membership, open_membership
from node.core.access.one_shot import renew_if_over
from node.core.configuration import Configuration
from node.core.control_client import a_node_answers
from node.core.directory import FAMILIES
from node.core.key_file import load_identity
from node.core.peer_address import PeerAddress, parse_peer_address
from node.net import Libp2pSettings, open_libp2p_network
from protocols.dht import Dht, DhtSettings, open_dht
from protocols.errors import PotluckError, Unreachable
from protocols.identity import Identity
from protocols.network import Network
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc, open_rpc


@dataclass(frozen=True)
class SwarmClient:
    network: Network
    rpc: Rpc
    dht: Dht


@asynccontextmanager
async def open_client(configuration: Configuration, seconds: float) -> AsyncIterator[SwarmClient]:
    """A client of the swarm for the length of the block, which begins when it has joined. Errors:
    see `join_swarm`."""
    identity, member = _identity(configuration)
    if member is not None:
        await renew_if_over(member)
    network_settings = Libp2pSettings(
        listen_addresses=(), dial_seconds=min(configuration.dial_seconds, seconds)
    )
    settings = DhtSettings(bootstrap=configuration.bootstrap_addresses, client=True)
    async with (
        open_libp2p_network(identity, network_settings) as network,
        open_rpc(network, member.guard(network) if member else None) as rpc,
        open_dht(network, rpc, families=FAMILIES, settings=settings) as dht,
    ):
        deadline = trio.current_time() + seconds
        await join_swarm(network, dht, configuration.bootstrap_addresses, deadline)
        yield SwarmClient(network, rpc, dht)


def _identity(configuration: Configuration) -> tuple[Identity, Membership | None]:
    own = load_identity(configuration.key_file)
    if own is None or a_node_answers(configuration.places.control_socket):
        return Identity.generate(), None
    return own, open_membership(configuration, own)


async def join_swarm(network: Network, dht: Dht, addresses: Sequence[str], deadline: float) -> None:
    """Join the swarm. Unreachable at once when every address fails, and after the deadline;
    NotAllowed when all nodes there refuse this node."""
    failures: dict[str, str] = {}
    refusals: list[NotAllowed] = []

    async def connect(address: PeerAddress) -> None:
        try:
            await network.connect(address.peer)
        except PotluckError as error:
            failures[address.text] = str(error)

    with trio.move_on_at(deadline):
        async with trio.open_nursery() as nursery:
            for text in addresses:
                address = parse_peer_address(text)
                network.learn_addresses(address.peer, [address.text])
                nursery.start_soon(connect, address)
        if len(failures) < len(addresses):
            async with trio.open_nursery() as nursery:

                async def hear_refusal() -> None:
                    refusals.append(await dht.turned_away())
                    nursery.cancel_scope.cancel()

                nursery.start_soon(hear_refusal)
                await dht.joined()
                nursery.cancel_scope.cancel()
            if not refusals:
                return
    if refusals:
        raise refusals[0]
    failures |= {one.address: one.failure for one in dht.bootstrap_state().addresses if one.failure}
    raise Unreachable(
        "The swarm cannot be joined.",
        why=" ".join(failures.values()) or "No node of it has answered in time.",
        advice="Use the address of a running node: `potluck listen` and `potluck status` print it "
        "there.",
    )
