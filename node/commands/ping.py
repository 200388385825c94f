"""`potluck ping ADDRESS`: can that node be reached from here, which way, and how fast?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.commands.configured import add_setting_flag
    from node.commands.parser import positive_count, positive_seconds

    parser = subparsers.add_parser(
        "ping",
        help="measure the way to another node",
        description="Connect to a node and measure round trips through potluck's own calls (a "
        "libp2p node of another make is measured through its link). Exit code 0 when at least one "
        "answer came, 4 when none did.",
        example="potluck ping /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…\n"
        "potluck ping --count 10 --interval 0.2 --json ADDRESS",
    )
    parser.add_argument("address", metavar="ADDRESS", help="as `potluck listen` prints it")
    parser.add_argument(
        "--count", type=positive_count, default=4, metavar="N", help="how many pings (4)"
    )
    parser.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between two pings (1)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for the connection and for each answer (5)",
    )
    parser.add_argument(
        "--identity",
        choices=("own", "new"),
        help="with this machine's own key, or with a new one that is forgotten afterwards; by "
        "default the own one, if there is one and no node is running with it",
    )
    add_setting_flag(parser, "identity.key_file")


def run(arguments: argparse.Namespace) -> int:
    from node.commands.configured import configuration_for
    from node.peer_address import parse_peer_address

    target = parse_peer_address(arguments.address)
    configuration = configuration_for(arguments)

    from node.commands.ping_identity import choose_identity, membership_of

    output = Output.of(arguments)
    identity = choose_identity(configuration, arguments.identity, target.peer, output)
    member = membership_of(configuration, identity)

    from node.commands.interruption import run_until_signal
    from node.commands.log_output import log_to_stderr
    from node.commands.pinging import Pings, ping

    log_to_stderr(debug=output.debug)
    pings = Pings(arguments.count, arguments.interval, arguments.timeout)
    return run_until_signal(lambda: ping(identity, target, pings, output, member))
