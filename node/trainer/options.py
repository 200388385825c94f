"""How this machine takes part, as its owner says. What the run says is in its definition."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.checkpoint_keeper import CheckpointSettings


@dataclass(frozen=True)
class TrainerOptions:
    """- `device`: cpu, cuda, cuda:1, mps; empty chooses the fastest that there is.
    - `threads`: that torch computes with; 0 is all but what the network needs.
    - `max_memory_bytes`: of this process; 0 is no limit but the machine's.
    - `micro_batch`: samples in one forward pass; 0 measures.
    - `client`: others cannot dial this node.
    - `begins`: this peer may begin the run anew: the organiser's first one.
    - `checkpoints`: this peer keeps the run's.
    - `up_bytes_per_second`, `down_bytes_per_second`: what the owner allows; 0 is no limit.
    - `fetching_folder`: where a state that is being fetched is kept across a restart.
    - `personal_seed`: decides which samples this peer draws; None is another one at every start.
    """

    device: str = ""
    threads: int = 0
    max_memory_bytes: int = 0
    micro_batch: int = 0
    client: bool = False
    begins: bool = False
    checkpoints: CheckpointSettings | None = None
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    fetching_folder: Path | None = None
    personal_seed: int | None = None
