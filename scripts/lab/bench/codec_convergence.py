"""`scripts/bench codecs`: do runs learn as well with codecs that lose much?

Some peers train the default model, and all of it is in this process: the peers' steps
(`LocalSteps`), and the exchange, with the sums of the product (`Reduction`) and equal parts. Only
the network is missing. Each codec gets the same samples in the same order, so that two trainings
differ by nothing but what was lost on the way. More trainings exchange the parameters in fragments,
without a codec and with each sparse one. Each exchange takes as long as it may, until the next one
begins.

The last trainings average gradients in place of local steps (`GradientSteps`), with the same
samples: whole ones, and thin factors of them (PowerSGD), of each rank. What the factors cost is
told beside whole gradients. The rate of both goes down as in a new run: what factors leave out is
late, and at a rate that stays high to the end, late is worse.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import Talk
from lab.bench.command import report
from lab.bench.experts_convergence import mean_curve, seeds
from lab.bench.machine import machine_facts
from lab.plot import add_plot_flag, check_plot, write_plot
from node.core.wrong_use import WrongUse
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from torch import Tensor

    from lab.bench.training_task import BenchTask
    from models.gpt import GPT
    from node.app.cli.parser import Subparsers
    from protocols.accumulation.accumulator import Contribution
    from protocols.accumulation.steps import Steps
    from protocols.moshpit.layout import Layout, SentParts
    from protocols.tensors import CodecName

BAR = 0.01  # how much higher the loss may be than without a codec, as a share of it
MAX_NORM = 1.0
LOOKS = 10  # at the loss, in a training
GRADIENTS = "gradients"  # averaged whole, in each step
SCHEDULE = {"name": "cosine", "warmup": 20, "floor": 0.1}  # of gradients, as `run init` writes it
SEEDS_APART = 1 << 40  # the numbers of a seed's samples: no training has so many


@dataclass(frozen=True)
class CodecTrial:
    """A codec, and whether what it loses is added to the next pseudo-gradient. The product does
    that with every coarse codec. With more than one of `fragments`, local steps go on beside the
    exchanges. With a `rank`, gradients are averaged: as factors of so many columns, or whole if it
    is 0."""

    codec: CodecName
    feeds_back: bool
    fragments: int = 1
    rank: int | None = None

    @property
    def name(self) -> str:
        if self.rank is not None:
            return f"{GRADIENTS}, PowerSGD of rank {self.rank}" if self.rank else GRADIENTS
        parts = f", {self.fragments} fragments" if self.fragments > 1 else ""
        return f"{self.codec}{parts}{'' if self.feeds_back else ', no feedback'}"


@dataclass(frozen=True)
class Extent:
    peers: int
    local_steps: int
    rounds: int


class OutOfStep(PotluckError):
    """Two peers have different parameters after a step."""


def arms_of(
    codecs: Sequence[CodecName], fragments: int = 1, ranks: Sequence[int] = ()
) -> list[CodecTrial]:
    """All parameters at once and without a codec comes first: all others with local steps are
    compared with it, and those of PowerSGD with whole gradients."""
    from protocols.tensors import CODECS

    arms = [CodecTrial("none", feeds_back=True)]
    for codec in codecs:
        arms += [CodecTrial(codec, feeds_back=True)] if codec != "none" else []
        arms += [CodecTrial(codec, feeds_back=False)] if CODECS[codec].is_coarse else []
    if fragments > 1:
        beside = ["none", *(codec for codec in codecs if CODECS[codec].is_sparse)]
        arms += [CodecTrial(codec, feeds_back=True, fragments=fragments) for codec in beside]
    of_gradients = (0, *ranks) if ranks else ()
    return arms + [CodecTrial("none", feeds_back=True, rank=rank) for rank in of_gradients]


async def measure_convergence(arguments: argparse.Namespace, say: Talk) -> dict[str, Any]:
    """Train with each codec and each seed, and compare."""
    import torch

    from lab.bench.training_task import BenchTask

    torch.set_num_threads(1)  # the model is small: threads would only wait for each other
    machine, began = machine_facts(), time.monotonic()
    extent = Extent(arguments.peers, arguments.local_steps, arguments.rounds)
    task = BenchTask()
    runs = []
    for seed in arguments.seeds:
        for arm in arms_of(arguments.codecs, arguments.fragments, arguments.ranks):
            one = train(task, arm, extent, seed)
            runs.append(one)
            say(f"{arm.name}, seed {seed}: {one['final']:.4f} ({one['seconds']} s)")
    result: dict[str, Any] = {
        "peers": extent.peers,
        "local_steps": extent.local_steps,
        "rounds": extent.rounds,
        "samples": extent.peers * extent.local_steps * extent.rounds * task.batch,
        "arms": summary(runs),
        "bar_share_worse": BAR,
        "runs": runs,
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }
    result["met"] = all(arm["share_worse"] <= BAR for arm in result["arms"] if arm["feeds_back"])
    if arguments.plot:
        _draw(result, arguments.plot)
        say(f"wrote {arguments.plot}")
    return result


def train(task: BenchTask, arm: CodecTrial, extent: Extent, seed: int) -> dict[str, Any]:
    """One training. The loss is that of the state for held-out samples, in nats for each byte."""
    import torch

    began = time.monotonic()
    samples = task.samples()
    held_out = samples.held_out()
    models = [task.model() for _ in range(extent.peers)]
    peers = [_steps_of(task, model, arm, extent) for model in models]
    exchanges = [PeersExchange(layout, extent.peers) for layout in peers[0].layouts]
    of_a_round = arm.fragments if arm.rank is None else extent.local_steps  # exchanges
    between = extent.local_steps // of_a_round
    whole = task.model()  # with the parameters that all peers share
    under_way: Exchanged | None = None
    curve = []
    for number in range(extent.rounds * of_a_round):
        for place, (model, steps) in enumerate(zip(models, peers, strict=True)):
            for step in range(between):
                batch = (number * between + step) * extent.peers + place
                first = seed * SEEDS_APART + batch * task.batch
                windows = samples.batch(range(first, first + task.batch))
                loss = model.loss(windows)
                loss.backward()  # type: ignore[no-untyped-call]
                steps.add(task.batch, float(loss.detach()))
                model.zero_grad()
        if under_way is not None:
            _step_together(peers, under_way, feeds_back=arm.feeds_back)
        under_way = _exchange(peers, exchanges[number % arm.fragments])
        if arm.fragments == 1 or number + 1 == extent.rounds * of_a_round:
            _step_together(peers, under_way, feeds_back=arm.feeds_back)
            under_way = None
        made, rest = divmod(number + 1, of_a_round)
        if not rest and (made % max(1, extent.rounds // LOOKS) == 0 or made == extent.rounds):
            with torch.no_grad():
                shared = dict(peers[0].shared.everything)
                for name, one in whole.named_parameters():
                    one.copy_(shared[name])
                curve.append((made, float(whole.loss(held_out))))
    return {
        "codec": arm.codec,
        "feeds_back": arm.feeds_back,
        "name": arm.name,
        "seed": seed,
        "final": curve[-1][1],
        "curve": curve,
        "fragments": arm.fragments,
        "rank": arm.rank,
        "bytes_of_a_round": sum(one.bytes for one in exchanges),
        "bytes_at_once": max(one.bytes for one in exchanges),
        "seconds": round(time.monotonic() - began, 1),
    }


def _steps_of(task: BenchTask, model: GPT, arm: CodecTrial, extent: Extent) -> Steps:
    from models.registry import schedule_factory
    from protocols.accumulation.local_steps import LocalSteps
    from protocols.accumulation.parameters import Parameters
    from protocols.accumulation.steps import GradientSteps

    parameters = Parameters(model.named_parameters())
    options: dict[str, Any] = {
        "max_norm": MAX_NORM,
        "codec": arm.codec,
        "scales_loss": False,
        "buffers": {},
        "delayed": arm.fragments > 1,
    }
    if arm.rank is not None:
        steps = extent.rounds * extent.local_steps
        scheduler = schedule_factory({**SCHEDULE, "steps": steps})
        options["powersgd_rank"] = arm.rank
        return GradientSteps(parameters, task.optimizer, scheduler, **options)
    return LocalSteps(parameters, task.optimizer, None, fragments=arm.fragments, **options)


@dataclass(frozen=True)
class Exchanged:
    """What each peer gave to a round, and what it holds afterwards."""

    exchange: PeersExchange
    given: Sequence[Contribution]
    results: Sequence[Tensor]


def _exchange(peers: Sequence[Steps], exchange: PeersExchange) -> Exchanged:
    """A round of all peers. Those with fragments take the last one over first."""
    for one in peers:
        one.take_over()
    given = [one.take() for one in peers]
    return Exchanged(exchange, given, exchange.averages([one.values for one in given]))


def _step_together(peers: Sequence[Steps], round_: Exchanged, *, feeds_back: bool) -> None:
    """The step that follows a round."""
    import torch

    together = zip(peers, round_.given, round_.results, strict=True)
    for place, (steps, given, result) in enumerate(together):
        steps.apply(result)
        steps.done_with(given, round_.exchange.sent_by(place) if feeds_back else None)
    first = peers[0].shared.tensors
    for other in peers[1:]:
        if not all(map(torch.equal, first, other.shared.tensors)):
            raise OutOfStep(
                "Two peers have different parameters after a step.",
                why="All have decoded the same bytes, so that a step is not the same at all.",
                advice="Report it as a bug, with the command.",
            )


class PeersExchange:
    """The exchanges of peers of equal weight, each of which reduces an equal part."""

    def __init__(self, layout: Layout, peers: int) -> None:
        from protocols.identity import PeerId
        from protocols.moshpit.ballots import Ballot
        from protocols.moshpit.exchange import ExchangePlan, Participant
        from protocols.moshpit.layout import cut, result_cut
        from protocols.moshpit.settings import CHUNK_BYTES

        cuts = cut(layout, [1.0] * peers)
        self._cut = result_cut(range(peers), cuts, CHUNK_BYTES)
        members = tuple(Participant(place, PeerId(f"peer {place}"), 1.0) for place in range(peers))
        self._plans = [
            ExchangePlan(bytes(32), Ballot(0, 0), place, members, cuts, layout, CHUNK_BYTES)
            for place in range(peers)
        ]
        self.bytes = layout.encoded_bytes(0, layout.values, CHUNK_BYTES)

    def sent_by(self, place: int) -> SentParts:
        from protocols.moshpit.layout import SentParts

        return SentParts(self._cut, place)

    def averages(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """What each peer holds after an exchange of these."""
        import torch

        results = [torch.zeros_like(one) for one in sources]
        for plan in self._plans:
            self._reduce(plan.me, sources, results)
        return results

    def _reduce(self, me: int, sources: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """The part of one reducer, for all."""
        from protocols.moshpit.reducing import Reduction
        from protocols.tensors import decode_into, encode_into

        reduction = Reduction(self._plans[me], sources[me], results[me])
        others = [place for place in range(len(sources)) if place != me]
        for number, chunk in enumerate(reduction.chunks):
            own, encoded = slice(chunk.start, chunk.stop), bytearray(chunk.encoded_bytes)
            for place in others:
                encode_into(sources[place][own], chunk.codec, encoded, name="a peer's values")
                reduction.add(place, number, memoryview(encoded))
            encoded[:] = reduction.encoded(number)
            for place in others:
                decode_into(results[place][own], chunk.codec, encoded, "float32")
                reduction.taken(number)


def summary(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each arm the mean over its seeds, and how far each seed is from its twin that loses
    nothing: with the same samples."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        arms.setdefault(run["name"], []).append(run)
    return [
        {
            "name": name,
            "codec": own[0]["codec"],
            "feeds_back": own[0]["feeds_back"],
            "fragments": own[0]["fragments"],
            "rank": own[0]["rank"],
            "seeds": len(own),
            "final": round(statistics.mean(run["final"] for run in own), 4),
            "share_worse": round(statistics.mean(shares := _shares_worse(own, plain)), 5),
            "share_worse_most": round(max(shares), 5),
            "share_of_bytes": _share_of_bytes("bytes_of_a_round", own, plain),
            "share_at_once": _share_of_bytes("bytes_at_once", own, plain),
        }
        for name, own in arms.items()
        for plain in (_twins(own[0], runs),)
    ]


def _twins(
    one: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """The trainings that lose nothing, by their seeds, of the kind of this one."""
    name = "none" if one["rank"] is None else GRADIENTS
    return {run["seed"]: run for run in runs if run["name"] == name}


def _share_of_bytes(
    which: str, runs: Sequence[Mapping[str, Any]], plain: Mapping[int, Mapping[str, Any]]
) -> float:
    shares: list[float] = [run[which] / plain[run["seed"]][which] for run in runs]
    return round(statistics.mean(shares), 4)


def _shares_worse(
    runs: Sequence[Mapping[str, Any]], plain: Mapping[int, Mapping[str, Any]]
) -> list[float]:
    return [run["final"] / plain[run["seed"]]["final"] - 1.0 for run in runs]


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "codecs",
        help="runs learn with codecs that lose much",
        description="Train the default model among some peers with local steps, with each codec "
        "and without one, and compare the losses of held-out text. All trainings of a seed have "
        "the same samples. A blockwise codec is also tried without error feedback, which the "
        "product always has; and without a codec, and with a sparse one, the parameters are "
        "exchanged in fragments beside the local steps, too. With the same samples gradients are "
        "averaged in each step with the schedule of a new run, whole and as factors of each rank "
        "(PowerSGD), and those are compared. Everything is in this process. The exit code is 1 if "
        f"one of them, with error feedback, ends more than {BAR:.0%} above the loss of its kind "
        "that loses nothing, in the mean of the seeds.",
        example="scripts/bench codecs --plot codecs.svg\n"
        "scripts/bench codecs --quick --codecs blockwise-int4 --json",
    )
    parser.set_defaults(measure=run)
    usual = "blockwise-int8,blockwise-int4,sparse-sign"
    add_flag(parser, "--codecs", _codecs, usual, "which codecs beside none", metavar="NAME,…")
    add_flag(parser, "--seeds", seeds, "0,1,2", "the seeds: which samples", metavar="N,…")
    add_flag(parser, "--peers", positive_count, 4, "how many peers")
    add_flag(parser, "--local-steps", positive_count, 20, "of each peer, between two exchanges")
    add_flag(parser, "--rounds", positive_count, 20, "how many exchanges")
    add_flag(parser, "--fragments", positive_count, 2, "in how many parts, beside; 1: not tried")
    add_flag(parser, "--ranks", _ranks, "16", "of PowerSGD; 0: not tried", metavar="N,…")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and a few short rounds: rough figures"
    )
    add_plot_flag(parser, "the curves")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.quick:
        arguments.seeds = arguments.seeds[:1]
        arguments.local_steps, arguments.rounds = 6, 4
    if arguments.local_steps % arguments.fragments:
        raise WrongUse(
            f"--local-steps {arguments.local_steps} cannot be divided among --fragments "
            f"{arguments.fragments}.",
            advice="Take a multiple of it, or --fragments 1.",
        )
    return report(arguments, partial(measure_convergence, arguments), lines)


def _codecs(text: str) -> tuple[str, ...]:
    """An argparse type: names of codecs for float32."""
    from protocols.tensors import CODECS

    names = tuple(dict.fromkeys(text.split(",")))
    known = [name for name in CODECS if name != "float64"]
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r} are not codecs, such as {', '.join(known)}")
    return names


def _ranks(text: str) -> tuple[int, ...]:
    """An argparse type: ranks, none of them if it is 0."""
    found = tuple(dict.fromkeys(text.split(",")))
    if not all(one.isascii() and one.isdigit() for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} are not ranks, such as 8,16")
    return tuple(int(one) for one in found if int(one))


def lines(result: dict[str, Any]) -> str:
    words = f"{'loss':>9}{'than none':>11}{'at most':>9}{'bytes':>8}{'at once':>9}  seeds"
    found = [f"{'':32}{words}"]
    for arm in result["arms"]:
        found.append(
            f"{arm['name']:32}{arm['final']:>9.4f}{arm['share_worse']:>+11.2%}"
            f"{arm['share_worse_most']:>+9.2%}{arm['share_of_bytes']:>8.1%}"
            f"{arm['share_at_once']:>9.1%}{arm['seeds']:>7}"
        )
    found += [
        "",
        f"After {result['rounds']} exchanges of {result['peers']} peers with "
        f"{result['local_steps']} local steps between them, {result['samples']:,} samples in all. "
        f"`than none`: how much higher the loss is than without a codec, in the mean of the seeds "
        f"(with feedback {result['bar_share_worse']:.0%} at most), and with PowerSGD than with "
        f"whole {GRADIENTS}, averaged in each step; `at most`: of one seed; `at once`: the bytes "
        "of the largest exchange.",
    ]
    return "\n".join(found)


PANEL_INCHES = (6.0, 4.0)


def _draw(result: dict[str, Any], file: Path) -> None:
    """A line for each arm: how much higher its loss is than that of its kind that loses nothing,
    with the same samples. A band for the seeds."""
    from matplotlib.figure import Figure

    curves: dict[str, list[list[tuple[int, float]]]] = {}
    for run in result["runs"]:
        twin = _twins(run, result["runs"])[run["seed"]]
        pairs = zip(run["curve"], twin["curve"], strict=True)
        curve = [(at, 100.0 * (loss / other - 1.0)) for (at, loss), (_, other) in pairs]
        curves.setdefault(run["name"], []).append(curve)
    figure = Figure(figsize=PANEL_INCHES, layout="constrained")
    axes = figure.subplots()
    for number, (name, of_seeds) in enumerate(curves.items()):
        at, means, spread = mean_curve(of_seeds)
        axes.plot(at, means, marker=".", color=f"C{number}", label=name)
        low = [mean - one for mean, one in zip(means, spread, strict=True)]
        high = [mean + one for mean, one in zip(means, spread, strict=True)]
        axes.fill_between(at, low, high, color=f"C{number}", alpha=0.2)
    axes.axhline(100.0 * BAR, color="gray", linestyle="--", label=f"{BAR:.0%}")
    axes.set_xlabel("exchanges")
    axes.set_ylabel("loss above that of its kind without loss, %")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    write_plot(figure, file)
