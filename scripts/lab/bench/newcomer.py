"""`scripts/bench newcomer`: how soon a newcomer has a part in a run with a large state, and what
that costs its donors.

Some donors train together, each a process with a node. A pass is a pause of a given length that
leaves gradients of real parameters behind (size_task.py), so the peers do not compete for the cores
of this machine. When the run has settled, one newcomer comes, whose state has three tensors for
each of the model's: the parameters and two of AdamW.

    first_sample_s    from when its model is there to its first step with samples of its own
    link_s            how long its link takes at least: for the state, and for the results of the
                      steps that the run makes meanwhile; and one step, which it has to be in
    donors_share      samples per second of the donors until then, as a share of those before;
                      from the last step before the newcomer came to the first after its own

With `--link-mbps` or `--newcomer-mbps` every peer has a network of its own, on a cable of that rate
both ways (shaped.py). Otherwise all are on loopback.

The donors' samples are counted over whole steps, because the peers wait at the end of each.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.own_network import check_own_networks
from lab.bench.processes import BenchFailed
from lab.bench.training_swarm import (
    GLANCE_SECONDS,
    Training,
    TrainingProcess,
    TrainingSwarm,
    open_training_swarm,
)
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from node.app.cli.parser import Subparsers
    from protocols.tensors.codecs import Codec

BYTES_PER_PARAMETER: Final = 12  # of a state: float32, and AdamW's two statistics
BATCH: Final = 16
PASSES: Final = 4  # of each donor in a step
SETTLED_STEPS: Final = 4  # before anything is measured
STEPS_ALONE: Final = 6  # measured before the newcomer comes
LONGEST_STEP_SECONDS: Final = 60.0
BAR_DONORS: Final = 0.95
BAR_OF_LINK: Final = 1.2  # times what its link takes
BARS_SECONDS: Final = ((130e6, 15.0), (1.5e9, 60.0))
"""For a state of so many bytes, over a link that is not the limit. Between and beyond, in
proportion."""
UNLIMITED_MBPS: Final = 10_000.0  # of donors, if only the newcomer's link is to be a limit
PATIENCE: Final = 5.0  # times the bar, before the newcomer counts as kept out
COPIES_OF_A_PEER: Final = 2.5  # of its state in its memory: its own, one for others, and results


@dataclass(frozen=True)
class NewcomerEffort:
    """`step_seconds`: how long the donors compute in a step. `link_mbps`, `newcomer_mbps`: 0 for
    loopback, and for the same link as the donors'."""

    state_bytes: int = 130_000_000
    step_seconds: float = 1.3
    donors: int = 3
    codec: str = "float16"
    delayed: bool = False
    link_mbps: float = 0.0
    newcomer_mbps: float = 0.0

    @property
    def parameters(self) -> int:
        return self.state_bytes // BYTES_PER_PARAMETER

    @property
    def bar_seconds(self) -> float:
        (small, short), (large, long) = BARS_SECONDS
        return max(short, short + (self.state_bytes - small) * (long - short) / (large - small))

    @property
    def bytes_per_second(self) -> float:
        """Of the newcomer's link."""
        return (self.newcomer_mbps or self.link_mbps or math.inf) * 1e6 / 8

    def link_seconds(self, result_bytes: float, run_step_seconds: float) -> float:
        """How long its link takes for a state, beside the results of the steps made meanwhile, and
        the step that it has to be in. Infinite if the link does not carry the results."""
        free = self.bytes_per_second - result_bytes / run_step_seconds
        return self.state_bytes / free + run_step_seconds if free > 0.0 else math.inf

    @property
    def training(self) -> Training:
        return Training(
            target_batch=self.donors * PASSES * BATCH,
            task={"parameters": self.parameters, "batch": BATCH, "tokens": BATCH},
            manner={
                "delayed": self.delayed,
                "pass_seconds": self.step_seconds / PASSES,
                "digests_from": None,
            },
            codec=self.codec,
            link_mbps=self.link_mbps or (UNLIMITED_MBPS if self.newcomer_mbps else 0.0),
        )


