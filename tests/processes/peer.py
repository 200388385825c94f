"""A peer for tests, in this process or as one of its own: `python -m tests.processes.peer`.

It is the real network and the real rpc, serving tests/processes/methods.py. As a process it
prints one JSON line when it listens, and ends when its standard input does.

Easy to get wrong: it must have nothing of its own that a test could mistake for the product's: no
retries, no timeouts, no clean-up beyond leaving its blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio

from node.net.libp2p.settings import Libp2pSettings
from node.net.network import open_libp2p_network
from node.net.transport import YamuxSettings
from protocols.guard import Caller
from protocols.identity import Identity, PeerId
from protocols.network import Network
from protocols.rpc import Empty, Rpc, Transfer, open_rpc
from protocols.rpc.ping import serve_ping
from tests.processes import generous
from tests.processes.methods import (
    BREAK,
    CENSUS,
    CHUNK_BYTES,
    ECHO,
    LINGER,
    SINK,
    SOURCE,
    Amount,
    Census,
    Content,
    Duration,
    Seen,
)
from tests.waiting import PATIENCE_SECONDS

CALL_SECONDS: Final = 30.0
# For a peer that sends no keep-alives while a test runs: it can learn of an end in time only from a
# closed socket, and not from a timeout of its own.
ONLY_TOLD_BY_SOCKETS: Final = YamuxSettings(keep_alive_seconds=10 * PATIENCE_SECONDS)
FULL_SECONDS: Final = 0.3  # without room for a megabyte on loopback: nobody reads any more
SEED_VARIABLE: Final = "POTLUCK_TEST_SEED"  # in hexadecimal; not an argument, others can see those
_PERIOD: Final = 251  # of the bytes in chunks: prime, so it falls in step with no chunk or frame


class Known(Protocol):
    """Something with an identity and addresses, such as a process that a test started."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> tuple[str, ...]: ...


