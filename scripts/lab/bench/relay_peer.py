"""Many nodes that nobody can dial, in one process: `python -m lab.bench.relay_peer COUNT RELAY`.

They listen nowhere, connect to the relay, and obey orders (orders.py) together: take places, be
dialled through the relay, pour bytes.
"""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import trio

from lab.bench.orders import obey
from lab.bench.processes import BenchFailed
from nat.circuits import CircuitTaker
from nat.relaying import STOP
from nat.reservations import Reservation, reserve
from node.net import Libp2pSettings, open_libp2p_network
from protocols.identity import Identity, PeerId
from protocols.network import Reach, Stream, TraversableNetwork

POUR = "/potluck/bench/relayed/1.0.0"
CHUNK_BYTES = 64 << 10
PATIENCE_SECONDS = 60.0


async def _drain(stream: Stream) -> None:
    buffer = bytearray(CHUNK_BYTES)
    while await stream.receive_into(buffer):
        pass


class RelayPeers:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, networks: list[TraversableNetwork], relay: str) -> None:
        self._networks = networks
        self._relay_address = relay
        self._relay = PeerId(relay.rpartition("/p2p/")[2])
        self._streams: list[Stream] = []
        for network in networks:
            network.serve(POUR, _drain)
            network.serve(STOP, CircuitTaker(network, lambda relay: relay == self._relay).answer)

    async def reserve(self) -> dict[str, Any]:
        """Every node takes a place at the relay: the addresses by which each is reached."""
        places: list[tuple[PeerId, Reservation]] = []

        async def take(network: TraversableNetwork) -> None:
            network.learn_addresses(self._relay, [self._relay_address])
            with trio.fail_after(PATIENCE_SECONDS):
                places.append((network.peer_id, await reserve(network, self._relay)))

        async with trio.open_nursery() as nursery:
            for network in self._networks:
                nursery.start_soon(take, network)
        return {"addresses": {peer: f"{one.addresses[0]}/p2p/{peer}" for peer, one in places}}

    async def dial(self, addresses: dict[str, str]) -> dict[str, Any]:
        """Each node dials one of these through the relay, and opens a stream."""
        ways: list[str] = []

        async def go(network: TraversableNetwork, peer: PeerId, address: str) -> None:
            network.learn_addresses(peer, [address])
            with trio.fail_after(PATIENCE_SECONDS):
                self._streams.append(await network.open(peer, POUR))
            link = network.link(peer)
            ways.append("none" if link is None else link.reach.value)

        async with trio.open_nursery() as nursery:
            for network, (peer, address) in zip(self._networks, addresses.items(), strict=True):
                nursery.start_soon(go, network, PeerId(peer), address)
        return {"relayed": ways.count(Reach.RELAYED.value)}

    async def pour(self, bytes_per_second: float, seconds: float) -> dict[str, Any]:
        """All streams together send this much; how much went, and how long it took.

        BenchFailed if the relay ends a circuit.
        """
        each = bytes_per_second / len(self._streams)
        block = bytes(CHUNK_BYTES)
        began = time.monotonic()
        sent = 0
        lost: list[PeerId] = []

        async def send(stream: Stream) -> None:
            nonlocal sent
            first, number = trio.current_time(), 0
            while time.monotonic() - began < seconds:
                await trio.sleep_until(first + number * CHUNK_BYTES / each)
                try:
                    await stream.send_all(block)
                except trio.BrokenResourceError:
                    lost.append(stream.remote_peer)
                    nursery.cancel_scope.cancel()
                    return
                sent += CHUNK_BYTES
                number += 1

        async with trio.open_nursery() as nursery:
            for stream in self._streams:
                nursery.start_soon(send, stream)
        if lost:
            raise BenchFailed(f"The circuit to {lost[0]} has ended.")
        return {"bytes": sent, "seconds": time.monotonic() - began}


async def main(count: str, relay: str) -> None:
    async with AsyncExitStack() as running:
        settings = Libp2pSettings(listen_addresses=())
        networks: list[TraversableNetwork] = [
            await running.enter_async_context(open_libp2p_network(Identity.generate(), settings))
            for _ in range(int(count))
        ]
        await obey(RelayPeers(networks, relay))


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
