"""When checkpoints are written while a run trains, and what a keeper begins from. Virtual time."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Self

import pytest
import torch
import trio
from trio.testing import MockClock

from node.core.wrong_use import WrongUse
from node.run.checkpoint_file import CheckpointBroken, CheckpointFailed
from node.run.checkpoint_keeper import CheckpointKeeper, CheckpointSettings, open_keeper
from node.run.checkpoints import Checkpoints, KeepPolicy
from protocols.accumulation.events import CheckpointMissed, CheckpointSaved, TrainingEvent
from protocols.accumulation.state_lock import StateLock
from protocols.accumulation.training_state import LiveState, TrainingState, capture, look
from protocols.blocking import do_at_once
from tests.checkpoints.states import state_of

RUN = "test"


class Training:
    """A state that takes steps, and the keeper that is told."""

    def __init__(self, keeper: CheckpointKeeper) -> None:
        self.lock = StateLock()
        self.model = torch.nn.Linear(2, 2)
        begun = keeper.newest()
        self.at = (0, bytes(16)) if begun is None else (begun.epoch, begun.history)
        self.events: list[TrainingEvent] = []
        self._keeper = keeper
        keeper.entered(self, self.events.append)

    def look(self) -> LiveState:
        epoch, history = self.at
        return look(self.model.named_parameters(), run=RUN, epoch=epoch, history=history)

    async def step(self, *, seconds: float) -> None:
        await trio.sleep(seconds)
        self.step_now()

    def step_now(self) -> None:
        self.at = (self.at[0] + 1, bytes(16))
        self._keeper.advanced()

    def saved(self) -> list[int]:
        return [one.epoch for one in self.events if isinstance(one, CheckpointSaved)]

    def missed(self) -> list[int]:
        return [one.epoch for one in self.events if isinstance(one, CheckpointMissed)]


@asynccontextmanager
async def training(settings: CheckpointSettings) -> AsyncIterator[Training]:
    do_at_once()
    async with open_keeper(settings, RUN) as keeper:
        yield Training(keeper)


async def test_checkpoints_are_written_every_so_often_and_the_last_step_at_the_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with training(CheckpointSettings(tmp_path, every_seconds=60.0)) as one:
        began = autojump_clock.current_time()
        for _ in range(26):
            await one.step(seconds=5.0)
        await trio.sleep(1000.0)  # nothing changes any more
        assert one.saved() == [12, 24, 26]
        assert autojump_clock.current_time() - began == pytest.approx(26 * 5.0 + 1000.0)
        await one.step(seconds=1.0)
        await one.step(seconds=1.0)
        assert one.saved() == [12, 24, 26, 27]
    assert one.saved() == [12, 24, 26, 27, 28]

    async with training(CheckpointSettings(tmp_path)) as again:
        assert again.at[0] == 28
    assert not again.events, "there was no step"


async def test_files_that_a_kill_left_half_written_are_removed_when_the_keeper_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / ".writing-0123").mkdir()
    async with training(CheckpointSettings(tmp_path)):
        assert os.listdir(tmp_path) == []


async def test_the_last_step_is_written_also_where_the_keeper_is_cancelled_from_outside(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    """As it is at Ctrl-C."""
    with trio.CancelScope() as scope:
        async with training(CheckpointSettings(tmp_path, every_seconds=60.0)) as one:
            await one.step(seconds=61.0)
            await trio.sleep(1.0)
            await one.step(seconds=1.0)
            assert one.saved() == [1]
            scope.cancel()
            await trio.sleep_forever()
    assert one.saved() == [1, 2]


async def test_a_checkpoint_that_is_kept_for_ever_is_written_at_its_step(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    policy = KeepPolicy(keep_last=1, keep_every=10)
    async with training(CheckpointSettings(tmp_path, 1000.0, policy)) as one:
        began = autojump_clock.current_time()
        for _ in range(25):
            await one.step(seconds=1.0)
    assert autojump_clock.current_time() - began == pytest.approx(25.0)
    assert one.saved() == [10, 20, 25]
    left = [int(path.name.split("-")[1]) for path in Checkpoints(tmp_path).paths()]
    assert left == [25, 20, 10]


async def test_a_checkpoint_that_is_kept_for_ever_is_of_its_step_however_fast_the_next_one_comes(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    policy = KeepPolicy(keep_last=1, keep_every=10)
    async with training(CheckpointSettings(tmp_path, every_seconds=60.0, policy=policy)) as one:
        for _ in range(13):
            one.step_now()  # the keeper's task has no turn in between
        await trio.sleep(1.0)
        assert one.saved() == [10]
        for _ in range(17):
            one.step_now()
    assert one.saved() == [10, 20, 30], "and the last ones when it ends"
    assert one.missed() == []


async def test_a_checkpoint_that_comes_while_two_are_to_be_written_is_reported_as_missed(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    """There is memory for one copy. It was left out without a word."""
    policy = KeepPolicy(keep_last=1, keep_every=10)
    async with training(CheckpointSettings(tmp_path, every_seconds=60.0, policy=policy)) as one:
        for _ in range(32):
            one.step_now()
        await trio.sleep(1.0)
        assert one.saved() == [10]
        assert one.missed() == [20, 30]


async def test_the_step_that_completes_the_run_is_written_at_once(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    """Its volunteers leave with it, and a keeper that was killed then would be left without."""
    async with training(CheckpointSettings(tmp_path, 1000.0, last_epoch=3)) as one:
        for _ in range(3):
            await one.step(seconds=1.0)
        await trio.sleep(1.0)
        assert one.saved() == [3]


async def test_a_failed_checkpoint_is_reported_and_tried_again_when_due(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file is in its place")
    async with training(CheckpointSettings(folder, every_seconds=60.0)) as one:
        began = autojump_clock.current_time()
        for _ in range(14):
            await one.step(seconds=5.0)
        assert [type(event) for event in one.events] == [CheckpointMissed]
        folder.unlink()
        for _ in range(14):
            await one.step(seconds=5.0)
        assert one.saved() == [24]
        assert autojump_clock.current_time() - began == pytest.approx(28 * 5.0)


async def test_a_checkpoint_to_be_kept_for_ever_that_failed_is_written_later(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file is in its place")
    policy = KeepPolicy(keep_last=1, keep_every=10)
    async with training(CheckpointSettings(folder, every_seconds=60.0, policy=policy)) as one:
        for _ in range(12):
            await one.step(seconds=1.0)
        assert [type(event) for event in one.events] == [CheckpointMissed]
        folder.unlink()
        await trio.sleep(70.0)
        assert one.saved() == [10]
    assert one.saved() == [10, 12]


async def test_a_failed_checkpoint_of_the_last_step_is_tried_again(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file is in its place")
    async with training(CheckpointSettings(folder, 1000.0, last_epoch=1)) as one:
        await one.step(seconds=1.0)
        await trio.sleep(500.0)
        assert [type(event) for event in one.events] == [CheckpointMissed]
        folder.unlink()
        await trio.sleep(600.0)
        assert one.saved() == [1], "although no other step has followed"


class Year2020(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2020, 1, 1, tzinfo=tz)


async def test_the_last_one_written_is_not_removed_although_another_has_a_later_epoch(
    tmp_path: Path,
    autojump_clock: MockClock,  # noqa: ARG001
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A keeper that was cut off alone went far, and gave way to the others when it was back. Then
    it was started anew, and after its first step nothing was left of what they had made."""
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as earlier:
        earlier.setattr("node.run.checkpoints.datetime", Year2020)
        checkpoints.save(state_of(5000))
    together = checkpoints.save(state_of(3510))
    async with training(CheckpointSettings(tmp_path, every_seconds=0.0)) as one:
        assert one.at[0] == 5000
        for _ in range(5):
            await one.step(seconds=1.0)
    assert (tmp_path / f"beside-{together.name}" / "manifest.json").is_file()
    assert "rename it back" in caplog.text
    assert len(checkpoints.paths()) == 3
    caplog.clear()
    async with training(CheckpointSettings(tmp_path)) as again:
        assert again.at[0] == 5005
    assert not caplog.text, "it is said once"


