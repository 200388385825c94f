"""The plan of a round, made from its roster: which member reduces which share of the vector.

Every member computes it from the same signed list and gets the same bits (the reason is below). So
no member needs to trust a plan that it is sent: it compares the leader's with its own. This takes
well under a millisecond for 16 members and needs neither torch nor scipy. plan_strategy.py plans a
whole collaboration, with the peers that should compute.

Easy to get wrong: a 0 in a roster is an unknown speed, not a slow one. It counts as the median of
the known speeds, for each direction separately. If none is known, all count as equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nat.kinds import Nat, can_punch
from protocols.errors import ProtocolMisuse

UNKNOWN = 0.0  # bytes per second: not measured yet
SUPPOSED_BYTES_PER_SECOND = 12.5e6  # 100 Mb/s for all, if no speed is known


def fractions_for(
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    reduces: Sequence[bool],
) -> tuple[float, ...]:
    """The share of the vector that each member reduces, so that the round is shortest.

    One entry per member in each argument; speeds in bytes per second, 0 for unknown. A member that
    does not contribute (weight 0) sends no values, but gets the result like all others. A member
    that does not reduce gets the share 0. The shares add up to 1 exactly.
    """
    return best_shares(_members(up, down, contributes, reduces))


def best_reducers(routers: Sequence[int], able: Sequence[bool]) -> tuple[bool, ...]:
    """Which members should reduce, so that no part goes through a relay if another way is there.

    Two members behind unlucky routers only meet through a relay (nat/kinds.py). Of the members that
    are `able`, those are taken that the fewest members reach only so; usually that is none. A
    member that is not able can only dial out, and then only reaches those that can be dialled.
    """
    kinds = [_kind(router) for router in routers]

    def needs_relay(reducer: int, other: int) -> bool:
        if other == reducer:
            return False
        if not able[other]:
            return kinds[reducer] not in (Nat.NONE, Nat.UNKNOWN)
        return not can_punch(kinds[reducer], kinds[other])

    everybody = range(len(kinds))
    return with_fewest_relays(
        [sum(needs_relay(one, other) for other in everybody) for one in everybody], able
    )


def with_fewest_relays(relayed: Sequence[int], able: Sequence[bool]) -> tuple[bool, ...]:
    """Of the members that are able to reduce, those whom the fewest reach only through a relay."""
    fewest = min((count for count, one in zip(relayed, able, strict=True) if one), default=0)
    return tuple(one and count == fewest for count, one in zip(relayed, able, strict=True))


def _kind(router: int) -> Nat:
    try:
        return Nat(router)
    except ValueError:  # of a newer version
        return Nat.UNKNOWN


def predicted_seconds(
    fractions: Sequence[float],
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    total_bytes: float,
) -> float:
    """How long a round takes if member i reduces fractions[i] of `total_bytes`."""
    members = _members(up, down, contributes, [fraction > 0 for fraction in fractions])
    return total_bytes * seconds_of(fractions, members)


def predicted_link_seconds(
    fractions: Sequence[float],
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    total_bytes: float,
) -> list[tuple[float, float]]:
    """The same for each member's uplink and downlink; the longest of them is the round."""
    members = _members(up, down, contributes, [fraction > 0 for fraction in fractions])
    return [
        (total_bytes * sending, total_bytes * receiving)
        for sending, receiving in link_seconds_of(fractions, members)
    ]


def _members(
    up: Sequence[float],
    down: Sequence[float],
    contributes: Sequence[bool],
    reduces: Sequence[bool],
) -> Members:
    if not len(up) == len(down) == len(contributes) == len(reduces) > 0:
        raise ProtocolMisuse("A plan needs the same number of entries for everything, at least 1.")
    if not any(contributes):
        raise ProtocolMisuse("A round to which no member contributes has nothing to average.")
    if not any(reduces):
        raise ProtocolMisuse("A round in which no member reduces cannot be planned.")
    return Members(_known(up), _known(down), contributes, reduces)


