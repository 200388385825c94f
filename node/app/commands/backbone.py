"""`potluck backbone`: an organiser's peer that keeps a run alive, and can be monitored.

It is `potluck run start --keep-only` with an HTTP face: others join at it, it keeps checkpoints,
helps to average and brings no samples; `/metrics` and `/healthz` report its state.

The HTTP face comes up before the run is entered, which can take long if a large state has to be
read. A health check then gets a 503 with the reason, and not silence.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.app.commands.line_queue import LineQueue
    from node.app.commands.parser import Subparsers
    from node.core.node import Node
    from node.training.session import TrainingSession

DEFAULT_HTTP = "127.0.0.1:8481"  # a first auth server is at 8480


def add_parser(subparsers: Subparsers) -> None:
    from node.app.commands.run import add_folder
    from node.app.commands.run_start import add_flags

    parser = subparsers.add_parser(
        "backbone",
        help="keep a run alive: a peer to join through, its checkpoints, /metrics and /healthz",
        description="Run an organiser's peer that computes no samples: others join through it, and "
        "it keeps the run's checkpoints in DIR/checkpoints, helps to average, and serves the state "
        "to newcomers. It does all that `potluck run start DIR --keep-only` does, and answers over "
        "HTTP: /metrics for Prometheus, and /healthz with 200 while it listens, has joined and "
        "writes checkpoints, otherwise with 503 and the reasons. See docs/backbone.md.\n\n"
        "DIR is the organiser's folder or a copy of it (run.toml and run.signed). This peer does "
        "not need the organiser's key.\n\n"
        "/metrics and /healthz have no password, and answer only this machine unless --http names "
        "another address. Ctrl-C writes a last checkpoint and leaves.",
        example="potluck backbone poem\n"
        "potluck backbone poem --listen /ip4/0.0.0.0/tcp/4001 --http 127.0.0.1:9100\n"
        "curl -s http://127.0.0.1:8481/healthz",
    )
    add_folder(parser)
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_HTTP,
        help=f"the address of /metrics and /healthz ({DEFAULT_HTTP}); a port of 0 is any that is "
        "free",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    import time
    from pathlib import Path

    import trio

    from node.app.backbone import BackboneRecord
    from node.app.commands.run_start import start_peer
    from node.app.listen_flag import listen_flag
    from node.run.definition import read_definition
    from node.run.folder import RunFolder

    address = listen_flag("--http", arguments.http)
    folder = RunFolder(Path(arguments.folder).expanduser().absolute())
    every_seconds = read_definition(folder.text()).checkpoints.every_seconds
    record = BackboneRecord(checkpoint_seconds=every_seconds, clock=time.monotonic)

    async def serve(node: Node, session: TrainingSession, lines: LineQueue) -> None:
        from node.app.backbone import BackboneHealth, serve_backbone

        def listening(url: str) -> None:
            lines.data(
                {"event": "serving_http", "url": url},
                f"{url}/metrics and {url}/healthz show the state of this peer",
            )

        def ailing(troubles: tuple[str, ...]) -> None:
            session.troubles = troubles
            session.changed()

        session.follow(record.take)
        health = BackboneHealth(record, node.status, folder.trouble)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(health.watch, ailing)
            await serve_backbone(address, health, session.view, listening)

    return start_peer(arguments, "potluck backbone", keeps_only=True, beside=serve)
