"""Routers in a simulated world: circuits, dial backs and punches, by the kinds of `nat.kinds`.

A node behind a router has the address that its router shows the world; packets to it are dropped
unless the router's kind lets them in. A circuit is asked for from the relay as on a real network,
by the messages of `nat`. After that the link over it is a link of its own, with the latency of both
hops, and lives as long as the circuit's streams. Its bytes do not pass through the relay's rates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from nat.addresses import port_of, without_peer
from nat.circuits import ask_for_circuit
from nat.kinds import Nat, can_punch
from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.network import LinkFacts, Reach, Sighting, Stream
from protocols.testing.link_model import LinkSettings

if TYPE_CHECKING:
    from protocols.testing.link import LinkEnd
    from protocols.testing.simulated_node import SimulatedNetwork

FREE_PORT = 40_000
FIRST_SYMMETRIC_PORT = 50_000
CIRCUIT_SECONDS = 10.0
"""From the stop message to the link: as long as a real handshake may take."""
BEAT_SECONDS = 60.0
"""A real link pings over its circuit. This one carries nothing there but a byte in this time."""


def lets_in(source: SimulatedNetwork, target: SimulatedNetwork) -> bool:
    """Whether the target's router lets a fresh connection in to the port that it listens on."""
    nat = target.settings.nat
    if nat is Nat.CONE:
        return source.machine in target.sent_to
    return nat is Nat.NONE and target.settings.dialable


async def sighting(node: SimulatedNetwork, peer: PeerId, port: int) -> Sighting:
    end = node.link_end(peer)
    if end is None or end.reach is not Reach.DIRECT or end.inbound:
        await trio.lowlevel.checkpoint()
        raise Unreachable(f"There is no direct link of ours to {peer}.")
    for _ in range(node.world.settings.connect_round_trips):
        await end.round_trip()
    there = end.other.node
    local = port or FREE_PORT
    if port == port_of(node.place):
        node.sent_to.add(there.machine)
    outside = local
    if node.settings.nat is Nat.SYMMETRIC:
        node.symmetric_ports += 1
        outside = FIRST_SYMMETRIC_PORT + node.symmetric_ports
    return Sighting(local, node.place.replace(f"/tcp/{port_of(node.place)}", f"/tcp/{outside}"))


@asynccontextmanager
async def dial_back(
    node: SimulatedNetwork, peer: PeerId, address: str, protocol: str
) -> AsyncIterator[Stream]:
    stranger = node.world.add_stranger(node)
    try:
        stranger.learn_addresses(peer, [address])
        yield await stranger.open(peer, protocol)
    finally:
        await stranger.aclose()


async def punch(
    node: SimulatedNetwork, peer: PeerId, addresses: Iterable[str], *, initiates: bool
) -> LinkFacts:
    """Meet the other side's punch, if the two routers allow it, or wait until cancelled."""
    tried = [node.world.node_at(_listening(one)) for one in addresses]
    if not tried:
        await trio.lowlevel.checkpoint()
        raise Unreachable(f"No address of {peer} can be tried.")
    there = next((one for one in tried if one is not None and one.peer_id == peer), None)
    with node.link_events() as events:
        try:
            if there is not None:
                await _knock(node, there, initiates=initiates)
            while not _is_direct(node, peer):
                await events.receive()
        finally:
            node.punching.pop(peer, None)
    link = node.link(peer)
    if link is None:
        raise Unreachable(f"The link to {peer} was lost.")
    return link


async def _knock(node: SimulatedNetwork, there: SimulatedNetwork, *, initiates: bool) -> None:
    node.punching[there.peer_id] = initiates
    node.sent_to.add(there.machine)
    round_trip = node.world.round_trip_seconds(node, there)
    await trio.sleep(node.world.settings.connect_round_trips * round_trip)
    if not _is_direct(node, there.peer_id) and _meets(node, there, initiates=initiates):
        node.link_to(there, there.address, punched=node.peer_id in there.punching)


def _listening(address: str) -> str:
    """The place behind an address: a symmetric router's is found by its host alone."""
    return "/".join([*without_peer(address).split("/")[:4], "4001"])


def _meets(node: SimulatedNetwork, there: SimulatedNetwork, *, initiates: bool) -> bool:
    if there.closed or node.world.is_cut(node, there) or node.world.is_cut(there, node):
        return False
    if initiates and lets_in(node, there):
        return True
    theirs = there.punching.get(node.peer_id)
    agreed = theirs is not None and theirs is not initiates
    return agreed and can_punch(node.settings.nat, there.settings.nat)


def _is_direct(node: SimulatedNetwork, peer: PeerId) -> bool:
    link = node.link(peer)
    return link is not None and link.reach is Reach.DIRECT


# ---- circuits


async def dial_circuit(node: SimulatedNetwork, peer: PeerId, address: str) -> LinkEnd:
    """The link to a peer through the relay in this address; Unreachable if there is none."""
    relay_address, _, _ = address.partition("/p2p-circuit")
    relay = PeerId(relay_address.rpartition("/p2p/")[2])
    if relay in (peer, node.peer_id):
        raise Unreachable(f"{address} names no relay.")
    node.learn_addresses(relay, [relay_address])
    node.asked_as_relays[relay] += 1
    try:
        stream = await ask_for_circuit(node, relay, peer)
    finally:
        node.asked_as_relays[relay] -= 1
    near = node.link_end(relay)
    far = None if near is None else near.other.node.link_end(peer)
    if near is None or far is None:
        stream.reset()
        raise Unreachable(f"The links to the relay {relay} were lost.")
    path = LinkSettings(
        latency_seconds=near.path.latency_seconds + far.path.latency_seconds,
        jitter_seconds=near.path.jitter_seconds + far.path.jitter_seconds,
        relayed=True,
    )
    end = node.link_to(far.other.node, without_peer(address), path=path, relay=relay)
    node.world.nursery.start_soon(_tie, end, stream)
    return end


async def carry_circuit(node: SimulatedNetwork, stream: Stream, peer: PeerId) -> None:
    """Wait for the link over a circuit that was accepted, and then for its end."""
    end = node.link_end(peer)
    with node.link_events() as events, trio.move_on_after(CIRCUIT_SECONDS):
        while end is None or end.link.relay != stream.remote_peer:
            await events.receive()
            end = node.link_end(peer)
    if end is None or end.link.relay != stream.remote_peer:
        stream.reset()
        raise Unreachable(f"{peer} did not come over its circuit.")
    await _tie(end, stream)


async def _tie(end: LinkEnd, stream: Stream) -> None:
    """End the link if its circuit ends, and the circuit if its link ends."""

    async def watch_circuit() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await stream.receive_some():
                pass
        end.break_now("the circuit has ended")
        nursery.cancel_scope.cancel()

    async def beat() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                await trio.sleep(BEAT_SECONDS)
                await stream.send_all(b"\0")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_circuit)
        nursery.start_soon(beat)
        await end.ended.wait()
        nursery.cancel_scope.cancel()
    stream.reset()