def _known(speeds: Sequence[float]) -> list[float]:
    if not all(math.isfinite(speed) and speed >= 0 for speed in speeds):
        raise ProtocolMisuse("A speed is a finite number of bytes per second, or 0 for unknown.")
    known = [speed for speed in speeds if speed != UNKNOWN]
    supposed = statistics.median(known) if known else SUPPOSED_BYTES_PER_SECOND
    return [speed if speed != UNKNOWN else supposed for speed in speeds]


# The exact solution: the best shares of one round, if it is known which members contribute.
#
# The problem. n members average a vector. Contributors send gradients, all members get the whole
# result, and member i reduces the share w_i of it (w ≥ 0, Σ w = 1; 0 if it only dials out). Let m
# of the n members contribute, c_i ∈ {0, 1}, and count bytes in vectors. Then in one round member i
#
# - sends its values to the other reducers, c_i (1 - w_i), and its reduced part to the n - 1 others:
#       upload_i   = c_i (1 - w_i) + (n - 1) w_i  =  c_i + (n - 1 - c_i) w_i
# - receives its part from the other contributors, and the rest of the result:
#       download_i = (m - c_i) w_i + (1 - w_i)    =  1 + (m - c_i - 1) w_i
#
# and the round takes T = max_i max(upload_i / u_i, download_i / d_i) seconds. Minimising T over w
# is a linear programme with n variables. If all members contribute and upload as fast as they
# download, it is the load balancing of Moshpit SGD: min_w max_i (1 - w_i + (n-1) w_i) / b_i.
#
# It equals appendix B of DeDLOC (equation 5 with c fixed). Its n² programme finds rates a_ki ≥ r_i
# (contributor k to reducer i), g_ij ≤ r_i (reducer i to receiver j) with Σ_j g_ji ≥ X for all i,
# and maximises X. Rates r_i = w_i X, a_ki = g_ij = r_i are feasible there exactly if w is feasible
# here with T = 1/X, so appendix B is never slower. Conversely, when all n contribute, take any
# solution of it, say Σ r = X + δ with δ ≥ 0, and let e_i = Σ_{j≠i} (r_i - g_ij) ≥ 0 be what i saves
# by not returning everything. A receiver j can go without at most δ in all, so Σ e ≤ nδ and e_i ≤
# (n-1) δ. Let x_i = r_i - max(0, e_i - δ) / (n - 2). Then 0 ≤ x_i ≤ r_i; at most (n-2) δ of Σ e is
# above the δ of each, so Σ x ≥ X; and i uploads X + (n-2) x_i ≤ Σ r - r_i + Σ_{j≠i} g_ij, which it
# could before, while its download X + (n-2) x_i ≤ (n-1) r_i + X - r_i did not grow either. Scaled
# down to Σ x = X these are our shares: the same X. (For n = 2 both programmes cost one vector each
# way.)
#
# Easy to get wrong: with helpers that do not contribute, appendix B can be a little faster on
# paper. There, two reducers may reduce the *same* values (δ > 0), so that neither needs the other's
# result. No cut of the vector into parts can do that; the shares found here are possible in a real
# round.
#
# The solution. For a given T, every member has a largest share hi_i(T), the least of up to three
# lines in T. So Σ hi is concave and grows; the answer is where it reaches 1. Newton's method from
# below reaches it after finitely many steps and needs no tolerance. Sums are `math.fsum`, which
# rounds once and so does not depend on the order, and everything else is IEEE arithmetic on
# doubles. So all peers get the same bits from the same list, in any order.


QUANTUM = 2.0**-40  # shares are multiples of it: a hundredth of a value of a vector of 10^10


class Members(NamedTuple):
    """The members of a round, one entry per member in each. Speeds in vectors per second.

    (Any other unit works, too: the seconds are then per that unit.) `math.inf` is an unlimited
    download.
    """

    up: Sequence[float]
    down: Sequence[float]
    contributes: Sequence[bool]
    reduces: Sequence[bool]


