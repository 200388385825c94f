"""The curve of the run's loss: bounded, whole, and the same after a restart."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from node.core.training_view import LOSSES_KEPT
from node.training import trainer
from node.training.loss_curve import LARGEST_FILE_BYTES, LossCurve, keep


def test_it_reaches_back_to_the_first_step_however_many_there_are() -> None:
    curve = LossCurve()
    for step in range(1, 20 * LOSSES_KEPT + 1):
        curve.note(step, float(step))
    points = curve.points
    assert LOSSES_KEPT / 2 <= len(points) <= LOSSES_KEPT
    assert points[0] == (32, sum(range(1, 33)) / 32)
    assert points[-1][0] == 20 * LOSSES_KEPT


def test_steps_that_are_made_again_take_the_place_of_what_followed() -> None:
    curve = LossCurve()
    for step in (1, 2, 3, 4):
        curve.note(step, float(step))
    curve.note(3, 9.0)
    curve.note(4, math.nan)
    assert curve.points == ((1, 1.0), (2, 2.0), (3, 9.0))


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    curve, path = LossCurve(), tmp_path / "poem.losses"
    for step in range(1, 3 * LOSSES_KEPT):
        curve.note(step, 1.0 / step)
    keep(curve.as_bytes("poem"), path)
    again = LossCurve.read(path, "poem")
    assert again.points == curve.points
    for one in (curve, again):
        one.note(3 * LOSSES_KEPT, 0.5)
    assert again.points == curve.points


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"run":"poem","width":0,"points":[]}',
        b'{"run":"other","width":1,"points":[]}',
        b'{"run":"poem","width":1,"points":[[2,1.0,1],[1,1.0,1]]}',
        b'{"run":"poem","width":1,"points":[[1,1e999,1]]}',
        b" " * (LARGEST_FILE_BYTES + 1),
        b'{"run":"poem","width":1,"points":['
        + b",".join(b"[%d,1.0,1]" % one for one in range(600))
        + b"]}",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_a_file_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "poem.losses"
    path.write_bytes(data)
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's are of several kinds
        LossCurve.read(path, "poem")


# -- while a node trains


def losses_in(path: Path) -> tuple[trainer._LossesFile, LossCurve]:
    account: Any = SimpleNamespace(curve=LossCurve())
    return trainer._LossesFile(account, path, "run"), account.curve


async def test_the_file_is_written_beside_the_other_tasks_and_also_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk would hold up every connection of the node."""
    threads: list[int] = []

    def noted(data: bytes, path: Path) -> None:
        threads.append(threading.get_ident())
        keep(data, path)

    monkeypatch.setattr(trainer, "keep", noted)
    losses, curve = losses_in(tmp_path / "losses")
    curve.note(1, 2.0)
    with trio.CancelScope() as ending:
        ending.cancel()
        await losses.keep()
    assert LossCurve.read(tmp_path / "losses", "run").points == ((1, 2.0),)
    assert threading.get_ident() not in threads


async def test_a_disk_that_takes_nothing_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    losses, curve = losses_in(folder / "losses")
    for step in range(1, 4):
        curve.note(step, 2.0)
        await losses.keep()
    assert caplog.text.count("cannot be saved") == 1
    folder.mkdir()
    await losses.keep()
    assert len(LossCurve.read(folder / "losses", "run").points) == 3
    (folder / "losses").unlink()
    folder.rmdir()
    curve.note(4, 2.0)
    await losses.keep()
    assert caplog.text.count("cannot be saved") == 2
