"""The same seed gives the same run, whatever the process; another seed gives another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio
from trio._core import _run as trio_run

from node.simulated_network import (
    LinkSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)
from protocols.network import Stream

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
    allowed, state = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()
    run_simulation(gossip, seed=3, settings=SETTINGS)
    assert (trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()) == (allowed, state)


if __name__ == "__main__":
    print(run_simulation(gossip, seed=1, settings=SETTINGS))