def best_shares(members: Members) -> tuple[float, ...]:
    """The shares with which the round is shortest; they add up to 1, exactly.

    Of several best answers, this is the one in which all members have the same part of their
    greatest possible share. At least one member must reduce and at least one contribute.
    """
    n = len(members.up)
    if n == 1:
        return (1.0,)
    seconds, most = _shortest(members)
    least = [_least_share(members, i, seconds) for i in range(n)]
    room = [high - low for high, low in zip(most, least, strict=True)]
    rest = 1.0 - math.fsum(least)
    total = math.fsum(room)
    scale = rest / total if total > 0 else 0.0
    return quantised([low + scale * space for low, space in zip(least, room, strict=True)])


def shortest_seconds(members: Members) -> float:
    """How long the best round takes, without its shares."""
    return _shortest(members)[0] if len(members.up) > 1 else 0.0


def greatest_shares(members: Members, seconds: float) -> list[float]:
    """The share that each member could reduce in this time, if only it were slow."""
    n, m = len(members.up), sum(members.contributes)
    rows = zip(*members, strict=True)
    return [_greatest_share(n, m, seconds, *row)[0] for row in rows]


def seconds_of(shares: Sequence[float], members: Members) -> float:
    """How long a round with these shares takes."""
    return max(max(each) for each in link_seconds_of(shares, members))


def link_seconds_of(shares: Sequence[float], members: Members) -> list[tuple[float, float]]:
    """How long each member's uplink and its downlink are busy in a round with these shares."""
    n, m = len(shares), sum(members.contributes)
    if n == 1:
        return [(0.0, 0.0)]
    return [
        ((c + (n - 1 - c) * w) / up, (1.0 + (m - c - 1) * w) / down)
        for w, up, down, c in zip(
            shares, members.up, members.down, members.contributes, strict=True
        )
    ]


def equal_shares(reduces: Sequence[bool]) -> tuple[float, ...]:
    """Plain all-reduce: the same share for each member that can reduce."""
    return quantised([1.0 / sum(reduces) if one else 0.0 for one in reduces])


def quantised(shares: Sequence[float]) -> tuple[float, ...]:
    """Multiples of QUANTUM that add up to 1 exactly; the largest takes the rounding's remainder."""
    units = [round(share / QUANTUM) for share in shares]
    units[units.index(max(units))] += round(1 / QUANTUM) - sum(units)
    return tuple(count * QUANTUM for count in units)


def _shortest(members: Members) -> tuple[float, list[float]]:
    """The least T at which the greatest shares reach 1, and those shares."""
    n, m = len(members.up), sum(members.contributes)
    rows = list(zip(*members, strict=True))
    seconds = max(_earliest(n, m, *row) for row in rows)
    for _ in range(3 * n + 3):  # there are no more pieces than that
        most, slopes = [], []
        for up, down, contributes, reduces in rows:
            high, slope = _greatest_share(n, m, seconds, up, down, contributes, reduces)
            most.append(high)
            slopes.append(slope)
        missing = 1.0 - math.fsum(most)
        later = seconds + missing / math.fsum(slopes) if missing > 0 else seconds
        if later <= seconds:
            break
        seconds = later
    return seconds, most


def _earliest(n: int, m: int, up: float, down: float, contributes: bool, reduces: bool) -> float:
    """The least T at which this member can take part at all, with any share."""
    if contributes and m == 1 and reduces:
        # It alone has data: the more it reduces itself, the less it has to download.
        return max(1.0 / up, 0.0 if math.isinf(down) else (n - 1) / ((n - 2) * down + up))
    return max(contributes / up, 1.0 / down)


def _greatest_share(
    n: int, m: int, seconds: float, up: float, down: float, contributes: bool, reduces: bool
) -> tuple[float, float]:
    """The greatest share that this member can reduce in this time, and how it grows."""
    if not reduces:
        return 0.0, 0.0
    high, slope = 1.0, 0.0
    sends, receives = n - 1 - contributes, m - contributes - 1  # for each further vector reduced
    if sends > 0:
        line = (up * seconds - contributes) / sends
        if line < high:
            high, slope = line, up / sends
    if receives > 0:
        line = (down * seconds - 1.0) / receives
        if line < high or (line == high and down / receives < slope):
            high, slope = line, down / receives
    return max(high, 0.0), slope


