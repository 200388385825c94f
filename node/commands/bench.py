"""`potluck bench`: measure this machine. Each kind of measurement is a subcommand.

Kinds with much to say about themselves have a module each, `bench_….py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.bench.figures import Figure
    from node.commands.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.commands import (
        bench_auth_server,
        bench_averaging,
        bench_caps,
        bench_interference,
        bench_join,
        bench_outage,
        bench_revocation,
        bench_shaped,
        bench_state,
        bench_survival,
        bench_training,
    )
    from node.commands.parser import CommandParser

    parser = subparsers.add_parser(
        "bench",
        help="measure this machine",
        description="Measure what potluck can do on this machine.",
        example="potluck bench transport --quick",
    )
    kinds = parser.add_subparsers(
        dest="kind", metavar="KIND", required=True, parser_class=CommandParser
    )
    _add_transport(kinds)
    _add_dht(kinds)
    bench_auth_server.add_parser(kinds)
    bench_revocation.add_parser(kinds)
    bench_averaging.add_parser(kinds)
    bench_survival.add_parser(kinds)
    bench_shaped.add_parser(kinds)
    bench_interference.add_parser(kinds)
    bench_state.add_parser(kinds)
    bench_caps.add_parser(kinds)
    bench_join.add_parser(kinds)
    bench_outage.add_parser(kinds)
    bench_training.add_parser(kinds)
    bench_training.add_churn_parser(kinds)


def _add_transport(kinds: Subparsers) -> None:
    from node.bench.figures import AUTH_FIGURES, AUTH_NAMES, FIGURES, NAMES
    from node.commands.parser import positive_count

    width = max(len(name) for name in (*NAMES, *AUTH_NAMES))
    figures = "\n".join(f"  {figure.name:{width}}  {figure.what}" for figure in FIGURES)
    with_auth = "\n".join(f"  {figure.name:{width}}  {figure.what}" for figure in AUTH_FIGURES)
    parser = kinds.add_parser(
        "transport",
        help="calls and transfers between processes on this machine",
        description="Start nodes in processes of their own on this machine and measure what "
        f"goes between them, over the whole path of a real node.\n\n{figures}\n\n"
        f"With --auth, each message is signed and verified as in a run with an auth server:\n\n"
        f"{with_auth}\n\n"
        "Figures are medians; --json has their spread and the machine they were measured on.",
        example="potluck bench transport --quick\n"
        "potluck bench transport --auth --json\n"
        "potluck bench transport --json --only stream_MiB_s --only cpu_s_per_GB",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=tuple(dict.fromkeys((*NAMES, *AUTH_NAMES))),
        metavar="FIGURE",
        help="measure this figure only; may be given several times",
    )
    parser.add_argument(
        "--auth", action="store_true", help="with tokens, beside an open run in turn with it"
    )
    parser.add_argument(
        "--repeat", type=positive_count, metavar="N", help="how often (3, or 1 with --quick)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: half a minute, rough figures"
    )


def _add_dht(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "dht",
        help="writing and reading the directory in a swarm on this machine",
        description="Start a swarm of real nodes on this machine and measure its directory: a "
        "random node stores under a fresh key, another one reads it.\n\n"
        "  store_ms_p50                    one slot to all its replicas\n"
        "  get_ms_p50                      a read that is content with the first replicas\n"
        "  get_latest_ms_p50               a read of the newest, from all replicas\n"
        "  success_rate                    of pairs that stored and read the same\n"
        "  idle_cpu_percent_per_node       of one core, while nobody asks anything\n"
        "  idle_bytes_per_second_per_node  sent and received, meanwhile\n\n"
        "Up to 16 nodes each have a process of their own; of more, 8 share one.",
        example="potluck bench dht --nodes 16 --json\npotluck bench dht --nodes 4 --quick",
    )
    add_flag(parser, "--nodes", positive_count, 16, "how many nodes")
    parser.add_argument(
        "--pairs",
        type=positive_count,
        metavar="N",
        help="how many stores and reads of either kind (200, or 40 with --quick)",
    )
    parser.add_argument(
        "--per-process",
        type=positive_count,
        metavar="N",
        help="how many nodes share a process (1 up to 16 nodes, 8 beyond)",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, rough figures")


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "auth-server":
        from node.commands import bench_auth_server

        return bench_auth_server.run(arguments)
    if arguments.kind == "revocation":
        from node.commands import bench_revocation

        return bench_revocation.run(arguments)
    if arguments.kind == "averaging":
        from node.commands import bench_averaging

        return bench_averaging.run(arguments)
    if arguments.kind == "survival":
        from node.commands import bench_survival

        return bench_survival.run(arguments)
    if arguments.kind == "shaped":
        from node.commands import bench_shaped

        return bench_shaped.run(arguments)
    if arguments.kind == "state":
        from node.commands import bench_state

        return bench_state.run(arguments)
    if arguments.kind == "outage":
        from node.commands import bench_outage

        return bench_outage.run(arguments)
    if arguments.kind == "join":
        from node.commands import bench_join

        return bench_join.run(arguments)
    if arguments.kind == "caps":
        from node.commands import bench_caps

        return bench_caps.run(arguments)
    if arguments.kind == "interference":
        from node.commands import bench_interference

        return bench_interference.run(arguments)
    if arguments.kind.startswith("training"):
        from node.commands import bench_training

        churn = arguments.kind == "training-churn"
        return bench_training.run_churn(arguments) if churn else bench_training.run(arguments)
    return _run_dht(arguments) if arguments.kind == "dht" else _run_transport(arguments)


def _run_dht(arguments: argparse.Namespace) -> int:
    from node.bench.dht import DhtEffort, measure_dht
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    if arguments.nodes < 2:
        raise WrongUse("A pair needs two nodes.", advice="Take --nodes 2 or more.")
    effort = DhtEffort.of(
        arguments.nodes,
        pairs=arguments.pairs,
        per_process=arguments.per_process,
        quick=arguments.quick,
    )

    async def measure() -> int:
        result = await measure_dht(effort, output.say)
        output.data(result, _dht_lines(result))
        return 0

    return run_until_signal(measure)


def _dht_lines(result: dict[str, Any]) -> str:
    lines = []
    for name, value in result.items():
        if isinstance(value, int | float):
            spread = result["spread"].get(name.removesuffix("_p50"))
            within = f"  ({spread['p10']:,.2f} to {spread['p90']:,.2f})" if spread else ""
            lines.append(f"{name:30}  {value:>10,}{within}")
    return "\n".join(lines)


def _run_transport(arguments: argparse.Namespace) -> int:
    from node.bench.figures import AUTH_FIGURES, FIGURES
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    figures = AUTH_FIGURES if arguments.auth else FIGURES
    names = tuple(figure.name for figure in figures)
    only = tuple(arguments.only or names)
    for name in only:
        if name not in names:
            raise WrongUse(
                f"{name} is not measured {'with' if arguments.auth else 'without'} --auth.",
                advice=f"Take one of {', '.join(names)}.",
            )

    def say(line: str) -> None:
        output.say(f"measuring {line}")

    async def measure() -> int:
        measure_now = _measure_auth if arguments.auth else _measure_plain
        result = await measure_now(arguments, only, say)
        output.data(result, _table(result, figures))
        return 0

    return run_until_signal(measure)


async def _measure_plain(
    arguments: argparse.Namespace, only: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, Any]:
    from node.bench.transport import Effort, measure_transport

    repeats = arguments.repeat
    effort = Effort.quick(repeats or 1) if arguments.quick else Effort(repeats or Effort.repeats)
    return await measure_transport(effort, only, say)


async def _measure_auth(
    arguments: argparse.Namespace, only: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, Any]:
    from node.bench.transport_auth import AuthEffort, measure_auth

    repeats = arguments.repeat
    quick = AuthEffort.quick(repeats or 1)
    effort = quick if arguments.quick else AuthEffort(repeats or AuthEffort.repeats)
    return await measure_auth(effort, only, say)


def _table(result: dict[str, Any], figures: tuple[Figure, ...]) -> str:
    rows: list[tuple[str, ...]] = [("figure", "median", "least", "most", "")]
    for figure in figures:
        if figure.name in result:
            spread = result["spread"][figure.name]
            values = (result[figure.name], spread["min"], spread["max"])
            rows.append(
                (figure.name, *(f"{value:,.{figure.digits}f}" for value in values), figure.what)
            )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]
    machine = result["machine"]
    lines.append("")
    lines.append(
        f"{machine['processor']}, {machine['cores_usable']} cores, {machine['memory_GiB']} GiB, "
        f"Python {machine['python']}, {result['seconds']} s"
    )
    return "\n".join(lines)
