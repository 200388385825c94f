"""One node of the bench in a process of its own: `python -m lab.bench.peer [AUTH SEED]`.

It starts a network and its rpc on loopback, prints its peer id and address, and then obeys orders:
one JSON object a line on stdin (`{"do": "unary", ...}`), one JSON line as the answer on stdout. It
ends when its stdin does, so it cannot outlive the bench that started it, however that ends.

Measuring happens here, between two such processes, and never in the process that asks. So the time
to talk with it is in no figure.

It also measures a plain TCP socket, whose speed is the limit of any transport on this machine: one
way, megabyte by megabyte, into one buffer that is used again; no encryption, no framing.
"""

from __future__ import annotations

import gc
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from lab.bench.admission import admitted
from lab.bench.holdings import PeakMemory
from lab.bench.orders import obey
from lab.bench.pouring import POUR, Basin, make_block, pour, pour_until_stuck
from node.net import Libp2pSettings, open_libp2p_network
from protocols.access import TokenGuard
from protocols.guard import Guard, OpenGuard
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.rpc import Rpc, open_rpc
from protocols.rpc.ping import ECHO, EchoRequest, serve_ping

CHUNK_BYTES = 1 << 20
PATIENCE_SECONDS = 30.0  # so that neither end outlives a bench that was killed


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE_SECONDS)
    return listener


def receive_all(listener: socket.socket) -> tuple[int, float]:
    """How many bytes one client sent, and when the last of them was here."""
    with listener, listener.accept()[0] as connection:
        connection.settimeout(PATIENCE_SECONDS)
        buffer = bytearray(CHUNK_BYTES)
        total = 0
        while received := connection.recv_into(buffer):
            total += received
    return total, time.monotonic()


