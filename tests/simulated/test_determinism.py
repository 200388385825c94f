"""The same seed gives the same run, whatever the process; another seed gives another."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import trio
from trio._core import _run as trio_run

from protocols.network import Stream
from protocols.testing.world import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

PROTOCOL = "/potluck/gossip/1.0.0"
NODES = 12
SETTINGS = WorldSettings(link=LinkSettings(latency_seconds=0.03, jitter_seconds=0.05))


async def gossip(world: SimulatedWorld) -> str:
    """Every node pings random others with random sizes for half a minute."""
    nodes = [world.add_node() for _ in range(NODES)]
    world.introduce(*nodes)

    async def answer(stream: Stream) -> None:
        while data := await stream.receive_some():
            await stream.send_all(data[: len(data) // 2 + 1])

    async def chatter(node: SimulatedNetwork) -> None:
        while True:
            await trio.sleep(node.random.expovariate(1.0))
            peer = node.random.choice([other for other in nodes if other is not node])
            stream = await node.open(peer.peer_id, PROTOCOL)
            await stream.send_all(bytes(node.random.randrange(1, 5000)))
            await stream.receive_some()
            await stream.aclose()

    with trio.move_on_after(30):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                node.serve(PROTOCOL, answer)
                nursery.start_soon(chatter, node)
    return world.trace_hash()


def test_one_seed_gives_one_trace() -> None:
    first = run_simulation(gossip, seed=1, settings=SETTINGS)
    second = run_simulation(gossip, seed=1, settings=SETTINGS)
    assert first == second


def test_another_seed_gives_another_trace() -> None:
    first = run_simulation(gossip, seed=1, settings=SETTINGS)
    second = run_simulation(gossip, seed=2, settings=SETTINGS)
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(
    "hash_seed", ["0", *(pytest.param(seed, marks=pytest.mark.slow) for seed in ("1", "4242"))]
)
def test_a_trace_is_the_same_in_another_process_with_another_hash_seed(hash_seed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.simulated.test_determinism"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == run_simulation(gossip, seed=1, settings=SETTINGS)


def test_the_scheduler_is_put_back_as_it_was() -> None:
    def in_place() -> tuple[object, ...]:
        runner = trio_run
        adds = runner.Deadlines.add
        return (
            runner._ALLOW_DETERMINISTIC_SCHEDULING,
            runner._r.getstate(),
            runner.CancelStatus,
            adds,
        )

    before = in_place()
    run_simulation(gossip, seed=3, settings=SETTINGS)
    assert in_place() == before


def told_to_end(*, by_a_deadline: bool) -> list[int]:
    """Which of many tasks, in the order in which they were begun, is told first that it is
    cancelled: all by one nursery, or each by a deadline of its own at the same moment."""
    told: list[int] = []

    async def wait(number: int) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            told.append(number)
            return trio.lowlevel.Abort.SUCCEEDED

        with trio.move_on_at(1.0 if by_a_deadline else math.inf):
            await trio.lowlevel.wait_task_rescheduled(abort)

    async def scenario(_world: SimulatedWorld) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(wait, number)
            await trio.sleep(0.5)
            if not by_a_deadline:
                nursery.cancel_scope.cancel()

    run_simulation(scenario)
    return told


@pytest.mark.parametrize("by_a_deadline", [False, True], ids=["nursery", "deadlines"])
def test_cancelled_tasks_are_told_in_the_same_order_in_every_run(*, by_a_deadline: bool) -> None:
    """A call that is cancelled tells the other side at once, so it matters who is told first."""
    orders = [told_to_end(by_a_deadline=by_a_deadline) for _ in range(4)]
    assert len(orders[0]) == 50
    assert orders.count(orders[0]) == 4


if __name__ == "__main__":
    print(run_simulation(gossip, seed=1, settings=SETTINGS))
