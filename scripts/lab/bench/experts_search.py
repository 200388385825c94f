"""`scripts/bench experts-search`: how fast a trainer finds the best experts of a batch.

A swarm of real nodes is started on loopback and joined, as in `scripts/bench dht`. The nodes share
the experts of a grid as `free_cells` places them, and go on announcing them. Then some nodes, one
after another, choose the best experts for batches of random scores. The first search of a node is
*cold*: it has read nothing of the experts, but has links to the other nodes. The next ones are
*warm*: what they need was read within the last seconds. Each result is compared with a look at all
experts.

Times are taken inside the processes (experts_search_peer.py), around the one call.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.dht import NODES_PER_PROCESS, SETTLE_SECONDS, WARM_UP_KEYS, join_all
from lab.bench.machine import machine_facts
from lab.bench.processes import open_process
from node.core.wrong_use import WrongUse
from protocols.experts import ExpertGrid, Uid, free_cells

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

GRID = ExpertGrid("ffn", (64, 64))
BATCH = 64
CHOSEN = 4
COLD_BAR_MS = 250.0
WARM_BAR_MS = 20.0
WARM_SEARCHES = 10  # after each cold one


@dataclass(frozen=True)
class SearchEffort:
    """How much is measured."""

    nodes: int = 64
    experts: int = GRID.cells
    cold_searches: int = 20
    seed: int = 7


async def measure_search(effort: SearchEffort, say: Talk = lambda _line: None) -> dict[str, Any]:
    """The figures, their spread, and what they were measured on."""
    chance = random.Random(effort.seed)
    machine = machine_facts()
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        say(f"{effort.nodes} nodes: joining")
        processes = [
            await stack.enter_async_context(
                open_process(f"process {number + 1}", ["-m", "lab.bench.experts_search_peer"])
            )
            for number in range(math.ceil(effort.nodes / NODES_PER_PROCESS))
        ]
        nodes, _ = await join_all(processes, effort.nodes, chance)
        for node in nodes:
            await node.process.ask("warm", node=node.number, keys=WARM_UP_KEYS)
        say(f"announcing {effort.experts:,} experts")
        live: list[Uid] = []
        for place, node in enumerate(nodes):
            share = (effort.experts - len(live)) // (len(nodes) - place)
            uids = free_cells(GRID, live, share, chance)
            live += uids
            await node.process.ask("host", node=node.number, uids=[*map(str, uids)])
        await trio.sleep(SETTLE_SECONDS)
        say(f"{effort.cold_searches} searches, each cold and then {WARM_SEARCHES} times warm")
        searches = [
            await node.process.ask(
                "search",
                node=node.number,
                live=[*map(str, live)],
                seed=chance.getrandbits(32),
                warm=WARM_SEARCHES,
            )
            for node in (chance.choice(nodes) for _ in range(effort.cold_searches))
        ]
    cold = [one["cold_ms"] for one in searches]
    warm = [ms for one in searches for ms in one["warm_ms"]]
    wrong = sum(one["wrong"] for one in searches)
    cold_ms, warm_ms = (round(statistics.median(one), 2) for one in (cold, warm))
    return {
        "cold_ms": cold_ms,
        "warm_ms": warm_ms,
        "identical": not wrong,
        "wrong_searches": wrong,
        "requests_per_cold_search": statistics.median(one["requests"] for one in searches),
        "met": not wrong and cold_ms < COLD_BAR_MS and warm_ms < WARM_BAR_MS,
        "nodes": effort.nodes,
        "experts": effort.experts,
        "spread": {
            "cold_ms": {"min": round(min(cold), 2), "max": round(max(cold), 2)},
            "warm_ms": {"min": round(min(warm), 2), "max": round(max(warm), 2)},
        },
        "settings": {**vars(effort), "grid": GRID.sizes, "batch": BATCH, "k": CHOSEN},
        "machine": machine,
        "seconds": round(time.monotonic() - began, 1),
    }


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "experts-search",
        help="finding the best experts of a batch in a swarm on this machine",
        description="Start a swarm of real nodes on this machine, let them announce the experts of "
        f"a grid of {' x '.join(map(str, GRID.sizes))}, and choose the best {CHOSEN} for each of "
        f"{BATCH} examples.\n\n"
        "  cold_ms                   a node's first search, which reads the directory\n"
        "  warm_ms                   a further search within seconds, with other scores\n"
        "  identical                 whether all searches found what a look at all experts finds\n"
        "  requests_per_cold_search  requests to other nodes\n\n"
        f"The exit code is 1 if cold_ms is not below {COLD_BAR_MS:g}, warm_ms not below "
        f"{WARM_BAR_MS:g}, or a search was wrong. Eight nodes share a process.",
        example="scripts/bench experts-search --json\n"
        "scripts/bench experts-search --experts 400 --quick",
    )
    parser.set_defaults(measure=run)
    effort = SearchEffort()
    add_flag(parser, "--nodes", positive_count, effort.nodes, "how many nodes")
    add_flag(parser, "--experts", positive_count, effort.experts, "how many experts, of all nodes")
    parser.add_argument("--quick", action="store_true", help="measure less: rough figures")


def run(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 2:
        raise WrongUse("A search needs two nodes.", advice="Take --nodes 2 or more.")
    if arguments.experts > GRID.cells:
        raise WrongUse(f"The grid has {GRID.cells:,} cells.", advice="Take fewer --experts.")
    searches = 3 if arguments.quick else SearchEffort.cold_searches
    effort = SearchEffort(arguments.nodes, arguments.experts, searches)
    return report(arguments, partial(measure_search, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    for name in ("cold_ms", "warm_ms"):
        spread = result["spread"][name]
        lines.append(f"{name:26}{result[name]:>8,}  ({spread['min']:,} to {spread['max']:,})")
    lines += [f"{name:26}{result[name]:>8}" for name in ("identical", "requests_per_cold_search")]
    return "\n".join(lines)
