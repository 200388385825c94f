"""Ctrl-C, SIGTERM and kill -9 at a hundred moments of a volunteer's life: from the first line of
Python to the middle of a round.

The short form of this is in tests/processes/test_joining.py.

Easy to get wrong: which moments. Half of the starts are in a home that has been in the run, the
others in a new one, which makes its key, asks for the definition and fetches the run's state; and
the moments go from the first millisecond to well into the training, by what a start takes on this
machine.
"""

from __future__ import annotations

import random
import signal
import statistics
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.processes.commands import leaves_in_time
from tests.processes.training_runs import TestRun, Trainer, started_run

MOMENTS: Final = 100
KILLS: Final = 30
TRAINING_SECONDS: Final = 6.0  # of moments after the first samples were accepted
LEAVE_SECONDS: Final = 5.0
SEED: Final = 7
ACCEPTED: Final = "first_samples_accepted"


class Sweep:
    """Volunteers of one run, each with a home and a temporary folder that are looked through."""

    def __init__(self, run: TestRun, seed: int) -> None:
        self._run, self._random = run, random.Random(seed)
        self._homes = 0
        self._longest = 0.0
        self.home = run.folder

    async def measure(self) -> None:
        """How long a first start takes here, with the last moment of the sweep after it."""
        self.next_home()
        began = trio.current_time()
        async with self.joining() as one:
            await one.until(ACCEPTED)
            self._longest = trio.current_time() - began + TRAINING_SECONDS
            await leaves_in_time(one.child, signal.SIGINT, LEAVE_SECONDS)
        one.traces.insist_on_nothing()

    def next_home(self) -> None:
        """The one of last time, or a new one."""
        if self._homes == 0 or self._random.random() < 0.5:
            self._homes += 1
            self.home = self._run.folder / f"volunteer-{self._homes}"

    async def until_a_moment(self, one: Trainer) -> float:
        seconds = self._random.uniform(0.0, self._longest)
        await trio.sleep(seconds)
        one.traces.look()
        return seconds

    def joining(self) -> AbstractAsyncContextManager[Trainer]:
        return self._run.joining(self.home.name)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_volunteer_leaves_at_a_hundred_moments(
    tmp_path: Path, number: signal.Signals
) -> None:
    """F22"""
    taken = []
    async with started_run(tmp_path) as run:
        sweep = Sweep(run, SEED + number)
        await sweep.measure()
        for _ in range(MOMENTS):
            sweep.next_home()
            async with sweep.joining() as one:
                await sweep.until_a_moment(one)
                seconds = await leaves_in_time(one.child, number, LEAVE_SECONDS)
            one.traces.insist_on_nothing()
            taken.append(seconds)
        assert not run.organiser.has_ended
    print(f"{number.name}: median {statistics.median(taken):.2f} s, worst {max(taken):.2f} s")


@pytest.mark.soak
async def test_a_volunteer_that_is_killed_comes_back_at_once(tmp_path: Path) -> None:
    """F22: with all that was accepted of it."""
    async with started_run(tmp_path) as run:
        sweep = Sweep(run, SEED)
        await sweep.measure()
        for _ in range(KILLS):
            sweep.next_home()
            async with sweep.joining() as one:
                await sweep.until_a_moment(one)
                one.child.send_signal(signal.SIGKILL)
                await one.child.exit_code()
            one.traces.insist_on_no_process()
            async with sweep.joining() as one:
                await one.until(ACCEPTED)
                await leaves_in_time(one.child, signal.SIGTERM, LEAVE_SECONDS)
            one.traces.insist_on_nothing()
        assert not run.organiser.has_ended
