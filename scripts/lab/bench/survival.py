"""`scripts/bench survival`: the rest of a round in which a peer is killed or stopped.

A trial is four rounds of a swarm of real processes: one with everybody, in which one peer is hit at
a random moment; one of the survivors alone, at once; and, after the dead peer has been replaced by
a fresh process (or the stopped one continued), one with everybody again, which is also the next
trial's warm-up. Moments are drawn over the whole length that an undisturbed round has here; two in
five of them from the short phases before and after the exchange.

Requirements: every survivor commits the average of the same members with the same bits, and it is
the average of those members; the round is over in time; the next one begins at once. A stopped peer
must not have committed anything else, whenever it is continued.

A survivor's round may have ended before the blow. Its seconds since then are 0 and prove nothing,
so such trials are counted apart (`too_late`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.admission import RUN
from lab.bench.averaging_swarm import (
    AveragingSwarm,
    SwarmPeer,
    SwarmRound,
    disagreement,
    open_swarm,
    ready_to_kill,
    ready_to_stop,
)
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed
from node.core.wrong_use import WrongUse
from protocols.identity import PeerId
from protocols.moshpit.group import group_key
from protocols.moshpit.roster import hash_order

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

KILL_SECONDS = 5.0  # from the death to the end of the survivors' round
STOP_SECONDS = 10.0
NEXT_SECONDS = 1.0  # from the call of the next round to its exchange
NEXT_BESIDE_STOPPED_SECONDS = 2.5  # the directory waits a second for one that is slow, twice
WARM_ROUNDS = 3
IN_SHORT_PHASES = 0.4  # of the moments
LEADERS = 0.2  # of the victims, besides those that chance finds
WHOLE_TRIES = 3  # of a round with everybody
WHOLE_GROUP = "all"  # the averager's name of a group that needs no grid

# Made ready before the round, so that the blow itself takes no time; it says when it fell
Blow = Callable[[SwarmPeer], AbstractAsyncContextManager[Callable[[], float]]]


@dataclass(frozen=True)
class SurvivalEffort:
    """How many trials of which kind, and with what."""

    peers: int = 4
    values: int = 10_000_000
    kills: int = 0
    stops: int = 0
    seed: int = 7


@dataclass(frozen=True)
class Phases:
    """How long the phases of an undisturbed round take here."""

    matchmaking_s: float
    exchange_s: float
    agreement_s: float

    @property
    def seconds(self) -> float:
        return self.matchmaking_s + self.exchange_s + self.agreement_s

    def at(self, moment: float) -> str:
        """The usual phase of a round this many seconds after its start."""
        if moment < self.matchmaking_s:
            return "matchmaking"
        return "exchange" if moment < self.matchmaking_s + self.exchange_s else "agreement"

    def random_moment(self, chance: random.Random) -> float:
        """Seconds after the start of a round."""
        end = self.seconds
        if chance.random() >= IN_SHORT_PHASES:
            return chance.uniform(0.0, end)
        if chance.random() < 0.5:
            return chance.uniform(0.0, self.matchmaking_s)
        return chance.uniform(self.matchmaking_s + self.exchange_s, end)


@dataclass
class Trial:
    """One blow, and what the survivors made of it."""

    moment_s: float
    phase: str
    victim: int
    victim_name: str
    leader_hit: bool = False
    too_late: bool = False
    seconds: float = 0.0
    attempts: int = 0
    members: int = 0
    victim_said: str = ""
    survivors_s: dict[str, float] = field(default_factory=dict)  # their longest of each phase
    next_start_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)  # all answers, if something was wrong


async def measure_survival(
    effort: SurvivalEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """All trials, and whether every bar is met."""
    machine, began = machine_facts(), time.monotonic()
    async with open_swarm(effort.values) as swarm:
        await swarm.start_all(effort.peers, say)
        bench = _Survival(swarm, random.Random(effort.seed), say)
        await bench.warm_up()
        kills = await bench.trials("kill", effort.kills, ready_to_kill)
        stops = await bench.trials("stop", effort.stops, ready_to_stop)
        phases, mishaps = bench.phases, bench.mishaps
    result: dict[str, Any] = {
        "round_s": round(phases.seconds, 3),
        "phases": {name: round(value, 4) for name, value in asdict(phases).items()},
        "failed_undisturbed": mishaps,
    }
    if kills:
        result["kill"] = _summary(kills, KILL_SECONDS, NEXT_SECONDS)
    if stops:
        result["stop"] = _summary(stops, STOP_SECONDS, NEXT_BESIDE_STOPPED_SECONDS)
    return result | {
        "met": not mishaps
        and all(result[kind]["met"] for kind in ("kill", "stop") if kind in result),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


class _Survival:
    """One swarm and the trials on it."""

    def __init__(self, swarm: AveragingSwarm, chance: random.Random, say: Talk) -> None:
        self.mishaps: list[str] = []  # failures of undisturbed rounds
        self._undisturbed: deque[SwarmRound] = deque(maxlen=WARM_ROUNDS)
        self._swarm = swarm
        self._chance = chance
        self._say = say
        self._epoch = 0

    async def warm_up(self) -> None:
        """Some undisturbed rounds, to measure their phases."""
        for _ in range(1 + WARM_ROUNDS):  # the first one is slower
            await self._whole_round()

    @property
    def phases(self) -> Phases:
        """The phases of the last undisturbed rounds: a machine's speed changes."""
        return _usual_phases(self._undisturbed)

    async def trials(self, kind: str, count: int, blow: Blow) -> list[Trial]:
        trials = []
        for number in range(count):
            victim = self._draw_victim()
            name = self._swarm.peers[victim].peer
            phases = self.phases
            moment = phases.random_moment(self._chance)
            trial = Trial(round(moment, 4), phases.at(moment), victim, name)
            self._say(
                f"{kind} {number + 1} of {count}: peer {victim + 1} after {moment:.3f} s, "
                f"in the {trial.phase}"
            )
            await self._hit(trial, blow)
            for failure in trial.failures:
                self._say(f"FAILED: {failure}")
            if trial.victim not in self._swarm.peers:
                await self._swarm.start(victim)
            await self._whole_round()
            trials.append(trial)
        return trials

    def _draw_victim(self) -> int:
        """Any peer, but often the one that will lead the round."""
        peers = self._swarm.peers
        if self._chance.random() >= LEADERS:
            return self._chance.choice(sorted(peers))
        key = group_key(RUN, self._epoch + 1, 0, WHOLE_GROUP)
        return min(peers, key=lambda number: hash_order(key, PeerId(peers[number].peer)))

    async def _hit(self, trial: Trial, blow: Blow) -> None:
        """The round with the blow, and the one after it."""
        swarm, victim = self._swarm, self._swarm.peers[trial.victim]
        survivors = [number for number in swarm.peers if number != trial.victim]
        this = self._next_round(swarm.peers)
        await swarm.arm(this.numbers)
        async with trio.open_nursery() as nursery, blow(victim) as strike:
            nursery.start_soon(swarm.run, this)
            await trio.sleep(trial.moment_s)
            struck_at = strike()
            await this.over_for(survivors)
            digests = await swarm.digests(survivors)
            after = await self._round_of(survivors)
            after_digests = await swarm.digests(survivors)
        # A stopped peer has gone on by now, and has reported the end of its round
        _judge(trial, this, survivors, struck_at)
        if trial.victim in this.answers and await _lives(victim):
            digests |= await swarm.digests([trial.victim])
        _judge_victim(trial, this, survivors)
        trial.failures += filter(None, [disagreement(this, digests)])
        trial.next_start_s = _matchmaking_seconds(after)
        trial.failures += [
            f"the next round: {failure}"
            for failure in [_failure(after, self._names(survivors), after_digests)]
            if failure
        ]
        if trial.failures:
            trial.said = {"round": this.answers, "next": after.answers}
        if not await _lives(victim):
            await swarm.end(trial.victim)

    async def _whole_round(self) -> None:
        """An undisturbed round of all peers. A few may fail; it is noted."""
        everybody = list(self._swarm.peers)
        for _ in range(WHOLE_TRIES):
            this = await self._round_of(everybody)
            digests = await self._swarm.digests(everybody)
            failure = _failure(this, self._names(everybody), digests)
            if not failure:
                self._undisturbed.append(this)
                return
            self.mishaps.append(failure)
            self._say(f"FAILED, undisturbed: {failure}")
        raise BenchFailed("Undisturbed rounds failed again and again.", why=failure)

    async def _round_of(self, numbers: Sequence[int]) -> SwarmRound:
        this = self._next_round(numbers)
        await self._swarm.arm(numbers)
        await self._swarm.run(this)
        return this

    def _next_round(self, numbers: Iterable[int]) -> SwarmRound:
        self._epoch += 1
        return SwarmRound(self._epoch, numbers)

    def _names(self, numbers: Iterable[int]) -> set[str]:
        return {self._swarm.peers[number].peer for number in numbers}


