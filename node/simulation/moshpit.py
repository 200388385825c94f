"""How fast a swarm comes to agree on the average, by Moshpit and by other methods.

The experiment of the Moshpit paper (thesis, section 3.2 and figure 7): every peer has one number
from the standard normal distribution; after each round we look at the mean squared deviation of
what the peers hold from the average of all numbers.

Promises: the same plan gives the same figures. In one trial all methods begin with the same
numbers and meet the same failures, so that what differs is the method.

Easy to get wrong: the deviation is from the average of *all* peers, who may fail in any round,
and not from the mean of what they hold now.
"""

from __future__ import annotations

import random as randomness
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from node.simulation.moshpit_methods import (
    AllReduce,
    Gossip,
    Method,
    Moshpit,
    Numbers,
    PushSum,
    RandomGroups,
)
from protocols.moshpit.grid import Grid, Index, grid_shape, numbered_index, random_index

MethodName = Literal["moshpit", "random", "allreduce", "gossip", "pushsum"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

FirstIndex = Literal["cells", "numbered", "random"]

PAPER_GRID = Grid(width=32, dimensions=2)
LEAST_USE = 0.5  # of the paper's grid, to take it unasked


def usual_grid(peers: int) -> Grid:
    """The paper's grid where it is more than half full, else what potluck would choose."""
    if LEAST_USE < peers / PAPER_GRID.cells <= 1:
        return PAPER_GRID
    return grid_shape(peers, PAPER_GRID.width)


def expected_contraction(peers: int, groups: int) -> float:
    """What is left of the deviation after a round in random groups, expected: the paper's.

    For groups whose sizes are fixed, however uneven, (r - 1) / (N - 1) is exact. The paper's
    (r - 1) / N + r / N² is above it by (N - r) / (N² (N - 1)): for 1024 peers in 32 groups by one
    part in thirty thousand.
    """
    return (groups - 1) / peers + groups / peers**2


@dataclass(frozen=True)
class AveragingPlan:
    """One experiment. `groups`: how many random ones there are; the grid's number by default."""

    peers: int = 1024
    rounds: int = 10
    methods: tuple[MethodName, ...] = ("moshpit",)
    grid: Grid = PAPER_GRID
    first_index: FirstIndex = "cells"
    random_groups: int | None = None
    failure_rate: float = 0.0
    discards: bool = False  # whether a failure costs its whole group the round
    trials: int = 1
    seed: int = 7

    @property
    def groups(self) -> int:
        """How many groups a random round has: as many as there are in the grid."""
        in_grid = int(self.grid.width ** (self.grid.dimensions - 1))
        return self.random_groups or min(in_grid, self.peers)


def simulate(plan: AveragingPlan) -> dict[str, Any]:
    """The figures of one experiment, for a program; deviations[0] is before any round."""
    began = time.perf_counter()
    trials: dict[str, list[list[float]]] = {method: [] for method in plan.methods}
    failed = 0
    for trial in range(plan.trials):
        world = np.random.default_rng((plan.seed, trial))
        numbers = world.standard_normal(plan.peers)
        failures = world.random((plan.rounds, plan.peers)) < plan.failure_rate
        failed += int(failures.sum())
        for name in plan.methods:
            random = randomness.Random(f"{plan.seed} {trial} {name}")
            trials[name].append(
                _deviations(_method(name, plan, numbers, random), numbers, failures)
            )
    means = {name: np.mean(lists, axis=0).tolist() for name, lists in trials.items()}
    result: dict[str, Any] = {
        "peers": plan.peers,
        "rounds": plan.rounds,
        "grid": [plan.grid.width, plan.grid.dimensions],
        "grid_use": round(plan.peers / plan.grid.cells, 4),
        "first_index": plan.first_index,
        "failure_rate": plan.failure_rate,
        "on_failure": "discard" if plan.discards else "leave-out",
        "failed": failed,
        "trials": plan.trials,
        "seed": plan.seed,
        "method": plan.methods[0],
        "mean_squared_deviation": means[plan.methods[0]],
        "methods": means,
    }
    if plan.trials > 1:
        result["mean_squared_deviation_of_trials"] = trials
    if "random" in plan.methods:
        result["random_groups"] = plan.groups
        result["expected_contraction"] = expected_contraction(plan.peers, plan.groups)
    return result | {"wall_seconds": round(time.perf_counter() - began, 3)}


def _deviations(
    method: Method, numbers: Numbers, failures: np.ndarray[Any, np.dtype[np.bool_]]
) -> list[float]:
    """The mean squared deviation before any round, and after each."""
    average = numbers.mean()
    found = [_deviation(method, average)]
    for failed in failures:
        method.average(failed)
        found.append(_deviation(method, average))
    return found


def _deviation(method: Method, average: float) -> float:
    return float(np.mean((method.estimates() - average) ** 2))


def _method(
    name: MethodName, plan: AveragingPlan, numbers: Numbers, random: randomness.Random
) -> Method:
    match name:
        case "moshpit":
            indices = _first_indices(plan, random)
            return Moshpit(numbers, indices, plan.grid, random, discards=plan.discards)
        case "random":
            return RandomGroups(numbers, plan.groups, random, discards=plan.discards)
        case "allreduce":
            return AllReduce(numbers)
        case "gossip":
            return Gossip(numbers)
        case "pushsum":
            return PushSum(numbers)


def _first_indices(plan: AveragingPlan, random: randomness.Random) -> list[Index]:
    """Where the peers stand before the first round."""
    match plan.first_index:
        case "cells":  # each in a cell of its own, the empty ones anywhere
            cells = random.sample(range(plan.grid.cells), plan.peers)
            return [numbered_index(cell, plan.grid) for cell in cells]
        case "numbered":
            return [numbered_index(peer, plan.grid) for peer in range(plan.peers)]
        case "random":
            return [random_index(random, plan.grid) for _ in range(plan.peers)]
