"""What a run costs whoever takes part: memory, disk, traffic. Pure: nothing is built or measured.

    costs = costs_of(definition)
    costs.memory_bytes(samples=8)           # of the whole process, with that many at once
    costs.state_bytes                       # what a newcomer downloads first
    costs.traffic(volunteers=8, samples_per_second=40.0).up_bytes_per_hour

Easy to get wrong: these are estimates from shapes, not measurements. The model is built without
memory (torch's meta device), so a definition of a terabyte costs nothing to look at.
"""

from __future__ import annotations

from dataclasses import dataclass

from node.run.definition import RunDefinition


@dataclass(frozen=True)
class Traffic:
    """Of one volunteer among equals."""

    step_seconds: float
    round_bytes: int
    """Sent, and as much received, in one round."""
    up_bytes_per_hour: int
    down_bytes_per_hour: int


@dataclass(frozen=True)
class Costs:
    parameters: int
    state_bytes: int
    """Parameters and the optimizer's statistics: what a newcomer fetches first."""
    fixed_bytes: int
    """Of memory, whatever the batch: Python and torch, parameters, gradients, statistics, the
    collaborative optimizer's buffers, the data's shuffle buffer."""
    sample_bytes: int
    """Of memory, for each sample at once."""
    disk_bytes: int
    """Of a volunteer: the state while it is fetched."""
    keeper_disk_bytes: int
    """Of whoever keeps the checkpoints."""

    def memory_bytes(self, samples: int) -> int:
        return self.fixed_bytes + samples * self.sample_bytes

    def most_samples(self, memory_bytes: int) -> int:
        """How many samples at once fit; 0 if not even one does."""
        return max(0, (memory_bytes - self.fixed_bytes) // max(1, self.sample_bytes))

    def traffic(self, *, volunteers: int, samples_per_second: float) -> Traffic:
        raise NotImplementedError


def costs_of(definition: RunDefinition) -> Costs:
    """For a registered model; a module's model is known only where the module is trusted."""
    raise NotImplementedError