def send_all(port: int, block: list[bytes], chunks: int) -> float:
    """Send this many chunks; when it began."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
        began = time.monotonic()
        for number in range(chunks):
            connection.sendall(block[number % len(block)])
    return began


LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO_BYTES = bytes(20)  # what the reference measures with: the size of a node id
CALL_SECONDS = 10.0
STUCK_SECONDS = 2.0  # without a chunk leaving: on loopback a thousand times what one takes


class BenchPeer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, network: Network, rpc: Rpc, memory: PeakMemory) -> None:
        self._network = network
        self._rpc = rpc
        self._memory = memory
        self._block = make_block()
        self._listener = listen()
        rpc.serve_bulk(POUR, Basin(self._block).receive)
        serve_ping(rpc)

    def introduction(self) -> dict[str, Any]:
        return {
            "peer": self._network.peer_id,
            "addresses": list(self._network.addresses()),
            "plain_port": self._listener.getsockname()[1],
        }

    async def learn(self, peer: str, addresses: list[str]) -> None:
        """Remember where a peer is, connect to it, and call it once."""
        self._network.learn_addresses(PeerId(peer), addresses)
        await self._call(PeerId(peer))

    async def unary(self, peer: str, seconds: float) -> dict[str, Any]:
        """One call after the other: the median time of one, in milliseconds."""
        times = []
        deadline = time.perf_counter() + seconds
        while (began := time.perf_counter()) < deadline:
            await self._call(PeerId(peer))
            times.append(time.perf_counter() - began)
        return {"ms_p50": statistics.median(times) * 1000, "calls": len(times)}

    async def in_flight(self, peer: str, seconds: float, callers: int) -> dict[str, Any]:
        """This many calls at a time: calls per second."""
        calls = 0
        began = time.perf_counter()
        deadline = began + seconds

        async def keep_calling() -> None:
            nonlocal calls
            while time.perf_counter() < deadline:
                await self._call(PeerId(peer))
                calls += 1

        async with trio.open_nursery() as nursery:
            for _ in range(callers):
                nursery.start_soon(keep_calling)
        return {"per_s": calls / (time.perf_counter() - began), "calls": calls}

    async def pour(self, peers: list[str], chunks: int, check: bool = False) -> dict[str, Any]:
        """Send this many chunks to each of the peers at once: begin, end and bytes."""
        pourings = []

        async def pour_to(peer: str) -> None:
            pourings.append(await pour(self._rpc, PeerId(peer), self._block, chunks, check=check))

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(pour_to, peer)
        return {
            "began": min(pouring.began for pouring in pourings),
            "ended": max(pouring.ended for pouring in pourings),
            "bytes": sum(pouring.bytes_sent for pouring in pourings),
        }

    async def pour_small(self, peer: str, transfers: int) -> dict[str, Any]:
        """This many transfers of one chunk, one after another: the median time of one."""
        times = []
        for _ in range(transfers):
            poured = await pour(self._rpc, PeerId(peer), self._block, 1)
            times.append(poured.ended - poured.began)
        return {"ms_p50": statistics.median(times) * 1000}

    async def pour_paced(self, peer: str, chunks: int, bytes_per_second: float) -> dict[str, Any]:
        """The same to one peer, no faster than this many bytes a second."""
        poured = await pour(
            self._rpc, PeerId(peer), self._block, chunks, bytes_per_second=bytes_per_second
        )
        return {"began": poured.began, "ended": poured.ended, "bytes": poured.bytes_sent}

    async def pour_until_stuck(self, peer: str, chunks: int) -> dict[str, Any]:
        sent = await pour_until_stuck(
            self._rpc, PeerId(peer), self._block, chunks, patience_seconds=STUCK_SECONDS
        )
        return {"chunks": sent}

    async def cpu(self) -> dict[str, Any]:
        """User and system seconds of all threads of this process so far."""
        return {"seconds": time.process_time()}

    async def watch_memory(self) -> None:
        gc.collect()
        self._memory.start()

    async def memory_growth(self) -> dict[str, Any]:
        return {"bytes": self._memory.growth_bytes()}

    async def plain_receive(self) -> dict[str, Any]:
        total, ended = await trio.to_thread.run_sync(
            receive_all,
            self._listener,
            abandon_on_cancel=True,  # type: ignore[call-arg] # trio-typing's old stubs hide it
        )
        self._listener = listen()
        return {"bytes": total, "ended": ended, "plain_port": self._listener.getsockname()[1]}

    async def plain_send(self, port: int, chunks: int) -> dict[str, Any]:
        began = await trio.to_thread.run_sync(
            send_all,
            port,
            self._block,
            chunks,
            abandon_on_cancel=True,  # type: ignore[call-arg] # as above
        )
        return {"began": began}

    async def _call(self, peer: PeerId) -> None:
        await self._rpc.call(peer, ECHO, EchoRequest(ECHO_BYTES), timeout=CALL_SECONDS)


@asynccontextmanager
async def open_bench_peer(auth_seed: bytes) -> AsyncIterator[BenchPeer]:
    async with open_bench_network(auth_seed) as (network, rpc, memory):
        yield BenchPeer(network, rpc, memory)


@asynccontextmanager
async def open_bench_network(auth_seed: bytes) -> AsyncIterator[tuple[Network, Rpc, PeakMemory]]:
    """The network of a node of the bench; with a token if there is a key to sign it."""
    settings = Libp2pSettings(listen_addresses=(LOOPBACK,))
    memory = PeakMemory()
    async with (
        open_libp2p_network(Identity.generate(), settings) as network,
        open_rpc(network, _guard(network, auth_seed)) as rpc,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(memory.run)
        yield network, rpc, memory
        nursery.cancel_scope.cancel()


def _guard(network: Network, auth_seed: bytes) -> Guard:
    if not auth_seed:
        return OpenGuard()
    return TokenGuard(admitted(network.identity, auth_seed), network.random)


async def main(auth_seed: bytes) -> None:
    async with open_bench_peer(auth_seed) as peer:
        await obey(peer, peer.introduction())


if __name__ == "__main__":
    trio.run(main, bytes.fromhex("".join(sys.argv[1:2])))
