"""`scripts/bench training-churn`: a run whose volunteers are killed and replaced, and its audit.

Volunteers in processes of their own train together, beside a keeper that comes to every round
without samples, as a backbone does, and is never killed. At first none is killed. Then each
volunteer lives for a random time (exponential, so kills are a Poisson process), is killed wherever
it is, and a fresh one takes its place after a random time as well. At the end every volunteer is
killed at once, and three fresh ones come. Requirements:

- the loss falls as in the calm run: within 5 % after as many samples;
- no sample is in two steps, and all peers that reached an epoch hold the same parameters (the
  audit);
- no 30 seconds pass without a step while volunteers come and go;
- the keeper's memory, tasks, threads and file descriptors do not grow;
- the three fresh ones continue where the others had been.

Losses are compared at equal samples, not at equal times: dead volunteers compute nothing.
"""

from __future__ import annotations

import bisect
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import trio

from lab import Talk
from lab.bench.machine import machine_facts
from lab.bench.training_audit import RunAudit
from lab.bench.training_swarm import (
    Training,
    TrainingProcess,
    TrainingSwarm,
    open_training_swarm,
)
from protocols.accumulation.tracker import FEWEST_THAT_WAIT

LONGEST_GAP_SECONDS = 30.0  # without a step
LOSS_TOLERANCE = 0.05
COMPARED_LOSSES = 5  # the curve's last values are smoothed over this many steps
START_SECONDS = 90.0  # for the first step of all, on a machine that imports six times
LATER_SECONDS = 90.0  # for fresh volunteers to find the run, fetch its state and make a step
LATER_IF_LARGE_SECONDS = 900.0
"""Such a run waits for minutes for those who are gone, and a step of all is many batches for three.
"""
FRESH_VOLUNTEERS = 3
FRESH_STEPS = 2
LEAST_ALIVE = 1
CENSUS_SECONDS = 2.0
WARM_UP_SHARE = 0.2
MEMORY_GROWTH_BYTES = 16 << 20  # of a median over half the time: what an allocator may scatter
TASKS_MORE, THREADS_MORE, DESCRIPTORS_MORE = 8, 2, 4  # between two halves' medians
MIB = 1 << 20
CALM, CHURN = "calm", "churn"  # whose logs


@dataclass(frozen=True)
class TrainingChurnEffort:
    """`calm_seconds`: of the run that is compared with; its loss curve has to be long enough for
    as many samples as the other one comes to."""

    seconds: float = 1200.0
    calm_seconds: float = 600.0
    volunteers: int = 6
    mean_life_seconds: float = 60.0
    mean_absence_seconds: float = 10.0
    target_batch: int = 256
    grace_seconds: float = 5.0
    idle_ms: float = 100.0
    seed: int = 7
    group_size: int = 64

    @property
    def training(self) -> Training:
        return Training(
            target_batch=self.target_batch,
            manner={"idle_seconds": self.idle_ms / 1000},
            grace_seconds=self.grace_seconds,
            group_size=self.group_size,
        )


@dataclass
class _Seen:
    kills: int = 0
    starts: int = 0
    censuses: list[dict[str, Any]] = field(default_factory=list)


