"""Steps of simulated runs, beside what the plan says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.simulate.virtual_run import Figures, RunPlan

VALUE_BYTES = 4
UNLIMITED = 1e12  # bytes per second, where a run's links have no limit


def step_seconds(figures: Figures) -> float:
    """How long a step took on average, in virtual time."""
    return 60.0 / float(figures["steps_per_minute"])


def computing_seconds(plan: RunPlan) -> float:
    """How long all peers compute for a step. They are equally fast (`rates` is 1)."""
    return plan.target_samples * plan.batch_seconds / (plan.peers * plan.batch_samples)


def planned_step(plan: RunPlan) -> float:
    """How long a step takes by the plan of the product: computing and then averaging."""
    from protocols.moshpit.plan_strategy import (
        Computes,
        PlannedPeer,
        PlannedPeers,
        best_strategy,
    )

    up = plan.upload_bytes_per_second or UNLIMITED
    down = plan.download_bytes_per_second or UNLIMITED
    peers = [
        PlannedPeer(f"peer {i:03}", plan.batch_samples / plan.batch_seconds, up, down,
                    Computes.ALWAYS)
        for i in range(plan.peers)
    ]  # fmt: skip
    vector = float(plan.parameters * VALUE_BYTES)
    strategy = best_strategy(PlannedPeers(vector, float(plan.target_samples), peers))
    return computing_seconds(plan) + strategy.round_seconds
