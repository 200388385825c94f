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
IDLE = "milliseconds that each pass leaves the processor alone"
CODECS = ("none", "float16", "bfloat16", "blockwise-int8")

WHAT = {
    "utilisation": "of the time, in forward and backward passes; the least of all peers",
    "waiting": "of the time, waiting for the network; the most of all peers",
    "pass_ms": "of one forward and backward pass",
    "samples_per_s": "of all peers together",
    "cpu_s_per_million_samples": "CPU seconds of all processes",
    "cores_used": "by all processes together",
    "computing_s_per_step": "computing the samples of one step",
    "averaging_s_p50": "averaging their gradients",
    "complete": "of the steps, with gradients of all peers",
    "digests_equal": "whether all peers held the same parameters after every step",
}
WHERE = {
    "computing": "forward and backward passes",
    "adding": "counting the gradients of a batch",
    "turning": "beginning rounds, stepping, taking parameters over",
    "waiting": "for the network",
    "rest": "of the loop",
}


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, number_or_zero, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parts = "\n".join(f"  {name:{width}}  {what}" for name, what in WHERE.items())
    parser = kinds.add_parser(
        "training",
        help="training together, with averaging delayed and not",
        description="Start peers in processes of their own on this machine, and have them train "
        "one small model together over uplinks slow enough for the averaging to matter: once "
        f"`delayed` (hidden behind the next step's computing), once waiting for it.\n\n{figures}"
        f"\n\nand where the time of all peers went:\n\n{parts}\n\n"
        "After each pass the thread leaves the processor alone for a while, as one does whose "
        "device computes: the peers share this machine, and would otherwise wait for one another's "
        "computing (`--idle-ms 0`). What the bench writes down for its audit is not counted.\n\n"
        "Exit code 1 if peers' parameters differ, if a sample counts twice, or if less than "
        "0.95 of the time is computing with `delayed` although averaging takes less time than "
        "computing.",
        example="potluck bench training --peers 4 --json\n"
        "potluck bench training --manner waiting --up-mbps 0 --idle-ms 0\n"
        "potluck bench training --peers 2 --steps 2 --target-batch 256",
    )
    add_flag(parser, "--peers", positive_count, 4, "how many")
    together = "samples of one step of all peers together"
    add_flag(parser, "--target-batch", positive_count, 2048, together)
    add_flag(parser, "--steps", positive_count, 6, "that are measured")
    add_flag(parser, "--warm-up-steps", positive_count, 2, "before them")
    add_flag(parser, "--batch", positive_count, 32, "samples of one pass")
    add_flag(parser, "--context", positive_count, 64, "of the model")
    add_flag(parser, "--width", positive_count, 64, "of the model")
    add_flag(parser, "--layers", positive_count, 2, "of the model")
    uplink = "of each peer's uplink, in megabits per second; 0 is no limit"
    add_flag(parser, "--up-mbps", number_or_zero, 8.0, uplink)
    add_flag(parser, "--idle-ms", number_or_zero, 100.0, IDLE)
    add_flag(parser, "--codec", CODECS, "none", "how gradients travel")
    parser.add_argument(
        "--manner", choices=MANNERS, action="append", help="measure only this one (both)"
    )


def add_churn_parser(kinds: Subparsers) -> None:
    from node.commands.parser import (
        add_flag,
        number_or_zero,
        positive_count,
        positive_number,
        positive_seconds,
    )

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
    add_flag(parser, "--minutes", positive_number, 20.0, "of churn")
    add_flag(parser, "--calm-minutes", positive_number, 10.0, "of peace")
    add_flag(parser, "--volunteers", positive_count, 6, "how many")
    life, absence = "of a volunteer", "until a fresh one comes"
    add_flag(parser, "--mean-life", positive_seconds, 60.0, life, metavar="SECONDS")
    add_flag(parser, "--mean-absence", positive_seconds, 10.0, absence, metavar="SECONDS")
    together = "samples of one step of all peers together"
    add_flag(parser, "--target-batch", positive_count, 256, together)
    add_flag(parser, "--idle-ms", number_or_zero, 100.0, IDLE)
    add_flag(parser, "--seed", positive_count, 7, "of lives and absences")
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
        idle_ms=arguments.idle_ms,
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
        idle_ms=arguments.idle_ms,
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
    lines.append("where the time went:")
    for name, what in WHERE.items():
        values = "".join(f"{_shown(result[manner]['where'][name]):>12}" for manner in manners)
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
