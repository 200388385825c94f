"""`scripts/bench averaging`: the cost of averaging a vector in a group on this machine.

Every peer is a process with a node of a run with tokens: its channels are encrypted, its messages
signed. A first round, cold, is reported separately. The others are measured one after the other,
each from known values that are set before it. After each, the result of every peer is compared with
the expected average of the members, and a digest of all its bits with the others'.

The figures are those of the reference's bench, with its spans: `aggregate` from the first peer's
start of the exchange to the last peer's end, matchmaking excluded; `round` from the first peer's
call to the last peer's return; `cpu` of all processes over the round and the comparison of its
result (not the digest, which the reference does not make); memory as proportional set size.

`cpu_s_per_GB` can be compared with that of `scripts/bench transport`: in both, user and system
seconds of all processes are divided by the bytes that were sent, each counted once and not again
where it arrives. The bytes are those of the chunks, as encoded. The comparison of the result is no
averaging, so it is taken away here.

The vector for the comparison is not the averager's memory. It is in a file that all processes map,
like the one copy in the reference's single process, and each process's share of it is in the
figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.averaging_swarm import (
    AveragingSwarm,
    SwarmRound,
    disagreement,
    open_swarm,
)
from lab.bench.command import report
from lab.bench.machine import machine_facts, proportional_bytes
from lab.bench.processes import BenchFailed
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

MIB = 1 << 20
SETTLE_SECONDS = 1.0  # the reference's; for what joining left to be done
FAILURES_TOLD = 3


@dataclass(frozen=True)
class AveragingEffort:
    """The vector, the number of peers, and the number of rounds."""

    peers: int = 4
    values: int = 10_000_000
    codec: str = "none"
    rounds: int = 5
    layout: str = "fork"
    profile: str = ""  # the file (its whole path) for what the first peer did in the rounds


@dataclass(frozen=True)
class MeasuredRound:
    """The figures of one round, and its fault, if there is one."""

    failure: str
    bit_identical: bool
    round_s: float
    aggregate_s: float
    cpu_s: float
    check_cpu_s: float
    cpu_s_per_GB: float
    matchmaking_s: float
    agreement_s: float
    relative_error: float

    @property
    def round_overhead_s(self) -> float:
        """Matchmaking and agreement: the round without the exchange."""
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
        "cpu_s_per_GB": _p50(good, "cpu_s_per_GB"),
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
    moved = 0 if incomplete else this.bytes_moved
    return MeasuredRound(
        failure=incomplete or disagreement(this, digests),
        bit_identical=len(set(digests.values())) <= 1,
        round_s=this.seconds,
        aggregate_s=0.0 if incomplete else this.exchange_seconds,
        cpu_s=cpu,
        check_cpu_s=this.check_cpu_seconds,
        cpu_s_per_GB=(cpu - this.check_cpu_seconds) / (moved / 1e9) if moved else 0.0,
        matchmaking_s=_longest(this, "matchmaking_seconds"),
        agreement_s=_longest(this, "agreement_seconds"),
        relative_error=max(answer.get("relative_error", 0.0) for answer in answers),
    )


def _longest(this: SwarmRound, phase: str) -> float:
    return float(max(answer["phases"].get(phase, 0.0) for answer in this.answers.values()))


def _failure(this: SwarmRound, peers: int) -> str:
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


# Flags and output


WHAT = {
    "aggregate_s_p50": "the exchange: from the first peer's start to the last peer's end",
    "round_s_p50": "the whole round: matchmaking, exchange, agreement",
    "round_overhead_s_p50": "the round less the exchange",
    "cpu_s": "CPU seconds of all processes, for one round",
    "cpu_s_per_GB": "the same without the check of the result, per GB sent (each byte once)",
    "pss_MiB_per_peer": "memory of a process, with its part of the shared memory",
    "worst_relative_error": "of any result, against the exact average",
    "bit_identical": "whether all peers held the same bits after every round",
}


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parser = kinds.add_parser(
        "averaging",
        help="averaging a vector with a group of processes on this machine",
        description="Start peers in processes of their own on this machine, each with a token, "
        "and have them average a vector of random values, again and again, over encrypted "
        f"channels.\n\n{figures}\n\n"
        "Figures are medians of all rounds but the first, which is shown separately. The exit code "
        "is 1 if a round failed or had a wrong result.",
        example="scripts/bench averaging --peers 4 --numel 10e6 --codec none --json\n"
        "scripts/bench averaging --peers 2 --numel 1e6 --rounds 3\n"
        "scripts/bench averaging --codec float16 --profile peer.pstats",
    )
    parser.set_defaults(measure=run)
    add_size_flags(parser)
    rounds = "how many rounds are measured, after one that is not"
    layout = (
        "fork: peers are forked from one process and share the memory of its imports; separate: "
        "each imports everything itself"
    )
    add_flag(parser, "--codec", str, "none", "how values are encoded", metavar="CODEC")
    add_flag(parser, "--rounds", positive_count, 5, rounds)
    add_flag(parser, "--layout", ("fork", "separate"), "fork", layout)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write a profile (of cProfile) of one peer's event loop; the rounds become slower",
    )


def add_size_flags(parser: argparse.ArgumentParser, *, peers: int = 4, values: int = 10**7) -> None:
    """`--peers` and `--numel`."""
    from node.app.cli.parser import add_flag, positive_count

    add_flag(parser, "--peers", positive_count, peers, "how many peers")
    vector = "how many values the vector has, for example 25e6"
    add_flag(parser, "--numel", number_of_values, values, vector)


def number_of_values(text: str) -> int:
    """An argparse type: a whole number above zero, also as 10e6."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not (0 < number < 2**40 and number == int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(number)


def run(arguments: argparse.Namespace) -> int:
    require_a_group(arguments.peers)
    profile = str(arguments.profile.absolute()) if arguments.profile else ""
    effort = AveragingEffort(
        arguments.peers,
        arguments.numel,
        arguments.codec,
        arguments.rounds,
        arguments.layout,
        profile,
    )

    return report(
        arguments,
        partial(measure_averaging, effort),
        _lines,
        lambda result: not result["failures"] and bool(result["bit_identical"]),
    )


def require_a_group(peers: int) -> None:
    if peers < 2:
        raise WrongUse("A group has two peers at least.", advice="Take --peers 2 or more.")


def _lines(result: dict[str, Any]) -> str:
    width = max(len(name) for name in WHAT)
    lines = []
    for name, what in WHAT.items():
        value = result[name]
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{name:{width}}  {shown:>10}  {what}")
    lines += [f"failed: {failure}" for failure in result["failures"]]
    settings, machine = result["settings"], result["machine"]
    lines.append("")
    lines.append(
        f"{settings['peers']} peers, {settings['values']:,} values, {settings['codec']}; "
        f"{machine['processor']}, {machine['cores_usable']} cores, {result['seconds']} s"
    )
    return "\n".join(lines)