def chunk_of(number: int) -> bytes:
    """The chunk with this number: no two neighbours are alike."""
    start = number % _PERIOD
    return (bytes(range(_PERIOD)) * (CHUNK_BYTES // _PERIOD + 2))[start : start + CHUNK_BYTES]


def digest_of(chunks: int) -> bytes:
    seen = hashlib.sha256()
    for number in range(chunks):
        seen.update(chunk_of(number))
    return seen.digest()


@dataclass
class TestPeer:
    """The network and the calls of one peer."""

    __test__ = False  # its name is no test's, whatever pytest thinks

    network: Network
    rpc: Rpc
    handlers: int = 0

    def knows(self, others: Iterable[Known]) -> None:
        for other in others:
            self.network.learn_addresses(other.peer, other.addresses)

    def census(self) -> Census:
        """The resources that this process holds now."""
        links = self.network.links()
        return Census(
            tasks=trio.lowlevel.current_statistics().tasks_living,
            file_descriptors=len(os.listdir("/proc/self/fd")),
            links=len(links),
            streams=sum(link.open_streams for link in links),
            handlers=self.handlers,
        )

    async def census_of(self, peer: PeerId) -> Census:
        """The resources that the other process reports to hold now."""
        return await self.rpc.call(peer, CENSUS, Empty(), timeout=CALL_SECONDS)

    async def upload(self, peer: PeerId, chunks: int) -> None:
        """Send so many chunks, and insist that all of them arrived as they were sent."""
        expected = hashlib.sha256()
        async with self.rpc.open_bulk(peer, SINK, Empty(), timeout=CALL_SECONDS) as upload:
            for number in range(chunks):
                chunk = chunk_of(number)
                expected.update(chunk)
                await upload.send_chunk(chunk)
            seen = await upload.finish(Empty())
        assert seen == Seen(chunks * CHUNK_BYTES, expected.digest())

    async def download(self, peer: PeerId, chunks: int) -> None:
        """Have so many chunks sent, and insist that all of them arrive as they should."""
        amount = Amount(chunks)
        buffer = bytearray(CHUNK_BYTES)
        async with self.rpc.open_bulk(peer, SOURCE, amount, timeout=CALL_SECONDS) as download:
            for number in range(chunks):
                assert await download.receive_chunk_into(buffer) == CHUNK_BYTES
                assert buffer == chunk_of(number)
            assert await download.receive_chunk_into(buffer) is None
            await download.finish(Empty())

    def serve(self) -> None:
        serve_ping(self.rpc)
        self.rpc.serve(ECHO, self._echo)
        self.rpc.serve(LINGER, self._linger)
        self.rpc.serve(BREAK, self._break)
        self.rpc.serve(CENSUS, self._take_census)
        self.rpc.serve_bulk(SINK, self._sink)
        self.rpc.serve_bulk(SOURCE, self._source)

    async def _echo(self, _caller: Caller, request: Content) -> Content:
        return request

    async def _linger(self, _caller: Caller, request: Duration) -> Empty:
        self.handlers += 1
        try:
            await trio.sleep(request.seconds)
        finally:
            self.handlers -= 1
        return Empty()

    async def _break(self, _caller: Caller, _request: Empty) -> Empty:
        raise RuntimeError("a secret that must not cross the wire")

    async def _take_census(self, _caller: Caller, _request: Empty) -> Census:
        return self.census()

    async def _sink(
        self, _caller: Caller, transfer: Transfer[Empty, Seen, Empty], _opening: Empty
    ) -> None:
        self.handlers += 1
        try:
            await transfer.accept(Empty())
            seen = hashlib.sha256()
            total = 0
            buffer = bytearray(CHUNK_BYTES)
            while (length := await transfer.receive_chunk_into(buffer)) is not None:
                seen.update(memoryview(buffer)[:length])
                total += length
            await transfer.finish(Seen(total, seen.digest()))
        finally:
            self.handlers -= 1

    async def _source(
        self, _caller: Caller, transfer: Transfer[Empty, Empty, Empty], opening: Amount
    ) -> None:
        self.handlers += 1
        try:
            await transfer.accept(Empty())
            for number in range(opening.chunks):
                await transfer.send_chunk(chunk_of(number))
            await transfer.finish(Empty())
        finally:
            self.handlers -= 1


@asynccontextmanager
async def open_test_peer(
    identity: Identity | None = None,
    *,
    knows: Iterable[Known] = (),
    port: int = 0,
    yamux: YamuxSettings | None = None,
    **settings: Any,
) -> AsyncIterator[TestPeer]:
    """A peer on loopback, serving, for the length of the block."""
    libp2p_settings = Libp2pSettings(
        listen_addresses=(f"/ip4/127.0.0.1/tcp/{port}",),
        yamux=yamux if yamux is not None else YamuxSettings(),
        **settings,
    )
    async with (
        open_libp2p_network(identity or Identity.generate(), libp2p_settings) as network,
        open_rpc(network) as rpc,
    ):
        peer = TestPeer(network, rpc)
        peer.serve()
        peer.knows(knows)
        yield peer


async def main() -> None:
    logging.basicConfig(level=os.environ.get("POTLUCK_TEST_LOG", "CRITICAL"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--inbound-connections", type=int, default=1024)
    parser.add_argument("--handshake-seconds", type=float, default=10.0)
    parser.add_argument("--dial", metavar="ADDRESS", help="connect there, and stay")
    parser.add_argument(
        "--exchange-with", metavar="ADDRESS", help="have that node send, and read none of it"
    )
    arguments = parser.parse_args()
    async with (
        open_test_peer(
            Identity.from_seed(bytes.fromhex(os.environ[SEED_VARIABLE])),
            port=arguments.port,
            inbound_connections=arguments.inbound_connections,
            handshake_seconds=arguments.handshake_seconds,
        ) as peer,
        trio.open_nursery() as nursery,
    ):
        addresses = peer.network.addresses()
        print(json.dumps({"peer": peer.network.peer_id, "addresses": addresses}), flush=True)
        if arguments.dial:
            await _dial(peer, arguments.dial)
        if arguments.exchange_with:
            nursery.start_soon(_exchange, peer, arguments.exchange_with)
        standard_input = trio.lowlevel.FdStream(os.dup(0))
        while await standard_input.receive_some():
            pass
        nursery.cancel_scope.cancel()


async def _dial(peer: TestPeer, address: str) -> PeerId:
    other = PeerId(address.rpartition("/p2p/")[2])
    peer.network.learn_addresses(other, [address])
    await peer.network.connect(other)
    return other


async def _exchange(peer: TestPeer, address: str) -> None:
    """Print a line when the other side's answers fill everything that is between us."""
    other = await _dial(peer, address)
    chunk = bytes(generous.CHUNK_BYTES)
    method = generous.GIVE_BACK
    async with peer.rpc.open_bulk(other, method, Empty(), timeout=CALL_SECONDS) as exchange:
        while True:
            with trio.move_on_after(FULL_SECONDS) as patience:
                await exchange.send_chunk(chunk)
            if patience.cancelled_caught:
                break
        print("full", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
