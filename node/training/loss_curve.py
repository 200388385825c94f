"""The run's loss over all of its steps that this peer knows of. Bounded, kept across restarts.

    curve = LossCurve()
    curve.note(312, 2.07)           # the run's loss in its 312th step
    curve.points                    # ((1, 5.49), ..., (312, 2.07)), at most LOSSES_KEPT of them

Each point is the mean of `width` steps in a row. When there are too many, the width doubles and
neighbours are merged, so the curve always reaches back to the first known step.

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

LARGEST_FILE_BYTES = 128 << 10  # LOSSES_KEPT points take some 20 KB
LARGEST_STEP = 1 << 40

Step = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]


class _Point(msgspec.Struct, array_like=True):
    """The mean loss of `count` steps, the last of which is `step`."""

    step: Step
    loss: float
    count: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_STEP)]


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    run: Annotated[str, msgspec.Meta(max_length=64)]
    width: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_STEP)]
    points: Annotated[list[_Point], msgspec.Meta(max_length=LOSSES_KEPT)]


class LossCurve:
    """Invariant: the points are in the order of their steps, at most one for `_width` steps."""

    def __init__(self) -> None:
        self._width = 1
        self._points: list[_Point] = []

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        return tuple((one.step, one.loss) for one in self._points)

    def note(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        self._add(_Point(step, loss, 1))
        while len(self._points) > LOSSES_KEPT:
            self._width *= 2
            points, self._points = self._points, []
            for one in points:
                self._add(one)

    def _add(self, new: _Point) -> None:
        last = self._points[-1] if self._points else None
        if last is None or (last.step - 1) // self._width != (new.step - 1) // self._width:
            self._points.append(new)
            return
        count = last.count + new.count
        last.loss += (new.loss - last.loss) * new.count / count
        last.step, last.count = new.step, count

    # -- on the disk

    def as_bytes(self, run: str) -> bytes:
        """`run`: the run that the curve belongs to."""
        return msgspec.json.encode(_Kept(run, self._width, self._points))

    @staticmethod
    def read(path: Path, run: str) -> LossCurve:
        """Read a file of `keep`. OSError or ValueError if it cannot be read, or is another
        run's."""
        curve = LossCurve()
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
        curve._width, curve._points = kept.width, kept.points
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