async def test_the_checkpoints_of_another_run_are_not_begun_from(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(state_of(3, run="other"))
    with pytest.raises(WrongUse, match="to the run other, not to test"):
        async with training(CheckpointSettings(tmp_path)):
            raise AssertionError


async def test_a_state_without_a_history_is_not_begun_from(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    alone: TrainingState = capture(model.named_parameters(), run=RUN, epoch=3)
    Checkpoints(tmp_path).save(alone)
    with pytest.raises(WrongUse, match="does not name the steps"):
        async with training(CheckpointSettings(tmp_path)):
            raise AssertionError


async def test_a_keeper_does_not_begin_anew_where_no_checkpoint_is_whole(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(state_of(3))
    (path / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointBroken, match="None of the 1 checkpoints"):
        async with training(CheckpointSettings(tmp_path)):
            raise AssertionError


async def test_it_goes_on_without_a_whole_checkpoint_where_others_have_the_state(
    tmp_path: Path,
) -> None:
    path = Checkpoints(tmp_path).save(state_of(3))
    (path / "state.safetensors").write_bytes(b"damaged")
    async with open_keeper(CheckpointSettings(tmp_path, passes_over_broken=True), RUN) as keeper:
        assert keeper.newest() is None
    assert path.exists()  # for a person to look at


async def test_the_state_that_it_begins_from_takes_no_memory_once_it_is_read(
    tmp_path: Path,
) -> None:
    """It was there until the node ended: gigabytes, with a large model."""
    do_at_once()  # a thread keeps what it has returned until its next job
    Checkpoints(tmp_path).save(state_of(3))
    async with open_keeper(CheckpointSettings(tmp_path), RUN) as keeper:
        state = keeper.newest()
        assert state is not None
        is_there = weakref.ref(state)
        del state
        gc.collect()
        assert is_there() is None


async def test_a_removed_folder_does_not_come_back_with_a_checkpoint_alone(tmp_path: Path) -> None:
    folder = tmp_path / "poem" / "checkpoints"
    async with open_keeper(CheckpointSettings(folder), RUN):
        shutil.rmtree(tmp_path / "poem")
        with pytest.raises(CheckpointFailed):
            Checkpoints(folder).save(state_of(3))
    assert not (tmp_path / "poem").exists()


async def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"every -1\.0 seconds"):
        CheckpointSettings(tmp_path, every_seconds=-1.0)
