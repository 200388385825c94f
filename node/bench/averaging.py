"""`potluck bench averaging`: what one averaging of a vector costs a group on this machine.

Every peer is a process with a node of a run with tokens: its channels are encrypted, its messages
signed. A first round, cold, is told apart; the others are measured, one after the other, each
from values that are known and set before it. After each the result of every peer is compared
with what the average of the members must be, and a digest of all its bits with the others'.

The figures are those of the reference's bench, with its spans: `aggregate` from the first peer's
start of the exchange to the last peer's end, matchmaking excluded; `round` from the first peer's
call to the last peer's return; `cpu` of all processes over the round and the comparison of its
result (not the digest, which the reference does not make); memory as proportional set size.

Easy to get wrong: the vector that results are compared with is not the averager's memory. It lies
in a file that all processes map, as the reference's one process has it once, and each process's
share of it is in the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import trio

from node.bench.averaging_swarm import (
    AveragingSwarm,
    Round,
    Talk,
    disagreement,
    open_swarm,
)
from node.bench.machine import machine_facts
from node.bench.memory_share import proportional_bytes
from node.bench.processes import BenchFailed

MIB = 1 << 20
SETTLE_SECONDS = 1.0  # the reference's; for what joining left to be done
FAILURES_TOLD = 3


@dataclass(frozen=True)
class AveragingEffort:
    """What is averaged, by how many, and how often."""

    peers: int = 4
    values: int = 10_000_000
    codec: str = "none"
    rounds: int = 5
    layout: str = "fork"
    profile: str = ""  # the file (its whole path) for what the first peer did in the rounds


@dataclass(frozen=True)
class MeasuredRound:
    """One round in figures, and what is wrong with it, if anything is."""

    failure: str
    bit_identical: bool
    round_s: float
    aggregate_s: float
    cpu_s: float
    check_cpu_s: float
    matchmaking_s: float
    agreement_s: float
    relative_error: float

    @property
    def round_overhead_s(self) -> float:
        """Matchmaking and agreement: what is not the exchange."""
        return self.round_s - self.aggregate_s


async def measure_averaging(
    effort: AveragingEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures, their spread, and what they were measured on. BenchFailed if no round ends."""
    machine, began = machine_facts(), time.monotonic()
    async with open_swarm(
        effort.values, effort.codec, lambda number: number + 1.0, layout=effort.layout
    ) as swarm:
        await swarm.start_all(effort.peers, say)
        await trio.sleep(SETTLE_SECONDS)
        say("the first round")
        first = await _measure_round(swarm, 0)
        rounds = await _measure_rounds(swarm, effort, say)
        memory = [proportional_bytes(one.process.process_id) for one in swarm.peers.values()]
    good = [one for one in rounds if not one.failure]
    if not good:
        raise BenchFailed("Not one round gave the right average.", why=rounds[-1].failure)
    shares = [share for share in memory if share is not None]
    return {
        **{f"{name}_p50": _p50(good, name) for name in ("aggregate_s", "round_s")},
        "round_overhead_s_p50": _p50(good, "round_overhead_s"),
        "matchmaking_s_p50": _p50(good, "matchmaking_s"),
        "agreement_s_p50": _p50(good, "agreement_s"),
        "cpu_s": _p50(good, "cpu_s"),
        "check_cpu_s": _p50(good, "check_cpu_s"),
        "pss_MiB_per_peer": round(statistics.fmean(shares) / MIB, 1) if shares else None,
        "worst_relative_error": float(f"{max(one.relative_error for one in good):.3g}"),
        "bit_identical": all(one.bit_identical for one in (first, *rounds)),
        "rounds_ok": len(good),
        "first_round": {name: round(getattr(first, name), 4) for name in SPREAD_OF},
        "failures": [one.failure for one in (first, *rounds) if one.failure][:FAILURES_TOLD],
        "spread": {name: _spread(good, name) for name in SPREAD_OF},
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


SPREAD_OF = ("aggregate_s", "round_s", "round_overhead_s", "cpu_s")


async def _measure_rounds(
    swarm: AveragingSwarm, effort: AveragingEffort, say: Talk
) -> list[MeasuredRound]:
    first_peer = swarm.peers[0].process
    if effort.profile:
        await first_peer.ask("profile")
    rounds = []
    for number in range(1, effort.rounds + 1):
        say(f"round {number} of {effort.rounds}")
        rounds.append(await _measure_round(swarm, number))
    if effort.profile:
        await first_peer.ask("profile", file=effort.profile)
    return rounds


async def _measure_round(swarm: AveragingSwarm, epoch: int) -> MeasuredRound:
    own_before = time.process_time()
    before = await swarm.arm(swarm.peers)
    this = await swarm.round(epoch, swarm.peers)
    cpu = await swarm.cpu_seconds() - before + time.process_time() - own_before
    if not this.answers:
        raise BenchFailed("All peers have died.", why="Their own words are on stderr, above.")
    digests = await swarm.digests(this.committed)
    incomplete = _failure(this, len(swarm.peers))
    answers = this.answers.values()
    return MeasuredRound(
        failure=incomplete or disagreement(this, digests, swarm.codec),
        bit_identical=len(set(digests.values())) <= 1,
        round_s=this.seconds,
        aggregate_s=0.0 if incomplete else this.exchange_seconds,
        cpu_s=cpu,
        check_cpu_s=sum(answer.get("check_cpu_seconds", 0.0) for answer in answers),
        matchmaking_s=_longest(this, "matchmaking_seconds"),
        agreement_s=_longest(this, "agreement_seconds"),
        relative_error=max(answer.get("relative_error", 0.0) for answer in answers),
    )


def _longest(this: Round, phase: str) -> float:
    return float(max(answer["phases"].get(phase, 0.0) for answer in this.answers.values()))


def _failure(this: Round, peers: int) -> str:
    """Why this was no round with everybody, or ""."""
    if this.lost:
        return f"peers {', '.join(str(number + 1) for number in this.lost)} died"
    for number, answer in this.answers.items():
        if answer["verdict"] != "committed":
            why = answer.get("reason") or answer["phases"].get("reason", "")
            return f"peer {number + 1}: {answer['verdict']}: {why}"
        if len(answer["members"]) != peers:
            excluded = answer["phases"]["excluded"]
            return f"peer {number + 1}: {len(answer['members'])} of {peers} members: {excluded}"
    return ""


def _p50(rounds: Sequence[MeasuredRound], name: str) -> float:
    return float(round(statistics.median(getattr(one, name) for one in rounds), 4))


def _spread(rounds: Sequence[MeasuredRound], name: str) -> dict[str, Any]:
    runs = [round(getattr(one, name), 4) for one in rounds]
    return {"min": min(runs), "max": max(runs), "runs": runs}
