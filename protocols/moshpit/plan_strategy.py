"""Plans a whole collaboration: which peers compute, which reduce what, and how fast that is.

DeDLOC's problem (2): as many steps per second as possible, min(Σ s_i c_i / B, 1 / T(c)). The round
T(c) is the best of plan.py, or of this file under pairwise limits. plan.py searches which free c_i
become 1. Two alternatives are computed for comparison: all-reduce (all peers compute, equal parts
for all that can reduce) and the best parameter server.

A run with more peers than fit into one group averages by cohorts (cohort_round.py). Then T(c) has
three parts: the round of the slowest cohort, the round of all heads, and the time in which a head's
result reaches all members of its cohort (handing_down.py). Who computes is chosen in each cohort
for itself, for its part of the batch.

Easy to get wrong: everything is computed in the order of names and put back into the file's order
at the end. So the order of the file makes no difference if several plans are equally good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from protocols.errors import PotluckError
from protocols.identity import PeerId
from protocols.moshpit.cohorts import cohort_of, in_order, settled_count, turn_of, uplink_of
from protocols.moshpit.handing_on import Arrival, children_for, place_above
from protocols.moshpit.plan import (
    Choice,
    Collaborators,
    Members,
    best_shares,
    choose,
    equal_shares,
    greatest_shares,
    link_seconds_of,
    quantised,
    seconds_of,
    shortest_seconds,
    with_fewest_relays,
)

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult


class Computes(Enum):
    """Whether a peer computes gradients: set by the user, or left to the plan."""

    ALWAYS = "true"
    NEVER = "false"
    AUTO = "auto"


class NobodyComputes(PotluckError):
    """Nobody computes, so there are no gradients to average."""

    exit_code = 2


class NobodyReduces(PotluckError):
    """All peers can only dial out, so none can be sent anything."""

    exit_code = 2


@dataclass(frozen=True)
class PlannedPeer:
    """The known facts about a peer. Speeds in bytes per second."""

    name: str
    samples_per_s: float
    up: float
    down: float
    computes: Computes
    dial_out_only: bool = False


@dataclass(frozen=True)
class PlannedPeers:
    """The input of a plan. `limits`: (from, to) by index of `peers`, in bytes per second.

    `relayed`: the pairs that only meet through a relay. Parts keep off them, as in a real round.
    `cohorts`: by index of `peers`, each in the order in which its members become head; none for one
    group of all.
    """

    vector_bytes: float
    batch: float
    peers: Sequence[PlannedPeer]
    limits: Links = field(default_factory=dict)
    relayed: frozenset[tuple[int, int]] = frozenset()
    cohorts: Sequence[Sequence[int]] = ()

    def part(self, chosen: Sequence[int], batch: float) -> PlannedPeers:
        """Only these peers, in one group."""
        place = {i: position for position, i in enumerate(chosen)}
        return PlannedPeers(
            self.vector_bytes,
            batch,
            [self.peers[i] for i in chosen],
            {
                (place[i], place[j]): limit
                for (i, j), limit in self.limits.items()
                if i in place and j in place
            },
            frozenset((place[i], place[j]) for i, j in self.relayed if i in place and j in place),
        )


@dataclass(frozen=True)
class CohortPlan:
    """One cohort. `members`: by index of the peers, its head first."""

    members: tuple[int, ...]
    round_seconds: float
    handing_down_seconds: float


@dataclass(frozen=True)
class Strategy:
    """Each peer's work, in the order of the peers, and the alternatives. By cohorts, the fractions
    of each cohort's members add up to 1.

    - `round_seconds`: the whole averaging of a step. By cohorts: the slowest cohort, the heads, and
      the slowest handing down, one after the other.
    - `link_seconds`: for how much of it the uplink and the downlink of each peer are busy.
    """

    fractions: tuple[float, ...]
    computes: tuple[bool, ...]
    round_seconds: float
    allreduce_seconds: float  # all peers compute, and all that can reduce have equal shares
    parameter_server_seconds: float  # all peers compute, and the best single peer reduces it all
    steps_per_second: float
    samples_per_second: float
    link_seconds: tuple[tuple[float, float], ...]
    cohorts: tuple[CohortPlan, ...] = ()
    heads_seconds: float = 0.0


def dealt(names: Sequence[str], group_size: int, run: str) -> tuple[tuple[int, ...], ...]:
    """The cohorts of the run's peers with these names, for `PlannedPeers`; none if all fit into one
    group."""
    count = settled_count(len(names), group_size)
    if count == 1:
        return ()
    place = {PeerId(name): i for i, name in enumerate(names)}
    cohorts: list[list[int]] = [[] for _ in range(count)]
    for peer in in_order(run, place):
        cohorts[cohort_of(run, peer, count)].append(place[peer])
    return tuple(tuple(members) for members in cohorts if members)


def best_strategy(collaboration: PlannedPeers) -> Strategy:
    """Make the plan. NobodyComputes or NobodyReduces if there can be none."""
    if collaboration.cohorts:
        return _by_cohorts(collaboration)
    return _in_one_group(collaboration)


def _in_one_group(collaboration: PlannedPeers, more_seconds: float = 0.0) -> Strategy:
    """The plan of a round of all these peers. `more_seconds`: that averaging takes after it."""
    peers, limits, place = _in_order_of_names(collaboration, more_seconds)

    def limited(computes: Choice) -> float:
        return shortest_limited_seconds(peers.members(computes), limits)

    best = choose(peers, len(limits), limited)
    members = peers.members(best.computes)
    fractions = limited_shares(members, limits)
    seconds = limited_seconds(fractions, members, limits)
    busy = link_seconds_of(fractions, members)
    plain, served = _alternatives(peers, limits)
    return Strategy(
        fractions=tuple(fractions[at] for at in place),
        computes=tuple(best.computes[at] for at in place),
        round_seconds=seconds,
        allreduce_seconds=plain,
        parameter_server_seconds=served,
        steps_per_second=_steps_per_second(best.samples, collaboration.batch, seconds),
        samples_per_second=best.samples,
        link_seconds=tuple(busy[at] for at in place),
    )


def _in_order_of_names(
    collaboration: PlannedPeers, more_seconds: float = 0.0
) -> tuple[Collaborators, Links, list[int]]:
    """The peers and limits in the order of names, and the place of each peer of the file there."""
    given = collaboration.peers
    order = sorted(range(len(given)), key=lambda i: given[i].name)
    place = {i: position for position, i in enumerate(order)}
    met_by_relay = Counter(end for pair in collaboration.relayed for end in pair)
    peers = _collaborators(
        collaboration, [given[i] for i in order], [met_by_relay[i] for i in order], more_seconds
    )
    limits = binding(
        peers.members(()),
        {
            (place[i], place[j]): limit / collaboration.vector_bytes
            for (i, j), limit in collaboration.limits.items()
        },
    )
    return peers, limits, [place[i] for i in range(len(order))]


def _alternatives(peers: Collaborators, limits: Links) -> tuple[float, float]:
    """How long all-reduce takes, and the best parameter server."""
    everybody = peers.members(peers.with_free(peers.free))
    plain = limited_seconds(equal_shares(peers.reduces), everybody, limits)
    return plain, _best_server_seconds(everybody, limits)


def _steps_per_second(samples: float, batch: float, averaging_seconds: float) -> float:
    computing = samples / batch
    return min(computing, 1.0 / averaging_seconds) if averaging_seconds > 0 else computing


def _by_cohorts(collaboration: PlannedPeers) -> Strategy:
    peers, batch = collaboration.peers, collaboration.batch
    cohorts = [_head_first(peers, cohort) for cohort in collaboration.cohorts]
    heads = [cohort[0] for cohort in cohorts]
    brings = [replace(peer, samples_per_s=1.0, computes=Computes.ALWAYS) for peer in peers]
    among_heads = _in_one_group(replace(collaboration, peers=brings).part(heads, batch))
    part = max(among_heads.fractions)
    handed = [_handing_down(collaboration, cohort, part) for cohort in cohorts]
    more_seconds = among_heads.round_seconds + max(seconds for seconds, _ in handed)

    together = math.fsum(_most_samples(peers, cohort) for cohort in cohorts)
    fractions, computes = [0.0] * len(peers), [False] * len(peers)
    up, down = [0.0] * len(peers), [0.0] * len(peers)
    plans, samples = [], []
    for cohort, (handing_down_seconds, handed_on) in zip(cohorts, handed, strict=True):
        target = batch * _most_samples(peers, cohort) / together
        plan = _in_one_group(collaboration.part(cohort, target), more_seconds)
        samples.append(plan.samples_per_second)
        plans.append(CohortPlan(cohort, plan.round_seconds, handing_down_seconds))
        for at, i in enumerate(cohort):
            fractions[i], computes[i] = plan.fractions[at], plan.computes[at]
            up[i], down[i] = plan.link_seconds[at]
            up[i] += handed_on[at] * collaboration.vector_bytes / peers[i].up
            down[i] += collaboration.vector_bytes / peers[i].down if at else 0.0
    for at, i in enumerate(heads):
        up[i] += among_heads.link_seconds[at][0]
        down[i] += among_heads.link_seconds[at][1]

    averaging = max(plan.round_seconds for plan in plans) + more_seconds
    plain, served = _alternatives(*_in_order_of_names(collaboration)[:2])
    return Strategy(
        fractions=tuple(fractions),
        computes=tuple(computes),
        round_seconds=averaging,
        allreduce_seconds=plain,
        parameter_server_seconds=served,
        steps_per_second=_steps_per_second(math.fsum(samples), batch, averaging),
        samples_per_second=math.fsum(samples),
        link_seconds=tuple(zip(up, down, strict=True)),
        cohorts=tuple(plans),
        heads_seconds=among_heads.round_seconds,
    )


def _head_first(peers: Sequence[PlannedPeer], cohort: Sequence[int]) -> tuple[int, ...]:
    """The members of a cohort, its head before all others, and last those that nobody can dial.
    NobodyComputes or NobodyReduces if it cannot average."""

    def place(i: int) -> tuple[bool, int]:
        return peers[i].dial_out_only, turn_of(follows=False, uplink=uplink_of(peers[i].up))

    ordered = tuple(sorted(cohort, key=place))  # a stable sort
    why = (
        f"A cohort averages by itself first, and a hash of the names has dealt {len(cohort)} peers "
        f"with {peers[ordered[0]].name} into one."
    )
    advice = "With a larger group_size there are fewer and larger cohorts."
    if peers[ordered[0]].dial_out_only:
        raise NobodyReduces("All peers of a cohort can only dial out.", why=why, advice=advice)
    if not _most_samples(peers, cohort):
        raise NobodyComputes("Nobody in a cohort computes.", why=why, advice=advice)
    return ordered


def _most_samples(peers: Sequence[PlannedPeer], cohort: Sequence[int]) -> float:
    """Samples per second of a cohort, if all of it compute that may."""
    return math.fsum(
        peers[i].samples_per_s for i in cohort if peers[i].computes is not Computes.NEVER
    )


def _handing_down(
    collaboration: PlannedPeers, cohort: Sequence[int], part: float
) -> tuple[float, tuple[int, ...]]:
    """How long it takes until all members of this cohort have the head's result, and how many
    copies each hands on. A member sends its copies at the same time, and each part once it has it.
    `part`: the largest one, as a share of the result."""
    peers, size = collaboration.peers, collaboration.vector_bytes
    children = children_for(size, part * size)
    dialled = sum(not peers[i].dial_out_only for i in cohort[1:])
    above = [0, *(1 + place_above(at, children, dialled) for at in range(len(cohort) - 1))]
    copies = Counter(above[1:])
    arrivals = [Arrival()]
    for at, i in enumerate(cohort[1:], 1):
        source = cohort[above[at]]
        limit = min(peers[i].down, collaboration.limits.get((source, i), math.inf))
        seconds_per_byte = max(copies[above[at]] / peers[source].up, 1.0 / limit)
        arrivals.append(arrivals[above[at]].handed_on(size, part * size, seconds_per_byte))
    return max(one.whole for one in arrivals), tuple(copies[at] for at in range(len(cohort)))


def _collaborators(
    collaboration: PlannedPeers,
    peers: Sequence[PlannedPeer],
    relayed: Sequence[int],
    more_seconds: float,
) -> Collaborators:
    fixed = [peer.computes is Computes.ALWAYS for peer in peers]
    free = [
        i
        for i, peer in enumerate(peers)
        if peer.computes is Computes.AUTO and peer.samples_per_s > 0
    ]
    if not free and not any(
        peer.samples_per_s > 0 for peer, one in zip(peers, fixed, strict=True) if one
    ):
        raise NobodyComputes(
            "Nobody computes, so there is nothing to average.",
            why='No peer has samples_per_s above 0 and computes = true or "auto".',
            advice='Set computes = true or "auto", and the speed, for each peer that has a GPU.',
        )
    if all(peer.dial_out_only for peer in peers):
        raise NobodyReduces(
            "Nobody can reduce, so no gradients can be averaged.",
            why="All peers have dial_out_only = true, so nothing can be sent to them.",
            advice="Add a peer that can be dialled: a cheap server without a GPU will do.",
        )
    vector = collaboration.vector_bytes
    return Collaborators(
        samples=[peer.samples_per_s for peer in peers],
        batch=collaboration.batch,
        up=[peer.up / vector for peer in peers],
        down=[peer.down / vector for peer in peers],
        reduces=with_fewest_relays(relayed, [not peer.dial_out_only for peer in peers]),
        fixed=fixed,
        free=free,
        more_seconds=more_seconds,
    )


def _best_server_seconds(members: Members, limits: Links) -> float:
    """How long a round takes if the best peer for it reduces everything."""
    n, m = len(members.up), sum(members.contributes)
    if n == 1:
        return 0.0
    waits = [
        max(c / up, 1.0 / down)
        for up, down, c in zip(members.up, members.down, members.contributes, strict=True)
    ]
    slowest = sorted(range(n), key=waits.__getitem__)[-2:]
    limited = [0.0] * n  # the cost of pairwise limits, if this peer is the server
    for (i, j), limit in limits.items():
        limited[i] = max(limited[i], 1.0 / limit)
        limited[j] = max(limited[j], members.contributes[i] / limit)
    return min(
        max(
            (n - 1) / members.up[i],
            (m - members.contributes[i]) / members.down[i],
            waits[slowest[-1] if slowest[-1] != i else slowest[0]],
            limited[i],
        )
        for i in range(n)
        if members.reduces[i]
    )


# The programmes that need a solver: shares under pairwise limits, and Moshpit's load balancing.
#
# A link from i to j that carries at most t_ij carries, in one round, i's contribution to j's part
# and the part that i has reduced: c_i w_j + w_i ≤ t_ij T. This joins two shares, so the members are
# no longer independent as in plan.py; but it is linear, and n + 1 variables are still enough:
#
#     minimise T  subject to  upload_i ≤ u_i T,  download_i ≤ d_i T,
#                             c_i w_j + w_i ≤ t_ij T,  Σ w = 1
#
# DeDLOC's appendix B has n² rates for this, and is an upper bound here: it may return a part to one
# receiver and not to another, which a cut of the vector into parts cannot do. In the end, (6) turns
# its rates into shares proportional to min_j g_ij. The shares found here are the best of all, so no
# solution of the large programme leads to a shorter round (tests/moshpit compares them).
#
# A limit that is no lower than i's upload or j's download never binds (both carry that link's bytes
# and more), and is left out. Scipy's HiGHS is deterministic: the same version gives the same result
# for the same rows. Rounds have no pairwise limits, so no two peers ever need to agree on this.
#
# Easy to get wrong: if one slow member decides how long the round is, there are many optima. The
# second programme then raises the least of all w_i / hi_i, where hi_i is what i could do alone.


Links = Mapping[tuple[int, int], float]  # (from, to): the most that this way carries

_SLACK = 1e-9  # relative; by this much the first programme's T may be too small for the second


class NoSolution(PotluckError):
    """The solver gave up; the reason is in its own words."""


def limited_shares(members: Members, links: Links) -> tuple[float, ...]:
    """The shares with which the round is shortest under pairwise limits; they add up to 1."""
    links = binding(members, links)
    return _unlimited(members, links) or programmed_shares(members, links)


def shortest_limited_seconds(members: Members, links: Links) -> float:
    """How long the best round takes under pairwise limits; half the work of the shares."""
    links = binding(members, links)
    if _unlimited(members, links):
        return shortest_seconds(members)
    programme = _Programme(members, links)
    return float(programme.shortest().x[-1]) / programme.unit


def programmed_shares(members: Members, links: Links) -> tuple[float, ...]:
    """The best shares by the linear programmes alone, even if no limit needs them."""
    programme = _Programme(members, links)
    found = programme.shortest()
    spread = programme.spread(float(found.x[-1]) * (1 + _SLACK))
    shares = [max(0.0, float(share)) for share in (spread if spread.success else found).x[:-1]]
    total = math.fsum(shares)
    return quantised([share / total for share in shares])


def _unlimited(members: Members, links: Links) -> tuple[float, ...] | None:
    """The best shares without limits, if they keep the limits; then none can be better."""
    free = best_shares(members)
    kept = limited_seconds(free, members, links) <= shortest_seconds(members) * (1 + _SLACK)
    return free if kept else None


def limited_seconds(shares: Sequence[float], members: Members, links: Links) -> float:
    """How long a round with these shares takes under these limits."""
    slowest = seconds_of(shares, members)
    for (i, j), limit in links.items():
        carried = shares[i] + (shares[j] if members.contributes[i] else 0.0)
        slowest = max(slowest, carried / limit)
    return slowest


def binding(members: Members, links: Links) -> Links:
    """The limits that are lower than the speeds of their two ends."""
    return {
        (i, j): limit
        for (i, j), limit in links.items()
        if limit < min(members.up[i], members.down[j])
    }


class _Rows:
    """Σ coefficient · variable ≤ bound, sparse."""

    def __init__(self) -> None:
        self.coefficients: list[dict[int, float]] = []
        self.bounds: list[float] = []

    def add(self, coefficients: dict[int, float], bound: float) -> None:
        self.coefficients.append(coefficients)
        self.bounds.append(bound)

    def matrix(self, width: int) -> Any:
        from scipy.sparse import csc_array

        cells = [
            (value, row, column)
            for row, coefficients in enumerate(self.coefficients)
            for column, value in coefficients.items()
        ]
        values, rows, columns = zip(*cells, strict=True)
        return csc_array((values, (rows, columns)), shape=(len(self.bounds), width))


class _Programme:
    """The rows of one round. Variables: the shares, then T. Speeds in multiples of `unit`."""

    def __init__(self, members: Members, links: Links) -> None:
        self.unit = math.fsum(members.up) / len(members.up)  # solvers like numbers near 1
        self._members = Members(
            [up / self.unit for up in members.up],
            [down / self.unit for down in members.down],
            members.contributes,
            members.reduces,
        )
        self._rows = _Rows()
        self._add_members()
        self._add_links(links)

    def shortest(self) -> OptimizeResult:
        """The least T."""
        n = len(self._members.up)
        return _minimise([0.0] * n + [1.0], self._rows, self._members.reduces)

    def spread(self, seconds: float) -> OptimizeResult:
        """The greatest least w_i / hi_i (the last variable) for this T."""
        n = len(self._members.up)
        spreading = _Rows()
        for coefficients, bound in zip(self._rows.coefficients, self._rows.bounds, strict=True):
            kept = {column: value for column, value in coefficients.items() if column != n}
            spreading.add(kept, bound - coefficients[n] * seconds)
        for i, most in enumerate(greatest_shares(self._members, seconds)):
            spreading.add({n: most, i: -1.0}, 0.0)
        return _minimise([0.0] * n + [-1.0], spreading, self._members.reduces)

    def _add_members(self) -> None:
        members = self._members
        n, m = len(members.up), sum(members.contributes)
        for i, (up, down, c) in enumerate(
            zip(members.up, members.down, members.contributes, strict=True)
        ):
            self._rows.add({i: float(n - 1 - c), n: -up}, -float(c))
            if not math.isinf(down):
                self._rows.add({i: float(m - c - 1), n: -down}, -1.0)

    def _add_links(self, links: Links) -> None:
        """c_i w_j + w_i ≤ t_ij T. Between two contributors both directions carry the same."""
        n = len(self._members.up)
        tightest: dict[tuple[int, int], float] = {}
        for (i, j), limit in links.items():
            if self._members.contributes[i] and self._members.contributes[j]:
                pair = (min(i, j), max(i, j))
            else:
                pair = (i, j)
            tightest[pair] = min(limit / self.unit, tightest.get(pair, math.inf))
        for (i, j), limit in tightest.items():
            also = {j: 1.0} if self._members.contributes[i] else {}
            self._rows.add({i: 1.0, **also, n: -limit}, 0.0)


def _minimise(cost: Sequence[float], rows: _Rows, reduces: Sequence[bool]) -> OptimizeResult:
    """Solve it with HiGHS: the reducers' shares are between 0 and 1, and add up to 1. Presolving
    takes a third of the time for 24 peers, and saves none for 256. `linprog` asks the same solver,
    but its own checks make it a third slower."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(reduces)
    lower = [-math.inf] * len(rows.bounds) + [1.0]
    constrained = _Rows()
    constrained.coefficients = [*rows.coefficients, dict.fromkeys(range(n), 1.0)]
    constrained.bounds = [*rows.bounds, 1.0]
    found = milp(
        cost,
        constraints=LinearConstraint(constrained.matrix(n + 1), lower, constrained.bounds),
        bounds=Bounds(0.0, [*(float(one) for one in reduces), math.inf]),
        options={"presolve": False},
    )
    if found.x is None:
        raise NoSolution(
            "The shares of a round could not be planned.",
            why=f"The solver of linear programmes says: {found.message}",
            advice="Please report it, with the peers and links of the plan.",
        )
    return found
