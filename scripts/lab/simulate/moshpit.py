"""How fast a swarm agrees on the average, by Moshpit and by other methods.

The experiment of the Moshpit paper (thesis, section 3.2 and figure 7): every peer has one number
from the standard normal distribution; after each round we measure the mean squared deviation of the
peers' numbers from the average of all initial numbers.

Promises: the same plan gives the same figures. In one trial all methods begin with the same numbers
and meet the same failures, so any difference is the method's.

The deviation is from the average of *all* peers, each of which may fail in any round, and not from
the mean of the present numbers.

`AveragingMethod`s are Moshpit and the methods that it is compared with. Each holds all peers'
numbers (one each, or a row) and advances them by a round, given which peers fail in it. All of them
keep the sum over all peers, so they approach the right average whichever peers fail.

A failure means the same for all: the peer is gone for this round and back in the next with its old
numbers. The cost to the others depends on the method:

- in a group the survivors average without it, as potluck's rounds do and as the authors of the
  Moshpit paper simulated; or, with `discards`, its group gets nothing from the round, as if the
  group could not agree;
- an all-reduce begins again, so the round has no result;
- in gossip and PushSum nothing is sent to it or by it, and its share stays with the sender.

The traffic should be equal. A butterfly sends two vectors per peer and round, whatever the group's
size. So gossip gets two neighbours; PushSum, which sends one, has that advantage.
"""

from __future__ import annotations

import random as randomness
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from protocols.moshpit.grid import (
    Grid,
    Index,
    coordinates,
    grid_shape,
    group_name,
    next_index,
    numbered_index,
    random_index,
)

Numbers = NDArray[np.float64]  # [peers], and for Moshpit and random groups also [peers, values]
Failed = NDArray[np.bool_]  # [peers]

ID_BYTES = 32  # of a round's id, which here is drawn


class AveragingMethod(Protocol):
    """One way of averaging, in the middle of it."""

    def average(self, failed: Failed) -> None:
        """One round, without those who fail."""

    def estimates(self) -> Numbers:
        """Each peer's present estimate of the average."""


class Moshpit:
    """Algorithm 1: groups by the grid, whose members are scattered over different groups next."""

    def __init__(
        self,
        numbers: Numbers,
        indices: list[Index],
        grid: Grid,
        random: randomness.Random,
        *,
        discards: bool,
    ) -> None:
        self._numbers, self._indices, self._grid = numbers.copy(), indices, grid
        self._random, self._discards = random, discards

    def groups(self) -> list[list[int]]:
        """The peers of each group of the next round."""
        groups: dict[str, list[int]] = defaultdict(list)
        for peer, index in enumerate(self._indices):
            groups[group_name(index)].append(peer)
        return list(groups.values())

    def average(self, failed: Failed) -> None:
        for roster in self.groups():
            # The order of a roster is that of hashes: another one for each round's key.
            self._random.shuffle(roster)
            _average_group(self._numbers, roster, failed, discards=self._discards)
            new = coordinates(len(roster), self._grid, self._random.randbytes(ID_BYTES))
            for peer, coordinate in zip(roster, new, strict=True):
                self._indices[peer] = next_index(self._indices[peer], coordinate)

    def estimates(self) -> Numbers:
        return self._numbers


class RandomGroups:
    """In each round the peers are put into random groups, as equal in size as possible."""

    def __init__(
        self, numbers: Numbers, groups: int, random: randomness.Random, *, discards: bool
    ) -> None:
        self._numbers, self._groups = numbers.copy(), groups
        self._random, self._discards = random, discards

    def average(self, failed: Failed) -> None:
        peers = list(range(self._numbers.size))
        self._random.shuffle(peers)
        for group in range(self._groups):
            members = peers[group :: self._groups]
            _average_group(self._numbers, members, failed, discards=self._discards)

    def estimates(self) -> Numbers:
        return self._numbers


class AllReduce:
    """All peers in one step, which begins again when one fails."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers.copy()

    def average(self, failed: Failed) -> None:
        if not failed.any():
            self._numbers[:] = self._numbers.mean()

    def estimates(self) -> Numbers:
        return self._numbers


class Gossip:
    """On a ring: each peer takes the mean of itself and its two neighbours."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers.copy()

    def average(self, failed: Failed) -> None:
        here = self._numbers
        change = np.zeros_like(here)
        for shift in (1, -1):
            both = ~(failed | np.roll(failed, shift))
            # Each gets as much from the other as it gives, so the sum stays.
            change += np.where(both, np.roll(here, shift) - here, 0.0) / 3
        self._numbers = here + change

    def estimates(self) -> Numbers:
        return self._numbers


class PushSum:
    """On the exponential graph: half of what I have, weight included, to the peer 2^t places on.

    The estimate is the quotient of both. Without failures and with 2^k peers it is exact after k
    rounds; the weights are what keeps it right when pushes are missing.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._sums, self._weights = numbers.copy(), np.ones_like(numbers)
        self._hops = [2**power for power in range((numbers.size - 1).bit_length())] or [0]
        self._round = 0

    def average(self, failed: Failed) -> None:
        hop = self._hops[self._round % len(self._hops)]
        self._round += 1
        pushes = ~(failed | np.roll(failed, -hop))  # sender and receiver are both there
        for amounts in (self._sums, self._weights):
            pushed = np.where(pushes, amounts / 2, 0.0)
            amounts += np.roll(pushed, hop) - pushed

    def estimates(self) -> Numbers:
        return self._sums / self._weights


def _average_group(numbers: Numbers, members: list[int], failed: Failed, *, discards: bool) -> None:
    """Give the members that are present their mean, or change nothing."""
    there = [peer for peer in members if not failed[peer]]
    if not there or (discards and len(there) < len(members)):
        return
    numbers[there] = numbers[there].mean(axis=0)


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
    """The expected remaining deviation after a round in random groups, by the paper.

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
    method: AveragingMethod, numbers: Numbers, failures: np.ndarray[Any, np.dtype[np.bool_]]
) -> list[float]:
    """The mean squared deviation before any round, and after each."""
    average = numbers.mean()
    found = [_deviation(method, average)]
    for failed in failures:
        method.average(failed)
        found.append(_deviation(method, average))
    return found


def _deviation(method: AveragingMethod, average: float) -> float:
    return float(np.mean((method.estimates() - average) ** 2))


def _method(
    name: MethodName, plan: AveragingPlan, numbers: Numbers, random: randomness.Random
) -> AveragingMethod:
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
