"""A newcomer whose fetch takes longer than the run stays in an epoch gets in all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from node.simulated_network import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from protocols.rpc import Rpc, open_rpc
from tests.accumulation.followed_runs import (
    STATE_BYTES,
    FollowedRun,
    RunMember,
    start_run,
)

EPOCH_SECONDS = 20.0
LINK = STATE_BYTES / (3 * EPOCH_SECONDS)
"""Bytes a second with which a state alone takes three epochs. A result takes half of one."""

Scenario = Callable[[SimulatedWorld, trio.Nursery, SimulatedNetwork, Rpc], Awaitable[None]]


def with_newcomer(scenario: Scenario, *, bytes_per_second: float = LINK) -> None:
    """A newcomer with a slow downlink, in virtual time."""

    async def main(world: SimulatedWorld) -> None:
        slow = NodeSettings(download_bytes_per_second=bytes_per_second)
        network = world.add_node("newcomer", slow)
        async with open_rpc(network) as rpc, trio.open_nursery() as nursery:
            await scenario(world, nursery, network, rpc)
            nursery.cancel_scope.cancel()

    run_simulation(main, settings=WorldSettings(link=LinkSettings(latency_seconds=0.02)))


def check_is_there(run: FollowedRun, newcomer: RunMember) -> None:
    """It has the very bytes that the others have."""
    assert newcomer.at == run.at
    assert newcomer.capture().digest == run.donors[0].member.capture().digest


def test_a_newcomer_whose_fetch_takes_three_epochs_gets_in() -> None:
    async def scenario(
        world: SimulatedWorld, nursery: trio.Nursery, network: SimulatedNetwork, rpc: Rpc
    ) -> None:
        run = await start_run(world, nursery, network, epoch_seconds=EPOCH_SECONDS)
        newcomer, began = RunMember(seed=1), run.at.epoch
        fetched = await run.fetch(rpc, newcomer)
        assert fetched.state.epoch == began
        assert len(fetched.results) >= 3
        newcomer.take(fetched.state, fetched.results)
        check_is_there(run, newcomer)
        assert run.told == []

    with_newcomer(scenario)
