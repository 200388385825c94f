"""Who reduces how much, exactly: the best shares of one round when it is known who contributes.

What is planned. n members average a vector. Contributors send gradients, everybody gets the whole
result, and member i reduces the share w_i of it (w ≥ 0, Σ w = 1; 0 if it only dials out). Say that
m of the n contribute, c_i ∈ {0, 1}, and count bytes in vectors. Then in one round member i

- sends its values to the other reducers, c_i (1 - w_i), and its reduced part to the n - 1 others:
      upload_i   = c_i (1 - w_i) + (n - 1) w_i  =  c_i + (n - 1 - c_i) w_i
- receives its part from the other contributors, and the rest of the result:
      download_i = (m - c_i) w_i + (1 - w_i)    =  1 + (m - c_i - 1) w_i

and the round takes T = max_i max(upload_i / u_i, download_i / d_i) seconds. Minimising T over w is
a linear programme with n variables. Where everybody uploads as fast as it downloads and all
contribute it is the load balancing of Moshpit SGD: min_w max_i (1 - w_i + (n-1) w_i) / b_i.

Why it is appendix B of DeDLOC (equation 5 with c fixed). Its n² programme finds rates a_ki ≥ r_i
(contributor k to reducer i), g_ij ≤ r_i (reducer i to receiver j) with Σ_j g_ji ≥ X for all i, and
maximises X. Rates r_i = w_i X, a_ki = g_ij = r_i are feasible there exactly if w is feasible here
with T = 1/X, so appendix B is never slower. Conversely, when all n contribute, take any solution
of it, say Σ r = X + δ with δ ≥ 0, and let e_i = Σ_{j≠i} (r_i - g_ij) ≥ 0 be what i saves by not
returning everything. A receiver j can go without at most δ in all, so Σ e ≤ nδ and e_i ≤ (n-1) δ.
Let x_i = r_i - max(0, e_i - δ) / (n - 2). Then 0 ≤ x_i ≤ r_i; at most (n-2) δ of Σ e is above the
δ of each, so Σ x ≥ X; and i uploads X + (n-2) x_i ≤ Σ r - r_i + Σ_{j≠i} g_ij, which it could
before, while its download X + (n-2) x_i ≤ (n-1) r_i + X - r_i did not grow either. Scaled down to
Σ x = X these are our shares: the same X. (For n = 2 both programmes cost one vector each way.)

Easy to get wrong: with helpers that do not contribute appendix B can be a little faster on paper.
There two reducers may reduce the *same* values (δ > 0), so that each is spared the other's result,
and no cut of the vector into parts does that. What is found here is what a round can really do.

How it is solved. For a given T every member has a largest share hi_i(T), the least of up to three
lines in T, so Σ hi is concave and grows; the answer is where it reaches 1. Newton's method from
below meets it after finitely many steps and needs no tolerance. Sums are `math.fsum`, which rounds
once and so does not care about order, and everything else is IEEE arithmetic on doubles: all
peers get the same bits from the same list, in whatever order it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

QUANTUM = 2.0**-40  # shares are multiples of it: a hundredth of a value of a vector of 10^10


class Members(NamedTuple):
    """Who takes part in a round, one entry per member in each. Speeds in vectors per second.

    (In any unit, in truth: seconds come out per that unit.) `math.inf` is an unlimited download.
    """

    up: Sequence[float]
    down: Sequence[float]
    contributes: Sequence[bool]
    reduces: Sequence[bool]


def best_shares(members: Members) -> tuple[float, ...]:
    """The shares with which the round is shortest; they add up to 1, exactly.

    Of several best answers the one in which everybody has the same part of its greatest possible
    share. At least one member reduces and at least one contributes.
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
    """How long the best round takes, without saying how."""
    return _shortest(members)[0] if len(members.up) > 1 else 0.0


def greatest_shares(members: Members, seconds: float) -> list[float]:
    """What each member could reduce in so many seconds, if it were alone in being slow."""
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
    """Plain all-reduce: the same for everybody who can reduce."""
    return quantised([1.0 / sum(reduces) if one else 0.0 for one in reduces])


def quantised(shares: Sequence[float]) -> tuple[float, ...]:
    """Multiples of QUANTUM that add up to 1 exactly; what rounding leaves goes to the largest."""
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
    """The least T at which this member can take part at all, with whatever share."""
    if contributes and m == 1 and reduces:
        # It alone has data: the more it reduces itself, the less it has to download.
        return max(1.0 / up, 0.0 if math.isinf(down) else (n - 1) / ((n - 2) * down + up))
    return max(contributes / up, 1.0 / down)


def _greatest_share(
    n: int, m: int, seconds: float, up: float, down: float, contributes: bool, reduces: bool
) -> tuple[float, float]:
    """The greatest share that this member can reduce in so many seconds, and how it grows."""
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
    """What member i has to reduce itself, because it could not download it in time."""
    alone = members.contributes[i] and sum(members.contributes) == 1
    if not alone or not members.reduces[i] or math.isinf(members.down[i]):
        return 0.0
    return max(0.0, 1.0 - members.down[i] * seconds)
