"""`potluck listen`: a bare node in the foreground, for trying things out. Ctrl-C ends it.

Its work is in node/app/link_report.py; here are its flags.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag

    parser = subparsers.add_parser(
        "listen",
        help="run a node that does not train",
        description="Run a node that does not train, in the foreground. It prints its addresses "
        "ready to paste, joins the swarm, keeps its share of the directory, answers pings, and "
        "reports its connections. Without --bootstrap it joins through the nodes that it knows "
        "from before; if it knows none, it waits for others. Ctrl-C ends it (exit code 130), and "
        "so does SIGTERM (exit code 0, as systemd expects).",
        example="potluck listen\npotluck listen --listen /ip4/0.0.0.0/tcp/4001 "
        "--announce /dns4/node.example/tcp/4001\n"
        "potluck listen --bootstrap /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…",
    )
    for key in (
        "network.listen",
        "network.announce",
        "network.dial_seconds",
        "network.inbound_connections",
        "network.inbound_connections_per_address",
        "dht.bootstrap",
        "dht.client",
        "dht.keep_slots",
        "identity.key_file",
        "limits.upload_limit",
        "limits.download_limit",
    ):
        add_setting_flag(parser, key)


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for

    configuration = configuration_for(arguments)

    from node.app.cli.exit_codes import DONE
    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.app.link_report import listen
    from node.core.descriptor_limit import raise_descriptor_limit

    output = Output.of(arguments)
    log_to_stderr(debug=output.debug)
    raise_descriptor_limit()
    return run_until_signal(lambda: listen(configuration, output), terminated=DONE)
