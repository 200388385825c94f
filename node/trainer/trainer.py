"""Train in a run until told to leave: the loop of `potluck join` and `potluck run start`.

    left = await train_run(node, definition, task, options, gate, departure, shown)

The loop itself (loop.py) is ordinary PyTorch in a worker thread; here it is fed, watched and ended.

Promises: it ends when `departure` says so, within its patience; when the node ends; and by an error
of the run that no waiting mends, which comes out. What it took is then given back: the model, the
threads, the data's files.
"""

from __future__ import annotations

from typing import Any

from node.node import Node
from node.trainer.departure import Departure
from node.trainer.gate import Gate
from node.trainer.happenings import Left
from node.trainer.options import TrainerOptions
from node.trainer.shown import Shown


async def train_run(
    node: Node,
    definition: Any,
    task: Any,
    options: TrainerOptions,
    gate: Gate,
    departure: Departure,
    shown: Shown,
) -> Left:
    """Take part in the run of `definition` with what was built of it; what the session gave."""
    raise NotImplementedError
