"""`scripts/bench experts-digits` and `experts-text`: do mixtures of experts far away learn?

Section 4.2 of Learning@home: mixtures of 16 and 64 experts, 4 of them active, beside a dense
network of equal compute, with calls that are late and calls that fail. Everything is in this
process (local_experts.py), with the layer and the trainer of the product.

One training takes minutes, and the whole has dozens, so it can be done in pieces: `--add` takes the
results of earlier calls into the table and the plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.plot import add_plot_flag, check_plot, write_plot
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from lab.bench.experts_tasks import Arm
    from node.app.cli.parser import Subparsers

LOOKS = 15  # at the model, in a training
MOST_IN_FLIGHT = 64


class Kind(NamedTuple):
    """The usual extent of a task."""

    help: str
    experts: str
    delays: str
    batches: int
    tolerance: float  # how much worse than the dense network counts as equal


KINDS = {
    "digits": Kind("handwritten digits", "1,16,64", "0,100,1000", 3000, 0.01),
    "text": Kind("a small transformer on text", "1,16", "0", 3000, 0.0),
}


async def measure_convergence(arguments: argparse.Namespace, say: Talk) -> dict[str, Any]:
    """Train each arm with each seed, and compare."""
    import torch

    from lab.bench.experts_tasks import TASKS, train

    torch.set_num_threads(1)  # there are threads enough
    machine, began = machine_facts(), time.monotonic()
    task = TASKS[arguments.task]()
    runs = [run for file in arguments.add for run in _read_runs(file, arguments)]
    for seed in arguments.seeds:
        for arm in _arms(arguments):
            run = asdict(arm) | {"seed": seed}
            if any(_is_same(run, earlier) for earlier in runs):
                continue
            look_every = max(1, arguments.batches // LOOKS)
            told = await train(
                task, arm, seed=seed, batches=arguments.batches, look_every=look_every
            )
            runs.append(run | told)
            say(f"{name_of(run)}, seed {seed}: {told['final']:.3f} ({told['batches_per_s']}/s)")
    tolerance = KINDS[arguments.task].tolerance
    result = {
        "task": arguments.task,
        "value": task.value,
        "is_loss": task.is_loss,
        "batches": arguments.batches,
        "arms": summary(runs, is_loss=task.is_loss, tolerance=tolerance),
        "bar_worse_than_dense": tolerance,
        "runs": runs,
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }
    result["met"] = all(arm.get("reaches_dense", True) for arm in result["arms"])
    if arguments.plot:
        _draw(result, arguments.plot)
        say(f"wrote {arguments.plot}")
    return result


def _arms(arguments: argparse.Namespace) -> list[Arm]:
    from lab.bench.experts_tasks import Arm

    return [
        Arm(experts, delay, in_flight(delay), failure_rate)
        for delay in arguments.delay_ms
        for failure_rate in arguments.failure_rates
        for experts in arguments.experts
        if experts > 1 or not failure_rate  # without an expert of four the dense one has no result
    ]


def in_flight(delay_ms: float) -> int:
    """As many as the paper has: 64 for a second, 16 for a tenth. One is ordinary training."""
    if not delay_ms:
        return 1
    return MOST_IN_FLIGHT if delay_ms >= 1000.0 else 16


CIRCUMSTANCES = ("experts", "delay_ms", "failure_rate")


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in (*CIRCUMSTANCES, "seed"))


def name_of(run: Mapping[str, Any]) -> str:
    """The arm of a run, in words."""
    words = ["dense" if run["experts"] == 1 else f"{run['experts']} experts"]
    words.append(f"{run['delay_ms']:g} ms" if run["delay_ms"] else "no delay")
    if run["failure_rate"]:
        words.append(f"{run['failure_rate']:.0%} fail")
    return ", ".join(words)


def summary(
    runs: Sequence[Mapping[str, Any]], *, is_loss: bool, tolerance: float
) -> list[dict[str, Any]]:
    """For each arm the mean over its seeds, and how far it is from the dense network that is
    trained in the ordinary way."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        arms.setdefault(name_of(run), []).append(run)
    found = []
    for name, own in arms.items():
        finals = [run["final"] for run in own]
        found.append(
            {
                "name": name,
                **{key: own[0][key] for key in (*CIRCUMSTANCES, "in_flight")},
                "seeds": len(own),
                "final": round(statistics.mean(finals), 4),
                "deviation": round(statistics.stdev(finals), 4) if len(own) > 1 else None,
                "dropped": sum(run["dropped"] for run in own),
                "staleness": round(statistics.mean(run["staleness"] for run in own), 1),
            }
        )
    dense = next((arm for arm in found if arm["experts"] == 1 and not arm["delay_ms"]), None)
    if dense:
        for arm in found:
            worse = arm["final"] - dense["final"] if is_loss else dense["final"] - arm["final"]
            arm["worse_than_dense"] = round(worse, 4)
            if arm["experts"] > 1:
                arm["reaches_dense"] = arm["worse_than_dense"] <= tolerance
    return found


