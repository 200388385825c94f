"""Who of those that may compute should: a search over c, each choice judged by its exact plan.

The objective is min(Σ s_i c_i / B, 1 / T(c)), T(c) being the best round when c contributes.

Easy to get wrong: the relaxed c of DeDLOC's (5). As soon as computing is not what holds a step
up, c = 0.99 takes a peer out of every min_k a_ki and costs next to no samples, so the best of that
programme is that nobody sends gradients. Therefore nothing is relaxed and rounded here. Instead:

- T only grows when one more peer contributes: with the same shares its own upload becomes more,
  everybody's download no less, and nothing else changes. Samples grow too. So along any order of
  the free peers the best number of them is where the two curves cross, found by bisection.
- The orders are by samples, by upload, and by samples for the share that computing costs a peer:
  for a given T it is a knapsack (which peers bring most samples while the greatest shares still
  add up to 1), and that is the order of its continuous solution.
- Then single peers are added, dropped and exchanged while that helps and the budget lasts.

"All that may" is the first candidate, and a candidate is only replaced by a better one, so the
plan makes at least as many steps as all-reduce and its round is never longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from protocols.moshpit.plan_shares import Members, greatest_shares, shortest_seconds

Choice = tuple[bool, ...]

# Looks at a peer while choices are compared, a third of a microsecond each: hundreds of peers stay
# within 200 ms. Counted and not timed: the same peers, the same plan.
LOOKS = 120_000
LOOKS_PER_PEER = 6  # Newton's steps for one choice, and its making
# Choices that are judged by a solver: two milliseconds each, and more with more limits.
FEWEST_PROGRAMMES, MOST_PROGRAMMES = 6, 12
MANY_LIMITS = 100
HERMITS = 16  # slow downloaders that are tried as the only ones that contribute
SAME = 1e-9  # relative: speeds that differ by less are the same speed


@dataclass(frozen=True)
class Collaborators:
    """What the search has to know. One entry per peer; speeds in vectors per second."""

    samples: Sequence[float]  # per second
    batch: float
    up: Sequence[float]
    down: Sequence[float]
    reduces: Sequence[bool]
    fixed: Sequence[bool]  # contributes in any case
    free: Sequence[int]  # who may contribute or not, by index

    def members(self, computes: Choice) -> Members:
        return Members(self.up, self.down, computes, self.reduces)

    def with_free(self, free: Sequence[int]) -> Choice:
        """Those that are fixed and these."""
        chosen = set(free)
        return tuple(fixed or i in chosen for i, fixed in enumerate(self.fixed))


@dataclass(frozen=True)
class Candidate:
    """A choice of c, and what it achieves."""

    computes: Choice
    samples: float
    seconds: float  # of a round
    steps: float  # per second

    @staticmethod
    def of(peers: Collaborators, computes: Choice, seconds: float) -> Candidate:
        chosen = [s for s, one in zip(peers.samples, computes, strict=True) if one]
        samples = math.fsum(chosen)
        steps = samples / peers.batch
        return Candidate(
            computes, samples, seconds, min(steps, 1.0 / seconds) if seconds > 0 else steps
        )

    def is_better_than(self, other: Candidate) -> bool:
        """More steps; of two that make the same, more samples: nobody idles without a reason."""
        if abs(self.steps - other.steps) > SAME * other.steps:
            return self.steps > other.steps
        return self.samples > other.samples * (1 + SAME)


def choose(
    peers: Collaborators, limits: int, limited_seconds: Callable[[Choice], float]
) -> Candidate:
    """The best choice found. With `limits` pairwise limits each is judged by `limited_seconds`."""
    search = _Search(peers)
    search.run()
    return _choose_with_limits(peers, search, limits, limited_seconds) if limits else search.best


class _Search:
    """The choices that were judged so far, as if there were no pairwise limits."""

    def __init__(self, peers: Collaborators) -> None:
        self.judged: dict[Choice, Candidate] = {}
        self._peers = peers
        self._looks = 0
        self.best = self.judge(peers.with_free(peers.free))

    def run(self) -> None:
        self._try_orders()
        while self._improve():
            pass

    def judge(self, computes: Choice) -> Candidate:
        candidate = self.judged.get(computes)
        if candidate is None:
            self._looks += LOOKS_PER_PEER * len(computes)
            seconds = shortest_seconds(self._peers.members(computes))
            candidate = self.judged[computes] = Candidate.of(self._peers, computes, seconds)
        return candidate

    def _try_orders(self) -> None:
        peers = self._peers
        self._try(sorted(peers.free, key=lambda i: -peers.samples[i]))
        self._try(sorted(peers.free, key=lambda i: -peers.up[i]))
        self._try(self.by_usefulness())
        self._try(self.by_usefulness())  # for the T that the order before has led to
        if not any(peers.fixed):
            # Who alone has data need not download what it reduces itself.
            for i in sorted(peers.free, key=lambda i: peers.down[i])[:HERMITS]:
                self._keep(self.judge(peers.with_free([i])))

    def _try(self, order: Sequence[int]) -> None:
        for candidate in crossing(self._peers, order, self.judge):
            self._keep(candidate)

    def _keep(self, candidate: Candidate) -> bool:
        if candidate.is_better_than(self.best):
            self.best = candidate
            return True
        return False

    def by_usefulness(self) -> list[int]:
        """The free peers by samples for the share of the vector that their computing costs."""
        peers, seconds = self._peers, self.best.seconds
        silent = greatest_shares(peers.members(peers.with_free([])), seconds)
        loud = greatest_shares(peers.members(peers.with_free(peers.free)), seconds)
        cost = [max(0.0, one - other) + SAME for one, other in zip(silent, loud, strict=True)]
        return sorted(peers.free, key=lambda i: -peers.samples[i] / cost[i])

    def _improve(self) -> bool:
        """Whether a single change made it better, and was kept."""
        for changed in self._neighbours():
            if self._looks > LOOKS:
                return False
            if self._keep(self.judge(changed)):
                return True
        return False

    def _neighbours(self) -> Iterator[Choice]:
        computes = self.best.computes
        inside = [i for i in self._peers.free if computes[i]]
        outside = [i for i in self._peers.free if not computes[i]]
        changes: list[tuple[int, ...]] = [(i,) for i in (*outside, *inside)]
        changes += [(i, j) for i in inside for j in outside]
        for change in changes:
            changed = tuple(one != (i in change) for i, one in enumerate(computes))
            if any(changed):
                yield changed


def crossing(
    peers: Collaborators, order: Sequence[int], judge: Callable[[Choice], Candidate]
) -> Iterator[Candidate]:
    """Between which numbers of peers of this order computing overtakes the network: those two."""
    fewest = 0 if any(peers.fixed) else 1
    low, high = fewest, len(order)
    while low < high:
        middle = (low + high) // 2
        candidate = judge(peers.with_free(order[:middle]))
        if candidate.samples * candidate.seconds >= peers.batch:
            high = middle  # enough is computed in the time of a round: fewer might do
        else:
            low = middle + 1
    for count in range(max(fewest, low - 1), low + 1):
        yield judge(peers.with_free(order[:count]))


def _choose_with_limits(
    peers: Collaborators,
    search: _Search,
    limits: int,
    limited_seconds: Callable[[Choice], float],
) -> Candidate:
    """The best of what looked best without limits, and of one more crossing with them."""
    solved: dict[Choice, Candidate] = {}
    programmes = FEWEST_PROGRAMMES if limits > MANY_LIMITS else MOST_PROGRAMMES

    def judge(computes: Choice) -> Candidate:
        if computes not in solved and len(solved) < programmes:
            seconds = limited_seconds(computes)
            solved[computes] = Candidate.of(peers, computes, seconds)
        return solved.get(computes) or search.judge(computes)

    best = judge(peers.with_free(peers.free))
    promising = sorted(
        search.judged.values(), key=lambda one: (-one.steps, -one.samples, one.computes)
    )
    for candidate in promising[: programmes // 2 - 1]:
        # Limits only make it slower, so what is no better without them need not be solved.
        if candidate.is_better_than(best):
            best = _better_of(best, judge(candidate.computes))
    for candidate in crossing(peers, search.by_usefulness(), judge):
        if candidate.computes in solved:
            best = _better_of(best, candidate)
    return best


def _better_of(one: Candidate, other: Candidate) -> Candidate:
    return other if other.is_better_than(one) else one
