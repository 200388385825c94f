"""Links through a relay, and what happens when a direct one appears beside them."""

from __future__ import annotations

import pytest
import trio

from protocols.network import LinkEvent, Reach
from protocols.testing.world import LinkSettings, NodeSettings, SimulatedNetwork, SimulatedWorld
from tests.simulated.peers import Server, is_served, open_rpc
from tests.simulated.worlds import (
    LATENCY_SECONDS,
    PROTOCOL,
    echo,
    joined,
    read_exactly,
    simulated,
    time_until_broken,
)

RELAYED = LinkSettings(latency_seconds=3 * LATENCY_SECONDS, relayed=True)
DIRECT = LinkSettings(latency_seconds=LATENCY_SECONDS)
REPLACED_LINK_SECONDS = 60.0


def _behind_nat(world: SimulatedWorld) -> tuple[SimulatedNetwork, SimulatedNetwork]:
    first = world.add_node("first", NodeSettings(dialable=False))
    second = world.add_node("second", NodeSettings(dialable=False))
    world.introduce(first, second)
    world.set_path(first, second, RELAYED)
    return first, second


@simulated
async def test_a_relayed_path_reaches_a_node_that_cannot_be_dialled(world: SimulatedWorld) -> None:
    first, second = _behind_nat(world)
    second.serve(PROTOCOL, echo)
    assert (await first.connect(second.peer_id)).reach is Reach.RELAYED
    stream = await first.open(second.peer_id, PROTOCOL)
    await stream.send_all(b"round about")
    assert await read_exactly(stream, 11) == b"round about"


@simulated
async def test_a_direct_link_takes_over_and_old_streams_live_on_for_a_while(
    world: SimulatedWorld,
) -> None:
    first, second = _behind_nat(world)
    near, far = await joined(first, second)
    with first.link_events() as ours, second.link_events() as theirs:
        world.punch(first, second, DIRECT)
        better = LinkEvent(second.peer_id, reach=Reach.DIRECT, was=Reach.RELAYED)
        assert ours.receive_nowait() == better
        assert theirs.receive_nowait() == LinkEvent(first.peer_id, better.reach, better.was)
        assert [link.reach for link in first.links()] == [Reach.DIRECT]
        await near.send_all(b"still here")
        assert await read_exactly(far, 10) == b"still here"
        new, _ = await joined(first, second)
        assert await time_until_broken(near) <= REPLACED_LINK_SECONDS
        await new.send_all(b"x")
        await trio.sleep(10 * REPLACED_LINK_SECONDS)
        assert [link.reach for link in second.links()] == [Reach.DIRECT]
        with pytest.raises(trio.WouldBlock):
            ours.receive_nowait()


@simulated
async def test_a_crash_ends_the_replaced_link_as_well(world: SimulatedWorld) -> None:
    first, second = _behind_nat(world)
    near, _ = await joined(first, second)
    world.punch(first, second, DIRECT)
    world.crash(second)
    assert await time_until_broken(near) == pytest.approx(RELAYED.latency_seconds)


@simulated
async def test_calls_move_to_the_direct_link_and_none_is_lost(world: SimulatedWorld) -> None:
    client = world.add_node("client", NodeSettings(dialable=False))
    server = Server(world, world.add_node("server", NodeSettings(dialable=False)))
    world.introduce(client, server.network)
    world.set_path(client, server.network, RELAYED)
    await server.ready.wait()
    async with open_rpc(client) as rpc:
        await is_served(rpc, server)
        started = trio.current_time()
        await is_served(rpc, server)
        assert trio.current_time() - started == pytest.approx(2 * RELAYED.latency_seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_served, rpc, server)
            await trio.sleep(LATENCY_SECONDS)
            world.punch(client, server.network, DIRECT)
        await is_served(rpc, server)
        started = trio.current_time()
        await is_served(rpc, server)
        assert trio.current_time() - started == pytest.approx(2 * DIRECT.latency_seconds)
