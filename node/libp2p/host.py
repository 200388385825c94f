"""The library's host, built from its parts and never "run".

`new_host` (libp2p/__init__.py:794) would add what a node must not have: plaintext and secio
beside Noise, Mplex, a resource manager with somebody else's limits, and QUIC. `host.run` would
start the auto-connector, system tasks and a service manager that ends everything when one task
raises. So the parts are put together here, with Noise alone and Yamux alone, our swarm, and of
the library's protocols only ping: identify is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.host.ping import ID as PING
from libp2p.host.ping import PingService
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.transport.upgrader import TransportUpgrader

from node.libp2p.connection import PeerConnection
from node.libp2p.selection import speed_up
from node.libp2p.settings import Libp2pSettings
from node.libp2p.swarm import NodeSwarm
from node.transport import install_muxer, security_options
from protocols.errors import MalformedMessage
from protocols.identity import Identity, PeerId


class NodeHost(BasicHost):  # type: ignore[misc]  # the library is untyped for mypy
    """A BasicHost that starts nothing of its own accord."""

    def __init__(self, swarm: NodeSwarm) -> None:
        super().__init__(swarm, default_protocols=OrderedDict({PING: self._answer_ping}))
        # Its notifee would identify every new connection in a system task.
        swarm.notifees.clear()
        swarm.library_handlers = self.multiselect.handlers
        self._ping_service = PingService(self)

    async def _answer_ping(self, stream: Any) -> None:
        await self._ping_service.handle_ping(stream)

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Ours runs when a connection comes up."""


def make_host(
    identity: Identity,
    settings: Libp2pSettings,
    nursery: trio.Nursery,
    *,
    dial: Callable[[PeerId, Iterable[str]], Awaitable[PeerConnection]],
    on_up: Callable[[PeerConnection], None],
    on_down: Callable[[PeerConnection], None],
) -> tuple[NodeHost, NodeSwarm]:
    """A host over our swarm, with Noise as the only security and our Yamux as the only muxer."""
    key_pair = create_new_key_pair(identity.seed)
    peer_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key_pair)
    upgrader = TransportUpgrader(security_options(key_pair), {})
    swarm = NodeSwarm(peer_id, peerstore, upgrader, settings, nursery, dial, on_up, on_down)
    host = NodeHost(swarm)
    beats = install_muxer(host, settings.yamux)
    nursery.start_soon(beats.run)
    speed_up(upgrader)
    return host, swarm


def library_id(peer: PeerId) -> ID:
    """The library's form of a peer id; MalformedMessage when it is none."""
    try:
        return ID.from_base58(peer)
    except ValueError as error:
        raise MalformedMessage(f"{peer[:64]!r} is not a peer id.", why=str(error)) from None