def _read_runs(file: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of an earlier call."""
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
        same = (earlier["task"], earlier["batches"]) == (arguments.task, arguments.batches)
        runs: list[dict[str, Any]] = earlier["runs"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WrongUse(
            f"{file} is no result of this bench ({error}).",
            advice="Name a file with the output of an earlier call with --json.",
        ) from error
    if not same:
        raise WrongUse(
            f"{file} is of another task, or of trainings of another length.",
            advice="Add results of the same task with the same --batches.",
        )
    return runs


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    for task, kind in KINDS.items():
        name = f"experts-{task}"
        by_more = f" by more than {kind.tolerance:g}" if kind.tolerance else ""
        parser = kinds.add_parser(
            name,
            help=f"mixtures of experts learn {kind.help}",
            description="Train mixtures of experts and a dense network of equal compute, with "
            "calls that are late and calls that fail, and compare what they reach. The dense "
            "network is the same model with one large expert in each mixture. Everything is in "
            "this process. The exit code is 1 if a mixture ends worse than the dense network "
            f"without delays{by_more}, in the mean of the seeds.\n\n"
            "The delay is that of a batch in all its passes together. With 100 ms 16 batches are "
            f"in flight, with 1000 ms {MOST_IN_FLIGHT}, and without delay one, which is ordinary "
            "training.",
            example=f"scripts/bench {name} --seeds 0 --plot {task}.svg\n"
            f"scripts/bench {name} --seeds 1 --experts 1,16 --json > piece.json\n"
            f"scripts/bench {name} --seeds 2 --add piece.json --plot {task}.svg",
        )
        parser.set_defaults(measure=run, task=task)
        counts = "how many experts each mixture has; 1 is the dense network"
        add_flag(parser, "--experts", _counts, kind.experts, counts, metavar="N,…")
        delays = "mean delays of a batch, in milliseconds"
        add_flag(parser, "--delay-ms", numbers, kind.delays, delays, metavar="MS,…")
        failures = "shares of calls that fail"
        add_flag(parser, "--failure-rates", _shares, "0,0.1", failures, metavar="P,…")
        add_flag(parser, "--seeds", seeds, "0,1,2,3,4", "the seeds", metavar="N,…")
        add_flag(parser, "--batches", positive_count, kind.batches, "how long to train")
        parser.add_argument(
            "--add",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="the JSON of an earlier call, whose trainings are not repeated; may be given "
            "several times",
        )
        add_plot_flag(parser, "the curves")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        check_plot(arguments.plot)
    return report(arguments, partial(measure_convergence, arguments), _lines)


def numbers(text: str) -> tuple[float, ...]:
    """An argparse type: numbers from 0, with commas between."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = (-1.0,)
    if not all(0.0 <= number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers from 0, such as 0,100")
    return numbers


def _shares(text: str) -> tuple[float, ...]:
    """An argparse type: shares below 1."""
    shares = numbers(text)
    if max(shares) >= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} are not shares below 1, such as 0,0.1")
    return shares


def seeds(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 0."""
    found = numbers(text)
    if not all(seed.is_integer() for seed in found):
        raise argparse.ArgumentTypeError(f"{text!r} are not whole numbers, such as 0,1")
    return tuple(map(int, found))


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 1."""
    counts = seeds(text)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are not counts from 1, such as 1,16")
    return counts


def _lines(result: dict[str, Any]) -> str:
    lines = [f"{'':30}{result['value']:>10}{'±':>8}{'worse':>9}{'stale':>8}{'dropped':>9}  seeds"]
    for arm in result["arms"]:
        deviation = "" if arm["deviation"] is None else f"{arm['deviation']:.4f}"
        worse = f"{arm['worse_than_dense']:.4f}" if "worse_than_dense" in arm else ""
        lines.append(
            f"{arm['name']:30}{arm['final']:>10.4f}{deviation:>8}{worse:>9}{arm['staleness']:>8}"
            f"{arm['dropped']:>9}{arm['seeds']:>7}"
        )
    lines += [
        "",
        f"After {result['batches']:,} batches. `worse`: than the dense network without delays (at "
        f"most {result['bar_worse_than_dense']:g}). `stale`: batches between a batch's beginning "
        "and its gradients.",
    ]
    return "\n".join(lines)


PANEL_INCHES = (4.0, 3.4)


def _draw(result: dict[str, Any], file: Path) -> None:
    """A panel for each delay and failure rate, a line for each model, a band for its seeds. The
    dense network without delays is in every panel."""
    from matplotlib.figure import Figure

    curves: dict[tuple[float, float, int], list[list[tuple[int, float]]]] = {}
    for run in result["runs"]:
        arm = (run["delay_ms"], run["failure_rate"], run["experts"])
        curves.setdefault(arm, []).append(run["curve"])
    panels = sorted({arm[:2] for arm in curves})
    models = sorted({arm[2] for arm in curves})
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (delay, failure_rate) in zip(all_axes, panels, strict=True):
        if (delay, failure_rate) != (0.0, 0.0) and (0.0, 0.0, 1) in curves:
            at, means, _ = mean_curve(curves[0.0, 0.0, 1])
            axes.plot(at, means, color="gray", linestyle="--", label="dense, no delay")
        for number, experts in enumerate(models):
            if (delay, failure_rate, experts) not in curves:
                continue
            at, means, spread = mean_curve(curves[delay, failure_rate, experts])
            label = "dense" if experts == 1 else f"{experts} experts"
            axes.plot(at, means, marker=".", color=f"C{number}", label=label)
            low = [mean - one for mean, one in zip(means, spread, strict=True)]
            high = [mean + one for mean, one in zip(means, spread, strict=True)]
            axes.fill_between(at, low, high, color=f"C{number}", alpha=0.2)
        title = f"{delay:g} ms, {in_flight(delay)} in flight" if delay else "no delay"
        axes.set_title(title + (f", {failure_rate:.0%} fail" if failure_rate else ""), fontsize=10)
        axes.set_xlabel("batches")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    all_axes[0].set_ylabel(result["value"])
    write_plot(figure, file)


def mean_curve(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> tuple[list[int], list[float], list[float]]:
    """When it was looked, the means, and the standard deviations (0 with one curve)."""
    columns = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
    return (
        [batch for batch, _ in curves[0]],
        [statistics.mean(column) for column in columns],
        [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns],
    )
