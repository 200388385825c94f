"""Averaging from end to end, where nothing goes wrong."""

from __future__ import annotations

from node.simulated_network import SimulatedWorld
from tests.dht.members import simulated
from tests.moshpit.averagers import average_all, averagers, check_same_result


@simulated
async def test_four_peers_hold_the_same_average(world: SimulatedWorld) -> None:
    peers = await averagers(world, 4)
    check_same_result(await average_all(peers), peers)
