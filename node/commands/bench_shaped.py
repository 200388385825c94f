"""`potluck bench shaped`: rounds over links of limited rate, beside what the plan says of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers

SETUPS = {
    "A": "8 peers at 1 Gb/s",
    "B": "16 at 0.2 Gb/s",
    "C": "the peers of A and B together",
    "D": "B and one peer at 2.5 Gb/s that does not compute",
}
WAYS = ("plan", "allreduce", "parameter_server")
SECONDS = 15.0  # of the plan's round: its first and last moments are not all links' time
ROUNDS = 3
MBPS_PER_GIGABIT = 48.0  # shaped_setups.py says why; a test holds both to the same


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count, positive_number, positive_seconds

    setups = "\n".join(f"  {name}  {what}" for name, what in SETUPS.items())
    parser = kinds.add_parser(
        "shaped",
        help="rounds over links of limited rate, beside what the plan says (root, Linux)",
        description="Build a setup of the DeDLOC paper of network namespaces, with links some "
        "twenty times slower than there (tbf, both directions), and have real peers average over "
        "them: with the shares of the plan, with equal shares, and with the best single reducer. "
        f"What is measured stands beside what the plan predicts.\n\n{setups}\n\n"
        "The prediction takes the links to carry what plain TCP carries over them, measured "
        "first. It needs root, Linux and iproute2; nothing of it is left afterwards, whatever "
        "ends it. A single reducer takes up to eight times as long as the plan's round. Exit "
        "code 1 if a way is more than 15 % off its prediction.",
        example="sudo potluck bench shaped --setup A --json\n"
        "sudo potluck bench shaped --setup D --way plan --rounds 1\n"
        "sudo potluck bench shaped --setup C --scale 24 --seconds 30",
    )
    parser.add_argument("--setup", choices=tuple(SETUPS), required=True, help="which setup")
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="measure this way only; may be given several times (all three)",
    )
    rounds = "how many rounds are measured, after a first one"
    length = "how long the plan's round shall take; the vector is as long as that"
    scale = (
        "how many Mb/s stand for a Gb/s of the paper; halve it, and double the seconds, where the "
        "processors are the limit: setup C on two cores"
    )
    add_flag(parser, "--rounds", positive_count, ROUNDS, rounds)
    add_flag(parser, "--seconds", positive_seconds, SECONDS, length, metavar="SECONDS")
    add_flag(parser, "--scale", positive_number, MBPS_PER_GIGABIT, scale, metavar="MBPS")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.own_network import check_own_networks

    check_own_networks()

    from node.bench.shaped import ShapedEffort, measure_shaped
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = ShapedEffort(
        setup=arguments.setup,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        mbps_per_gigabit=arguments.scale,
        ways=tuple(dict.fromkeys(arguments.way or WAYS)),
    )

    async def measure() -> int:
        result = await measure_shaped(effort, output.say)
        output.data(result, _lines(result))
        return 0 if result["within_15_percent"] and not result["failures"] else 1

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    lines = [f"{'':18}{'predicted':>10}{'measured':>10}{'off by':>9}{'CPU':>9}"]
    for way, figures in result["ways"].items():
        lines.append(
            f"{way:18}{figures['predicted_seconds']:>8.2f} s{figures['exchange_seconds_p50']:>8.2f}"
            f" s{figures['deviation'] * 100:>+7.1f} %{figures['cpu_seconds_p50']:>7.1f} s"
        )
    for what, ratios in result["ratios"].items():
        lines.append(
            f"{what}: all-reduce / plan {ratios['allreduce']:.2f}, "
            f"parameter server / plan {ratios['parameter_server']:.2f}"
        )
    lines += [f"not counted: {failure}" for failure in result["failures"]]
    lines.append(
        f"{result['peers']} peers, {result['vector_bytes'] / 1e6:.1f} MB, "
        f"{result['efficiency'] * 100:.1f} % of a link's rate is payload, {result['seconds']} s"
    )
    return "\n".join(lines)