def _judge(trial: Trial, this: SwarmRound, survivors: Sequence[int], struck_at: float) -> None:
    """The survivors' results."""
    dead = [number for number in survivors if number not in this.answers]
    if dead:
        trial.failures.append(f"peer {dead[0] + 1} died as well")
        return
    ended_at = this.ended_for(survivors)
    trial.seconds = round(max(0.0, ended_at - struck_at), 3)
    trial.too_late = ended_at < struck_at
    first = this.answers[survivors[0]]
    trial.leader_hit = first["phases"].get("leader") == trial.victim_name
    phases = [this.answers[number]["phases"] for number in survivors]
    trial.attempts = max(one.get("attempts", 0) for one in phases)
    trial.survivors_s = {
        name: round(max(one.get(f"{name}_seconds", 0.0) for one in phases), 3)
        for name in ("matchmaking", "exchange", "agreement")
    }
    trial.members = len(first.get("members", ()))
    if any(this.answers[number]["verdict"] != "committed" for number in survivors):
        trial.failures.append(this.verdicts())


def _judge_victim(trial: Trial, this: SwarmRound, survivors: Sequence[int]) -> None:
    """A peer that was stopped may have any outcome but a commit of its own."""
    answer = this.answers.get(trial.victim)
    trial.victim_said = answer["verdict"] if answer else "nothing"
    if trial.victim_said == "committed" and not any(one in this.committed for one in survivors):
        trial.failures.append(f"only the victim committed: {this.verdicts()}")


