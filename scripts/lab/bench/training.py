"""`scripts/bench training`: the share of their time that peers compute, with delayed averaging
and without.

Peers in processes of their own train one small model together, over uplinks that are slow enough
for the averaging to matter. They begin at the same moment; a run has some steps to warm up and some
that are measured; it is done once with `delayed` and once without, one after the other.

    utilisation   a peer's time in its own forward and backward passes, by the wall: everything
                  else (accumulating, waiting, stepping) is lost. The least of all peers counts.
    where         what the time of all peers went into, part by part (time_sheet.py)

The bar applies where the averaging can be hidden at all: where it takes less time than the peers
need to compute the next step's samples.

The peers share the machine's cores, unlike volunteers: one peer's computing delays another one's
step. So a pass does not end with its last operation but takes `idle_ms` longer, in which the thread
sleeps, as it does while an accelerator computes. Then all peers together need less than the machine
has (`cores_used` says how much), and their own work besides computing is still there, at its full
price. With `idle_ms` of 0 they compete for the cores.

`step` and its waits are measured. The bench's own records for its audit (logs, digests, a loss on
held-out samples) are not a part of training, and are taken off the wall-clock time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.time_sheet import COMPUTING, PARTS, WAITING, parts_between
from lab.bench.training_audit import RunAudit
from lab.bench.training_swarm import (
    GLANCE_SECONDS,
    Training,
    TrainingSwarm,
    open_training_swarm,
)
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

BAR_UTILISATION = 0.95
LONGEST_STEP_SECONDS = 60.0  # of the whole run; a bench's steps take some seconds
MANNERS = ("delayed", "waiting")


@dataclass(frozen=True)
class TrainingEffort:
    """`up_mbps`: each peer's uplink, 0 for no limit; `steps` are measured after `warm_up_steps`;
    `idle_ms`: how long a pass leaves the processor alone."""

    peers: int = 4
    target_batch: int = 2048
    steps: int = 6
    warm_up_steps: int = 2
    batch: int = 32
    context: int = 64
    width: int = 64
    layers: int = 2
    up_mbps: float = 8.0
    idle_ms: float = 100.0
    codec: str = "none"
    manners: tuple[str, ...] = MANNERS

    @property
    def task(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "width": self.width,
            "layers": self.layers,
        }


async def measure_training(
    effort: TrainingEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures of each manner, and whether the bar is met where it holds."""
    machine, began = machine_facts(), time.monotonic()
    result: dict[str, Any] = {}
    for manner in effort.manners:
        say(f"training, {manner}")
        result[manner] = await _measure(effort, manner, say)
    judged = result.get("delayed", {})
    holds = bool(judged) and judged["averaging_s_p50"] < judged["computing_s_per_step"]
    return result | {
        "bar_utilisation": BAR_UTILISATION,
        "bar_holds": holds,
        "met": all(one["digests_equal"] and not one["failures"] for one in result.values())
        and (not holds or judged["utilisation"] >= BAR_UTILISATION),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _measure(effort: TrainingEffort, manner: str, say: Talk) -> dict[str, Any]:
    training = Training(
        target_batch=effort.target_batch,
        task=effort.task,
        manner={"delayed": manner == "delayed", "idle_seconds": effort.idle_ms / 1000},
        codec=effort.codec,
        up_bytes_per_second=effort.up_mbps * 1e6 / 8,
    )
    async with open_training_swarm(training) as swarm:
        say(f"starting {effort.peers} peers")
        await swarm.start_together({"held_out": number == 0} for number in range(effort.peers))
        return await measure_steps(
            swarm, effort.warm_up_steps, effort.steps, LONGEST_STEP_SECONDS, say
        )


async def measure_steps(
    swarm: TrainingSwarm, warm_up_steps: int, steps: int, longest_step_seconds: float, say: Talk
) -> dict[str, Any]:
    """The figures of so many steps of all peers that there are, after some to warm up."""
    first = warm_up_steps
    await swarm.until_epoch(first, longest_step_seconds * (first + 1))
    before = await swarm.ask_all("cpu")
    first = max(look["epoch"] for look in before.values())
    say(f"measuring {steps} steps")
    await swarm.until_epoch(first + steps, longest_step_seconds * steps)
    after = await _look_when_all_have_computed(swarm, before, longest_step_seconds)
    taken = [
        line
        for life in swarm.living
        for line in swarm.lines(life, "StepTaken")
        if first <= line["epoch"] < first + steps
    ]
    return figures_of(before, after, swarm.audit(), taken, len(swarm.living))


async def _look_when_all_have_computed(
    swarm: TrainingSwarm, before: Mapping[int, Mapping[str, Any]], seconds: float
) -> dict[int, dict[str, Any]]:
    """The second look, once each peer has ended a batch since the first. A peer whose whole step
    was one wait for the others has nothing to divide by before that."""
    with trio.fail_after(seconds):
        while True:
            after = await swarm.ask_all("cpu")
            if have_all_computed(before, after):
                return after
            await trio.sleep(GLANCE_SECONDS)


def have_all_computed(
    before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]
) -> bool:
    return all(
        look["sheet"]["batches"] > before[peer]["sheet"]["batches"] for peer, look in after.items()
    )


