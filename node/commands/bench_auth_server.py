"""`potluck bench auth-server`: flags and output. node/bench/auth_server.py does the measuring."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(kinds: Subparsers) -> None:
    from node.commands.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "auth-server",
        help="access passes from an auth server on this machine",
        description="Start an auth server in a process of its own, with TLS, SQLite on disk and "
        "each commit synced, and many clients in another, each with a key and a connection; and "
        "measure what renewing takes. Each pass is a whole renewal; some are verified as a node "
        "does it.\n\n"
        "  passes_per_s      each client renews again as soon as it has its pass\n"
        "  saturated_ms_p99  from request to pass, meanwhile: mostly waiting for the others\n"
        "  paced_ms_p99      from request to pass at 300 passes a second, all clients together\n"
        "  cpu_ms_per_pass   of a processor, in the server",
        example="potluck bench auth-server --json\npotluck bench auth-server --quick --clients 10",
    )
    add_flag(parser, "--clients", positive_count, 100, "how many clients")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIRECTORY",
        help="where the database lies meanwhile: choose the disk (the temporary folder)",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything, rough figures")


def run(arguments: argparse.Namespace) -> int:
    from node.bench.auth_server import AuthServerEffort, lines_of, measure_auth_server
    from node.commands.interruption import run_until_signal

    output = Output.of(arguments)
    effort = AuthServerEffort.of(clients=arguments.clients, quick=arguments.quick)

    async def measure() -> int:
        result = await measure_auth_server(effort, arguments.folder, output.say)
        output.data(result, lines_of(result))
        return 0

    return run_until_signal(measure)
