"""The k best live experts for each example of a batch (Learning@home, algorithm 1), found exactly.

    chosen = await select_experts([scores_0, scores_1], 4, grid, directory.active)

The score of an expert is g(x, f) = Σ g_i(x)[u_i] (equation 2). A beam search extends the k best
prefixes by one dimension at a time, by live indices only. That is not always the best: an index
with a high score may lead to poor experts only. So the search goes on where something better could
be. The best that an unread prefix can have is its own score and the highest scores of the
remaining dimensions (its *bound*). A prefix whose bound is lower than the k-th best expert found so
far is left out, and the others are read, the highest bounds first, until there are none. If every
cell of a grid has an expert, the beam search alone proves this, and nothing more is read.

The examples of a batch share their readings: one call of `active` a step. The beam search needs one
step for each dimension. `MOST_WIDENED` limits what is read after it; only then the result may lack
an expert that is better.

Of equal scores the smaller uid is better, so all machines choose alike. Scores are added in float32
from the first dimension to the last. Bounds are added in the same order, so that rounding cannot
make one too low: if a ≤ b, then also rounded a + c ≤ b + c.

`BeamSearch` is pure. An *open* prefix of an example may have experts below it that count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocols.blocking import in_thread
from protocols.errors import ProtocolMisuse
from protocols.experts.directory import Below, Host, in_order_of_claim
from protocols.experts.grid import ExpertGrid, Uid
from protocols.tensors import NotFinite

log = logging.getLogger("potluck.experts")

MOST_WIDENED: Final = 512
"""Prefixes that a search reads beyond the beam. Somebody may announce prefixes without experts, so
without a limit a search could read for minutes."""

PAIRS_AT_ONCE = 1 << 21  # of an example and a cell: 8 MiB of scores

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]
Chosen: TypeAlias = tuple[Uid, tuple[Host, ...]]
Active: TypeAlias = Callable[[Sequence[Uid]], Awaitable[Mapping[Uid, Below]]]


async def select_experts(
    scores: Sequence[Tensor], k: int, grid: ExpertGrid, active: Active
) -> list[list[Chosen]]:
    """The k best live experts of each example, the best first, with their hosts.

    `scores[i]` is (batch, size of dimension i). An example has fewer than k only if fewer are live.
    The first host of an expert is the one that keeps it if several announce it.
    """

    def begin() -> tuple[BeamSearch, list[Uid]]:
        search = BeamSearch(scores, k, grid)
        return search, search.wanted()

    def go_on(found: Mapping[Uid, Below]) -> list[Uid]:
        search.take(found)
        return search.wanted()

    search, prefixes = await in_thread(begin)
    while prefixes:
        prefixes = await in_thread(go_on, await active(prefixes))
    if not search.is_exact:
        log.debug("a search for experts ended after %d prefixes beyond its beam", MOST_WIDENED)
    return await in_thread(search.best)


class BeamSearch:
    """One search for a whole batch.

        while prefixes := search.wanted():
            search.take(what is below these prefixes)
        search.best()

    Invariant: in each example, every live expert that is better than the k-th best so far is below
    one of the open prefixes; unless `is_exact` is false.
    """

    def __init__(self, scores: Sequence[Tensor], k: int, grid: ExpertGrid) -> None:
        self._gates = [_as_array(one) for one in scores]
        self._k = k
        self._grid = grid
        self._check()
        batch = len(self._gates[0])
        self._highest = [gate.max(axis=1) for gate in self._gates]
        self._known: dict[Uid, tuple[Below, Integers]] = {}
        self._next: dict[Uid, Integers] = {}  # the chosen prefixes, with their places in `_open`
        self._rounds = 0
        self._widened = 0
        self.is_exact = True
        self._open = self._opened(np.arange(batch), 0, np.zeros(batch, np.int64), _zeros(batch))
        self._best_scores = np.full((batch, k), -np.inf, np.float32)  # the best first
        self._best_numbers = np.full((batch, k), grid.cells, np.int64)

    def _check(self) -> None:
        shapes = [gate.shape for gate in self._gates]
        batch = shapes[0][0] if shapes and shapes[0] else 0
        if shapes != [(batch, size) for size in self._grid.sizes]:
            raise ProtocolMisuse(
                f"These scores do not fit the grid {self._grid.name}.",
                why=f"Their shapes are {shapes}, and the sizes of the grid {self._grid.sizes}.",
            )
        if self._k < 1:
            raise ProtocolMisuse(f"A search for {self._k} experts finds none.")
        if not all(np.isfinite(gate).all() for gate in self._gates):
            raise NotFinite("The scores of a gate are not all finite numbers.")

    def wanted(self) -> list[Uid]:
        """The prefixes to read next; none once the best experts are known."""
        while True:
            if not self._next:
                self._leave_out_the_worse()
                self._next = self._choose()
            if not self._next:
                return []
            unknown = [prefix for prefix in self._next if prefix not in self._known]
            if unknown:
                return unknown
            self._expand()

    def take(self, found: Mapping[Uid, Below]) -> None:
        """What is below the prefixes that were wanted. Cells outside of the grid are ignored."""
        for prefix, below in found.items():
            cells = np.fromiter(below, np.int64, len(below))
            self._known[prefix] = below, cells[cells < self._grid.sizes[len(prefix.cells)]]

    def best(self) -> list[list[Chosen]]:
        """The best experts of each example. Fewer than k if no more are live."""
        numbers = np.unique(self._best_numbers).tolist()  # many examples choose the same
        found = {one: self._found(one) for one in numbers if one < self._grid.cells}
        rows = self._best_numbers.tolist()
        return [[found[one] for one in row if one in found] for row in rows]

    def _found(self, number: int) -> Chosen:
        uid = self._grid.at(number)
        below, _ = self._known[uid.parent]
        return uid, in_order_of_claim(uid, below[uid.cells[-1]])

    # -- one round

    def _leave_out_the_worse(self) -> None:
        """Close the prefixes that can have nothing better than the k-th best."""
        these = self._open
        score = self._best_scores[these.example, -1]
        number = self._best_numbers[these.example, -1]
        is_better = (these.bound > score) | ((these.bound == score) & (these.number < number))
        self._open = these.only(is_better)

    def _choose(self) -> dict[Uid, Integers]:
        """The prefixes to expand next: of each example those with the highest bounds."""
        these, dimensions = self._open, self._grid.dimensions
        able = np.arange(len(these.example))
        if self._rounds < dimensions:
            width = self._k
            able = able[these.depth == self._rounds]
        else:
            width = self._k << min(self._rounds - dimensions, 16)
        able = able[np.lexsort((these.number[able], -these.bound[able], these.example[able]))]
        example = these.example[able]
        rank = np.arange(len(able)) - np.searchsorted(example, example)
        chosen = self._by_prefix(able[rank < width])
        if self._rounds >= dimensions:
            chosen = self._within_limit(chosen)
        self._rounds += 1
        if not chosen and self._rounds < dimensions and len(these.example):
            return self._choose()
        return chosen

    def _by_prefix(self, places: Integers) -> dict[Uid, Integers]:
        dimensions = self._grid.dimensions
        keys = self._open.number[places] * dimensions + self._open.depth[places]
        distinct, inverse = np.unique(keys, return_inverse=True)
        ends = np.cumsum(np.bincount(inverse, minlength=len(distinct)))[:-1]
        groups = np.split(places[np.argsort(inverse, kind="stable")], ends) if len(places) else []
        chosen = {}
        for key, group in zip(distinct.tolist(), groups, strict=True):
            number, depth = divmod(key, dimensions)
            chosen[Uid(self._grid.name, self._grid.at(number).cells[:depth])] = group
        return chosen

    def _within_limit(self, chosen: dict[Uid, Integers]) -> dict[Uid, Integers]:
        """Without the prefixes that would be too many to read."""
        unknown = [prefix for prefix in chosen if prefix not in self._known]
        for prefix in unknown[MOST_WIDENED - self._widened :]:
            del chosen[prefix]
            self.is_exact = False
        self._widened = min(MOST_WIDENED, self._widened + len(unknown))
        return chosen

    def _expand(self) -> None:
        """Put the live children of the chosen prefixes in their place."""
        these, chosen, self._next = self._open, self._next, {}
        stays = np.ones(len(these.example), np.bool_)
        opened = []
        for depth, size in enumerate(self._grid.sizes):
            prefixes = [prefix for prefix in chosen if len(prefix.cells) == depth]
            if not prefixes:
                continue
            live = np.zeros((len(prefixes), size), np.bool_)
            for row, prefix in enumerate(prefixes):
                live[row, self._known[prefix][1]] = True
            places = np.concatenate([chosen[prefix] for prefix in prefixes])
            rows = np.repeat(np.arange(len(prefixes)), [len(chosen[one]) for one in prefixes])
            stays[places] = False
            step = max(1, PAIRS_AT_ONCE // size)
            for start in range(0, len(places), step):
                part = slice(start, start + step)
                opened += self._children(these.only(places[part]), depth, live[rows[part]])
        self._open = _Open.joined([these.only(stays), *opened])

    def _children(self, parents: _Open, depth: int, live: npt.NDArray[np.bool_]) -> list[_Open]:
        """The live children of these prefixes; whole uids are compared with the best instead.

        `live` is (parents, size of the dimension).
        """
        scores = parents.score[:, None] + self._gates[depth][parents.example]
        is_last = depth + 1 == self._grid.dimensions
        if is_last and self._k < scores.shape[1]:
            scores[~live] = -np.inf  # no parent has more than k experts that count
            place = scores.shape[1] - self._k
            live &= scores >= np.partition(scores, place, axis=1)[:, place : place + 1]
        row, cell = np.nonzero(live)
        below = math.prod(self._grid.sizes[depth + 1 :])
        example, number = parents.example[row], parents.number[row] + cell * below
        if is_last:
            self._compare(example, number, scores[row, cell])
            return []
        return [self._opened(example, depth + 1, number, scores[row, cell])]

    def _compare(self, example: Integers, number: Integers, score: Floats) -> None:
        """Keep the k best of these experts and the best so far."""
        batch = len(self._best_scores)
        example = np.concatenate([example, np.repeat(np.arange(batch), self._k)])
        number = np.concatenate([number, self._best_numbers.ravel()])
        score = np.concatenate([score, self._best_scores.ravel()])
        order = np.lexsort((number, -score, example))
        first = np.searchsorted(example[order], np.arange(batch))
        best = order[first[:, None] + np.arange(self._k)]
        self._best_scores, self._best_numbers = score[best], number[best]

    def _opened(self, example: Integers, depth: int, number: Integers, score: Floats) -> _Open:
        bound = score
        for highest in self._highest[depth:]:
            bound = bound + highest[example]
        return _Open(example, np.full(len(example), depth), number, score, bound)


@dataclass(frozen=True)
class _Open:
    """Open prefixes, in parallel arrays: the example, and the prefix's length, the number of the
    first cell below it (`ExpertGrid.at`), its score, and its bound."""

    example: Integers
    depth: Integers
    number: Integers
    score: Floats
    bound: Floats

    def only(self, which: Integers | npt.NDArray[np.bool_]) -> _Open:
        return _Open(*(one[which] for one in self._arrays))

    @staticmethod
    def joined(parts: Sequence[_Open]) -> _Open:
        columns = zip(*(part._arrays for part in parts), strict=True)
        return _Open(*(np.concatenate(column) for column in columns))

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.example, self.depth, self.number, self.score, self.bound


def _as_array(scores: Tensor) -> Floats:
    array: Floats = scores.detach().to("cpu", torch.float32).numpy()
    return array


def _zeros(number: int) -> Floats:
    return np.zeros(number, np.float32)
