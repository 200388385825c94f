"""Dials in a simulated world: all known addresses in parallel, each started a little later.

The outcome of a dial is decided when the answer would arrive, not when the dial begins. So a node
that appears, vanishes or is cut off in between is met in its state at that moment.

The outcomes: a peer with another key, refused (the machine is up, but the node is not, or it is
full), or no answer at all (no such machine, cut off, stopped, behind a NAT), which takes the whole
timeout.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import trio

from protocols.errors import Unreachable
from protocols.identity import PeerId
from protocols.testing.trace import TraceKind
from protocols.testing.traversal import dial_circuit, lets_in

if TYPE_CHECKING:
    from protocols.testing.link import LinkEnd
    from protocols.testing.simulated_node import SimulatedNetwork

NO_ANSWER = "no answer"
CIRCUIT = "/p2p-circuit"


async def dial(node: SimulatedNetwork, peer: PeerId) -> LinkEnd:
    """Return a link to `peer` over the first known address that answers, or raise Unreachable.

    Relays are asked beside, with the head start of one more address, and only if one is known. A
    relay itself is only dialled directly, because addresses could lead round in a circle.
    """
    circuits = [one for one in node.addresses_of(peer) if CIRCUIT in one]
    if not circuits or node.asked_as_relays[peer]:
        return await _dial_directly(node, peer)
    found: list[LinkEnd] = []
    failures: list[Unreachable] = []

    async def attempt(
        dialled: Callable[..., Awaitable[LinkEnd]], delay_seconds: float, *arguments: str
    ) -> None:
        await trio.sleep(delay_seconds)
        try:
            found.append(await dialled(node, peer, *arguments))
        except Unreachable as error:
            failures.append(error)
        else:
            nursery.cancel_scope.cancel()

    head_start = node.world.settings.dial_head_start_seconds
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, _dial_directly, 0.0)
        for order, address in enumerate(circuits, start=1):
            nursery.start_soon(attempt, dial_circuit, order * head_start, address)
    for end in found[1:]:
        end.close("another link was faster")
    if found:
        return found[0]
    raise _unreachable(
        peer, {one: str(error) for one, error in zip(circuits, failures[1:], strict=False)}
    )


async def _dial_directly(node: SimulatedNetwork, peer: PeerId) -> LinkEnd:
    world = node.world
    settings = world.settings
    now = trio.current_time()
    failures: dict[str, str] = {}
    pending: list[tuple[float, int, str, float]] = []
    direct = [one for one in reversed(node.addresses_of(peer)) if CIRCUIT not in one]
    for order, address in enumerate(direct):
        started = now + order * settings.dial_head_start_seconds
        there = world.node_at(address)
        duration = settings.dial_timeout_seconds
        if there is not None:
            round_trip = world.round_trip_seconds(node, there)
            duration = min(duration, settings.connect_round_trips * round_trip)
        pending.append((started + duration, order, address, started))
    heapq.heapify(pending)
    while pending:
        due, order, address, started = heapq.heappop(pending)
        await trio.sleep_until(due)
        end = node.link_end(peer)
        if end is not None:  # another dial, or theirs to us, was faster
            return end
        there = world.node_at(address)
        failure = _failure(node, there, peer)
        if failure is None and there is not None:
            return node.link_to(there, address)
        give_up = started + settings.dial_timeout_seconds
        if failure == NO_ANSWER and trio.current_time() < give_up:
            heapq.heappush(pending, (give_up, order, address, started))
        else:
            failures[address] = failure or NO_ANSWER
    world.record(TraceKind.DIAL_FAILED, node)
    raise _unreachable(peer, failures)


async def check(node: SimulatedNetwork, peer: PeerId, addresses: Iterable[str]) -> str:
    """Return the first address at which the peer answers, or raise Unreachable. Makes no link."""
    world = node.world
    settings = world.settings
    failures: dict[str, str] = {}
    for address in addresses:
        there = world.node_at(address)
        duration = settings.dial_timeout_seconds
        if there is not None and _failure(node, there, peer) != NO_ANSWER:
            round_trip = world.round_trip_seconds(node, there)
            duration = min(duration, settings.connect_round_trips * round_trip)
        await trio.sleep(duration)
        there = world.node_at(address)
        failure = _failure(node, there, peer)
        if failure is None and there is not None and world.path(node, there).relayed:
            failure = "only through a relay"
        if failure is None:
            return address
        failures[address] = failure
    raise _unreachable(peer, failures)


def _failure(node: SimulatedNetwork, there: SimulatedNetwork | None, peer: PeerId) -> str | None:
    if there is None or there.silent:
        return NO_ANSWER
    world = node.world
    if not lets_in(node, there) and not world.path(node, there).relayed:
        return NO_ANSWER
    if world.is_cut(node, there) or world.is_cut(there, node):
        return NO_ANSWER
    if there.closed:
        return "refused: nobody listens there"
    if node.stopped_at is not None or there.stopped_at is not None:
        return NO_ANSWER
    if there.peer_id != peer:
        return "somebody else answered"
    if there.inbound_links() >= there.settings.inbound_links:
        return "refused: it has too many connections"
    return None


def _unreachable(peer: PeerId, failures: dict[str, str]) -> Unreachable:
    if not failures:
        return Unreachable(
            f"{peer} cannot be reached.",
            why="No address is known for it.",
            advice="Give an address that ends in its peer id.",
        )
    tried = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
    return Unreachable(
        f"{peer} cannot be reached.",
        why=f"Every known address failed: {tried}.",
        advice="Check that it runs and that its address is right, then try again.",
    )
