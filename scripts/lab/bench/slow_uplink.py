"""A network with a limited uplink, like one at home.

    async with open_slow_network(identity, configuration, bytes_per_second=500_000) as network: ...

Everything that this node's streams send goes out through one gate, in slices, so that small
messages do not wait behind large ones. It needs no privileges, unlike the kernel's traffic control,
and limits all of a node's links together, unlike a link proxy.

Only the payload of streams is limited. Encryption and frames come on top, and pings and the opening
of streams bypass the gate.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager

import trio

from node.core.configuration import Configuration
from node.core.node import open_real_network
from protocols.identity import Identity, PeerId
from protocols.network import (
    LinkEvent,
    LinkFacts,
    Sighting,
    Stream,
    StreamHandler,
    TrafficFacts,
    TraversableNetwork,
)

SLICE_BYTES = 16 << 10  # at 4 Mb/s a thirtieth of a second: small frames wait no longer


class UplinkGate:
    """Lets this many bytes through in a second, first come, first served."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.passed_bytes = 0
        self._free_at = 0.0

    async def pass_through(self, size: int) -> None:
        """Wait for one's turn. Cancelled, the turn is lost all the same."""
        now = trio.current_time()
        turn = max(now, self._free_at)
        self._free_at = turn + size / self.bytes_per_second
        self.passed_bytes += size
        await trio.sleep_until(turn)


class GatedStream(Stream):
    """A stream that sends through the gate, and is the stream behind it otherwise."""

    def __init__(self, stream: Stream, gate: UplinkGate) -> None:
        self._stream = stream
        self._gate = gate

    @property
    def remote_peer(self) -> PeerId:
        return self._stream.remote_peer

    @property
    def protocol(self) -> str:
        return self._stream.protocol

    @property
    def last_arrival(self) -> float:
        return self._stream.last_arrival

    async def send_all(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if not view:
            await self._stream.send_all(data)
        for start in range(0, len(view), SLICE_BYTES):
            part = view[start : start + SLICE_BYTES]
            await self._gate.pass_through(len(part))
            await self._stream.send_all(part)

    async def send_parts(self, start: bytes, rest: memoryview) -> None:
        await self.send_all(start)
        await self.send_all(rest)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._stream.receive_some(max_bytes)

    async def receive_into(self, buffer: memoryview | bytearray) -> int:
        return await self._stream.receive_into(buffer)

    def receive_now(self, buffer: memoryview | bytearray) -> int:
        return self._stream.receive_now(buffer)

    def reset(self) -> None:
        self._stream.reset()

    async def aclose(self) -> None:
        await self._stream.aclose()


class SlowNetwork(TraversableNetwork):
    """A network behind a gate. Made by `open_slow_network`."""

    def __init__(self, network: TraversableNetwork, gate: UplinkGate) -> None:
        self._network = network
        self._gate = gate

    @property
    def identity(self) -> Identity:
        return self._network.identity

    @property
    def random(self) -> random.Random:
        return self._network.random

    def wall_time(self) -> float:
        return self._network.wall_time()

    def addresses(self) -> tuple[str, ...]:
        return self._network.addresses()

    def learn_addresses(self, peer: PeerId, addresses: Iterable[str]) -> None:
        self._network.learn_addresses(peer, addresses)

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return self._network.addresses_of(peer)

    def link(self, peer: PeerId) -> LinkFacts | None:
        return self._network.link(peer)

    def links(self) -> tuple[LinkFacts, ...]:
        return self._network.links()

    def traffic(self) -> TrafficFacts:
        sent = self._gate.passed_bytes
        received = self._network.traffic().received_bytes
        return TrafficFacts(sent, received, sent, sent / self._gate.bytes_per_second)

    def link_events(self) -> AbstractContextManager[trio.MemoryReceiveChannel[LinkEvent]]:
        return self._network.link_events()

    async def connect(self, peer: PeerId) -> LinkFacts:
        return await self._network.connect(peer)

    async def check_dialable(self, peer: PeerId, addresses: Iterable[str]) -> str:
        return await self._network.check_dialable(peer, addresses)

    async def disconnect(self, peer: PeerId) -> None:
        await self._network.disconnect(peer)

    async def ping(self, peer: PeerId) -> float:
        return await self._network.ping(peer)

    async def open(self, peer: PeerId, protocol: str) -> Stream:
        return GatedStream(await self._network.open(peer, protocol), self._gate)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def handle(stream: Stream) -> None:
            await handler(GatedStream(stream, self._gate))

        self._network.serve(protocol, handle)

    def stop_serving(self, protocol: str) -> None:
        self._network.stop_serving(protocol)

    def listened_addresses(self) -> tuple[str, ...]:
        return self._network.listened_addresses()

    def announce(self, addresses: Iterable[str]) -> None:
        self._network.announce(addresses)

    async def sighting(self, peer: PeerId, *, port: int = 0, ipv4: bool = False) -> Sighting:
        return await self._network.sighting(peer, port=port, ipv4=ipv4)

    def dial_back(
        self, peer: PeerId, address: str, protocol: str
    ) -> AbstractAsyncContextManager[Stream]:
        return self._network.dial_back(peer, address, protocol)

    async def punch(self, peer: PeerId, addresses: Iterable[str], *, initiates: bool) -> LinkFacts:
        return await self._network.punch(peer, addresses, initiates=initiates)

    async def carry_circuit(self, stream: Stream, peer: PeerId) -> None:
        await self._network.carry_circuit(stream, peer)


@asynccontextmanager
async def open_slow_network(
    identity: Identity, configuration: Configuration, bytes_per_second: float
) -> AsyncIterator[TraversableNetwork]:
    """A real network of which the uplink is limited; 0: it is not."""
    async with open_real_network(identity, configuration) as network:
        yield SlowNetwork(network, UplinkGate(bytes_per_second)) if bytes_per_second else network
