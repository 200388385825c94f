"""One home's node in `scripts/bench nat`: `python -m lab.bench.nat_peer HOME PORT ADDRESS...`.

A whole node of the product, as `potluck` starts it, that joins at the addresses, and obeys orders
(orders.py). Only the receiver of the bench's transfers is added.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import trio

from lab.bench.orders import obey
from lab.bench.pouring import POUR, Basin, make_block, pour
from node.core.configuration import read_configuration
from node.core.node import Node
from node.core.status import memory_in_use
from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.network import Reach
from protocols.rpc import ping

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from protocols.moshpit.averager import Averager

PING_SECONDS = 10.0
LINK_SECONDS = 30.0
RETRY_SECONDS = 0.5


class NatPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, node: Node, began: float, nursery: trio.Nursery) -> None:
        self._node = node
        self._nursery = nursery
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

    async def router(self) -> dict[str, Any]:
        """Wait until the kind of the router is known."""
        await self._node.connectivity.looked.wait()
        return {"router": self._node.connectivity.nat.name.lower()}

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

    async def carry(self, peer: str, chunks: int, seconds: float) -> dict[str, Any]:
        """Send this many chunks, again and again until they have arrived: each try."""
        tries: list[dict[str, Any]] = []
        with trio.move_on_after(seconds):
            while not tries or tries[-1]["why"]:
                one = {"began": time.monotonic(), "why": "it was not over in time", "ended": 0.0}
                tries.append(one)
                try:
                    await pour(self._node.rpc, PeerId(peer), self._block, chunks, check=True)
                except (PotluckError, trio.BrokenResourceError) as error:
                    one["why"] = str(error) or "the stream broke"
                    await trio.sleep(RETRY_SECONDS)
                else:
                    one["why"] = ""
                one["ended"] = time.monotonic()
        return {"tries": tries}

    async def hold(
        self, run: str, values: int, seed: int, up: float, down: float, dials_out_only: bool
    ) -> None:
        """Open an averager, and hold this many values of this seed, as float16 on the wire."""
        import torch

        from protocols.moshpit.averager import open_averager
        from protocols.moshpit.layout import Vector
        from protocols.moshpit.settings import AveragerSettings

        held = torch.randn(values, generator=torch.Generator().manual_seed(seed))
        self._vector = Vector.of({"values": held}, "float16")
        settings = AveragerSettings(
            run=run,
            up_bytes_per_second=up,
            down_bytes_per_second=down,
            reduces=lambda: not dials_out_only,
            router=lambda: self._node.connectivity.nat,
        )
        node = self._node

        async def keep_open(
            task_status: TaskStatus[Averager] = trio.TASK_STATUS_IGNORED,
        ) -> None:
            async with open_averager(node.network, node.rpc, node.dht, settings) as averager:
                task_status.started(averager)
                await trio.sleep_forever()

        self._averager = await self._nursery.start(keep_open)

    async def average(self, epoch: int, expected: int) -> dict[str, Any]:
        """One round: how it ended, how long it took, and a digest of the result."""
        import blake3

        from protocols.moshpit.outcome import Committed
        from protocols.moshpit.request import RoundRequest

        began = time.monotonic()
        outcome = await self._averager.average(
            RoundRequest(self._vector, weight=1.0, epoch=epoch, expected=expected)
        )
        told: dict[str, Any] = {"ended": type(outcome).__name__}
        told["seconds"] = time.monotonic() - began
        if outcome.rounds:
            last = outcome.rounds[-1]
            told |= {
                "members": len(last.members),
                "exchange_seconds": last.exchange_seconds,
                "matchmaking_seconds": last.matchmaking_seconds,
                "averaged_bytes": list(last.averaged_bytes),
                "why": last.reason,
            }
        if isinstance(outcome, Committed):
            told["digest"] = blake3.blake3(outcome.result.numpy().data.cast("B")).hexdigest()
        return told

    async def used(self) -> dict[str, Any]:
        """Processor seconds so far, and the memory of this process now."""
        return {"cpu_seconds": time.process_time(), "memory_bytes": memory_in_use() or 0}

    async def traffic(self) -> dict[str, Any]:
        """Bytes sent in all, and carried for others; and the way to each linked peer."""
        node = self._node
        return {
            "sent": node.network.traffic().sent_bytes,
            "carried": 0 if node.relay is None else node.relay.counts().carried_bytes,
            "ways": {link.peer: link.way for link in node.network.links()},
        }

    def _way(self, peer: PeerId) -> dict[str, Any]:
        link = self._node.network.link(peer)
        return {"way": "none" if link is None else link.way}


async def main(home: str, port: str, *bootstrap: str) -> None:
    began = time.monotonic()
    flags = {
        "network.listen": (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"),
        "dht.bootstrap": bootstrap,
    }
    configuration = read_configuration(flags, environment={}, home=home)
    async with Node(configuration) as node, trio.open_nursery() as nursery:
        await obey(NatPeer(node, began, nursery), {"peer": node.network.peer_id})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