async def measure_newcomer(
    effort: NewcomerEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    machine, began = machine_facts(), time.monotonic()
    async with open_training_swarm(effort.training) as swarm:
        say(f"{effort.donors} donors")
        donors = await swarm.start_together({} for _ in range(effort.donors))
        await swarm.until_epoch(SETTLED_STEPS, LONGEST_STEP_SECONDS * SETTLED_STEPS)
        settled = time.monotonic()
        last = SETTLED_STEPS + STEPS_ALONE
        await swarm.until_epoch(last, LONGEST_STEP_SECONDS * STEPS_ALONE)
        say("the newcomer")
        (newcomer,) = await swarm.join(1, mbps=effort.newcomer_mbps or None)
        came = time.monotonic()
        await swarm.train(newcomer, {})
        patience = PATIENCE * effort.bar_seconds
        first = await _first_sample(swarm, newcomer, patience)
        if first is not None:
            last = max(line["epoch"] for line in swarm.lines(newcomer, "StepTaken"))
            await swarm.until_epoch(last + 1, 2 * LONGEST_STEP_SECONDS, donors)
        found = _figures(effort, swarm, donors, newcomer, (settled, came, first))
    met = found["donors_share"] >= BAR_DONORS and found["first_sample_s"] is not None
    met = met and found["first_sample_s"] <= found["bar_s"]
    return found | {
        "bar_donors_share": BAR_DONORS,
        "met": bool(met),
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _first_sample(
    swarm: TrainingSwarm, newcomer: TrainingProcess, seconds: float
) -> float | None:
    """When it had made a step with samples of its own; None if it had not after so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await trio.sleep(GLANCE_SECONDS)
        told = await newcomer.ask("progress")
        if told["failure"]:
            raise BenchFailed("The newcomer's training failed.", why=told["failure"])
        for line in swarm.lines(newcomer, "StepTaken"):
            if line["own_samples"]:
                return float(line["at"])
    return None


def _figures(
    effort: NewcomerEffort,
    swarm: TrainingSwarm,
    donors: Sequence[TrainingProcess],
    newcomer: TrainingProcess,
    times: tuple[float, float, float | None],
) -> dict[str, Any]:
    settled, came, first = times
    until = time.monotonic() if first is None else first
    logs = [(swarm.lines(one, "batch"), swarm.lines(one, "StepTaken")) for one in donors]
    steps = [line["at"] for line in logs[0][1] if settled <= line["at"] <= came]
    alone = serving = 0.0
    for batches, taken in logs:
        at = [line["at"] for line in taken]
        before = [one for one in at if settled <= one <= came]
        after = [one for one in at if one > until] or at
        alone += samples_per_second(batches, before[0], before[-1])
        serving += samples_per_second(batches, before[-1], after[0])
    step_seconds = (steps[-1] - steps[0]) / (len(steps) - 1)
    (entered,) = swarm.lines(newcomer, "enters")
    fetched = swarm.lines(newcomer, "CaughtUp")
    results = usual_result_bytes(effort)
    link = effort.link_seconds(results, step_seconds)
    bar = effort.bar_seconds
    if effort.newcomer_mbps:
        bar = BAR_OF_LINK * link
    return {
        "first_sample_s": None if first is None else round(first - entered["at"], 1),
        "bar_s": _finite(bar),
        "link_s": _finite(link),
        "donors_share": round(serving / alone, 3),
        "donors_samples_per_s": [round(alone, 1), round(serving, 1)],
        "step_s": round(step_seconds, 2),
        "state_MB": round(effort.state_bytes / 1e6, 1),
        "result_MB": round(results / 1e6, 1),
        "caught_up": [_caught_up(line, entered["at"]) for line in fetched],
        "too_slow_s": [
            round(line["at"] - entered["at"], 1)
            for line in swarm.lines(newcomer, "TooSlowToCatchUp")
        ],
        "failed": [line["reason"] for line in swarm.lines(newcomer, "FetchingFailed")],
    }


def _caught_up(line: Mapping[str, Any], entered: float) -> dict[str, Any]:
    return {
        "after_s": round(line["at"] - entered, 1),
        "fetched_MB": round(line["fetched_bytes"] / 1e6, 1),
        "sources": len(line["sources"]),
        "results": line["replayed"],
        "whole_state": not line["leads_on"],
    }


def _finite(seconds: float) -> float | None:
    return round(seconds, 1) if math.isfinite(seconds) else None


def usual_result_bytes(effort: NewcomerEffort) -> float:
    from protocols.tensors.codecs import CODECS

    codecs: Mapping[str, Codec] = dict(CODECS.items())
    return float(codecs[effort.codec].encoded_bytes(effort.parameters))


def samples_per_second(batches: Sequence[Mapping[str, Any]], began: float, ended: float) -> float:
    """Of one peer between two of its steps."""
    samples = sum(line["count"] for line in batches if began < line["at"] <= ended)
    return float(samples / (ended - began))


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, number_or_zero, positive_count, positive_number

    parser = kinds.add_parser(
        "newcomer",
        help="how soon a newcomer has a part in a run with a large state",
        description="Have some peers train together on this machine, with passes of a given length "
        "over real parameters, and then let one more come. Measured are the time until a step "
        "has samples of the newcomer, and how many samples per second the others compute until "
        "then, as a share of those before.\n\n"
        "--link-mbps gives each peer a link of its own, with this rate up and down; "
        "--newcomer-mbps gives the newcomer a slower one. Both need Linux and root.\n\n"
        "The exit code is 1 if the newcomer is not in within 15 s for 130 MB, and 60 s for 1.5 GB "
        f"(with --newcomer-mbps {BAR_OF_LINK:g} times what its link takes), or if the others "
        f"compute less than {BAR_DONORS:g} of their samples meanwhile.",
        example="scripts/bench newcomer --json\n"
        "scripts/bench newcomer --megabytes 1500 --link-mbps 800 --codec blockwise-int8\n"
        "scripts/bench newcomer --newcomer-mbps 100 --codec blockwise-int8",
    )
    parser.set_defaults(measure=run)
    link = "the rate of each peer's link, in Mb/s; 0 is loopback"
    own = "the rate of the newcomer's link, in Mb/s; 0 is that of the others"
    add_flag(parser, "--megabytes", positive_number, 130.0, "how large the state is, in MB")
    add_flag(parser, "--step-seconds", positive_number, 1.3, "how long a peer computes in a step")
    add_flag(parser, "--donors", positive_count, 3, "how many peers are there before")
    add_flag(parser, "--codec", str, "float16", "how gradients are encoded", metavar="CODEC")
    add_flag(parser, "--link-mbps", number_or_zero, 0.0, link)
    add_flag(parser, "--newcomer-mbps", number_or_zero, 0.0, own)
    parser.add_argument("--delayed", action="store_true", help="average beside the next step")


def run(arguments: argparse.Namespace) -> int:
    effort = NewcomerEffort(
        state_bytes=round(arguments.megabytes * 1e6),
        step_seconds=arguments.step_seconds,
        donors=arguments.donors,
        codec=arguments.codec,
        delayed=arguments.delayed,
        link_mbps=arguments.link_mbps,
        newcomer_mbps=arguments.newcomer_mbps,
    )
    if effort.link_mbps or effort.newcomer_mbps:
        check_own_networks()
    needed = (effort.donors + 1) * COPIES_OF_A_PEER * effort.state_bytes / 2**30
    if needed > (memory := machine_facts()["memory_GiB"]):
        raise WrongUse(
            f"That takes about {needed:,.0f} GiB of memory, and this machine has {memory:,.0f}.",
            advice="Take fewer --donors, or fewer --megabytes.",
        )
    return report(arguments, partial(measure_newcomer, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    first, link = result["first_sample_s"], result["link_s"]
    alone, serving = result["donors_samples_per_s"]
    lines = [
        f"a state of {result['state_MB']:,} MB, a step every {result['step_s']} s with "
        f"{result['result_MB']:,} MB of results",
        "the newcomer was never in" if first is None else f"the newcomer was in after {first} s",
        "its link does not carry the results of this run"
        if link is None
        else f"its link takes {link} s; the bar is {result['bar_s']} s",
        f"donors        {alone:,} samples/s before, {serving:,} meanwhile: "
        f"{result['donors_share']:.1%}",
    ]
    lines += [
        f"caught up     after {one['after_s']} s, with {one['fetched_MB']:,} MB from "
        f"{one['sources']} peers and {one['results']} results"
        for one in result["caught_up"]
    ]
    lines += [f"told too slow after {seconds} s" for seconds in result["too_slow_s"]]
    lines += [f"failed: {one}" for one in result["failed"]]
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
