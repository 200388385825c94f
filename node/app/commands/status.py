"""`potluck status`: the state of the node that runs on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output, as_json

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.parser import positive_seconds

    parser = subparsers.add_parser(
        "status",
        help="show the state of the running node",
        description="Show the state of the node that runs in this home. Exit code 4 if none is "
        "running.",
        example="potluck status\npotluck status --watch\npotluck status --json --watch",
    )
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between two answers with --watch (1)",
    )


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.core.control_client import ANSWER_SECONDS, ask, ask_once

    output = Output.of(arguments)
    socket = configuration_for(arguments).places.control_socket
    if not arguments.watch:
        _show(ask_once(socket, "status"), output)
        return 0
    every = {"every_seconds": arguments.interval}
    patience = arguments.interval + ANSWER_SECONDS
    with ask(socket, "status", every, silence_seconds=patience) as statuses:
        if output.json:
            for status in statuses:
                _show(status, output)
        else:
            from node.app.views.status_view import watch

            watch(statuses)
    return 0


def _show(status: dict[str, Any], output: Output) -> None:
    if output.json:
        print(as_json(status), flush=True)
        return
    from node.app.views.status_view import show

    show(status)
