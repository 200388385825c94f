"""A thousand nodes in one process: busy ones talk, idle ones cost nothing."""

from __future__ import annotations

import pytest
import trio

from protocols.network import Stream
from protocols.testing.world import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from tests.simulated.worlds import PROTOCOL, echo, simulated

NODES = 1000
PEERS_OF_EACH = 10
BUSY_SECONDS = [
    pytest.param(20.0, id="short", marks=pytest.mark.slow),
    pytest.param(60.0, id="long", marks=pytest.mark.soak),
]
PAUSE_SECONDS = 10.0  # between two messages on one stream, on average
TICK_SECONDS = 0.001
MESSAGE = b"m" * 200


async def talking(world: SimulatedWorld, seconds: float) -> tuple[int, str]:
    """Each of a thousand nodes talks to ten others; how many answers came, and the trace."""
    nodes = [world.add_node() for _ in range(NODES)]
    answers = 0

    async def talk(node: SimulatedNetwork, peer: SimulatedNetwork) -> None:
        nonlocal answers
        node.learn_addresses(peer.peer_id, peer.addresses())
        stream: Stream = await node.open(peer.peer_id, PROTOCOL)
        async with stream:
            while True:
                await trio.sleep(node.random.expovariate(1 / PAUSE_SECONDS))
                await stream.send_all(MESSAGE)
                assert await stream.receive_some() == MESSAGE
                answers += 1

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                node.serve(PROTOCOL, echo)
            for node in nodes:
                for step in range(PEERS_OF_EACH):
                    nursery.start_soon(talk, node, nodes[(node.index + 1 + 97 * step) % NODES])
    return answers, world.trace_hash()


@pytest.mark.parametrize("seconds", BUSY_SECONDS)
def test_a_thousand_nodes_talk_to_ten_others_each(seconds: float) -> None:
    link = LinkSettings(latency_seconds=0.03, jitter_seconds=0.02)
    answers, _ = run_simulation(
        talking, seconds, seed=1, settings=WorldSettings(link=link), tick_seconds=TICK_SECONDS
    )
    expected = NODES * PEERS_OF_EACH * seconds / PAUSE_SECONDS
    assert 0.95 * expected < answers < expected


@pytest.mark.slow
@simulated
async def test_a_thousand_nodes_start_no_task(world: SimulatedWorld) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    nodes = [world.add_node() for _ in range(NODES)]
    for node in nodes:
        node.serve(PROTOCOL, echo)
    assert trio.lowlevel.current_statistics().tasks_living == before


@pytest.mark.slow
@simulated
async def test_a_thousand_linked_nodes_that_are_idle_for_hours_cost_nothing(
    world: SimulatedWorld,
) -> None:
    nodes = [world.add_node() for _ in range(NODES)]
    for node in nodes:
        neighbour = nodes[(node.index + 1) % NODES]
        node.learn_addresses(neighbour.peer_id, neighbour.addresses())
        await node.connect(neighbour.peer_id)
    calls = world.timeline.calls_made
    await trio.sleep(12 * 3600)
    assert world.timeline.calls_made == calls
    assert all(len(node.links()) == 2 for node in nodes)
