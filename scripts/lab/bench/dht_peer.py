"""Nodes of the directory's bench in a process of their own: `python -m lab.bench.dht_peer`.

Each node has its own identity, network, port, links, calls and directory; they share only the
process and its event loop. The orders are in `DhtBenchPeer` (orders.py has their format).

Only the one call is timed. Finding the node, and talking with the bench, is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import trio

from lab.bench.orders import obey_with_nursery
from node.core.status import memory_in_use
from node.net import Libp2pSettings, open_libp2p_network
from protocols.dht import Dht, DhtSettings, Family, open_dht
from protocols.errors import PotluckError
from protocols.identity import Identity
from protocols.network import Network
from protocols.rpc import open_rpc

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
JOIN_SECONDS = 30.0


class DhtBenchPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery, families: Iterable[Family] = ()) -> None:
        self._nursery = nursery
        self._families = tuple(families)
        self._nodes: list[tuple[Network, Dht]] = []

    async def join(self, addresses: list[str]) -> dict[str, Any]:
        """Start a node that joins through these; its number here, its address, and the time."""
        began = time.perf_counter()
        with trio.fail_after(JOIN_SECONDS):
            network, dht = await self._nursery.start(self._run_node, tuple(addresses))
            await dht.joined()
        self._nodes.append((network, dht))
        return {
            "node": len(self._nodes) - 1,
            "address": network.addresses()[0],
            "seconds": time.perf_counter() - began,
        }

    async def warm(self, node: int, keys: int) -> dict[str, Any]:
        """Read this many random keys at once; afterwards there are links to all their replicas."""
        network, dht = self._nodes[node]
        await dht.get_many([f"note/{network.random.getrandbits(64):x}" for _ in range(keys)])
        return {"links": len(network.links())}

    async def put(self, node: int, key: str, value: str, ttl: float) -> dict[str, Any]:
        dht = self._nodes[node][1]
        began = time.perf_counter()
        try:
            await dht.put(key, value, ttl, keep_up=False)
        except PotluckError:
            return {"ms": (time.perf_counter() - began) * 1000, "ok": False}
        return {"ms": (time.perf_counter() - began) * 1000, "ok": True}

    async def get(self, node: int, key: str, expected: str, newest: bool) -> dict[str, Any]:
        dht = self._nodes[node][1]
        began = time.perf_counter()
        try:
            entries = await dht.get(key, latest_enough=not newest)
        except PotluckError:
            entries = {}
        milliseconds = (time.perf_counter() - began) * 1000
        values = [entry.value for entry in entries.values()]
        return {"ms": milliseconds, "ok": values == [expected]}

    async def totals(self) -> dict[str, Any]:
        """The use of this process so far, all its nodes together."""
        links = [link for network, _ in self._nodes for link in network.links()]
        return {
            "cpu_seconds": time.process_time(),
            "bytes": sum(link.bytes_sent + link.bytes_received for link in links),
            "memory_bytes": memory_in_use() or 0,
            "links": len(links),
        }

    async def statistics(self, node: int) -> dict[str, Any]:
        return vars(self._nodes[node][1].statistics())

    async def _run_node(
        self,
        addresses: tuple[str, ...],
        task_status: TaskStatus[tuple[Network, Dht]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        settings = DhtSettings(bootstrap=addresses)
        async with (
            open_libp2p_network(
                Identity.generate(), Libp2pSettings(listen_addresses=(LOOPBACK,))
            ) as network,
            open_rpc(network) as rpc,
            open_dht(network, rpc, families=self._families, settings=settings) as dht,
        ):
            task_status.started((network, dht))
            await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(obey_with_nursery, DhtBenchPeer)