def _failure(this: SwarmRound, members: set[str], digests: Mapping[int, str | None]) -> str:
    """The fault in a round that should have had exactly these members; or ""."""
    if len(this.committed) < len(this.numbers):
        return this.verdicts()
    for answer in this.committed.values():
        if set(answer["members"]) != members:
            return f"{len(answer['members'])} members, {len(members)} were there"
    return disagreement(this, digests)


async def _lives(peer: SwarmPeer) -> bool:
    return not await peer.process.has_ended()


def _usual_phases(rounds: Collection[SwarmRound]) -> Phases:
    exchange = statistics.median(one.exchange_seconds for one in rounds)
    whole = statistics.median(one.seconds for one in rounds)
    matchmaking = statistics.median(_matchmaking_seconds(one) for one in rounds)
    return Phases(matchmaking, exchange, max(0.0, whole - exchange - matchmaking))


def _matchmaking_seconds(this: SwarmRound) -> float:
    """Until the last one's exchange could begin."""
    phases = [answer["phases"] for answer in this.answers.values()]
    return round(max((one.get("matchmaking_seconds", 0.0) for one in phases), default=0.0), 4)


def _summary(trials: Sequence[Trial], bar_seconds: float, bar_start: float) -> dict[str, Any]:
    """All trials of one kind in figures."""
    in_time = [trial for trial in trials if not trial.too_late]
    worst = max((trial.seconds for trial in trials), default=0.0)
    worst_start = max((trial.next_start_s for trial in trials), default=0.0)
    failures = [failure for trial in trials for failure in trial.failures]
    return {
        "trials": len(trials),
        "trials_right": sum(not trial.failures for trial in trials),
        "seconds_worst": worst,
        "seconds_p50": statistics.median(trial.seconds for trial in in_time) if in_time else 0.0,
        "bar_seconds": bar_seconds,
        "next_start_s_worst": worst_start,
        "bar_next_start_s": bar_start,
        "too_late": len(trials) - len(in_time),
        "leaders_hit": sum(trial.leader_hit for trial in trials),
        "phases_hit": dict(Counter(trial.phase for trial in trials)),
        "members": dict(Counter(str(trial.members) for trial in trials)),
        "repeated": sum(trial.attempts > 1 for trial in trials),
        "met": not failures and worst <= bar_seconds and worst_start <= bar_start,
        "failures": failures,
        "details": [asdict(trial) for trial in trials],
    }


# Flags and output


TRIAL_PEERS, TRIAL_VALUES = 4, 10_000_000
CHURN_PEERS, CHURN_VALUES = 8, 1_000_000