def _least_share(members: Members, i: int, seconds: float) -> float:
    """The share that member i must reduce itself, because it could not download it in time."""
    alone = members.contributes[i] and sum(members.contributes) == 1
    if not alone or not members.reduces[i] or math.isinf(members.down[i]):
        return 0.0
    return max(0.0, 1.0 - members.down[i] * seconds)


# Which of the peers that may compute should: a search over c; each choice is judged by its plan.
#
# The objective is min(Σ s_i c_i / B, 1 / T(c)), where T(c) is the best round if c contributes.
#
# Easy to get wrong: the relaxed c of DeDLOC's (5). As soon as computing is not the bottleneck of a
# step, c = 0.99 takes a peer out of every min_k a_ki and costs next to no samples, so the best
# solution of that programme is that no peer sends gradients. So nothing is relaxed and rounded
# here. Instead:
#
# - T only grows if one more peer contributes: with the same shares, its own upload grows, no
#   download shrinks, and nothing else changes. Samples grow, too. So along any order of the free
#   peers, the best number of them is where the two curves cross, which bisection finds.
# - The orders are by samples, by upload, and by samples for the share that computing costs a peer:
#   for a given T it is a knapsack (which peers bring most samples while the greatest shares still
#   add up to 1), and that is the order of its continuous solution.
# - Then single peers are added, dropped and exchanged while that helps and the budget lasts.
#
# The first candidate is that all compute that may, and only a better one replaces a candidate. So
# the plan makes at least as many steps as all-reduce, and its round is never longer.


Choice = tuple[bool, ...]

# Looks at a peer while choices are compared, a third of a microsecond each: hundreds of peers stay
# within 200 ms. They are counted, not timed, so the same peers always give the same plan.
LOOKS = 120_000
LOOKS_PER_PEER = 6  # Newton's steps for one choice, and its making
# Choices that are judged by a solver: two milliseconds each, and more with more limits.
FEWEST_PROGRAMMES, MOST_PROGRAMMES = 6, 12
MANY_LIMITS = 100
HERMITS = 16  # slow downloaders that are tried as the only contributors
SAME = 1e-9  # relative: speeds that differ by less are the same speed


@dataclass(frozen=True)
class Collaborators:
    """The input of the search. One entry per peer; speeds in vectors per second."""

    samples: Sequence[float]  # per second
    batch: float
    up: Sequence[float]
    down: Sequence[float]
    reduces: Sequence[bool]
    fixed: Sequence[bool]  # contributes in any case
    free: Sequence[int]  # the peers that may contribute or not, by index
    more_seconds: float = 0.0  # that averaging takes after the round, whoever contributes

    def members(self, computes: Choice) -> Members:
        return Members(self.up, self.down, computes, self.reduces)

    def with_free(self, free: Sequence[int]) -> Choice:
        """The fixed peers, and these."""
        chosen = set(free)
        return tuple(fixed or i in chosen for i, fixed in enumerate(self.fixed))


@dataclass(frozen=True)
class PlanCandidate:
    """A choice of c, and what it achieves."""

    computes: Choice
    samples: float
    seconds: float  # of a round
    steps: float  # per second

    @staticmethod
    def of(peers: Collaborators, computes: Choice, seconds: float) -> PlanCandidate:
        chosen = [s for s, one in zip(peers.samples, computes, strict=True) if one]
        samples = math.fsum(chosen)
        steps, averaging = samples / peers.batch, seconds + peers.more_seconds
        return PlanCandidate(
            computes, samples, seconds, min(steps, 1.0 / averaging) if averaging > 0 else steps
        )

    def is_better_than(self, other: PlanCandidate) -> bool:
        """Whether it makes more steps, or as many with more samples: no peer idles without need."""
        if abs(self.steps - other.steps) > SAME * other.steps:
            return self.steps > other.steps
        return self.samples > other.samples * (1 + SAME)


