"""`scripts/simulate run`: a whole training run in virtual time, with peers that die and come.

All peers begin together and make some calm steps. Then, depending on the plan, peers die and others
come while it makes the steps that are judged. All deciding code is the real one (lifecycle,
tracker, directory, averager, rpc); `virtual_trainer` and `simulated_network` describe the rest.

The checked promise: all peers that made a step hold the same bits after it, and the run has one
line of steps. Both are checked in every step from the first one on, also in the calm ones, and at
every peer, also at those that have died since.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import trio
from trio.testing import MockClock

from lab.simulate.liars import Lie
from lab.simulate.rare_collections import rare_collections
from lab.simulate.virtual_trainer import Manner, Trainer, longest_gap, trainer
from node.core.status import memory_in_use
from protocols.accumulation.progress_slot import publisher_of
from protocols.identity import PeerId
from protocols.moshpit.settings import GROUP_SIZE
from protocols.testing.link_model import LinkSettings
from protocols.testing.settings import NodeSettings, WorldSettings
from protocols.testing.world import SimulatedWorld, run_simulation

CALM_STEPS = 5  # before anything happens, to compare the steps under churn with
JOINING_SECONDS = 5.0  # in which peers come that begin together, one after the other
LONGEST_START_STEPS = 12  # of so many peers: until all are in, or it goes on without
LONGEST_STEP_SECONDS = 60.0  # on average: a run that is slower is broken off
LAST_WORDS_SECONDS = 3.0  # after the last step, so that all who are in it have made it
STEPS_TO_GET_IN = 2  # of the run: a newcomer is in one of the first two that end while it is there
UNEQUAL = 0.25  # by this share, batches may take longer or shorter than the plan says
PARTITION_SECONDS = 60.0
LOOK_SECONDS = 1.0  # a doubt lasts for longer
TICK_SECONDS = 0.001  # a fiftieth of a round trip; many peers are several times faster by it


@dataclass(frozen=True)
class RunPlan:
    """The plan of a simulation.

    - `mean_life_seconds`: peers die at random, after so long on average, and for each that dies a
      new one that is as fast comes at once. None: no peer dies.
    - `newcomers`: so many come beside these, evenly spread over the steps that are judged.
    - `deaths`: so many die at the same moment, after the first of these steps.
    - `liars`: this share of the peers lies, from the first of these steps on, each in the next of
      these `lies`.
    - `partition`: this share of the peers is cut off from the others then, for a minute.
    - `dial_out`: this share of the peers can only dial out.
    - `rates`: by how much faster the fastest peer is than the slowest.
    - `batch_seconds`, `batch_samples`: of one peer; each peer's own time is drawn around it.
    - `step_seconds`: how long all compute together for a step, unless `target` says how many
      samples a step takes.
    - `upload_bytes_per_second`, `download_bytes_per_second`: of each peer; None is without limit.
    """

    peers: int
    steps: int
    seed: int
    mean_life_seconds: float | None = None
    newcomers: int = 0
    deaths: int = 0
    partition: float = 0.0
    liars: float = 0.0
    lies: tuple[Lie, ...] = tuple(Lie)
    dial_out: float = 0.0
    rates: float | None = None
    latency_seconds: float = 0.02
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    parameters: int = 1000
    target: int | None = None
    step_seconds: float = 10.0
    batch_seconds: float = 1.0
    batch_samples: int = 8
    group_size: int = GROUP_SIZE
    approximate: bool = False

    @property
    def target_samples(self) -> int:
        together = self.peers * self.batch_samples * self.step_seconds / self.batch_seconds
        if self.rates is not None and self.rates > 1.0:  # the mean of rates as `batch` draws them
            together *= (self.rates**0.5 - self.rates**-0.5) / math.log(self.rates)
        return self.target or max(1, round(together))

    def batch(self, chance: random.Random) -> float:
        """How long a peer computes a batch."""
        if self.rates is None:
            return self.batch_seconds * chance.uniform(1.0 - UNEQUAL, 1.0 + UNEQUAL)
        return self.batch_seconds * math.pow(self.rates, chance.uniform(-0.5, 0.5))

    @property
    def is_calm(self) -> bool:
        happens = self.newcomers or self.deaths or self.partition or self.liars
        return self.mean_life_seconds is None and not happens


Figures = dict[str, Any]


def simulate(
    plan: RunPlan,
    say: Callable[[str], None] = lambda _: None,
    *,
    tell: Callable[[Figures], None] = lambda _: None,
    stop: trio.Event | None = None,
    run: Callable[[Callable[[], Awaitable[Figures]], MockClock], Figures] | None = None,
) -> Figures:
    """Run the whole plan and return its figures. All but `cpu_ms_per_s`, `memory_MiB` and
    `wall_seconds` follow from the seed.

    When `stop` is set, the figures are of the time until then; there are none ({}) before all peers
    train. `tell` gets them before the peers are taken down, which takes seconds for some dozens of
    them and may be cut short. `run` is as in `run_simulation`.
    """
    began = time.perf_counter()
    settings = WorldSettings(link=LinkSettings(latency_seconds=plan.latency_seconds))

    async def scenario(world: SimulatedWorld) -> Figures:
        figures = await _Run(plan, world, say).run(trio.Event() if stop is None else stop)
        if figures:
            figures["wall_seconds"] = round(time.perf_counter() - began, 1)
            tell(figures)
        return figures

    with rare_collections():
        return run_simulation(
            scenario, seed=plan.seed, settings=settings, tick_seconds=TICK_SECONDS, run=run
        )


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """The promises that a run with these figures has broken, each as a sentence."""
    found = []
    if figures["variants_max"] > 1:
        found.append(
            f"After one step the peers that made it held {figures['variants_max']} different "
            f"states: {figures['steps_with_variants']} steps left more than one."
        )
    if figures["histories_max"] > 1:
        found.append(
            f"The run forked: {figures['steps_with_forks']} epochs were reached with more than "
            "one history."
        )
    if figures["steps"] < figures["steps_wanted"] and not figures["stopped"]:
        found.append(
            f"It made {figures['steps']} of {figures['steps_wanted']} steps in "
            f"{figures['virtual_seconds']:g} s of its time."
        )
    return found


@dataclass
class _Epoch:
    """One step, at all peers that made it. `number` is the epoch after it."""

    number: int
    first_at: float
    digests: set[bytes] = field(default_factory=set)
    histories: set[bytes] = field(default_factory=set)
    made_at: list[float] = field(default_factory=list)
    samples: float = 0.0


@dataclass(frozen=True)
class _Meter:
    """The resources used until one moment."""

    at: float
    cpu_seconds: float
    sent_bytes: dict[str, int]
    exchanged_bytes: dict[str, int]
    calls: dict[str, int]


class _Run:
    """One run. `peers` has all that ever were, in the order in which they came."""

    def __init__(self, plan: RunPlan, world: SimulatedWorld, say: Callable[[str], None]) -> None:
        self.plan, self.world, self.say = plan, world, say
        self.chance = random.Random(f"{plan.seed} run")
        self.node = NodeSettings(
            upload_bytes_per_second=plan.upload_bytes_per_second,
            download_bytes_per_second=plan.download_bytes_per_second,
        )
        self.peers: list[Trainer] = []
        self.newcomers: list[Trainer] = []
        self._judged_from: tuple[int, int, _Meter] | None = None
        """The epochs before the calm steps and before those that are judged, and what had been
        used by then."""
        self._judged_until: _Meter | None = None
        self._back_seconds: float | None = None
        self._named: set[PeerId] = set()
        """The liars whose samples did not count at some honest peer."""
        self._memory = memory_in_use()
        self._haste = 1.0
        self._step_made = trio.Event()
        """Set and replaced whenever a peer has made a step."""

    async def run(self, stop: trio.Event) -> Figures:
        async with trio.open_nursery() as nursery:

            async def end_when_told() -> None:
                await stop.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_when_told)
            await self._go_through()
            nursery.cancel_scope.cancel()
        if self._judged_from is None:
            return {}
        return {**self._figures(*self._judged_from), "stopped": stop.is_set()}

    async def _go_through(self) -> None:
        plan = self.plan
        await self._begin()
        before = self._furthest()
        calm_steps = 0 if plan.is_calm else CALM_STEPS
        if calm_steps:
            self.say(f"{calm_steps} calm steps, to compare with")
            await self._made(before + calm_steps)
        start = self._furthest()
        self._judged_from = before, start, self._meter()
        self.say(f"{plan.steps} steps")
        async with trio.open_nursery() as nursery:
            if plan.mean_life_seconds is not None:
                nursery.start_soon(self._let_peers_die, plan.mean_life_seconds)
            if plan.newcomers:
                nursery.start_soon(self._let_others_come, plan.newcomers)
            if plan.liars:
                self._let_some_lie(plan.liars)
                nursery.start_soon(self._watch_the_liars)
            if plan.deaths or plan.partition:
                nursery.start_soon(self._strike, start + 1)
            await self._made(start + plan.steps)
            nursery.cancel_scope.cancel()
        self._judged_until = self._meter()
        await trio.sleep(LAST_WORDS_SECONDS)

    # -- what happens

    async def _begin(self) -> None:
        """Let the first peers come and train until all of them are in the steps: at first as many
        as one group takes, then each time as many as there are. While some are missing, the others
        compute as fast as all together will, or a step of a few would take minutes."""
        plan = self.plan
        self.say(f"{plan.peers} peers join")
        coming = min(plan.peers, plan.peers if plan.approximate else plan.group_size)
        while coming:
            begins, there = not self.peers, len(self.peers) + coming
            self._haste = plan.peers / there
            for one in self.peers:
                one.haste = self._haste
            for _ in range(coming):
                self._come(begins=begins)
                await trio.sleep(JOINING_SECONDS / coming)
            with trio.move_on_after(LONGEST_START_STEPS * plan.step_seconds):
                while not all(one.steps for one in self.peers):
                    await self._step_made.wait()
            made = sum(1 for one in self.peers if one.steps)
            self.say(f"{made} are in the steps, {trio.current_time():.0f} s after the first came")
            coming = min(there, plan.peers - there)

    def _come(self, *, begins: bool, batch_seconds: float | None = None) -> Trainer:
        plan = self.plan
        manner = Manner(
            batch_seconds or plan.batch(self.chance),
            plan.batch_samples,
            begins=begins,
            target=plan.target_samples,
            parameters=plan.parameters,
            group_size=plan.group_size,
            approximate=plan.approximate,
        )
        # the first three are where all others join
        dialable = len(self.peers) < 3 or self.chance.random() >= plan.dial_out
        node = replace(self.node, dialable=dialable)
        one = trainer(self.world, f"peer-{len(self.peers)}", manner, self.peers, node)
        one.when_stepped, one.haste = self._stepped, self._haste
        self.peers.append(one)
        return one

    def _stepped(self) -> None:
        self._step_made.set()
        self._step_made = trio.Event()

    async def _let_peers_die(self, mean_life_seconds: float) -> None:
        while True:
            living = self._living()
            await trio.sleep(self.chance.expovariate(len(living) / mean_life_seconds))
            dead = self.chance.choice(living)
            dead.kill()
            seconds = dead.manner.seconds  # a run's speed stays what it was
            self.newcomers.append(self._come(begins=False, batch_seconds=seconds))

    async def _let_others_come(self, count: int) -> None:
        for _ in range(count):
            await trio.sleep(self.plan.steps * self.plan.step_seconds / (count + 1))
            self.newcomers.append(self._come(begins=False))

    def _let_some_lie(self, share: float) -> None:
        """Those that lie as heads are heads."""
        living, count = self._living(), round(share * self.plan.peers)
        ways = itertools.islice(itertools.cycle(self.plan.lies), count)
        for way in sorted(ways, key=lambda one: not one.is_of_heads):
            fitting = [one for one in living if one.lie is None]
            heads = [one for one in fitting if one.tracker.estimate.sum is not None]
            self.chance.choice(heads if way.is_of_heads and heads else fitting).lie = way

    async def _watch_the_liars(self) -> None:
        while True:
            liars = {one.network.peer_id for one in self.peers if one.lie is not None}
            for one in self._living():
                found = one.tracker.estimate
                if one.lie is None:
                    self._named |= liars & {publisher_of(each.peer) for each in found.ignored}
                    self._named |= liars & {found.boaster}
            await trio.sleep(LOOK_SECONDS)

    async def _strike(self, after: int) -> None:
        """When the run has reached this epoch: many die, or a part of them is cut off."""
        await self._made(after)
        plan = self.plan
        await trio.sleep(plan.step_seconds * self.chance.random())
        for one in self.chance.sample(self._living(), min(plan.deaths, len(self._living()))):
            one.kill()
        struck = trio.current_time()
        if plan.partition:
            cut_off = self.chance.sample(self._living(), round(plan.partition * plan.peers))
            rest = [one for one in self._living() if one not in cut_off]
            cuts = self.world.partition(
                [one.network for one in cut_off], [one.network for one in rest]
            )
            await trio.sleep(PARTITION_SECONDS)
            self.world.heal(cuts)
            struck = trio.current_time()
        before = self._furthest()
        honest = [one for one in self._living() if one.lie is None]
        while not all(one.steps and one.steps[-1].epoch > before for one in honest if one.alive):
            await self._step_made.wait()
        self._back_seconds = trio.current_time() - struck

    async def _made(self, epoch: int) -> None:
        """Until the run has reached this epoch, or is far too slow for it."""
        steps = epoch - self._furthest()
        with trio.move_on_after(steps * max(LONGEST_STEP_SECONDS, 6 * self.plan.step_seconds)):
            while self._furthest() < epoch:
                await self._step_made.wait()

    # -- what is seen

    def _living(self) -> list[Trainer]:
        return [one for one in self.peers if one.alive]

    def _furthest(self) -> int:
        """The epoch after the last step that a living peer has made."""
        return max((one.steps[-1].epoch for one in self._living() if one.steps), default=0)

    def _meter(self) -> _Meter:
        calls = {}
        for one in self.peers:
            if one.directory is not None:
                counts = one.directory.statistics()
                calls[one.name] = counts.finds_sent + counts.stores_sent + counts.greets_sent
        sent = {one.name: one.network.bytes_sent for one in self.peers}
        exchanged = {one.name: one.exchanged_bytes for one in self.peers}
        return _Meter(trio.current_time(), time.process_time(), sent, exchanged, calls)

    def _epochs(self) -> dict[int, _Epoch]:
        found: dict[int, _Epoch] = {}
        honest = [one for one in self.peers if one.lie is None]
        for step in sorted(step for one in honest for step in one.steps):
            epoch = found.setdefault(step.epoch, _Epoch(step.epoch, step.at))
            epoch.digests.add(step.digest)
            epoch.histories.add(step.history)
            epoch.made_at.append(step.at)
            epoch.samples = step.samples
        return dict(sorted(found.items()))

    def _figures(self, before: int, start: int, begun: _Meter) -> Figures:
        plan, epochs = self.plan, self._epochs()
        ended = self._judged_until or self._meter()
        judged = [one for number, one in epochs.items() if start < number <= start + plan.steps]
        calm = [one for number, one in epochs.items() if before < number <= start]
        shares = [len(one.made_at) / max(1, self._living_at(one.first_at)) for one in judged]
        commits = [late for one in judged for late in self._commit_seconds(one)]
        variants = {number: len(one.digests) for number, one in epochs.items()}
        histories = {number: len(one.histories) for number, one in epochs.items()}
        since = epochs[start].first_at if start in epochs else begun.at
        return {
            "peers": plan.peers,
            "seed": plan.seed,
            "target_samples": plan.target_samples,
            "group_size": plan.group_size,
            "approximate": plan.approximate,
            "mean_life_s": plan.mean_life_seconds,
            "dial_out": plan.dial_out,
            "rates": plan.rates,
            "partition": plan.partition,
            "latency_s": plan.latency_seconds,
            "up_bytes_per_s": plan.upload_bytes_per_second,
            "down_bytes_per_s": plan.download_bytes_per_second,
            "steps_wanted": plan.steps,
            "steps": len(judged),
            "steps_per_minute": _per_minute(since, judged, ended.at),
            "calm_steps_per_minute": _per_minute(epochs[before].first_at, calm, begun.at)
            if calm
            else None,
            "longest_gap_s": round(longest_gap(self.peers, since, ended.at), 1),
            "variants_max": max(variants.values(), default=0),
            "steps_with_variants": sum(number > 1 for number in variants.values()),
            "histories_max": max(histories.values(), default=0),
            "steps_with_forks": sum(number > 1 for number in histories.values()),
            "variants": list(variants.values()),
            "histories": list(histories.values()),
            "counted_share": _rounded(self._counted_share(judged), 4),
            "share_in_step_min": _rounded(min(shares, default=None), 3),
            "share_in_step_p50": _rounded(median(shares) if shares else None, 3),
            "shares": [round(share, 3) for share in shares],
            "without_place": sum(one.lie is None and not one.has_place for one in self._living()),
            **self._newcomers(judged),
            "liars": sum(one.lie is not None for one in self.peers),
            "liars_named": len(self._named),
            "lies_named": sorted(
                {
                    one.lie.name.lower()
                    for one in self.peers
                    if one.lie is not None and one.network.peer_id in self._named
                }
            ),
            "deaths": sum(one.died is not None for one in self.peers),
            "back_s": _rounded(self._back_seconds, 1),
            "commit_s_p50": _rounded(median(commits) if commits else None, 2),
            "commit_s_max": _rounded(max(commits, default=None), 2),
            **self._costs(begun, ended),
            "trace": self.world.trace_hash(),
        }

    def _living_at(self, moment: float) -> int:
        return sum(
            one.lie is None and one.began <= moment and (one.died is None or one.died > moment)
            for one in self.peers
        )

    def _commit_seconds(self, epoch: _Epoch) -> list[float]:
        """For each who made the step: how long after all together had the samples of it."""
        batches = sorted(
            batch for one in self.peers for batch in one.batches if batch.epoch == epoch.number - 1
        )
        enough = min(self.plan.target_samples, epoch.samples)
        together, reached = 0, epoch.first_at
        for batch in batches:
            together, reached = together + batch.samples, batch.at
            if together >= enough:
                break
        return [at - reached for at in epoch.made_at]

    def _counted_share(self, judged: Sequence[_Epoch]) -> float | None:
        """The share of all samples that were computed for these steps, and are in them."""
        before = {one.number - 1 for one in judged}
        computed = sum(
            batch.samples for one in self.peers for batch in one.batches if batch.epoch in before
        )
        return sum(one.samples for one in judged) / computed if computed else None

    def _newcomers(self, judged: Sequence[_Epoch]) -> dict[str, Any]:
        """How many of the run's steps each of them saw, up to the first that it was in. One that
        saw fewer than it may need, because it died or the run ended, says nothing."""
        waited: list[int] = []
        never = 0
        for one in self.newcomers:
            until = one.steps[0].epoch if one.steps else None
            seen = [
                epoch
                for epoch in judged
                if epoch.first_at > one.began
                and (one.died is None or epoch.first_at < one.died)
                and (until is None or epoch.number <= until)
            ]
            if until is not None:
                waited.append(len(seen))
            elif len(seen) >= STEPS_TO_GET_IN:
                never += 1
        return {
            "newcomers": len(self.newcomers),
            "newcomers_judged": len(waited) + never,
            "newcomers_in": len(waited),
            "newcomers_in_within_two_steps": sum(steps <= STEPS_TO_GET_IN for steps in waited),
            "newcomers_never_in": never,
            "newcomer_steps": waited,
        }

    def _costs(self, begun: _Meter, ended: _Meter) -> dict[str, Any]:
        """Of the peers that were there all the time."""
        seconds = max(1e-9, ended.at - begun.at)
        there = [one.name for one in self._living() if one.name in begun.calls]
        sent = [(ended.sent_bytes[name] - begun.sent_bytes[name]) / seconds for name in there]
        control = [
            sent_by - (ended.exchanged_bytes[name] - begun.exchanged_bytes[name]) / seconds
            for name, sent_by in zip(there, sent, strict=True)
        ]
        calls = [(ended.calls[name] - begun.calls[name]) / seconds for name in there]
        cpu = (ended.cpu_seconds - begun.cpu_seconds) * 1000 / seconds / self.plan.peers
        return {
            "calls_per_s_p50": _rounded(median(calls) if calls else None, 1),
            "sent_bytes_per_s_p50": _rounded(median(sent) if sent else None, 0),
            "control_bytes_per_s_p50": _rounded(median(control) if control else None, 0),
            "hottest_bytes_per_s": _rounded(max(sent, default=None), 0),
            "cpu_ms_per_s": round(cpu, 2),
            "memory_MiB": self._memory_per_peer(),
            "virtual_seconds": round(trio.current_time(), 1),
        }

    def _memory_per_peer(self) -> float | None:
        now = memory_in_use()
        if now is None or self._memory is None:
            return None
        return round((now - self._memory) / 2**20 / self.plan.peers, 2)


def _per_minute(since: float, steps: Sequence[_Epoch], now: float) -> float:
    if not steps:
        return 0.0
    until = max(one.first_at for one in steps)
    seconds = until - since if until > since else now - since
    return round(60 * len(steps) / seconds, 2)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
