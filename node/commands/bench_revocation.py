"""`potluck bench revocation`: how long until every peer refuses whoever was revoked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.commands.output import Output
from node.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "revocation",
        help="how long until every peer refuses whoever was revoked",
        description="Start an auth server and a swarm of real nodes on this machine, let members "
        "in that take no notice of being revoked, revoke them with `potluck auth revoke`, and "
        "measure from the start of that command until every node refuses them.\n\n"
        "  revocation_seconds_p95              with the auth server up\n"
        "  revocation_seconds_server_down_p95  with it stopped: through the directory alone\n\n"
        "Four nodes share a process.",
        example="potluck bench revocation --json\npotluck bench revocation --quick",
    )
    outlaws = "how many are revoked with the server up, and as many with it down"
    add_flag(parser, "--nodes", positive_count, 16, "how many nodes")
    add_flag(parser, "--outlaws", positive_count, 2, outlaws)
    parser.add_argument("--quick", action="store_true", help="six nodes, one outlaw of each kind")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.revocation import RevocationEffort, measure_revocation
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    if arguments.nodes < 2:
        raise WrongUse("A swarm has two nodes at least.", advice="Take --nodes 2 or more.")
    effort = RevocationEffort(arguments.nodes, arguments.outlaws)
    if arguments.quick:
        effort = RevocationEffort.quick(arguments.nodes)

    async def measure() -> int:
        result = await measure_revocation(effort, output.say)
        output.data(result, _lines(result))
        return 0

    return run_until_signal(measure)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    for name in ("revocation_seconds", "revocation_seconds_server_down"):
        spread = result["spread"][name]
        lines.append(
            f"{name + '_p95':36}{result[name + '_p95']:>8.2f}"
            f"  ({spread['min']:.2f} to {spread['max']:.2f}, half within {spread['p50']:.2f})"
        )
    lines.append(
        f"{result['outlaws']} revoked, {result['nodes']} nodes in {result['processes']} processes"
    )
    return "\n".join(lines)
