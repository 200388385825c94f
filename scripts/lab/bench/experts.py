"""`scripts/bench experts`: the cost of calling experts on another peer, on this machine.

Three measurements, each with processes of its own:

- Latency: one server with an expert that does nothing, one trainer that calls it from its training
  thread, one call after another. The figure is what that thread waits.
- Memory: of that server, after these calls.
- Throughput: one server with feed-forward experts, and trainers in processes of their own, which
  all begin at once, after each has called each expert. Each forward pass is followed by its
  backward pass, in which the expert makes a step. A sample counts once for both.

Beside the throughput stands what the same server's experts do without a network: the same passes,
one after another, in one thread. The server batches what waits, so it makes fewer and larger steps.
`network_cpu_share` is the part of the server's processor time that is not spent in the thread of
its runtime; all processes of the bench compute with one thread each.

The sizes are those of the reference's bench; scripts/bench-against-hivemind runs both in turn.

With `--delay-ms` it measures something else: what delays cost (experts_delay.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchProcess, open_forge, open_process

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

MIB = 1 << 20
PEER = ("-m", "lab.bench.experts_peer")
LATENCY_WIDTH = 1024
LATENCY_ROWS = (1, 64, 2048)


@dataclass(frozen=True)
class ExpertsEffort:
    """How much is measured."""

    calls: int = 200
    trainers: int = 8
    batches: int = 32
    rows: int = 64
    width: int = 256
    experts: int = 4

    @staticmethod
    def quick() -> ExpertsEffort:
        """Enough to see that it works and roughly where it stands."""
        return ExpertsEffort(calls=30, batches=8)


async def measure_experts(effort: ExpertsEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures, and what they were measured on."""
    machine, began = machine_facts(), time.monotonic()
    latency = await _measure_latency(effort, say)
    throughput = await _measure_throughput(effort, say)
    return {
        **latency,
        **throughput,
        "settings": asdict(effort),
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def _measure_latency(effort: ExpertsEffort, say: Talk) -> dict[str, Any]:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    async with (
        open_process("the server", PEER) as server,
        open_process("the trainer", PEER) as trainer,
    ):
        where = await server.ask("serve", expert={"name": "nop", "width": LATENCY_WIDTH}, experts=1)
        await trainer.ask("learn", **where, experts=1, width=LATENCY_WIDTH)
        for rows in LATENCY_ROWS:
            say(f"calls with {rows} x {LATENCY_WIDTH} values")
            answer = await trainer.ask(
                "latency", rows=rows, width=LATENCY_WIDTH, calls=effort.calls
            )
            size = f"{rows}x{LATENCY_WIDTH}"
            forward[size] = round(answer["forward_ms"], 3)
            backward[size] = round(answer["backward_ms"], 3)
        memory = (await server.ask("spent"))["pss_bytes"]
    return {
        "forward_ms_p50": forward,
        "backward_ms_p50": backward,
        "server_pss_MiB": None if memory is None else round(memory / MIB, 1),
    }


async def _measure_throughput(effort: ExpertsEffort, say: Talk) -> dict[str, Any]:
    expert = {"name": "feed-forward", "width": effort.width, "inner": [4 * effort.width]}
    size = {"rows": effort.rows, "width": effort.width}
    async with _swarm(effort.trainers) as (server, trainers):
        where = await server.ask("serve", expert=expert, experts=effort.experts)
        for trainer in trainers:
            await trainer.ask("learn", **where, experts=effort.experts, width=effort.width)
        say(f"{effort.trainers} trainers at once")
        before, own_before = await server.ask("spent"), await _cpu_seconds(trainers)
        began = time.monotonic()
        async with trio.open_nursery() as nursery:
            for number, trainer in enumerate(trainers):
                train = partial(trainer.ask, "train", batches=effort.batches, seed=number, **size)
                nursery.start_soon(train)
        seconds = time.monotonic() - began
        after, own = await server.ask("spent"), await _cpu_seconds(trainers)
        say("the same without a network")
        batches = effort.trainers * effort.batches
        alone = await server.ask("train_alone", batches=batches, **size)
    samples = batches * effort.rows
    spent = {name: after[name] - before[name] for name in ("cpu_seconds", "batches", "rows")}
    device, device_before = after["device_cpu_seconds"], before["device_cpu_seconds"]
    return {
        "samples_per_s": round(samples / seconds, 1),
        "samples_per_s_alone": round(samples / alone["seconds"], 1),
        "rows_per_batch": round(spent["rows"] / spent["batches"], 1),
        "server_cpu_s": round(spent["cpu_seconds"], 3),
        "trainers_cpu_s": round(own - own_before, 3),
        "network_cpu_share": None
        if device is None
        else round(1.0 - (device - device_before) / spent["cpu_seconds"], 3),
    }


async def _cpu_seconds(processes: Sequence[BenchProcess]) -> float:
    return sum([float((await one.ask("spent"))["cpu_seconds"]) for one in processes])


@asynccontextmanager
async def _swarm(trainers: int) -> AsyncIterator[tuple[BenchProcess, list[BenchProcess]]]:
    async with open_forge(PEER) as forge, AsyncExitStack() as stack:
        server = await stack.enter_async_context(forge.open_process("the server"))
        names = [f"trainer {number + 1}" for number in range(trainers)]
        yield (
            server,
            [await stack.enter_async_context(forge.open_process(name)) for name in names],
        )


# Flags and output


WHAT = {
    "forward_ms_p50": "a forward call of an expert that does nothing, by its size: the median",
    "backward_ms_p50": "a backward call of it",
    "server_pss_MiB": "memory of its server",
    "samples_per_s": "feed-forward experts, forward and backward, from all trainers together",
    "samples_per_s_alone": "the same experts in one thread, without a network",
    "rows_per_batch": "how many rows the server computed at once, on average",
    "server_cpu_s": "CPU seconds of the server for the samples",
    "network_cpu_share": "the part of them outside of the thread that computes",
    "trainers_cpu_s": "CPU seconds of all trainers for the samples",
}


def add_parser(kinds: Subparsers) -> None:
    from lab.bench.experts_convergence import numbers
    from lab.bench.experts_delay import BARS, DelayEffort
    from node.app.cli.parser import add_flag, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    bars = " and ".join(f"{kept:g} up to {longest:g} ms" for longest, kept in BARS)
    effort = ExpertsEffort()
    parser = kinds.add_parser(
        "experts",
        help="calling experts of a mixture that another process serves",
        description="Start a server of experts and its trainers in processes of their own on this "
        f"machine, and measure calls and throughput over encrypted channels.\n\n{figures}\n\n"
        "With --delay-ms, train a model of mixtures in one process instead. Each call of an expert "
        "takes an exponential time in addition. Measured are the batches per second with "
        f"{DelayEffort.in_flight} batches in flight, and with one at a time, which is naive model "
        "parallelism. The exit code is 1 if many in flight keep less of their throughput without "
        f"delay than {bars}.",
        example="scripts/bench experts --json\nscripts/bench experts --quick --trainers 4\n"
        "scripts/bench experts --delay-ms 0,10,50,100,200,1000",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--trainers", positive_count, effort.trainers, "how many train at once")
    parser.add_argument("--quick", action="store_true", help="measure less: rough figures")
    delays = "measure what these mean delays of a call cost, in milliseconds"
    parser.add_argument("--delay-ms", type=numbers, metavar="MS,…", help=delays)


def run(arguments: argparse.Namespace) -> int:
    from lab.bench.experts_delay import DelayEffort, lines_of, measure_delays

    if arguments.delay_ms:
        make = DelayEffort.quick if arguments.quick else DelayEffort
        return report(arguments, partial(measure_delays, make(arguments.delay_ms)), lines_of)
    effort = ExpertsEffort.quick() if arguments.quick else ExpertsEffort()
    effort = replace(effort, trainers=arguments.trainers)
    return report(arguments, partial(measure_experts, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    width = max(len(name) for name in WHAT)
    lines = [f"{name:{width}}  {_shown(result[name]):>12}  {what}" for name, what in WHAT.items()]
    machine = result["machine"]
    lines.append("")
    lines.append(f"{machine['processor']}, {machine['cores_usable']} cores, {result['seconds']} s")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{size}: {number:,.3g}" for size, number in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
