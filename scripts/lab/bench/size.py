"""`scripts/bench size`: what potluck costs a model of a real size, beside torch alone.

Peers in processes of their own train a model of so many parameters, on one GPU, or each on a double
that copies and waits as a GPU does (size_task.py, lab/gpu_double.py): first each with torch alone,
all at the same time, then together `delayed`, then `waiting`, and at last with torch alone again. A
step has the same passes everywhere, and is clipped.

    share_delayed, share_waiting    samples per second, as a share of torch's alone (the mean of
                                    both times)
    host_bytes_beyond_plain         the most memory that a process had at any time, less what one
                                    with torch alone had; device_bytes_beyond_plain: of the GPU
    host_copies, device_copies      the same, as copies of the parameters in float32
    late_share                      the part of the time in which a double stood idle that a GPU
                                    would have used: its host had to wait for it, or to compute for
                                    its launches, for too long
    share_delayed_less_late, …      the shares without that part, which the bars are for
    averaging_of_alone              of several peers: a round while they train (waiting), beside
                                    one of `bench averaging` of the same size just after that

On a GPU no manner may take more of its memory than the table in docs/organisers.md says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lab import Talk
from lab.bench.averaging import AveragingEffort, measure_averaging
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed
from lab.bench.training import measure_steps
from lab.bench.training_swarm import Training, TrainingSwarm, open_training_swarm
from node.core.wrong_use import WrongUse
from node.run.costs import STATISTICS, copies_of

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

BATCH: Final = 16
MAX_NORM: Final = 1.0
MANNERS: Final = ("delayed", "waiting")
DOUBLE: Final = "double"
WARM_UP_STEPS: Final = 2
LONGEST_STEP_SECONDS: Final = 120.0
SAMPLE_TOKENS: Final = 1024
BARS: Final[Mapping[str, float]] = {"delayed": 0.98, "waiting": 0.95}
"""Of a peer that is alone. Of several `delayed` is held to another one, and `waiting` to none."""
BAR_DELAYED_TOGETHER: Final = 0.93
BAR_OF_ALONE: Final = 1.25
ROUNDS_ALONE: Final = 5
HOST_SLACK: Final = 0.2  # of a copy: parts of a round, and the interpreter
HOST_COPIES: Final = 2 + HOST_SLACK  # of the parameters in float32, beyond what torch alone takes
DEVICE_SLACK: Final = 0.1  # of a copy: what the allocator rounds up


@dataclass(frozen=True)
class SizeEffort:
    """`pass_ms`: how long a pass takes on the double; on a GPU it takes as long as `tokens` say.
    `passes`: of each peer in a step."""

    parameters: int = 124_000_000
    pass_ms: float = 80.0
    passes: int = 16
    peers: int = 1
    steps: int = 4
    codec: str = "float16"
    device: str = DOUBLE
    tokens: int = BATCH * SAMPLE_TOKENS
    offload: bool = False

    @property
    def task(self) -> dict[str, Any]:
        from lab import gpu_double

        return {
            "parameters": self.parameters,
            "device": gpu_double.NAME if self.device == DOUBLE else self.device,
            "batch": BATCH,
            "tokens": self.tokens,
            "pass_seconds": self.pass_ms / 1000,
        }

    @property
    def manner(self) -> dict[str, Any]:
        return {
            "max_norm": MAX_NORM,
            "digests_from": None,
            "offload": self.offload,
            "threads": max(1, (os.cpu_count() or 1) // self.peers),
        }

    @property
    def memory_bars(self) -> dict[str, float]:
        """Of the manner that takes the most. With `offload`, the table says what the host has."""
        told = [
            copies_of(
                delayed=manner == "delayed",
                local_steps=1,
                parameters_every=0,
                offload=self.offload,
                statistics=STATISTICS["adamw"],
            )
            for manner in MANNERS
        ]
        host = max(one.beside_gpu for one in told) + HOST_SLACK if self.offload else HOST_COPIES
        return {"host_copies": host, "device_copies": max(one.on_gpu for one in told)}

    def training(self, manner: str) -> Training:
        return Training(
            target_batch=self.peers * self.passes * BATCH,
            task=self.task,
            manner=self.manner | {"delayed": manner == "delayed"},
            codec=self.codec,
        )


async def measure_size(effort: SizeEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    machine, began = machine_facts(), time.monotonic()
    plain = [await _plain(effort, say)]
    result: dict[str, Any] = {}
    for manner in MANNERS:
        result[manner] = await _together(effort, manner, say)
    averaging = result["waiting"]["averaging_s_p50"]
    of_alone = averaging / await _averaging_alone(effort, say) if effort.peers > 1 else 0.0
    plain.append(await _plain(effort, say))

    def share(manner: str, *, less_late: bool = False) -> float:
        """Of the speed of torch alone; `less_late`: if the time of the double's delays is left out
        in both."""

        def rate(one: dict[str, Any]) -> float:
            of_late = one["late_share"] if less_late else 0.0
            return float(one["samples_per_s"]) / (1.0 - of_late)

        return rate(result[manner]) / statistics.mean(map(rate, plain))

    most, device = plain[0]["most_memory_bytes"], plain[0]["most_device_bytes"]
    shares = {f"share_{manner}": share(manner) for manner in MANNERS}
    on_gpu = {f"share_{manner}_less_late": share(manner, less_late=True) for manner in MANNERS}
    beyond = max(result[manner]["most_memory_bytes"] for manner in MANNERS) - most
    there = max(result[one]["most_device_bytes"] for one in MANNERS) - device
    copy = 4 * effort.parameters
    memory_bars = effort.memory_bars
    bars: Mapping[str, float] = BARS if effort.peers == 1 else {"delayed": BAR_DELAYED_TOGETHER}
    most_of_alone = {"averaging_of_alone": BAR_OF_ALONE} if effort.peers > 1 else {}
    if effort.offload:
        bars = most_of_alone = {}  # it saves memory, and not time
    return result | {
        "plain_samples_per_s": [round(one["samples_per_s"], 1) for one in plain],
        "plain_late_share": [round(one["late_share"], 4) for one in plain],
        **{name: round(one, 5) for name, one in (shares | on_gpu).items()},  # one may be small
        "averaging_s_p50": averaging,
        "averaging_of_alone": round(of_alone, 3) if effort.peers > 1 else None,
        "host_bytes_beyond_plain": beyond,
        "device_bytes_beyond_plain": there,
        "host_copies": round(beyond / copy, 2),
        "device_copies": round(there / copy, 2),
        "bars": dict(bars) | memory_bars | most_of_alone,
        "met": all(on_gpu[f"share_{name}_less_late"] >= bar for name, bar in bars.items())
        and all(of_alone <= bar for bar in most_of_alone.values())
        and all(result[one]["complete"] == 1.0 for one in MANNERS)
        and beyond <= memory_bars["host_copies"] * copy
        and there <= (memory_bars["device_copies"] + DEVICE_SLACK) * copy,
        "settings": asdict(effort),
        "double": _told() if effort.device == DOUBLE else None,
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


def _told() -> dict[str, float]:
    from lab import gpu_double

    return gpu_double.told()


async def _plain(effort: SizeEffort, say: Talk) -> dict[str, Any]:
    say("torch alone")
    async with open_training_swarm(effort.training("waiting")) as swarm:
        peers = await swarm.join(effort.peers)
        took = await swarm.ask_all(
            "train_plainly",
            peers,
            task=effort.task,
            manner=effort.manner,
            steps=effort.steps + 1,
            passes=effort.passes,
        )
        memory = await _memory(swarm)
    samples = effort.passes * BATCH
    return {
        "samples_per_s": sum(samples / one["step_seconds"] for one in took.values()),
        "late_share": max(one["late_seconds"] / one["step_seconds"] for one in took.values()),
        **memory,
    }


async def _together(effort: SizeEffort, manner: str, say: Talk) -> dict[str, Any]:
    say(f"{effort.peers} peers of potluck, {manner}")
    async with open_training_swarm(effort.training(manner)) as swarm:
        await swarm.start_together({} for _ in range(effort.peers))
        figures = await measure_steps(swarm, WARM_UP_STEPS, effort.steps, LONGEST_STEP_SECONDS, say)
        memory = await _memory(swarm)
    wanted = ("where", "samples_per_s", "cores_used", "averaging_s_p50", "stepping_s_p50")
    late = {"late_share": round(figures["late_s"] / figures["measured_s"], 4)}
    return {name: figures[name] for name in (*wanted, "steps", "complete")} | late | memory


async def _averaging_alone(effort: SizeEffort, say: Talk) -> float:
    say(f"{effort.peers} peers that only average")
    rounds = AveragingEffort(effort.peers, effort.parameters, effort.codec, ROUNDS_ALONE)
    figures = await measure_averaging(rounds, say)
    if figures["failures"]:
        raise BenchFailed("A round of peers that only average failed.", why=figures["failures"][0])
    return float(figures["round_s_p50"])


async def _memory(swarm: TrainingSwarm) -> dict[str, int]:
    totals = (await swarm.ask_all("totals")).values()
    names = ("most_memory_bytes", "most_device_bytes")
    return {name: max(one[name] for one in totals) for name in names}


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count, positive_number

    parser = kinds.add_parser(
        "size",
        help="training a model of a given size, beside torch alone",
        description="Train a model of so many parameters with torch alone, then with potluck, "
        "with averaging delayed and not, and then with torch alone again. Without a "
        "GPU this takes a double for each peer: a device whose passes take a given "
        "time, which computes what else it is asked for, and lets its host wait as "
        "long as a GPU would. It may be late itself, which is told and left out "
        "(late_share). The exit code is 1 if potluck takes more than 2 % (delayed) or "
        "5 % (waiting) of the speed of one peer alone, more than 7 % (delayed) of "
        "several peers', more than 1.25 times as long for a round of theirs as `bench "
        "averaging` of that size, more than 2.2 times the parameters' memory beyond "
        "what torch alone takes, or more of the GPU's than the table in "
        "docs/organisers.md says. With --offload that is none, the machine's may take "
        "what the table says, and no speed is asked for.",
        example="scripts/bench size --params 124e6 --pass-ms 80 --json\n"
        "scripts/bench size --peers 2 --codec float16\n"
        "scripts/bench size --device cuda --offload",
    )
    parser.set_defaults(measure=run)
    parser.add_argument(
        "--offload", action="store_true", help="keep the copies for averaging off the GPU"
    )
    add_flag(parser, "--params", positive_number, 124e6, "parameters of the model")
    add_flag(parser, "--pass-ms", positive_number, 80.0, "length of a pass on the double")
    add_flag(parser, "--passes", positive_count, 16, "passes of each peer in a step")
    add_flag(parser, "--peers", positive_count, 1, "how many peers")
    add_flag(parser, "--steps", positive_count, 4, "how many steps are measured")
    add_flag(parser, "--codec", str, "float16", "how gradients are encoded", metavar="CODEC")
    parser.add_argument(
        "--device",
        choices=(DOUBLE, "cuda"),
        default=DOUBLE,
        help="cuda: one GPU for all; double: no GPU is needed (double)",
    )
    tokens = "rows of a pass on a GPU, which say how long it takes"
    add_flag(parser, "--tokens", positive_count, BATCH * SAMPLE_TOKENS, tokens)


def run(arguments: argparse.Namespace) -> int:
    if arguments.device != DOUBLE:
        import torch

        if not torch.cuda.is_available():
            raise WrongUse("There is no GPU that torch can use here.", advice="Leave out --device.")
    effort = SizeEffort(
        parameters=round(arguments.params),
        pass_ms=arguments.pass_ms,
        passes=arguments.passes,
        peers=arguments.peers,
        steps=arguments.steps,
        codec=arguments.codec,
        device=arguments.device,
        tokens=arguments.tokens,
        offload=arguments.offload,
    )
    copies = effort.memory_bars["host_copies"]
    needed = effort.peers * copies * 4 * effort.parameters / 2**30
    if needed > (memory := machine_facts()["memory_GiB"]):
        raise WrongUse(
            f"That takes about {needed:,.0f} GiB of memory, and this machine has {memory:,.0f}.",
            advice="Take fewer peers or a smaller --params.",
        )
    return report(arguments, partial(measure_size, effort), _lines)


def _late(one: dict[str, Any], result: dict[str, Any], manner: str) -> str:
    if not result["double"]:
        return ""
    less = result[f"share_{manner}_less_late"]
    return f"; {less:.1%} without the {one['late_share']:.1%} in which the double was late"


def _lines(result: dict[str, Any]) -> str:
    plain = " and ".join(f"{one:,}" for one in result["plain_samples_per_s"])
    lines = [f"torch alone   {plain} samples/s"]
    for manner in MANNERS:
        one = result[manner]
        lines.append(
            f"{manner:12}  {one['samples_per_s']:,} samples/s, {result[f'share_{manner}']:.1%} of "
            f"that; averaging {one['averaging_s_p50']} s, the step {one['stepping_s_p50']} s, "
            f"{one['cores_used']} cores{_late(one, result, manner)}"
        )
    lines.append(
        f"memory        {result['host_bytes_beyond_plain'] / 1e6:,.0f} MB more than torch alone, "
        f"{result['host_copies']} times the parameters; "
        f"{result['device_bytes_beyond_plain'] / 1e6:,.0f} MB more of the GPU's, "
        f"{result['device_copies']} times"
    )
    if result["averaging_of_alone"] is not None:
        lines.append(f"averaging     {result['averaging_of_alone']} times as long as alone")
    lines.append("all as it must be" if result["met"] else "NOT as it must be")
    return "\n".join(lines)
