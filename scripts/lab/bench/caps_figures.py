"""The figures of `scripts/bench caps` from its observations, each with whether its cap was kept.
Pure.

A rest has edges: work that was under way when it began, and work that begins when it ends, do not
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import msgspec

from lab.bench.caps_lab import Told
from lab.bench.caps_meter import MeterReading, between, most_memory, over, used_between
from lab.bench.processes import BenchFailed
from protocols.accumulation.events import Share, reduced_by
from protocols.identity import PeerId

OVER: Final = 0.05  # by which part a cap may be exceeded, in any ten seconds
EDGE_SECONDS: Final = 1.0  # at both ends of a rest, for what was under way
REST_PROCESSOR_SHARE: Final = 0.1  # of one core: signs of life, the directory
REST_BYTES_PER_SECOND: Final = 10_000.0


@dataclass(frozen=True)
class MeasuredRest:
    """A time in which the node should do nothing, without its edges."""

    seconds: float
    resumed_at: float
    processor_share: float
    sent_per_second: float
    received_per_second: float
    memory_before: int
    memory_meanwhile: int

    @property
    def is_rest(self) -> bool:
        traffic = max(self.sent_per_second, self.received_per_second)
        quiet = traffic <= REST_BYTES_PER_SECOND
        return quiet and self.processor_share <= REST_PROCESSOR_SHARE

    def figures(self) -> dict[str, Any]:
        return {
            "rest_seconds": round(self.seconds, 1),
            "processor_percent_of_a_core": round(100 * self.processor_share, 1),
            "sent_bytes_per_second": round(self.sent_per_second),
            "received_bytes_per_second": round(self.received_per_second),
            "memory_before": self.memory_before,
            "memory_meanwhile": self.memory_meanwhile,
        }


def rest_of(
    readings: Sequence[MeterReading], paused: float, opens: float, resumed: float = 0.0
) -> MeasuredRest:
    began, ended = paused + EDGE_SECONDS, opens - EDGE_SECONDS
    seconds = max(ended - began, 1e-9)
    inside = between(readings, began, ended)
    before = between(readings, paused - 10.0, paused)
    return MeasuredRest(
        opens - paused,
        resumed or opens,
        used_between(readings, began, ended, "processor_seconds") / seconds,
        used_between(readings, began, ended, "sent_bytes") / seconds,
        used_between(readings, began, ended, "received_bytes") / seconds,
        most_memory(before),
        inside[-1].memory_bytes if inside else 0,
    )


def plan_figures(told: Sequence[Told], free: str, capped: str) -> dict[str, Any]:
    """Of the steps that both were in: which part of the vector each of them reduced."""
    found = [
        reduced_by([msgspec.convert(each, Share) for each in one["shares"]])
        for one in told
        if one["event"] == "step_taken"
        and {free, capped} <= {each["peer"] for each in one["shares"]}
    ]
    if not found:
        raise BenchFailed("No step was made with both volunteers.")
    mine, theirs = (median(one[PeerId(peer)] for one in found) for peer in (capped, free))
    return {
        "rounds": len(found),
        "capped_reduces": round(mine, 4),
        "free_reduces": round(theirs, 4),
        "kept": mine < theirs,
    }


def waited_share(told: Sequence[Told], began: float, ended: float) -> float:
    """Of the time between two steps of that time, how much its training did nothing but wait."""
    steps = [one for one in told if one["event"] == "step_taken" and began <= one["at"] <= ended]
    if len(steps) < 2:
        return 0.0
    waited: float = sum(one["waiting_seconds"] for one in steps[1:])
    seconds: float = steps[-1]["at"] - steps[0]["at"]
    return waited / seconds


def rate_figures(worst: float, limit: float) -> dict[str, Any]:
    return {
        "limit": round(limit),
        "worst_bytes_per_second": round(worst),
        "over_percent": round(100 * over(worst, limit), 1),
        "kept": over(worst, limit) <= OVER,
    }