async def measure_training_churn(
    effort: TrainingChurnEffort, say: Talk = lambda _line: None, logs: Path | None = None
) -> dict[str, Any]:
    """Both runs, the audit's findings, and whether the bars are met. With a folder, the peers' logs
    stay in its subfolders `calm` and `churn`, which exist already."""
    machine, began = machine_facts(), time.monotonic()
    say("the calm run")
    async with open_training_swarm(effort.training, logs and logs / CALM) as swarm:
        calm = await _Churn(swarm, effort, say).calm()
    say("the run with churn")
    async with open_training_swarm(effort.training, logs and logs / CHURN) as swarm:
        churned = await _Churn(swarm, effort, say).churn()
    loss = compare(calm.pop("curve"), churned.pop("curve"))
    failures = [*calm["failures"], *churned["failures"]]
    met = (
        not failures
        and churned["longest_gap_s"] <= LONGEST_GAP_SECONDS
        and churned["states_compared"] > 0
        and all(leak["met"] for leak in churned["leaks"].values())
        and loss["met"]
        and churned["went_on"]
    )
    return {
        "met": met,
        "loss": loss,
        "calm": calm,
        "churn": churned,
        "bar_gap_s": LONGEST_GAP_SECONDS,
        "failures": failures,
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


class _Churn:
    """One run. Invariant: `_mortal` live, and have a random end each; no other peer is killed."""

    def __init__(self, swarm: TrainingSwarm, effort: TrainingChurnEffort, say: Talk) -> None:
        self._swarm = swarm
        self._effort = effort
        self._say = say
        self._chance = random.Random(effort.seed)
        self._mortal: list[TrainingProcess] = []
        self._seen = _Seen()
        self._watched = (0.0, 0.0)  # from when to when, by the clock of the peers' logs

    async def calm(self) -> dict[str, Any]:
        await self._start()
        await self._watch(self._effort.calm_seconds)
        return self._told(self._swarm.audit())

    async def churn(self) -> dict[str, Any]:
        keeper = await self._start()
        async with trio.open_nursery() as nursery:
            for life in list(self._mortal):
                nursery.start_soon(self._live_and_die, life)
            await self._watch(self._effort.seconds)
            nursery.cancel_scope.cancel()
        before = self._swarm.audit()
        went_on = await self._begin_again(keeper)
        after = self._swarm.audit()
        told = self._told(before) | {"went_on": went_on, "leaks": leaks(self._seen.censuses)}
        told["failures"] = after.failures
        return told

    async def _start(self) -> TrainingProcess:
        """A keeper and the volunteers, and a first step of all of them."""
        keeper = await self._swarm.start(auxiliary=True, delayed=False, held_out=True)
        for number in range(self._effort.volunteers):
            self._say(f"starting volunteer {number + 1} of {self._effort.volunteers}")
            self._mortal.append(await self._swarm.start())
        await self._swarm.until_epoch(1, START_SECONDS)
        return keeper

    async def _live_and_die(self, life: TrainingProcess) -> None:
        """One volunteer after the other in one place."""
        effort = self._effort
        while True:
            await trio.sleep(self._chance.expovariate(1 / effort.mean_life_seconds))
            if len(self._mortal) <= LEAST_ALIVE:
                continue
            self._mortal.remove(life)
            self._seen.kills += 1
            await self._swarm.kill(life)
            await trio.sleep(self._chance.expovariate(1 / effort.mean_absence_seconds))
            self._seen.starts += 1
            life = await self._swarm.start()
            self._mortal.append(life)

    async def _watch(self, seconds: float) -> None:
        """Look at the keeper from time to time, for this long."""
        keeper, began = self._swarm.living[0], time.monotonic()
        deadline = trio.current_time() + seconds
        while trio.current_time() < deadline:
            await trio.sleep(min(CENSUS_SECONDS, max(0.0, deadline - trio.current_time())))
            self._seen.censuses.append(await keeper.ask("totals"))
            progress = await keeper.ask("progress")
            self._say(
                f"{deadline - trio.current_time():.0f} s left: epoch {progress['epoch']}, "
                f"{len(self._mortal)} live, {self._seen.kills} killed, {self._seen.starts} started"
            )
        self._watched = (began, time.monotonic())

    async def _begin_again(self, keeper: TrainingProcess) -> bool:
        """Kill all volunteers, and have fresh ones make some steps. Whether they did."""
        for life in self._swarm.living[1:]:
            await self._swarm.kill(life)
        self._say("all volunteers are dead; three fresh ones come")
        reached = (await keeper.ask("progress"))["epoch"]
        fresh = [await self._swarm.start() for _ in range(FRESH_VOLUNTEERS)]
        volunteers, group = self._effort.volunteers, self._effort.group_size
        is_large = volunteers >= FEWEST_THAT_WAIT or volunteers > group
        patience = LATER_IF_LARGE_SECONDS if is_large else LATER_SECONDS
        await self._swarm.until_epoch(reached + FRESH_STEPS, patience, [keeper, *fresh])
        return all(self._swarm.lines(life, "began")[0]["epoch"] >= reached for life in fresh)

    def _told(self, audit: RunAudit) -> dict[str, Any]:
        return {
            "curve": audit.loss_curve(),
            "epochs": len(audit.step_moments()),
            "samples": audit.samples,
            "computed": audit.computed,
            "dropped": audit.dropped,
            "held_back": audit.held_back,
            "counted_for_dead": audit.taken_for_dead,
            "counted_after_refusal": audit.taken_for_refused,
            "states_compared": audit.states_compared,
            "longest_gap_s": round(longest_gap(audit.step_moments(), *self._watched), 2),
            "kills": self._seen.kills,
            "starts": self._seen.starts,
            "failures": audit.failures,
        }


def longest_gap(moments: Sequence[float], began: float, ended: float) -> float:
    """Without one of these moments, in this time. A stall that lasts to the end counts."""
    within = [at for at in moments if began < at < ended]
    return max(later - earlier for earlier, later in itertools.pairwise([began, *within, ended]))


def compare(
    calm: Sequence[tuple[float, float]], churned: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """The losses of both runs after as many samples: those that the shorter of them came to."""
    if not calm or not churned:
        return {"met": False, "samples": 0}
    samples = min(calm[-1][0], churned[-1][0])
    one, other = loss_at(calm, samples), loss_at(churned, samples)
    return {
        "samples": samples,
        "calm": round(one, 4),
        "churn": round(other, 4),
        "ratio": round(other / one, 4),
        "at_the_start": round(calm[0][1], 4),
        "met": other <= one * (1 + LOSS_TOLERANCE),
    }


def loss_at(curve: Sequence[tuple[float, float]], samples: float) -> float:
    """The mean of the last few losses up to this many samples."""
    end = bisect.bisect_right([at for at, _ in curve], samples)
    return statistics.mean(loss for _, loss in curve[max(0, end - COMPARED_LOSSES) : max(1, end)])


def leaks(censuses: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The keeper's resources: the medians of both halves of the time, after warming up."""
    warm = censuses[round(len(censuses) * WARM_UP_SHARE) :]
    half = len(warm) // 2
    told = {}
    for name, tolerance, unit in (
        ("memory_bytes", MEMORY_GROWTH_BYTES, MIB),
        ("tasks", TASKS_MORE, 1),
        ("threads", THREADS_MORE, 1),
        ("descriptors", DESCRIPTORS_MORE, 1),
    ):
        values = [census[name] for census in warm]
        first = statistics.median(values[:half] or [0])
        second = statistics.median(values[half:] or [0])
        told[name.replace("_bytes", "_MiB")] = {
            "first_half": round(first / unit, 1),
            "second_half": round(second / unit, 1),
            "tolerance": tolerance / unit,
            "met": second - first <= tolerance,
        }
    if not told["tasks"]["met"]:
        told["tasks"]["grew"] = _grown(warm[:half], warm[half:])
    return told


def _grown(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """The tasks of which there are more, by name: the medians of both halves."""
    names = {name for census in (*first, *second) for name in census["tasks_by_name"]}
    found = {}
    for name in sorted(names):
        one, other = (
            statistics.median(census["tasks_by_name"].get(name, 0) for census in half)
            for half in (first, second)
        )
        if other > one:
            found[name] = one, other
    return found