def choose(
    peers: Collaborators, limits: int, limited_seconds: Callable[[Choice], float]
) -> PlanCandidate:
    """The best choice found. With `limits` pairwise limits each is judged by `limited_seconds`."""
    search = _Search(peers)
    search.run()
    return _choose_with_limits(peers, search, limits, limited_seconds) if limits else search.best


class _Search:
    """The choices that were judged so far, as if there were no pairwise limits."""

    def __init__(self, peers: Collaborators) -> None:
        self.judged: dict[Choice, PlanCandidate] = {}
        self._peers = peers
        self._looks = 0
        self.best = self.judge(peers.with_free(peers.free))

    def run(self) -> None:
        self._try_orders()
        while self._improve():
            pass

    def judge(self, computes: Choice) -> PlanCandidate:
        candidate = self.judged.get(computes)
        if candidate is None:
            self._looks += LOOKS_PER_PEER * len(computes)
            seconds = shortest_seconds(self._peers.members(computes))
            candidate = self.judged[computes] = PlanCandidate.of(self._peers, computes, seconds)
        return candidate

    def _try_orders(self) -> None:
        peers = self._peers
        self._try(sorted(peers.free, key=lambda i: -peers.samples[i]))
        self._try(sorted(peers.free, key=lambda i: -peers.up[i]))
        self._try(self.by_usefulness())
        self._try(self.by_usefulness())  # for the T that the order before has led to
        if not any(peers.fixed):
            # A peer that alone has data need not download the part that it reduces itself.
            for i in sorted(peers.free, key=lambda i: peers.down[i])[:HERMITS]:
                self._keep(self.judge(peers.with_free([i])))

    def _try(self, order: Sequence[int]) -> None:
        for candidate in crossing(self._peers, order, self.judge):
            self._keep(candidate)

    def _keep(self, candidate: PlanCandidate) -> bool:
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
        """Try single changes. Returns whether one was better, and was kept."""
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
    peers: Collaborators, order: Sequence[int], judge: Callable[[Choice], PlanCandidate]
) -> Iterator[PlanCandidate]:
    """The two numbers of peers of this order between which computing overtakes the network."""
    fewest = 0 if any(peers.fixed) else 1
    low, high = fewest, len(order)
    while low < high:
        middle = (low + high) // 2
        candidate = judge(peers.with_free(order[:middle]))
        if candidate.samples * (candidate.seconds + peers.more_seconds) >= peers.batch:
            high = middle  # enough is computed while others average: fewer may be enough
        else:
            low = middle + 1
    for count in range(max(fewest, low - 1), low + 1):
        yield judge(peers.with_free(order[:count]))


def _choose_with_limits(
    peers: Collaborators,
    search: _Search,
    limits: int,
    limited_seconds: Callable[[Choice], float],
) -> PlanCandidate:
    """The best of those that looked best without limits, and of one more crossing with them."""
    solved: dict[Choice, PlanCandidate] = {}
    programmes = FEWEST_PROGRAMMES if limits > MANY_LIMITS else MOST_PROGRAMMES

    def judge(computes: Choice) -> PlanCandidate:
        if computes not in solved and len(solved) < programmes:
            seconds = limited_seconds(computes)
            solved[computes] = PlanCandidate.of(peers, computes, seconds)
        return solved.get(computes) or search.judge(computes)

    best = judge(peers.with_free(peers.free))
    promising = sorted(
        search.judged.values(), key=lambda one: (-one.steps, -one.samples, one.computes)
    )
    for candidate in promising[: programmes // 2 - 1]:
        # Limits only make it slower: a choice that is no better without them need not be solved.
        if candidate.is_better_than(best):
            best = _better_of(best, judge(candidate.computes))
    for candidate in crossing(peers, search.by_usefulness(), judge):
        if candidate.computes in solved:
            best = _better_of(best, candidate)
    return best


def _better_of(one: PlanCandidate, other: PlanCandidate) -> PlanCandidate:
    return other if other.is_better_than(one) else one
