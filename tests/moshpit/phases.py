"""When each phase of a round begins, measured in a run without faults with the same seed.

A simulated run is decided by its seed. So what happens in the second round of some peers, until
something is done to them, happens at the same moments in every run; `undisturbed` says when.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import trio

from protocols.testing.world import SimulatedWorld, run_simulation
from tests.dht.members import SETTINGS as WORLD
from tests.moshpit.averagers import HOME, AveragingPeer, average_all, averagers

MATCHMAKING, EXCHANGE, AGREEMENT = "matchmaking", "exchange", "agreement"
PHASES = (MATCHMAKING, EXCHANGE, AGREEMENT)
EPOCH = 2  # of the round in which something will happen


@dataclass(frozen=True)
class Moments:
    """Seconds from the beginning of the round to the beginning of each phase, and to the end."""

    starts: tuple[float, float, float, float]
    leader: int

    def at(self, phase: str, part: float) -> float:
        """The moment when this part of a phase is over."""
        start, stop = self.starts[PHASES.index(phase) :][:2]
        return start + part * (stop - start)


async def ready_for_a_round(world: SimulatedWorld, count: int) -> list[AveragingPeer]:
    """Peers that have averaged once, so that they have links."""
    peers = await averagers(world, count, machine=HOME)
    await average_all(peers, epoch=1)
    for one in peers:
        one.ended.clear()
    return peers


@functools.cache
def undisturbed(count: int, seed: int) -> Moments:
    async def scenario(world: SimulatedWorld) -> Moments:
        peers = await ready_for_a_round(world, count)
        began = trio.current_time()
        rounds = [one.outcome.rounds[0] for one in await average_all(peers, epoch=EPOCH)]
        exchanged = min(one.exchange_began or 0.0 for one in rounds)
        agreed = max(one.exchange_ended or 0.0 for one in rounds)
        over = max(one.ended for one in rounds)
        leader = next(n for n, one in enumerate(peers) if one.peer == rounds[0].leader)
        return Moments((0.0, exchanged - began, agreed - began, over - began), leader)

    return run_simulation(scenario, seed=seed, settings=WORLD)
