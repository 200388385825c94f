"""How this machine takes part, as its owner says. What the run says is in its definition."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from node.checkpoint_keeper import CheckpointSettings


def _whole() -> float:
    return 1.0


async def _nothing() -> None:
    """What has to be made sure of, where nothing has."""


@dataclass(frozen=True)
class TrainerOptions:
    """The device and the threads are the task's, which was built for them.

    - `micro_batch`: samples in one forward pass; 0 measures.
    - `most_samples`: what memory allows of them; 0 is what the definition says.
    - `batch_share`: of the micro-batch, looked at between batches: less where memory runs short.
    - `make_sure`: done last before the run is entered; what it raises keeps this peer out.
    - `client`: others cannot dial this node.
    - `name`: what its owner wants to be called by the others.
    - `begins`: this peer may begin the run anew: the organiser's first one.
    - `from_peers`: it waits for others who have the run's state instead.
    - `keeps_only`: it brings no samples, and helps with the rounds of the others.
    - `checkpoints`: this peer keeps the run's.
    - `up_bytes_per_second`, `down_bytes_per_second`: by which rounds are planned; 0 is measured.
    - `upload_limit`, `download_limit`: what the owner allows, to be shown; None is no limit.
    - `fetching_folder`: where a state that is being fetched is kept across a restart.
    - `position_file`: where it is kept how far the data has been read.
    - `losses_file`: where the curve of the run's loss is kept across a restart.
    """

    micro_batch: int = 0
    most_samples: int = 0
    batch_share: Callable[[], float] = _whole
    make_sure: Callable[[], Awaitable[None]] = _nothing
    client: bool = False
    name: str = ""
    begins: bool = False
    from_peers: bool = False
    keeps_only: bool = False
    checkpoints: CheckpointSettings | None = None
    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    upload_limit: float | None = None
    download_limit: float | None = None
    fetching_folder: Path | None = None
    position_file: Path | None = None
    losses_file: Path | None = None
