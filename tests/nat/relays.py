"""A relay in a simulated world, the peers that use it, and those that misuse it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import base58
import trio

from nat import messages
from nat.circuits import ask_for_circuit
from nat.messages import Hop, HopType, Status, Stop, StopType
from nat.relay_limits import RelayLimits
from nat.relaying import HOP, STOP, Relay
from nat.reservations import reserve
from protocols.identity import PeerId
from protocols.network import Stream
from protocols.testing.world import NodeSettings, SimulatedNetwork, SimulatedWorld


class Hub:
    """A node that relays."""

    def __init__(self, world: SimulatedWorld, network: SimulatedNetwork, relay: Relay) -> None:
        self.world = world
        self.network = network
        self.relay = relay

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    async def guest(self, name: str, *, machine: SimulatedNetwork | None = None) -> Guest:
        """A peer with a link to the relay; perhaps one of many on that machine."""
        if machine is not None:
            network = self.world.add_stranger(machine)
        else:
            network = self.world.add_node(name, NodeSettings(dialable=False))
        network.learn_addresses(self.peer, self.network.addresses())
        await network.connect(self.peer)
        return Guest(self, network)

    async def guests(self, count: int) -> list[Guest]:
        return [await self.guest(f"guest-{number}") for number in range(count)]

    async def circuit(self, source: Guest, target: Guest) -> tuple[Stream, Stream]:
        """The two ends of a new circuit, without a link over it."""
        near = await ask_for_circuit(source.network, self.peer, target.peer)
        return near, await target.arrived()


class Guest:
    """A peer that has a link to the relay, and takes whatever circuit it brings."""

    def __init__(self, hub: Hub, network: SimulatedNetwork) -> None:
        self.hub = hub
        self.network = network
        self._brings, self._brought = trio.open_memory_channel[Stream](1000)
        network.serve(STOP, self._take)

    @property
    def peer(self) -> PeerId:
        return self.network.peer_id

    async def _take(self, stream: Stream) -> None:
        await messages.read(stream, Stop)
        await messages.send(stream, Stop(type=StopType.STATUS, status=Status.OK))
        await self._brings.send(stream)
        await trio.sleep_forever()  # returning would close it

    async def arrived(self) -> Stream:
        """The next circuit that the relay has brought."""
        return await self._brought.receive()

    async def reserve(self) -> None:
        await reserve(self.network, self.hub.peer)

    async def ask(self, message: Any) -> Any:
        """What the relay answers to this, whatever it is: a message, or bytes that are none."""
        stream = await self.network.open(self.hub.peer, HOP)
        async with stream:
            await stream.send_all(
                message if isinstance(message, bytes) else messages.encode(message)
            )
            return await messages.read(stream, Hop)

    async def status_of_reserving(self) -> int:
        answer = await self.ask(Hop(type=HopType.RESERVE))
        assert answer.type == HopType.STATUS
        status: int = answer.status
        return status

    async def status_of_connecting(self, target: PeerId) -> int:
        ask = Hop(type=HopType.CONNECT)
        ask.peer.id = base58.b58decode(target)
        answer = await self.ask(ask)
        assert answer.type == HopType.STATUS
        status: int = answer.status
        return status


@asynccontextmanager
async def hub_in(
    world: SimulatedWorld,
    limits: RelayLimits | None = None,
    *,
    name: str = "hub",
    admits: Callable[[PeerId], Awaitable[bool]] | None = None,
    month_left: Callable[[], int] | None = None,
    spend: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Hub]:
    network = world.add_node(name)
    relay = Relay(
        network, limits or RelayLimits(), admits=admits, month_left=month_left, spend=spend
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(relay.run)
        yield Hub(world, network, relay)
        nursery.cancel_scope.cancel()
