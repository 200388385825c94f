"""`potluck bench survival`: what becomes of an averaging in which peers are killed or stopped."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

TRIAL_PEERS, TRIAL_VALUES = 4, 10_000_000
CHURN_PEERS, CHURN_VALUES = 8, 1_000_000


def add_parser(kinds: Subparsers) -> None:
    from node.commands.bench_averaging import number_of_values
    from node.commands.parser import add_flag, positive_count, positive_seconds

    parser = kinds.add_parser(
        "survival",
        help="averaging while peers are killed, stopped and started",
        description="Start peers in processes of their own on this machine, have them average, "
        "and hit one of them at a random moment of the round.\n\n"
        "  --kill   the victim is killed; a fresh process takes its place afterwards\n"
        "  --stop   it is stopped (SIGSTOP), and continued when the others have gone on\n"
        "  --churn  one is killed or started again and again, some are never touched\n\n"
        "After each blow all survivors must hold the average of the same members, with the same "
        "bits, in 5 s (10 s if the victim was stopped), and begin their next round at once. "
        "During churn there must be a completed round every 30 s, and those who live through it "
        "must not come to hold more memory, tasks or file descriptors. Exit code 1 if one of "
        "these is not so.",
        example="potluck bench survival --kill 50 --json\n"
        "potluck bench survival --stop 10 --numel 1e6\n"
        "potluck bench survival --churn 600 --peers 8 --every 1",
    )
    parser.add_argument("--kill", type=positive_count, default=0, metavar="N", help="so many kills")
    parser.add_argument("--stop", type=positive_count, default=0, metavar="N", help="so many stops")
    parser.add_argument(
        "--churn", type=positive_seconds, metavar="SECONDS", help="for so long, in a swarm apart"
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
    every = "between one kill or start and the next, for churn"
    add_flag(parser, "--every", positive_seconds, 1.0, every, metavar="SECONDS")
    add_flag(parser, "--seed", positive_count, 7, "of victims and moments")


def run(arguments: argparse.Namespace) -> int:
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    _require_sense(arguments)

    async def measure() -> int:
        result: dict[str, Any] = {}
        if arguments.kill or arguments.stop:
            result |= await _trials(arguments, output)
        if arguments.churn:
            result["churn"] = await _churn(arguments, output)
        result["met"] = result.get("met", True) and result.get("churn", {}).get("met", True)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def _require_sense(arguments: argparse.Namespace) -> None:
    if not (arguments.kill or arguments.stop or arguments.churn):
        raise WrongUse(
            "Nothing is to happen to anybody.", advice="Take --kill 5, --stop 5 or --churn 60."
        )
    if arguments.peers is not None and arguments.peers < 3:
        raise WrongUse(
            "Survivors of two peers have nobody to average with.", advice="Take --peers 3 or more."
        )


async def _trials(arguments: argparse.Namespace, output: Output) -> dict[str, Any]:
    from node.bench.survival import SurvivalEffort, measure_survival

    effort = SurvivalEffort(
        peers=arguments.peers or TRIAL_PEERS,
        values=arguments.numel or TRIAL_VALUES,
        kills=arguments.kill,
        stops=arguments.stop,
        seed=arguments.seed,
    )
    return await measure_survival(effort, output.say)


async def _churn(arguments: argparse.Namespace, output: Output) -> dict[str, Any]:
    from node.bench.survival_churn import ChurnEffort, measure_churn

    effort = ChurnEffort(
        seconds=arguments.churn,
        peers=arguments.peers or CHURN_PEERS,
        values=arguments.numel or CHURN_VALUES,
        every_seconds=arguments.every,
        seed=arguments.seed,
    )
    return await measure_churn(effort, output.say)


def _lines(result: dict[str, Any]) -> str:
    lines = [_trial_line(kind, result[kind]) for kind in ("kill", "stop") if kind in result]
    failures = [
        failure for kind in ("kill", "stop", "churn") for failure in _failures(result, kind)
    ]
    if "churn" in result:
        lines += _churn_lines(result["churn"])
    lines += [f"failed: {failure}" for failure in failures]
    lines += [f"failed, with nobody hit: {one}" for one in result.get("failed_undisturbed", ())]
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
