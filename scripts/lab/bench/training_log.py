"""The log of a training peer, line by line, so that it can be audited after a kill.

    {"what": "began", "at": …, "delayed": false, "epoch": 3, "history": "…"}
    {"what": "batch", "at": …, "model_epoch": 3, "first": 4294967296, "count": 8, "loss": 5.1}
    {"what": "StepTaken", "at": …, "epoch": 3, "own_samples": 72, …}
    {"what": "digest", "at": …, "epoch": 4, "model_epoch": 4, "digest": "…", "held_out": 2.9}

A batch is written before it is handed to the optimizer, and an event after it happened. So the
samples of a committed round are in the log of the peer that computed them, whenever it is killed.
`at` is the machine's monotonic clock, the same for all processes of a bench.

The last line of a killed peer may be cut short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec


class TrainingLog:
    """Appends lines; each is in the kernel's hands when `write` returns, so a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **fields: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **fields}
        os.write(self._file, msgspec.json.encode(line) + b"\n")

    def write_event(self, event: msgspec.Struct) -> None:
        """An event of the collaboration, under the name of its type."""
        told = msgspec.structs.asdict(event)
        self.write(type(event).__name__, **{name: _plain(value) for name, value in told.items()})

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, in order."""
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line)
