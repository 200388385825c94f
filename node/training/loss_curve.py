"""The run's loss over all of its steps that this peer knows of. Bounded, kept across restarts.

    curve = LossCurve()
    curve.note(312, 2.07)           # the run's loss in its 312th step
    curve.points                    # ((1, 5.49), ..., (312, 2.07)), at most LOSSES_KEPT of them

Each point is the mean of some steps in a row, so the curve always reaches back to the first known
step (thinned.py). The page has a history of its own (history.py), with more than the loss.

A run may go back to a checkpoint and make a step again. Then the later points are dropped.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Annotated

import msgspec

from node.core.training_view import LOSSES_KEPT
from node.training.thinned import Thinned

LARGEST_FILE_BYTES = 128 << 10  # LOSSES_KEPT points take some 20 KB
LARGEST_STEP = 1 << 40

Step = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]


class _Point(msgspec.Struct, frozen=True, array_like=True):
    """The mean loss of `count` steps, the last of which is `step`."""

    step: Step
    loss: float
    count: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_STEP)]


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    run: Annotated[str, msgspec.Meta(max_length=64)]
    width: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_STEP)]
    points: Annotated[list[_Point], msgspec.Meta(max_length=LOSSES_KEPT)]


def _together(first: _Point, second: _Point) -> _Point:
    count = first.count + second.count
    loss = first.loss + (second.loss - first.loss) * second.count / count
    return _Point(second.step, loss, count)


class LossCurve:
    """The points are in the order of their steps."""

    def __init__(self, width: int = 1) -> None:
        self._points = Thinned(LOSSES_KEPT, _together, width=width)

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        return tuple((one.step, one.loss) for one in self._points)

    def note(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self._points.drop_from(step)
        self._points.add(_Point(step, loss, 1))

    # -- on the disk

    def as_bytes(self, run: str) -> bytes:
        """`run`: the run that the curve belongs to."""
        return msgspec.json.encode(_Kept(run, self._points.width, list(self._points)))

    @staticmethod
    def read(path: Path, run: str) -> LossCurve:
        """Read a file of `keep`. OSError or ValueError if it cannot be read, or is another
        run's."""
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise ValueError(f"{path} has more than {LARGEST_FILE_BYTES:,} bytes.")
        kept = msgspec.json.decode(data, type=_Kept)
        if kept.run != run:
            raise ValueError(f"{path} belongs to another run of this name.")
        steps = [one.step for one in kept.points]
        if sorted(set(steps)) != steps:
            raise ValueError(f"The steps in {path} are not in order.")
        curve = LossCurve(kept.width)
        for one in kept.points:
            curve._points.add(one)
        return curve


def keep(data: bytes, path: Path) -> None:
    """Replace the file. Blocks."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(data)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
