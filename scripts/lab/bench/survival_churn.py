"""`scripts/bench survival --churn`: rounds without end, while peers are killed and started.

Some peers, the veterans, are never killed; each of the others may be at any moment, and a fresh
process takes its place later. All living peers are told to average again as soon as all have an
outcome. The bench measures the longest time without a completed round (one that two peers
committed), and whether a veteran leaks: its memory over the second half of the time against the
first, and its tasks and descriptors at rest, when all others are gone, against the beginning,
before the others came.

A group may fall into two when its members die while it forms. Each half then averages on its own,
which is right. Two results with a member in common are wrong.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from lab import Talk
from lab.bench.averaging_swarm import AveragingSwarm, SwarmRound, disagreement, open_swarm
from lab.bench.machine import machine_facts

LONGEST_GAP_SECONDS = 30.0  # without a completed round
MOST_VETERANS = 3
LEAST_ALIVE = 3  # fewer are not killed
CENSUS_SECONDS = 2.0  # between two looks at what the veterans hold
CENSUSES_ALONE = 4
WARM_UP_SHARE = 0.2  # of the time: caches fill, and allocators take what they will keep
MEMORY_GROWTH_BYTES = 16 << 20  # of a median over half the time: what an allocator may scatter
REST_SECONDS = 40.0  # for what remembers the dead to forget them
TASKS_MORE = 2  # at rest; a timer may just be running
DESCRIPTORS_MORE = 1
FAILURES_TOLD = 10
MIB = 1 << 20


@dataclass(frozen=True)
class ChurnEffort:
    seconds: float
    peers: int = 8
    values: int = 1_000_000
    every_seconds: float = 1.0
    seed: int = 7

    @property
    def veterans(self) -> range:
        """Half of the peers at most, and no more than it takes to see a leak."""
        return range(min(MOST_VETERANS, max(1, self.peers // 2)))


@dataclass
class _Seen:
    """The events of a churn."""

    completed_at: list[float] = field(default_factory=list)
    rounds: int = 0
    members: list[int] = field(default_factory=list)
    kills: int = 0
    starts: int = 0
    split: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


async def measure_churn(effort: ChurnEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The results of the rounds and the veterans, and whether the bars are met."""
    machine, began = machine_facts(), time.monotonic()
    async with open_swarm(effort.values) as swarm:
        churn = _Churn(swarm, effort, say)
        result = await churn.measure()
    return result | {
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


class _Churn:
    """One swarm whose peers come and go.

    Invariant: `_living` take part in the next round; `_dead` have been killed and not been seen
    off, since a round may still wait for them; `_vacant` are numbers without a process.
    """

    def __init__(self, swarm: AveragingSwarm, effort: ChurnEffort, say: Talk) -> None:
        self._swarm = swarm
        self._effort = effort
        self._say = say
        self._chance = random.Random(effort.seed)
        self._living: set[int] = set()
        self._dead: set[int] = set()
        self._vacant: list[int] = []
        self._starting = 0
        self._epoch = 0
        self._seen = _Seen()

    async def measure(self) -> dict[str, Any]:
        effort = self._effort
        for number in effort.veterans:
            await self._start(number)
        alone = await self._alone()
        for number in range(len(effort.veterans), effort.peers):
            self._say(f"starting peer {number + 1} of {effort.peers}")
            await self._start(number)
        self._seen, censuses = _Seen(), list[dict[int, dict[str, Any]]]()
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._disturb, nursery)
            while time.perf_counter() < began + effort.seconds:
                await self._round()
                if time.perf_counter() > began + CENSUS_SECONDS * (1 + len(censuses)):
                    censuses.append(await self._census())
                    self._say(self._progress(time.perf_counter() - began))
            nursery.cancel_scope.cancel()
        ended, seen = time.perf_counter(), self._seen
        self._seen = _Seen(failures=seen.failures)
        rest = await self._at_rest(alone)
        gap = longest_gap(began, seen.completed_at, ended)
        leaks = {
            "memory_MiB": memory_figure(censuses, effort.veterans),
            "tasks": _at_rest_figure("tasks", alone, rest, TASKS_MORE),
            "descriptors": _at_rest_figure("descriptors", alone, rest, DESCRIPTORS_MORE),
        }
        met = gap <= LONGEST_GAP_SECONDS and not seen.failures
        return {
            "longest_gap_s": round(gap, 2),
            "bar_gap_s": LONGEST_GAP_SECONDS,
            "rounds": seen.rounds,
            "rounds_completed": len(seen.completed_at),
            "rounds_split": seen.split,
            "members_p50": statistics.median(seen.members or [0]),
            "verdicts": seen.verdicts,
            "kills": seen.kills,
            "starts": seen.starts,
            "leaks": leaks,
            "met": met and all(leak["met"] for leak in leaks.values()),
            "failures": seen.failures[:FAILURES_TOLD],
        }

    async def _start(self, number: int) -> None:
        self._starting += 1
        try:
            await self._swarm.start(number)
        finally:
            self._starting -= 1
        self._living.add(number)

    async def _disturb(self, nursery: trio.Nursery) -> None:
        """Each second, or as often as is said, kill one or start one."""
        while True:
            await trio.sleep(self._effort.every_seconds)
            mortal = sorted(self._living - set(self._effort.veterans))
            missing = self._effort.peers - len(self._living) - self._starting
            if self._vacant and (missing > 1 or not mortal or self._chance.random() < 0.5):
                self._seen.starts += 1
                nursery.start_soon(self._start, self._vacant.pop(0))
            elif mortal and len(self._living) > LEAST_ALIVE:
                number = self._chance.choice(mortal)
                self._living.remove(number)
                self._dead.add(number)
                self._seen.kills += 1
                self._swarm.peers[number].send_signal(signal.SIGKILL)

    async def _round(self) -> None:
        """Everybody who lives averages; then the dead are seen off."""
        self._epoch += 1
        numbers = sorted(self._living)
        await self._swarm.arm(numbers)
        this = await self._swarm.round(self._epoch, numbers)
        digests = await self._swarm.digests(self._living.intersection(this.committed))
        self._note(this, digests)
        for number in sorted(self._dead):
            await self._see_off(number)

    async def _see_off(self, number: int) -> None:
        self._dead.remove(number)
        await self._swarm.end(number)
        self._vacant.append(number)

    def _note(self, this: SwarmRound, digests: Mapping[int, str | None]) -> None:
        seen = self._seen
        seen.rounds += 1
        for answer in this.answers.values():
            seen.verdicts[answer["verdict"]] = seen.verdicts.get(answer["verdict"], 0) + 1
        died = set(this.lost) - self._dead
        seen.failures += [
            f"round {this.epoch}: peer {number + 1} died by itself" for number in died
        ]
        groups = groups_of(this)
        for numbers in groups:
            failure = disagreement(part_of(this, numbers), digests)
            if failure:
                seen.failures.append(f"round {this.epoch}: {failure}")
        named = [set(this.answers[numbers[0]]["members"]) for numbers in groups]
        if sum(map(len, named)) > len(set().union(*named)):
            seen.failures.append(f"round {this.epoch}: two results with a member in common")
        seen.split += len(groups) > 1
        largest = max(map(len, named), default=0)
        if largest > 1:
            seen.completed_at.append(this.ended_for(this.committed))
            seen.members.append(largest)

    async def _census(self) -> dict[int, dict[str, Any]]:
        return await self._swarm.ask_all("totals", self._effort.veterans)

    async def _alone(self) -> dict[int, dict[str, Any]]:
        """The most that the veterans hold before the others come."""
        censuses = []
        for _ in range(CENSUSES_ALONE):
            await self._round()
            censuses.append(await self._census())
        return {
            number: max((census[number] for census in censuses), key=lambda held: held["tasks"])
            for number in self._effort.veterans
        }

    async def _at_rest(self, alone: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The resources of the veterans at rest, when no other peer is left."""
        mortal = set(self._swarm.peers) - set(self._effort.veterans)
        for number in mortal - self._dead:  # some were killed after the last round's end
            self._swarm.peers[number].send_signal(signal.SIGKILL)
        self._living -= mortal
        self._dead = mortal
        for number in sorted(mortal):
            await self._see_off(number)
        deadline = time.monotonic() + REST_SECONDS
        while True:
            await self._round()
            rest = await self._census()
            limits = (("tasks", TASKS_MORE), ("descriptors", DESCRIPTORS_MORE))
            quiet = all(_at_rest_figure(name, alone, rest, more)["met"] for name, more in limits)
            if quiet or time.monotonic() > deadline:
                return rest
            await trio.sleep(CENSUS_SECONDS)

    def _progress(self, seconds: float) -> str:
        seen = self._seen
        return (
            f"{seconds:.0f} s: {len(seen.completed_at)} of {seen.rounds} rounds completed, "
            f"{len(self._living)} live, {seen.kills} killed, {seen.starts} started"
        )


def groups_of(this: SwarmRound) -> list[list[int]]:
    """The groups of peers that committed the same, by their numbers."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, answer in this.committed.items():
        groups.setdefault((answer["agreed_digest"], tuple(answer["members"])), []).append(number)
    return list(groups.values())


def part_of(this: SwarmRound, numbers: Iterable[int]) -> SwarmRound:
    """A round as if only these had taken part in it."""
    part = SwarmRound(this.epoch, numbers)
    for number in part.numbers:
        part.note(number, this.answers[number])
    return part


def longest_gap(began: float, completed_at: Sequence[float], ended: float) -> float:
    moments = [began, *completed_at, ended]
    return max(later - earlier for earlier, later in itertools.pairwise(moments))


def memory_figure(
    censuses: Sequence[Mapping[int, dict[str, Any]]], veterans: Iterable[int]
) -> dict[str, Any]:
    """The veteran that has grown most: medians of both halves, after warming up."""
    warm = censuses[round(len(censuses) * WARM_UP_SHARE) :]
    half = len(warm) // 2
    grown = []
    for number in veterans:
        sizes = [census[number]["memory_bytes"] for census in warm if number in census]
        if half:
            first, second = statistics.median(sizes[:half]), statistics.median(sizes[half:])
            grown.append((second - first, first, second))
    most, first, second = max(grown, default=(0.0, 0.0, 0.0))
    return {
        "first_half": round(first / MIB, 1),
        "second_half": round(second / MIB, 1),
        "tolerance": MEMORY_GROWTH_BYTES / MIB,
        "met": most <= MEMORY_GROWTH_BYTES,
    }


def _at_rest_figure(
    name: str,
    before: Mapping[int, dict[str, Any]],
    after: Mapping[int, dict[str, Any]],
    tolerance: int,
) -> dict[str, Any]:
    """The veteran that holds most more than at the beginning."""
    more, number = max((after[number][name] - before[number][name], number) for number in after)
    figure = {
        "before": before[number][name],
        "after": after[number][name],
        "tolerance": tolerance,
        "met": more <= tolerance,
    }
    if name == "tasks" and more > tolerance:
        was, now = (each[number]["tasks_by_name"] for each in (before, after))
        figure["more_of"] = {
            task: count - was.get(task, 0)
            for task, count in now.items()
            if count > was.get(task, 0)
        }
    return figure
