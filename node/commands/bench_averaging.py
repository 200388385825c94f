"""`potluck bench averaging`: one averaging of a vector by a group of processes on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

CODECS = ("none", "float16", "bfloat16", "blockwise-int8")

WHAT = {
    "aggregate_s_p50": "the exchange: first peer's start to last peer's end",
    "round_s_p50": "the whole round: matchmaking, exchange, agreement",
    "round_overhead_s_p50": "the round less the exchange",
    "cpu_s": "CPU seconds of all processes, for one round",
    "pss_MiB_per_peer": "memory of a process, with its share of what all share",
    "worst_relative_error": "of any result, against the exact average",
    "bit_identical": "whether all peers held the same bits after every round",
}


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count

    width = max(len(name) for name in WHAT)
    figures = "\n".join(f"  {name:{width}}  {what}" for name, what in WHAT.items())
    parser = kinds.add_parser(
        "averaging",
        help="averaging a vector with a group of processes on this machine",
        description="Start peers in processes of their own on this machine, each with a token, "
        "and have them average a vector of random values, again and again, over encrypted "
        f"channels.\n\n{figures}\n\n"
        "Figures are medians of the rounds after the first, which is told apart. Exit code 1 if "
        "a round failed or its result was not right.",
        example="potluck bench averaging --peers 4 --numel 10e6 --codec none --json\n"
        "potluck bench averaging --peers 2 --numel 1e6 --rounds 3\n"
        "potluck bench averaging --codec float16 --profile peer.pstats",
    )
    add_size_flags(parser)
    rounds = "how many rounds are measured, after a first one"
    layout = (
        "whether peers are forked from one process, and share the memory of what it has imported, "
        "or import everything themselves"
    )
    add_flag(parser, "--codec", CODECS, "none", "how values are encoded")
    add_flag(parser, "--rounds", positive_count, 5, rounds)
    add_flag(parser, "--layout", ("fork", "separate"), "fork", layout)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write a profile (cProfile's) of one peer's event loop in these rounds, which makes "
        "them slower",
    )


def add_size_flags(parser: argparse.ArgumentParser, *, peers: int = 4, values: int = 10**7) -> None:
    """`--peers` and `--numel`."""
    from node.commands.parser import add_flag, positive_count

    add_flag(parser, "--peers", positive_count, peers, "how many")
    vector = "how many values the vector has, such as 25e6"
    add_flag(parser, "--numel", number_of_values, values, vector)


def number_of_values(text: str) -> int:
    """An argparse type: a whole number above zero, also as 10e6."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not (0 < number < 2**40 and number == int(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(number)


def run(arguments: argparse.Namespace) -> int:
    from node.bench.averaging import AveragingEffort, measure_averaging
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    require_a_group(arguments.peers)
    profile = str(arguments.profile.absolute()) if arguments.profile else ""
    effort = AveragingEffort(
        arguments.peers,
        arguments.numel,
        arguments.codec,
        arguments.rounds,
        arguments.layout,
        profile,
    )

    async def measure() -> int:
        result = await measure_averaging(effort, output.say)
        output.data(result, _lines(result))
        return 1 if result["failures"] or not result["bit_identical"] else 0

    return run_until_signal(measure)


def require_a_group(peers: int) -> None:
    if peers < 2:
        raise WrongUse("A group has two peers at least.", advice="Take --peers 2 or more.")


def _lines(result: dict[str, Any]) -> str:
    width = max(len(name) for name in WHAT)
    lines = []
    for name, what in WHAT.items():
        value = result[name]
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        lines.append(f"{name:{width}}  {shown:>10}  {what}")
    lines += [f"failed: {failure}" for failure in result["failures"]]
    settings, machine = result["settings"], result["machine"]
    lines.append("")
    lines.append(
        f"{settings['peers']} peers, {settings['values']:,} values, {settings['codec']}; "
        f"{machine['processor']}, {machine['cores_usable']} cores, {result['seconds']} s"
    )
    return "\n".join(lines)
