"""DeDLOC's appendix B as it is printed, with c fixed: the programme that ours is held against.

Variables a_ki (rate of contributor k to reducer i) and g_ij (rate of reducer i to receiver j), and
the objective max X with X ≤ Σ_j g_ji for all i, which is 1 / T for a vector of size 1.

Of the a_ki only r_i = min_k a_ki is kept, so that there are n + n² variables and not n³ rows.
That loses nothing: given any solution, lower every a_ki to r_i. Each g_ij ≤ min_k a_ki = r_i still
holds, and uploads, downloads and links only get less. Conversely a_ki = r_i is a solution of the
original. Members that do not reduce have neither r_i nor g_ij.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocols.moshpit.plan import Members


@dataclass(frozen=True)
class Rates:
    """A solution: X, r_i, and g[i][j] of reducer i to receiver j."""

    fastest: float
    reducing: list[float]
    returning: list[list[float]]

    def fractions(self) -> list[float] | None:
        """Equation 6: proportional to min_j g_ij; None if no reducer returns to all members."""
        least = [min(row) for row in self.returning]
        return [one / sum(least) for one in least] if sum(least) > 1e-9 else None


def appendix_b(members: Members, links: Mapping[tuple[int, int], float]) -> Rates:
    """Solve it."""
    import numpy as np
    from scipy.optimize import linprog

    up, down, contributes, reduces = members
    n = len(up)
    width = n + n * n + 1  # r, g, X
    rows: list[np.ndarray] = []
    bounds: list[float] = []

    def row(cells: Sequence[tuple[int, float]], bound: float) -> None:
        line = np.zeros(width)
        for column, value in cells:
            line[column] += value
        rows.append(line)
        bounds.append(bound)

    def g(i: int, j: int) -> int:
        return n + i * n + j

    for i in range(n):
        others = [j for j in range(n) if j != i]
        row([(width - 1, 1.0)] + [(g(j, i), -1.0) for j in range(n)], 0.0)
        for j in range(n):
            row([(g(i, j), 1.0), (i, -1.0)], 0.0)
        gradients = [(j, float(contributes[i])) for j in others]
        row(gradients + [(g(i, j), 1.0) for j in others], up[i])
        senders = sum(contributes[j] for j in others)
        row([(i, float(senders))] + [(g(j, i), 1.0) for j in others], down[i])
    for (i, j), limit in links.items():
        row([(j, float(contributes[i])), (g(i, j), 1.0)], limit)
    most = [float("inf") if one else 0.0 for one in reduces]
    limits = [(0.0, one) for one in most]
    limits += [(0.0, most[i]) for i in range(n) for _ in range(n)]
    cost = np.zeros(width)
    cost[-1] = -1.0
    found = linprog(cost, A_ub=np.array(rows), b_ub=bounds, bounds=[*limits, (0.0, None)])
    assert found.success, found.message
    rates = [float(x) for x in found.x]
    return Rates(rates[-1], rates[:n], [rates[g(i, 0) : g(i, 0) + n] for i in range(n)])
