"""`scripts/simulate dht`: flags and output. dht_swarm.py does the simulating."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lab.simulate.dht_swarm import SwarmPlan, simulate
from node.app.cli.output import Output
from node.app.cli.parser import add_flag, positive_count, positive_seconds
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

NODES = 10_000
NODES_IN_CHURN = 1_000  # four hours of it take minutes; each node is replaced eight times
SEED = 7
HOURS = 4.0
FEWEST_NODES = 30  # with fewer, everybody is among the k closest to everything
MOST_LIARS = 0.9  # the others have to publish and to read

FIGURES = {
    "hops_p50, hops_p99": "how many nodes a read asks one after another until it reaches the "
    "node closest to the key, with that one; 1 means that it was in the "
    "reader's own table",
    "hops_to_first_slot_p50, …_p99": "the same, to the first node that had the slot",
    "messages_per_get_p50, …_p99": "questions and answers of a read; a question to a dead node"
    " counts as one",
    "get_virtual_ms_p50": "how long a whole read takes in virtual time; dead nodes do not answer",
    "found_rate": "the share of reads that found a slot of its publisher, among the reads whose "
    "slot was live from beginning to end",
    "success_rate": "the share of reads that found the newest slot",
    "found_rate_after_refresh": "with --kill: found_rate an hour later, when every bucket was "
    "refreshed; found_rate itself is from directly after, before any "
    "repair",
}


def add_parser(kinds: Subparsers) -> None:
    width = max(len(name) for name in FIGURES)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in FIGURES.items())
    parser = kinds.add_parser(
        "dht",
        help="the directory: joining, publishing, reading, dying and lying",
        description="Let nodes of the directory join one after the other, publish slots and read "
        "them at random nodes, with the routing tables, lookups and storage of real nodes and a "
        "network that only adds delay. The same seed gives the same figures. 10,000 nodes take "
        f"a few minutes and 1 GiB of memory.\n\n{figures}",
        example="scripts/simulate dht --nodes 1000 --json\n"
        "scripts/simulate dht --kill 0.3\n"
        "scripts/simulate dht --churn 1200 --hours 4\n"
        "scripts/simulate dht --liars 0.1",
    )
    parser.set_defaults(simulate=run)
    parser.add_argument(
        "--nodes",
        type=positive_count,
        metavar="N",
        help=f"how many nodes ({NODES}, or {NODES_IN_CHURN} with --churn)",
    )
    add_flag(parser, "--seed", int, SEED, "the seed of all random choices")
    parser.add_argument(
        "--kill",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="let this share of all nodes die at once; read directly after that, and an hour later",
    )
    parser.add_argument(
        "--churn",
        type=positive_seconds,
        metavar="HALF_LIFE_SECONDS",
        help="let nodes die and others come, so that half of them are gone after this many "
        "seconds, and read all the time; slots live for half an hour, and readers repair "
        "replicas that are behind",
    )
    parser.add_argument(
        "--hours",
        type=positive_seconds,
        metavar="HOURS",
        help=f"how long the churn lasts ({HOURS:g})",
    )
    parser.add_argument(
        "--liars",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="let this share of nodes answer lookups with each other, with nodes that do not "
        "exist and with wrong addresses, and store nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    nodes = arguments.nodes or (NODES_IN_CHURN if arguments.churn else NODES)
    if nodes < FEWEST_NODES:
        raise WrongUse(f"A swarm of {nodes} shows nothing.", why=f"It takes {FEWEST_NODES} nodes.")
    if arguments.hours and not arguments.churn:
        raise WrongUse(
            "--hours says how long the churn lasts, and there is none.",
            advice="Add --churn 1200, say: then half of all nodes are replaced every 20 minutes.",
        )
    if arguments.churn and arguments.kill:
        raise WrongUse("--kill and --churn are two experiments.", advice="Run one at a time.")
    if arguments.liars > MOST_LIARS:
        raise WrongUse(f"At most {MOST_LIARS:g} of the nodes can be liars.")
    output = Output.of(arguments)
    plan = SwarmPlan(
        nodes=nodes,
        seed=arguments.seed,
        kill=arguments.kill,
        churn_half_life_seconds=arguments.churn,
        hours=arguments.hours or HOURS,
        liars=arguments.liars,
    )
    result = simulate(plan, output.say)
    output.data(result, _table(result))
    return 0


def share(text: str) -> float:
    """An argparse type: a part of the whole, such as 0.3."""
    try:
        part = float(text)
    except ValueError:
        part = float("nan")
    if not 0 <= part < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 0.3")
    return part


def _table(result: dict[str, Any]) -> str:
    rows = {name: value for name, value in result.items() if value is not None}
    width = max(len(name) for name in rows)
    return "\n".join(
        f"{name:{width}}  {value:,}" if isinstance(value, int) else f"{name:{width}}  {value:g}"
        for name, value in rows.items()
    )
