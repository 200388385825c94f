"""One home's node in `scripts/bench nat`: `python -m lab.bench.nat_peer HOME PORT ADDRESS...`.

A whole node of the product, as `potluck` starts it, that joins at the addresses, and obeys orders
(orders.py). Only the receiver of the bench's transfers is added.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import trio

from lab.bench.orders import obey
from lab.bench.pouring import POUR, Basin, make_block, pour
from nat.connectivity import Mode
from node.core.configuration import read_configuration
from node.core.node import Node
from protocols.identity import PeerId
from protocols.network import Reach
from protocols.rpc import ping

PING_SECONDS = 10.0
LINK_SECONDS = 30.0
RETRY_SECONDS = 0.5


class NatPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, node: Node, began: float) -> None:
        self._node = node
        self._began = began
        self._block = make_block()
        node.rpc.serve_bulk(POUR, Basin(self._block).receive)

    async def mode(self) -> dict[str, Any]:
        """Wait for the stated mode: which, how long it took, and where we are reached."""
        connectivity = self._node.connectivity
        await connectivity.stated.wait()
        return {
            "mode": connectivity.mode.value,
            "router": connectivity.nat.name.lower(),
            "seconds": time.monotonic() - self._began,
            "peer": self._node.network.peer_id,
            "addresses": list(self._node.network.addresses()),
        }

    async def wait_for(self, mode: str, within: float) -> dict[str, Any]:
        """Wait until this node has a mode; how long it took."""
        began = time.monotonic()
        wanted = Mode(mode)
        with trio.fail_after(within):
            while self._node.connectivity.mode is not wanted:
                await self._node.connectivity.changed.wait()
        return {"seconds": time.monotonic() - began}

    async def meet(self, peer: str, addresses: list[str], direct_within: float) -> dict[str, Any]:
        """Connect, call once, and wait for a direct link: how, and when each came."""
        network, other = self._node.network, PeerId(peer)
        network.learn_addresses(other, addresses)
        began = time.monotonic()
        with network.link_events() as events:
            with trio.fail_after(LINK_SECONDS):
                await network.connect(other)
            linked = time.monotonic()
            round_trip = await ping(self._node.rpc, other, timeout=PING_SECONDS)
            direct: float | None = None
            with trio.move_on_after(direct_within):
                while (link := network.link(other)) is None or link.reach is not Reach.DIRECT:
                    await events.receive()
                direct = time.monotonic()
        return {
            "seconds_to_link": linked - began,
            "seconds_to_direct": None if direct is None else direct - linked,
            "first_round_trip_ms": round_trip * 1000,
            **self._way(other),
        }

    async def pour(self, peer: str, chunks: int) -> dict[str, Any]:
        """Send this many chunks, and say which way they went."""
        poured = await pour(self._node.rpc, PeerId(peer), self._block, chunks, check=True)
        seconds = poured.ended - poured.began
        return {"MB_per_s": poured.bytes_sent / 1e6 / seconds, **self._way(PeerId(peer))}

    def _way(self, peer: PeerId) -> dict[str, Any]:
        link = self._node.network.link(peer)
        return {"way": "none" if link is None else link.way}


async def main(home: str, port: str, *bootstrap: str) -> None:
    began = time.monotonic()
    flags = {"network.listen": (f"/ip4/0.0.0.0/tcp/{port}",), "dht.bootstrap": bootstrap}
    configuration = read_configuration(flags, environment={}, home=home)
    async with Node(configuration) as node:
        await obey(NatPeer(node, began), {"peer": node.network.peer_id})


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
