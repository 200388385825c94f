"""`potluck listen`: a bare node in the foreground, for trying things out. Ctrl-C ends it.

It answers pings, and tells of every link that comes, changes or goes. The lines are rendered from
the network's own typed events.

Easy to get wrong: whoever reads our output may stop reading (a paused terminal, a full pipe). A
plain `print` would then stop the node with it. Lines therefore go through a bounded queue to a
thread, and are counted and dropped when it is full.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.commands.output import Output

if TYPE_CHECKING:
    from node.commands.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.commands.configured import add_setting_flag

    parser = subparsers.add_parser(
        "listen",
        help="run a bare node that others can ping",
        description="Run a bare node in the foreground: it prints its addresses ready to paste, "
        "answers pings, and tells of its connections. Ctrl-C ends it (exit code 130); SIGTERM "
        "does, too (exit code 0, so that systemd is content).",
        example="potluck listen\npotluck listen --listen /ip4/0.0.0.0/tcp/4001 "
        "--announce /dns4/node.example/tcp/4001",
    )
    for key in (
        "network.listen",
        "network.announce",
        "network.dial_seconds",
        "network.inbound_connections",
        "network.inbound_connections_per_address",
        "identity.key_file",
    ):
        add_setting_flag(parser, key)


def run(arguments: argparse.Namespace) -> int:
    from node.commands.configured import configuration_for

    configuration = configuration_for(arguments)

    from node.commands.exit_codes import DONE
    from node.commands.interruption import run_until_signal
    from node.commands.listening import listen

    output = Output.of(arguments)
    return run_until_signal(lambda: listen(configuration, output), terminated=DONE)