def figures_of(
    before: Mapping[int, Mapping[str, Any]],
    after: Mapping[int, Mapping[str, Any]],
    audit: RunAudit,
    steps: list[dict[str, Any]],
    peers: int,
) -> dict[str, Any]:
    """The difference between two looks at all peers, and the figures of their steps."""
    parts = [parts_between(before[peer]["sheet"], after[peer]["sheet"]) for peer in after]
    shares = [{name: one[name] / sum(one.values()) for name in PARTS} for one in parts]
    sheets = [(before[peer]["sheet"], after[peer]["sheet"]) for peer in after]
    samples = sum(b["samples"] - a["samples"] for a, b in sheets)
    seconds = statistics.mean(b["at"] - a["at"] for a, b in sheets)
    rate = sum((b["samples"] - a["samples"]) / (b["at"] - a["at"]) for a, b in sheets)
    cores = sum(
        (after[peer]["seconds"] - before[peer]["seconds"])
        / (after[peer]["now"] - before[peer]["now"])
        for peer in after
    )
    batches = sum(b["batches"] - a["batches"] for a, b in sheets)
    computing = sum(one[COMPUTING] for one in parts)
    epochs = statistics.mean(after[peer]["epoch"] - before[peer]["epoch"] for peer in after)
    complete = [line for line in steps if len(line["members"]) == peers]
    return {
        "utilisation": round(min(one[COMPUTING] for one in shares), 4),
        "utilisation_mean": round(statistics.mean(one[COMPUTING] for one in shares), 4),
        "where": {name: round(statistics.mean(one[name] for one in shares), 4) for name in PARTS},
        "waiting": round(max(one[WAITING] for one in shares), 4),
        "pass_ms": round(1000 * computing / batches, 2),
        "samples_per_s": round(rate, 1),
        "cpu_s_per_million_samples": round(cores / rate * 1e6, 1),
        "cores_used": round(cores, 2),
        "computing_s_per_step": round(computing / peers / max(1.0, epochs), 3),
        "accumulating_s_p50": _median_of(steps, "accumulating_seconds"),
        "averaging_s_p50": _median_of(steps, "averaging_seconds"),
        "stepping_s_p50": _median_of(steps, "stepping_seconds"),
        "steps": len({line["epoch"] for line in steps}),
        "complete": round(len(complete) / max(1, len(steps)), 3),
        "measured_s": round(seconds, 1),
        "late_s": round(max(after[peer]["late"] - before[peer]["late"] for peer in after), 3),
        "samples": samples,
        "loss": [round(loss, 4) for _, loss in audit.loss_curve()],
        "digests_equal": not any("different states" in failure for failure in audit.failures),
        "failures": audit.failures,
    }


def _median_of(steps: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(line[name] for line in steps), 3) if steps else 0.0


# Flags and output


IDLE = "how long the thread sleeps after each pass, in milliseconds"

