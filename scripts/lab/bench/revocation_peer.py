"""Nodes of the revocation bench in a process of their own: `python -m lab.bench.revocation_peer`.

Two kinds. A *node* is a whole one, as `potluck listen` runs it, that has logged in and follows
revocations. An *outlaw* has logged in, too, but ignores being revoked: it goes on pinging all
nodes, and notes when each of them last answered. The orders are in `RevocationBenchPeer` (orders.py
has their format).

A single missing answer may be chance. A peer counts as refusing from the first failure after its
last answer, and only when it has refused for SETTLED_SECONDS, in which a node that shuts somebody
out lets one request through.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from auth.invites import read_invite
from lab.bench.orders import obey_with_nursery
from node.core.access.login import enrol
from node.core.access.membership import open_membership
from node.core.configuration import Configuration, read_configuration
from node.core.key_file import load_or_create_identity
from node.core.node import Node
from node.net import Libp2pSettings, open_libp2p_network
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc, open_rpc
from protocols.rpc.ping import ping

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
JOIN_SECONDS = 60.0
PING_SECONDS = 3.0
BETWEEN_PINGS_SECONDS = 0.25  # how exactly the moment is known
SETTLED_SECONDS = 6.0  # a peer that shuts somebody out looks at one stream each 5 s


class RevocationBenchPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._nodes: list[Node] = []
        self._outlaw: Rpc | None = None

    async def join(self, home: str, invite: str, bootstrap: list[str]) -> dict[str, Any]:
        """Log in and start a node that joins through these. Returns its id and addresses."""
        configuration = read_configuration(
            {"network.listen": (LOOPBACK,), "dht.bootstrap": tuple(bootstrap)}, home=home
        )
        await _enrol(configuration, invite)
        with trio.fail_after(JOIN_SECONDS):
            node: Node = await self._nursery.start(self._run_node, configuration)
            await node.dht.joined()
        self._nodes.append(node)
        return {"peer": node.network.peer_id, "address": node.network.addresses()[0]}

    async def known(self) -> dict[str, Any]:
        """The number of the newest revocation list that each node here knows."""
        return {"numbers": [node.status().membership.revocations for node in self._nodes]}

    async def become_outlaw(self, home: str, invite: str, peers: dict[str, str]) -> dict[str, Any]:
        """Log in and have each of these peers answer a ping, at its address."""
        configuration = read_configuration(home=home)
        await _enrol(configuration, invite)
        rpc: Rpc = await self._nursery.start(self._run_outlaw, configuration)
        for peer, address in peers.items():
            rpc.network.learn_addresses(PeerId(peer), [address])
            await ping(rpc, PeerId(peer), timeout=PING_SECONDS)
        self._outlaw = rpc
        return {"peer": rpc.network.peer_id}

    async def ping_until_refused(self, peers: list[str], seconds: float) -> dict[str, Any]:
        """Ping all until all refuse; when each began to, by the machine's monotonic clock."""
        assert self._outlaw is not None
        refused: dict[str, dict[str, Any]] = {}
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(_ping_until_refused, self._outlaw, peer, refused)
        return {"refused": refused}

    async def _run_node(
        self, configuration: Configuration, task_status: TaskStatus[Node] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with Node(configuration) as node:
            task_status.started(node)
            await trio.sleep_forever()

    async def _run_outlaw(
        self, configuration: Configuration, task_status: TaskStatus[Rpc] = trio.TASK_STATUS_IGNORED
    ) -> None:
        identity = load_or_create_identity(configuration.key_file)
        member = open_membership(configuration, identity)
        assert member is not None
        async with (
            open_libp2p_network(identity, Libp2pSettings(listen_addresses=())) as network,
            open_rpc(network, member.guard(network)) as rpc,
        ):
            task_status.started(rpc)
            await trio.sleep_forever()


async def _enrol(configuration: Configuration, invite: str) -> None:
    identity = load_or_create_identity(configuration.key_file)
    await enrol(identity, read_invite(invite), Path(configuration.places.pass_file))


async def _ping_until_refused(rpc: Rpc, peer: str, refused: dict[str, dict[str, Any]]) -> None:
    first_failure: float | None = None
    reasons: list[str] = []
    while first_failure is None or time.monotonic() - first_failure < SETTLED_SECONDS:
        try:
            await ping(rpc, PeerId(peer), timeout=PING_SECONDS)
        except PotluckError as error:
            first_failure = first_failure or time.monotonic()
            if isinstance(error, NotAllowed) and error.reason is not None:
                reasons.append(error.reason.value)
        else:
            first_failure, reasons = None, []
        await trio.sleep(BETWEEN_PINGS_SECONDS)
    refused[peer] = {"at": first_failure, "reasons": sorted(set(reasons))}


if __name__ == "__main__":
    trio.run(obey_with_nursery, RevocationBenchPeer)