def add_parser(kinds: Subparsers) -> None:
    from lab.bench.averaging import number_of_values
    from node.app.cli.parser import add_flag, positive_count, positive_seconds

    parser = kinds.add_parser(
        "survival",
        help="averaging while peers are killed, stopped and started",
        description="Start peers in processes of their own on this machine, have them average, "
        "and kill or stop one of them at a random moment of the round.\n\n"
        "  --kill   the victim is killed; a fresh process takes its place "
        "afterwards\n"
        "  --stop   it is stopped (SIGSTOP), and continued once the others have gone "
        "on\n"
        "  --churn  peers are killed and started again and again; some are never "
        "touched\n\n"
        "Afterwards all survivors must hold the average of the same members, with "
        "the same bits, within 5 s (10 s if the victim was stopped), and begin their "
        "next round at once. During churn a round must complete every 30 s, and the "
        "peers that live through it must not use more and more memory, tasks or file "
        "descriptors. The exit code is 1 if one of these is not so.",
        example="scripts/bench survival --kill 50 --json\n"
        "scripts/bench survival --stop 10 --numel 1e6\n"
        "scripts/bench survival --churn 600 --peers 8 --every 1",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "--kill", type=positive_count, default=0, metavar="N", help="how many kills"
    )
    parser.add_argument(
        "--stop", type=positive_count, default=0, metavar="N", help="how many stops"
    )
    parser.add_argument(
        "--churn",
        type=positive_seconds,
        metavar="SECONDS",
        help="how long the churn lasts, in a swarm of its own",
    )
    parser.add_argument(
        "--peers",
        type=positive_count,
        metavar="N",
        help=f"how many peers ({TRIAL_PEERS}, and {CHURN_PEERS} for churn)",
    )
    parser.add_argument(
        "--numel",
        type=number_of_values,
        metavar="N",
        help=f"how many values the vector has ({TRIAL_VALUES:g}, and {CHURN_VALUES:g} for churn)",
    )
    every = "the time between two kills or starts, during churn"
    add_flag(parser, "--every", positive_seconds, 1.0, every, metavar="SECONDS")
    add_flag(parser, "--seed", positive_count, 7, "the seed for victims and moments")


def run(arguments: argparse.Namespace) -> int:
    _require_sense(arguments)

    async def measure(say: Talk) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if arguments.kill or arguments.stop:
            result |= await _trials(arguments, say)
        if arguments.churn:
            result["churn"] = await _churn(arguments, say)
        result["met"] = result.get("met", True) and result.get("churn", {}).get("met", True)
        return result

    return report(arguments, measure, _lines)


def _require_sense(arguments: argparse.Namespace) -> None:
    if not (arguments.kill or arguments.stop or arguments.churn):
        raise WrongUse(
            "There is nothing to measure.", advice="Take --kill 5, --stop 5 or --churn 60."
        )
    if arguments.peers is not None and arguments.peers < 3:
        raise WrongUse(
            "The survivor of two peers has nobody to average with.",
            advice="Take --peers 3 or more.",
        )


async def _trials(arguments: argparse.Namespace, say: Talk) -> dict[str, Any]:
    effort = SurvivalEffort(
        peers=arguments.peers or TRIAL_PEERS,
        values=arguments.numel or TRIAL_VALUES,
        kills=arguments.kill,
        stops=arguments.stop,
        seed=arguments.seed,
    )
    return await measure_survival(effort, say)


async def _churn(arguments: argparse.Namespace, say: Talk) -> dict[str, Any]:
    from lab.bench.survival_churn import ChurnEffort, measure_churn

    effort = ChurnEffort(
        seconds=arguments.churn,
        peers=arguments.peers or CHURN_PEERS,
        values=arguments.numel or CHURN_VALUES,
        every_seconds=arguments.every,
        seed=arguments.seed,
    )
    return await measure_churn(effort, say)


def _lines(result: dict[str, Any]) -> str:
    lines = [_trial_line(kind, result[kind]) for kind in ("kill", "stop") if kind in result]
    failures = [
        failure for kind in ("kill", "stop", "churn") for failure in _failures(result, kind)
    ]
    if "churn" in result:
        lines += _churn_lines(result["churn"])
    lines += [f"failed: {failure}" for failure in failures]
    lines += [f"failed, undisturbed: {one}" for one in result.get("failed_undisturbed", ())]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)


def _trial_line(kind: str, told: dict[str, Any]) -> str:
    return (
        f"{kind}: {told['trials_right']} of {told['trials']} right; over {told['seconds_worst']} s "
        f"after the blow at the latest (at most {told['bar_seconds']:g}), half within "
        f"{told['seconds_p50']} s; next round forms in {told['next_start_s_worst']} s "
        f"(at most {told['bar_next_start_s']:g})"
    )


def _churn_lines(told: dict[str, Any]) -> list[str]:
    lines = [
        f"churn: {told['rounds_completed']} of {told['rounds']} rounds completed, at most "
        f"{told['longest_gap_s']} s apart (at most {told['bar_gap_s']:g}); "
        f"{told['kills']} killed, {told['starts']} started"
    ]
    for name, leak in told["leaks"].items():
        before, after = list(leak.values())[:2]
        lines.append(f"  {name}: {before} before, {after} after (tolerance {leak['tolerance']:g})")
    return lines


def _failures(result: dict[str, Any], kind: str) -> list[str]:
    found: list[str] = result.get(kind, {}).get("failures", [])
    return found