WHAT = {
    "utilisation": "share of the time in forward and backward passes; the lowest of all peers",
    "waiting": "share of the time waiting for the network; the highest of all peers",
    "pass_ms": "time of one forward and backward pass",
    "samples_per_s": "of all peers together",
    "cpu_s_per_million_samples": "CPU seconds of all processes",
    "cores_used": "cores that all processes use together",
    "computing_s_per_step": "computing the samples of one step",
    "averaging_s_p50": "averaging their gradients",
    "complete": "share of the steps with gradients of all peers",
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
    _add_training(kinds)
    _add_churn(kinds)


def _add_training(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, number_or_zero, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parts = "\n".join(f"  {name:{width}}  {what}" for name, what in WHERE.items())
    parser = kinds.add_parser(
        "training",
        help="training together, with averaging delayed and not",
        description="Start peers in processes of their own on this machine, and have them train "
        "one small model together over uplinks slow enough for the averaging to matter: once "
        "`delayed` (averaging is hidden behind the computing of the next step), and once waiting "
        f"for it.\n\n{figures}\n\nThe parts of the peers' time:\n\n{parts}\n\n"
        "After each pass the thread sleeps for a while, as if an accelerator computed. Otherwise "
        "(`--idle-ms 0`) the peers, which share this machine, would wait for each other's "
        "computing. The time in which the bench writes its audit is not counted.\n\n"
        "The exit code is 1 if peers' parameters differ, if a sample counts twice, or if "
        "`delayed` computes for less than 0.95 of the time although averaging takes less time "
        "than computing.",
        example="scripts/bench training --peers 4 --json\n"
        "scripts/bench training --manner waiting --up-mbps 0 --idle-ms 0\n"
        "scripts/bench training --peers 2 --steps 2 --target-batch 256",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--peers", positive_count, 4, "how many peers")
    together = "samples of one step, of all peers together"
    add_flag(parser, "--target-batch", positive_count, 2048, together)
    add_flag(parser, "--steps", positive_count, 6, "how many steps are measured")
    add_flag(parser, "--warm-up-steps", positive_count, 2, "how many steps come before those")
    add_flag(parser, "--batch", positive_count, 32, "samples of one pass")
    add_flag(parser, "--context", positive_count, 64, "the context of the model")
    add_flag(parser, "--width", positive_count, 64, "the width of the model")
    add_flag(parser, "--layers", positive_count, 2, "how many layers the model has")
    uplink = "the rate of each peer's uplink, in megabits per second; 0 is no limit"
    add_flag(parser, "--up-mbps", number_or_zero, 8.0, uplink)
    add_flag(parser, "--idle-ms", number_or_zero, 100.0, IDLE)
    add_flag(parser, "--codec", str, "none", "how gradients are encoded", metavar="CODEC")
    parser.add_argument(
        "--manner", choices=MANNERS, action="append", help="measure only this one (both)"
    )


def _add_churn(kinds: Subparsers) -> None:
    from node.app.cli.parser import (
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
        "that computes no samples and is never killed. First they train undisturbed. "
        "Then, in another run, each is killed after a random time, and a fresh one "
        "takes its place. Last, all volunteers are killed at once, and three fresh "
        "ones come.\n\n"
        "The loss must fall as in the calm run, no sample may count twice and all "
        "must hold the same parameters after every step (the peers' own logs are "
        "audited), no 30 seconds may pass without a step, the keeper must not use "
        "more and more memory, tasks or file descriptors, and the fresh volunteers "
        "must go on where the others were. The exit code is 1 if one of these is not "
        "so.",
        example="scripts/bench training-churn --json\n"
        "scripts/bench training-churn --minutes 2 --calm-minutes 1 --mean-life 20",
    )
    parser.set_defaults(measure=run_churn)
    add_flag(parser, "--minutes", positive_number, 20.0, "of churn")
    add_flag(parser, "--calm-minutes", positive_number, 10.0, "of peace")
    add_flag(parser, "--volunteers", positive_count, 6, "how many")
    life, absence = "the mean life of a volunteer", "the mean time until a fresh one comes"
    add_flag(parser, "--mean-life", positive_seconds, 60.0, life, metavar="SECONDS")
    add_flag(parser, "--mean-absence", positive_seconds, 10.0, absence, metavar="SECONDS")
    together = "samples of one step, of all peers together"
    add_flag(parser, "--target-batch", positive_count, 256, together)
    add_flag(parser, "--idle-ms", number_or_zero, 100.0, IDLE)
    add_flag(
        parser,
        "--group-size",
        positive_count,
        64,
        "how many peers average as one group; more do it by cohorts",
    )
    add_flag(parser, "--seed", positive_count, 7, "the seed for lives and absences")
    parser.add_argument(
        "--logs",
        metavar="FOLDER",
        help="a new folder in which the peers' logs stay (by default they are deleted)",
    )


def run(arguments: argparse.Namespace) -> int:
    from lab.bench.averaging import require_a_group

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

    return report(arguments, partial(measure_training, effort), _lines)


def run_churn(arguments: argparse.Namespace) -> int:
    from lab.bench.training_churn import (
        CALM,
        CHURN,
        TrainingChurnEffort,
        measure_training_churn,
    )

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
        group_size=arguments.group_size,
    )

    logs = None if arguments.logs is None else Path(arguments.logs)
    if logs is not None:
        try:
            for part in (CALM, CHURN):
                (logs / part).mkdir(parents=True)
        except FileExistsError:
            raise WrongUse(f"{logs} has logs already.", advice="Name another folder.") from None

    measure = partial(measure_training_churn, effort, logs=logs)
    return report(arguments, measure, _churn_lines)


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
