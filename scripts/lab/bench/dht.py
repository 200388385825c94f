"""`scripts/bench dht`: the costs and times of the directory, with real nodes on loopback.

A swarm is started, joined as volunteers would (each node through a few random earlier ones), and
warmed up: every node reads enough random keys to have its links, and some pairs are tried. Then it
is left alone, for the idle cost. Then pairs: one random node stores a fresh key, another reads it,
one operation at a time. First reads that accept the first replicas that answer, then reads of the
newest.

The reference's bench does the same with the same counts, so that figures can be compared; it gives
each node processes of its own. This bench does so up to sixteen nodes; with more, eight share a
process (each with its own network, port, identity and links, on one event loop) to save memory.

Times are taken inside the processes (dht_peer.py), around the one call, so talking with them is in
no figure.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchProcess, open_process
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

NODES_WITH_A_PROCESS_EACH = 16
NODES_PER_PROCESS = 8
BOOTSTRAP_PEERS = 4  # the reference's
TTL_SECONDS = 600.0  # the reference's
# The replicas of this many random keys are all nodes of a swarm of 64 (one in millions is missed).
WARM_UP_KEYS = 32
WARM_UP_PAIRS_PER_NODE = 1
SETTLE_SECONDS = 2.0  # the reference's; for what joining left to be done
MIB = 1 << 20


@dataclass(frozen=True)
class DhtEffort:
    """How much is measured."""

    nodes: int = 16
    pairs: int = 200
    idle_seconds: float = 20.0
    nodes_per_process: int = 1
    seed: int = 7

    @staticmethod
    def of(
        nodes: int, *, pairs: int | None = None, per_process: int | None = None, quick: bool = False
    ) -> DhtEffort:
        """The usual effort for this many nodes."""
        usual = 1 if nodes <= NODES_WITH_A_PROCESS_EACH else NODES_PER_PROCESS
        return DhtEffort(
            nodes=nodes,
            pairs=pairs or (40 if quick else 200),
            idle_seconds=3.0 if quick else 20.0,
            nodes_per_process=per_process or usual,
        )

    @property
    def processes(self) -> int:
        return -(-self.nodes // self.nodes_per_process)


@dataclass(frozen=True)
class SwarmNode:
    """One node of the swarm: in which process, and which of those there."""

    process: BenchProcess
    number: int

    async def put(self, key: str, value: str) -> dict[str, Any]:
        return await self.process.ask(
            "put", node=self.number, key=key, value=value, ttl=TTL_SECONDS
        )

    async def get(self, key: str, value: str, *, newest: bool) -> dict[str, Any]:
        return await self.process.ask(
            "get", node=self.number, key=key, expected=value, newest=newest
        )


async def measure_dht(effort: DhtEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures, their spread, and what they were measured on."""
    chance = random.Random(effort.seed)
    machine = machine_facts()
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        say(f"{effort.nodes} nodes in {effort.processes} processes: joining")
        processes = [
            await stack.enter_async_context(
                open_process(f"process {number + 1}", ["-m", "lab.bench.dht_peer"])
            )
            for number in range(effort.processes)
        ]
        nodes, join_seconds = await join_all(processes, effort.nodes, chance)
        say("warming up")
        for node in nodes:
            await node.process.ask("warm", node=node.number, keys=WARM_UP_KEYS)
        warm = await _pairs(nodes, WARM_UP_PAIRS_PER_NODE * len(nodes), chance, newest=True)
        await trio.sleep(SETTLE_SECONDS)
        say(f"idle for {effort.idle_seconds:g} s")
        idle = await _idle_cost(processes, effort)
        say(f"{effort.pairs} pairs, reading what answers first")
        first = await _pairs(nodes, effort.pairs, chance, newest=False)
        say(f"{effort.pairs} pairs, reading the newest")
        before = await _totals(processes)
        newest = await _pairs(nodes, effort.pairs, chance, newest=True)
        spent = (await _totals(processes))["cpu_seconds"] - before["cpu_seconds"]
        memory = (await _totals(processes))["memory_bytes"]
    stores = [*first.store_ms, *newest.store_ms]
    done = [*warm.succeeded, *first.succeeded, *newest.succeeded]
    return {
        "store_ms_p50": _p50(stores),
        "get_ms_p50": _p50(first.get_ms),
        "get_latest_ms_p50": _p50(newest.get_ms),
        "success_rate": sum(done) / len(done),
        **idle,
        "cpu_ms_per_pair": round(1000 * spent / effort.pairs, 2),
        "join_ms_p50": _p50([seconds * 1000 for seconds in join_seconds]),
        "memory_MiB_per_node": round(memory / MIB / effort.nodes, 1),
        "nodes": effort.nodes,
        "processes": effort.processes,
        "spread": {
            "store_ms": _spread(stores),
            "get_ms": _spread(first.get_ms),
            "get_latest_ms": _spread(newest.get_ms),
        },
        "settings": {**vars(effort), "bootstrap_peers": BOOTSTRAP_PEERS},
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


async def join_all(
    processes: Sequence[BenchProcess], count: int, chance: random.Random
) -> tuple[list[SwarmNode], list[float]]:
    """Start the nodes, one after another, over the processes in turn."""
    nodes: list[SwarmNode] = []
    addresses: list[str] = []
    seconds = []
    for number in range(count):
        process = processes[number % len(processes)]
        known = chance.sample(addresses, min(BOOTSTRAP_PEERS, len(addresses)))
        joined = await process.ask("join", addresses=known)
        nodes.append(SwarmNode(process, joined["node"]))
        addresses.append(joined["address"])
        seconds.append(joined["seconds"])
    return nodes, seconds


@dataclass(frozen=True)
class Pairs:
    """The times of some pairs of a store and a read, and whether each read the stored value."""

    store_ms: list[float]
    get_ms: list[float]
    succeeded: list[bool]


async def _pairs(
    nodes: Sequence[SwarmNode], count: int, chance: random.Random, *, newest: bool
) -> Pairs:
    pairs = Pairs([], [], [])
    for _ in range(count):
        key, value = f"note/{chance.getrandbits(64):x}", str(chance.getrandbits(60))
        writer, reader = chance.sample(nodes, 2)
        stored = await writer.put(key, value)
        read = await reader.get(key, value, newest=newest)
        pairs.store_ms.append(stored["ms"])
        pairs.get_ms.append(read["ms"])
        pairs.succeeded.append(stored["ok"] and read["ok"])
    return pairs


async def _idle_cost(processes: Sequence[BenchProcess], effort: DhtEffort) -> dict[str, Any]:
    """The cost of one idle node: of one core, and on the wire both ways."""
    before, began = await _totals(processes), time.monotonic()
    await trio.sleep(effort.idle_seconds)
    after, seconds = await _totals(processes), time.monotonic() - began
    node_seconds = effort.nodes * seconds
    cpu = after["cpu_seconds"] - before["cpu_seconds"]
    return {
        "idle_cpu_percent_per_node": round(100 * cpu / node_seconds, 3),
        "idle_bytes_per_second_per_node": round((after["bytes"] - before["bytes"]) / node_seconds),
    }


async def _totals(processes: Sequence[BenchProcess]) -> dict[str, float]:
    answers = [await process.ask("totals") for process in processes]
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


def _p50(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(place * last)], 2) for name, place in places.items()}


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "dht",
        help="writing and reading the directory in a swarm on this machine",
        description="Start a swarm of real nodes on this machine and measure its directory: a "
        "random node stores under a fresh key, and another one reads it.\n\n"
        "  store_ms_p50                    storing one slot at all its replicas\n"
        "  get_ms_p50                      a read that takes the first replicas that "
        "answer\n"
        "  get_latest_ms_p50               a read of the newest slot, from all "
        "replicas\n"
        "  success_rate                    share of pairs that stored and read the "
        "same value\n"
        "  idle_cpu_percent_per_node       of one core, while there are no requests\n"
        "  idle_bytes_per_second_per_node  sent and received at that time\n\n"
        "Up to 16 nodes each have a process of their own; of more, 8 share one.",
        example="scripts/bench dht --nodes 16 --json\nscripts/bench dht --nodes 4 --quick",
    )
    parser.set_defaults(measure=run)
    add_flag(parser, "--nodes", positive_count, 16, "how many nodes")
    parser.add_argument(
        "--pairs",
        type=positive_count,
        metavar="N",
        help="how many pairs of a store and a read, for each kind of read (200, or 40 with "
        "--quick)",
    )
    parser.add_argument(
        "--per-process",
        type=positive_count,
        metavar="N",
        help="how many nodes share a process (1 for up to 16 nodes, else 8)",
    )
    parser.add_argument("--quick", action="store_true", help="measure less: rough figures")


def run(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 2:
        raise WrongUse("A pair needs two nodes.", advice="Take --nodes 2 or more.")
    effort = DhtEffort.of(
        arguments.nodes,
        pairs=arguments.pairs,
        per_process=arguments.per_process,
        quick=arguments.quick,
    )

    return report(arguments, partial(measure_dht, effort), _dht_lines)


def _dht_lines(result: dict[str, Any]) -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, int | float):
            spread = result["spread"].get(name.removesuffix("_p50"))
            within = f"  ({spread['p10']:,.2f} to {spread['p90']:,.2f})" if spread else ""
            lines.append(f"{name:30}  {value:>10,}{within}")
    return "\n".join(lines)
