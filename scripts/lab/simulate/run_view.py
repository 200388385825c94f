"""The results of `scripts/simulate run` for several numbers of peers: a table, how fast the costs
grow, and a plot.

A cost that grows like peers to the power of 0.5 doubles when there are four times as many peers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.plot import write_plot

Runs = Sequence[dict[str, Any]]

COSTS = {
    "control_bytes_per_s_p50": "control bytes/s",
    "hottest_bytes_per_s": "hottest peer, bytes/s",
    "calls_per_s_p50": "calls/s",
    "cpu_ms_per_s": "CPU ms/s",
    "memory_MiB": "memory, MiB",
}
PROMISES = {
    "variants_max": "variants",
    "counted_share": "counted",
    "share_in_step_min": "in a step",
    "steps_per_minute": "steps/min",
    "longest_gap_s": "longest gap, s",
    "commit_s_p50": "commit, s",
}


def growth(runs: Runs) -> dict[str, float]:
    """For each cost the power of the number of peers with which it grows, by least squares."""
    powers = {}
    for name in COSTS:
        points = [
            (math.log(one["peers"]), math.log(one[name]))
            for one in runs
            if one[name] and one[name] > 0.0
        ]
        if len({x for x, _ in points}) > 1:
            powers[name] = round(_slope(points), 2)
    return powers


def by_peers(runs: Runs) -> str:
    """One run a row, and the growth."""
    columns = {"peers": "peers", **PROMISES, **COSTS}
    rows = [list(columns.values())]
    rows += [[_text(one[name]) for name in columns] for one in runs]
    powers = growth(runs)
    rows.append(["peers^", *(_text(powers.get(name)) for name in columns if name != "peers")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def draw(runs: Runs, file: Path) -> None:
    """The costs over the number of peers, each with a line that grows like its square root."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.subplots(2, 2).flat
    peers = [one["peers"] for one in runs]
    for panel, name in zip(axes, list(COSTS)[:4], strict=True):
        values = [one[name] or math.nan for one in runs]
        panel.plot(peers, values, "o-", label=COSTS[name])
        like_root = [values[0] * math.sqrt(one / peers[0]) for one in peers]
        panel.plot(peers, like_root, ":", color="grey", label="like the square root")
        panel.set(xscale="log", yscale="log", xlabel="peers", title=COSTS[name])
        panel.legend(frameon=False, fontsize="small")
    write_plot(figure, file)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    above = sum((x - middle_x) * (y - middle_y) for x, y in points)
    return above / sum((x - middle_x) ** 2 for x, _ in points)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"
