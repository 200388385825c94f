"""How a session ends where there is no round to see out: its thread is woken wherever it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trio

from node.core.caps.memory import MemoryUsedUp
from node.run.building import RunTask, build_task
from node.run.definition import read_definition
from node.training.batch_size import MeasuredBatch
from node.training.happenings import (
    COMPILING,
    ENTERING,
    MEASURING,
    Measured,
    Notice,
    Preparing,
)
from node.training.join.bootstrap import KeyInUse
from node.training.trainer import TrainerOptions, train_run
from protocols.testing.world import SimulatedWorld
from tests.runs.definitions import TEXT, changed, with_line
from tests.trainer.training_nodes import TrainingNode, training_node
from tests.waiting import PATIENCE_SECONDS, until

ENDING_SECONDS: Final = 30.0  # it takes milliseconds; without an end of its own it is for ever


@dataclass(frozen=True)
class Crowded(RunTask):
    """On a machine whose memory others use as well, and which computes when it may."""

    room: int
    may_compute: threading.Event

    def loss(self, batch: Any) -> torch.Tensor:
        self.may_compute.wait()
        if self.samples_in(batch) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().loss(batch)


@asynccontextmanager
async def training(
    folder: Path,
    *,
    closed: bool = False,
    room: int = 1 << 20,
    measures: bool = False,
    computes: bool = False,
    text: bytes = TEXT,
    helps: bool = False,
    make_sure: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[TrainingNode]:
    """A lone node's. `closed`: it begins in a pause. `room`: for so many samples at once, in memory
    that others have taken since it was measured; without any it ends in words. `measures`: and does
    not come to an end with it, unless it `computes`. `helps`: it brings no samples."""
    torch.set_num_threads(1)
    definition = read_definition(text)
    may_compute = threading.Event()
    if computes or not measures:
        may_compute.set()
    task = Crowded(**vars(build_task(definition)), room=room, may_compute=may_compute)
    options = TrainerOptions(begins=True, micro_batch=0 if measures else 4, keeps_only=helps)
    if make_sure is not None:
        options = replace(options, make_sure=make_sure)

    async def train(one: TrainingNode) -> None:
        if closed:
            one.session.gate.close("pause", "paused by you")
        end = pytest.RaisesGroup(MemoryUsedUp, allow_unwrapped=True, flatten_subgroups=True)
        with nullcontext() if room else end:
            await train_run(one.node, definition, task, options, one.session)

    async with SimulatedWorld(seed=1) as world, training_node(world, "ann", folder, train) as one:
        try:
            yield one
        finally:
            may_compute.set()


async def ends(one: TrainingNode) -> bool:
    with trio.move_on_after(ENDING_SECONDS):
        await one.ended.wait()
    has_ended = one.ended.is_set()
    one.session.gate.end()  # or a thread that waits would keep the test from ending
    return has_ended


def stages(one: TrainingNode) -> list[str]:
    return [each.doing for each in one.shown.happenings if isinstance(each, Preparing)]


async def test_a_node_that_ends_in_a_pause_does_not_wait_for_it_to_be_over(tmp_path: Path) -> None:
    async with training(tmp_path) as one:
        await one.until("Began")
        one.session.gate.close("pause", "paused by you")
        await one.until("Paused")
        one.scope.cancel()  # as a pass does that is taken back
        assert await ends(one)


async def test_a_pause_that_begins_while_batches_are_measured_is_kept_and_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), list[bool]()

    def measure(_task: RunTask, *, goes_on: Callable[[], bool], **_limits: int) -> MeasuredBatch:
        began.set()
        until_late = time.monotonic() + 5.0
        while not ended and goes_on() and time.monotonic() < until_late:
            time.sleep(0.001)
        ended.append(goes_on())
        return MeasuredBatch(4, 0.01, 4)

    monkeypatch.setattr("node.training.trainer.measure", measure)
    async with training(tmp_path, measures=True, computes=True) as one:
        await until(began.is_set, PATIENCE_SECONDS)
        one.session.gate.close("pause", "paused by you")
        await until(lambda: bool(ended), PATIENCE_SECONDS)
        await one.until("Paused")
        paused = one.shown.kinds()
        one.session.gate.open("pause")
        await one.until("Began")
        one.session.departure.leave()
        assert await ends(one)
    assert "Measured" not in paused
    assert ended == [False, True]
    assert stages(one) == [MEASURING, MEASURING, ENTERING]


async def test_a_helper_pauses_without_waiting_for_a_step(tmp_path: Path) -> None:
    async with training(tmp_path, helps=True) as one:
        await one.until("Began")
        one.session.gate.close("pause", "paused by you")
        await one.until("Paused")
        one.session.gate.open("pause")
        await one.until("Resumed")
        one.session.departure.leave()
        assert await ends(one)
    assert one.shown.kinds()[-1] == "Left"
    assert "StepTaken" not in one.shown.kinds()


async def test_a_node_that_leaves_before_its_loop_begins_nothing(tmp_path: Path) -> None:
    async with training(tmp_path, closed=True) as one:
        await one.until("Paused")
        assert not one.session.trains, "there is no round to see out"
        one.session.departure.leave()
        assert await ends(one)
    assert not {MEASURING, ENTERING} & set(stages(one))
    assert one.shown.kinds()[-1] == "Left"


async def test_a_node_that_leaves_while_it_measures_does_not_wait(tmp_path: Path) -> None:
    async with training(tmp_path, measures=True) as one:
        await until(lambda: MEASURING in stages(one), PATIENCE_SECONDS)
        one.session.departure.leave()
        assert await ends(one)
    assert ENTERING not in stages(one)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
async def test_a_machine_that_cannot_compile_says_so_and_trains(tmp_path: Path) -> None:
    from torch._inductor import config

    text = with_line("compile = true")
    with config.patch("cpp.cxx", ("no-such-compiler",)):
        async with training(tmp_path, measures=True, text=text, computes=True) as one:
            await one.until("Began")
            one.session.departure.leave()
            assert await ends(one)
    (words,) = [each.words for each in one.shown.happenings if isinstance(each, Notice)]
    assert "without compiling the model, because it has no C++ compiler" in words
    assert COMPILING in stages(one)
    (measured,) = [each for each in one.shown.happenings if isinstance(each, Measured)]
    assert measured.samples_per_second > 0
    assert not measured.compiled


async def test_the_model_hears_for_which_step_of_the_run_each_batch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    monkeypatch.setattr(RunTask, "at_step", lambda _task, step: heard.append(step))
    async with training(tmp_path, text=changed("batch = 64", "batch = 8")) as one:
        await until(lambda: 2 in heard, PATIENCE_SECONDS)
        one.scope.cancel()
        assert await ends(one)
    assert heard == sorted(heard)
    assert set(heard) >= {0, 1, 2}


async def test_a_node_that_finds_its_key_in_use_does_not_enter(tmp_path: Path) -> None:
    async def refuse() -> None:
        raise KeyInUse("Another node takes part in this run with this node's key.")

    with pytest.RaisesGroup(KeyInUse, flatten_subgroups=True):
        async with training(tmp_path, make_sure=refuse) as one:
            await one.ended.wait()
    assert ENTERING not in stages(one)


@pytest.mark.slow
async def test_memory_that_others_take_makes_batches_smaller_and_ends_nothing(
    tmp_path: Path,
) -> None:
    async with training(tmp_path, room=1) as one:
        await one.until("StepTaken")
        one.scope.cancel()
        assert await ends(one)
    said = [each.words for each in one.shown.happenings if isinstance(each, Notice)]
    assert said == [
        "4 samples at once do not fit into memory now: 2 from now on",
        "2 samples at once do not fit into memory now: 1 from now on",
    ]


@pytest.mark.slow
async def test_without_room_for_one_sample_it_ends_in_words(tmp_path: Path) -> None:
    async with training(tmp_path, room=0) as one:
        assert await ends(one)
