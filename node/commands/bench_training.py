"""`potluck bench training` and `potluck bench training-churn`: processes that train together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

MANNERS = ("delayed", "waiting")
CODECS = ("none", "float16", "bfloat16", "blockwise-int8")

WHAT = {
    "utilisation": "of the time, in forward and backward passes; the least of all peers",
    "waiting": "of the time, waiting for the network; the most of all peers",
    "samples_per_s": "of all peers together",
    "cpu_s_per_million_samples": "CPU seconds of all processes",
    "accumulating_s_p50": "computing the samples of one step",
    "averaging_s_p50": "averaging their gradients",
    "digests_equal": "whether all peers held the same parameters after every step",
}


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import number_or_zero, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parser = kinds.add_parser(
        "training",
        help="training together, with averaging delayed and not",
        description="Start peers in processes of their own on this machine, and have them train "
        "one small model together over uplinks slow enough for the averaging to matter: once "
        f"`delayed` (hidden behind the next step's computing), once waiting for it.\n\n{figures}"
        "\n\nExit code 1 if peers' parameters differ, if a sample counts twice, or if less than "
        "0.95 of the time is computing with `delayed` although averaging takes less time than "
        "computing.",
        example="potluck bench training --peers 4 --json\n"
        "potluck bench training --manner waiting --up-mbps 0\n"
        "potluck bench training --peers 2 --steps 2 --target-batch 256",
    )
    parser.add_argument("--peers", type=positive_count, default=4, metavar="N", help="how many (4)")
    parser.add_argument(
        "--target-batch",
        type=positive_count,
        default=2048,
        metavar="N",
        help="samples of one step of all peers together (2048)",
    )
    parser.add_argument(
        "--steps", type=positive_count, default=6, metavar="N", help="that are measured (6)"
    )
    parser.add_argument(
        "--warm-up-steps", type=positive_count, default=2, metavar="N", help="before them (2)"
    )
    parser.add_argument(
        "--batch", type=positive_count, default=32, metavar="N", help="samples of one pass (32)"
    )
    parser.add_argument(
        "--context", type=positive_count, default=64, metavar="N", help="of the model (64)"
    )
    parser.add_argument(
        "--width", type=positive_count, default=64, metavar="N", help="of the model (64)"
    )
    parser.add_argument(
        "--layers", type=positive_count, default=2, metavar="N", help="of the model (2)"
    )
    parser.add_argument(
        "--up-mbps",
        type=number_or_zero,
        default=4.0,
        metavar="N",
        help="of each peer's uplink, in megabits per second; 0 is no limit (4)",
    )
    parser.add_argument(
        "--codec", choices=CODECS, default="none", help="how gradients travel (none)"
    )
    parser.add_argument(
        "--manner", choices=MANNERS, action="append", help="measure only this one (both)"
    )


def add_churn_parser(kinds: Subparsers) -> None:
    from node.commands.parser import positive_count, positive_number, positive_seconds

    parser = kinds.add_parser(
        "training-churn",
        help="training together while volunteers are killed and come anew",
        description="Start volunteers in processes of their own on this machine, beside a keeper "
        "that brings no samples and is never killed. First they train in peace; then, in a run of "
        "its own, each is killed after a random while, wherever it is, and a fresh one comes in "
        "its place. At last all volunteers are killed at once, and three fresh ones come.\n\n"
        "The loss must fall as in the calm run, no sample may count twice and all must hold the "
        "same parameters after every step (the peers' own logs are audited), no 30 seconds may "
        "pass without a step, the keeper must not come to hold more and more, and the fresh ones "
        "must go on where the others were. Exit code 1 if one of these is not so.",
        example="potluck bench training-churn --json\n"
        "potluck bench training-churn --minutes 2 --calm-minutes 1 --mean-life 20",
    )
    parser.add_argument(
        "--minutes", type=positive_number, default=20.0, metavar="N", help="of churn (20)"
    )
    parser.add_argument(
        "--calm-minutes", type=positive_number, default=10.0, metavar="N", help="of peace (10)"
    )
    parser.add_argument(
        "--volunteers", type=positive_count, default=6, metavar="N", help="how many (6)"
    )
    parser.add_argument(
        "--mean-life",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="of a volunteer (60)",
    )
    parser.add_argument(
        "--mean-absence",
        type=positive_seconds,
        default=10.0,
        metavar="SECONDS",
        help="until a fresh one comes (10)",
    )
    parser.add_argument(
        "--target-batch",
        type=positive_count,
        default=256,
        metavar="N",
        help="samples of one step of all peers together (256)",
    )
    parser.add_argument(
        "--seed", type=positive_count, default=7, metavar="N", help="of lives and absences (7)"
    )
    parser.add_argument(
        "--logs", metavar="FOLDER", help="a new one, for what the peers write down (it is deleted)"
    )


def run(arguments: argparse.Namespace) -> int:
    from node.bench.training import TrainingEffort, measure_training
    from node.commands.bench_averaging import require_a_group
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    require_a_group(arguments.peers)
    effort = TrainingEffort(
        peers=arguments.peers,
        target_batch=arguments.target_batch,
        steps=arguments.steps,
        warm_up_steps=arguments.warm_up_steps,
        batch=arguments.batch,
        context=arguments.context,
        width=arguments.width,
        layers=arguments.layers,
        up_mbps=arguments.up_mbps,
        codec=arguments.codec,
        manners=tuple(dict.fromkeys(arguments.manner or MANNERS)),
    )

    async def measure() -> int:
        result = await measure_training(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def run_churn(arguments: argparse.Namespace) -> int:
    from node.bench.training_churn import (
        CALM,
        CHURN,
        TrainingChurnEffort,
        measure_training_churn,
    )
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    if arguments.volunteers < 2:
        raise WrongUse(
            "Nobody is left to go on when the only volunteer is killed.",
            advice="Take --volunteers 2 or more.",
        )
    effort = TrainingChurnEffort(
        seconds=arguments.minutes * 60,
        calm_seconds=arguments.calm_minutes * 60,
        volunteers=arguments.volunteers,
        mean_life_seconds=arguments.mean_life,
        mean_absence_seconds=arguments.mean_absence,
        target_batch=arguments.target_batch,
        seed=arguments.seed,
    )

    logs = None if arguments.logs is None else Path(arguments.logs)
    if logs is not None:
        try:
            for part in (CALM, CHURN):
                (logs / part).mkdir(parents=True)
        except FileExistsError:
            raise WrongUse(f"{logs} has logs already.", advice="Name another folder.") from None

    async def measure() -> int:
        result = await measure_training_churn(effort, output.say, logs)
        output.data(result, _churn_lines(result))
        return 0 if result["met"] else 1

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    manners = [manner for manner in MANNERS if manner in result]
    width = max(len(name) for name in WHAT)
    lines = [f"{'':{width}}" + "".join(f"{manner:>12}" for manner in manners)]
    for name, what in WHAT.items():
        values = "".join(f"{_shown(result[manner][name]):>12}" for manner in manners)
        lines.append(f"{name:{width}}{values}  {what}")
    lines += [f"failed: {one}" for manner in manners for one in result[manner]["failures"]]
    if "delayed" in manners and not result["bar_holds"]:
        lines.append("Averaging takes longer than computing: it cannot be hidden.")
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _churn_lines(result: dict[str, Any]) -> str:
    churn, loss = result["churn"], result["loss"]
    lines = [
        f"churn: {churn['epochs']} steps with {churn['samples']:,.0f} samples, at most "
        f"{churn['longest_gap_s']} s apart (at most {result['bar_gap_s']:g}); {churn['kills']} "
        f"killed, {churn['starts']} started",
        f"  of {churn['computed']:,} samples computed {churn['dropped']:,} are in no step; "
        f"{churn['states_compared']:,} states compared",
        f"calm: {result['calm']['epochs']} steps with {result['calm']['samples']:,.0f} samples",
        f"loss after {loss['samples']:,.0f} samples: {loss.get('churn')}, and {loss.get('calm')} "
        f"in peace (from {loss.get('at_the_start')})",
        "three fresh ones went on where all others died"
        if churn["went_on"]
        else "three fresh ones did NOT go on where all others died",
    ]
    lines += [
        f"  {name}: {leak['first_half']} in the first half, {leak['second_half']} in the second "
        f"(tolerance {leak['tolerance']:g})"
        for name, leak in churn["leaks"].items()
    ]
    lines += [f"failed: {failure}" for failure in result["failures"]]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
