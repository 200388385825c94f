"""`potluck ping ADDRESS`: can that node be reached from here, which way, and how fast?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.core.access.membership import Membership
    from node.core.configuration import Configuration
    from protocols.identity import Identity, PeerId


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag
    from node.app.cli.parser import positive_count, positive_seconds

    parser = subparsers.add_parser(
        "ping",
        help="measure the round trip to another node",
        description="Connect to a node and measure round trips through potluck's own calls (for "
        "other libp2p nodes, through the link's ping). Exit code 0 if at least one answer came, 4 "
        "if none did.",
        example="potluck ping /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…\n"
        "potluck ping --count 10 --interval 0.2 --json ADDRESS",
    )
    parser.add_argument(
        "address", metavar="ADDRESS", help="the node's address, as `potluck listen` prints it"
    )
    parser.add_argument(
        "--count", type=positive_count, default=4, metavar="N", help="the number of pings (4)"
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
        help="use this machine's own key, or a new one that is not kept; by default the own one, "
        "if there is one and no node is running with it",
    )
    add_setting_flag(parser, "identity.key_file")


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.core.peer_address import parse_peer_address

    target = parse_peer_address(arguments.address)
    configuration = configuration_for(arguments)

    # Wrong arguments are refused before the network is imported.
    output = Output.of(arguments)
    identity = choose_identity(configuration, arguments.identity, target.peer, output)
    member = membership_of(configuration, identity)

    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.app.pinger import PingPlan, ping

    log_to_stderr(debug=output.debug)
    pings = PingPlan(arguments.count, arguments.interval, arguments.timeout)
    return run_until_signal(lambda: ping(identity, target, pings, output, member))


def choose_identity(
    configuration: Configuration, wanted: str | None, target: PeerId, output: Output
) -> Identity:
    """The identity to ping with. Says so if it is not the expected one.

    Two processes with one identity disturb each other, because a peer keeps one link to each
    identity and closes the other. While a node runs here, pings use a new identity; otherwise the
    node's own, because some nodes only talk to peers they know.
    """
    from node.core.control_client import a_node_answers
    from node.core.key_file import load_identity
    from node.core.wrong_use import WrongUse
    from protocols.errors import Unreachable
    from protocols.identity import Identity

    if wanted == "new":
        return Identity.generate()
    own = load_identity(configuration.key_file)
    node_runs = a_node_answers(configuration.places.control_socket)
    if wanted == "own":
        if own is None:
            raise WrongUse(
                "This node has no key yet, so it cannot ping as itself.",
                advice="`potluck id` makes one; without --identity, ping uses a new one.",
            )
        if node_runs:
            output.say("warning: a node with this identity runs here; its links may be cut off.")
        return own
    if own is None or node_runs:
        return Identity.generate()
    if own.peer_id == target:
        raise Unreachable(
            "That address is this node's own, and no node is running here.",
            advice="Start it with `potluck listen`, or ping another node.",
        )
    return own


def membership_of(configuration: Configuration, identity: Identity) -> Membership | None:
    """The membership to ping with, if this machine's own identity is used."""
    from node.core.key_file import load_identity

    if not configuration.places.pass_file.exists():
        return None
    own = load_identity(configuration.key_file)
    if own is None or own.peer_id != identity.peer_id:
        return None
    from node.core.access.membership import open_membership

    return open_membership(configuration, own)
