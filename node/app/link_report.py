"""The work of `potluck listen`: it reports links as they come and go.

The lines are made from the network's own typed events, and printed through a queue, so that a
reader who pauses does not stop the node. Its traffic counts against the quota of its home. When the
quota is used up, the node stays part of the swarm, and says so.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import trio

from node.app.cli.interruption import at_hard_exit
from node.app.cli.line_queue import LAST_LINES_SECONDS, LineQueue
from node.app.cli.output import Output
from node.app.views.status_view import in_one_line
from node.core.caps.settings import Caps, caps_of
from node.core.configuration import Configuration
from node.core.node import Node
from node.training.caps_watch import WatchedCaps, open_caps
from node.training.gate import Gate
from protocols.network import LinkEvent, Network, Reach


async def listen(configuration: Configuration, output: Output) -> int:
    """Run a node until cancelled."""
    lines = LineQueue(output)
    node = Node(configuration)
    with at_hard_exit(node.remove_run_files), lines.logging():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lines.run)
            try:
                async with node:
                    await _tell_of_links(node, lines, output)
            finally:
                await lines.finish(LAST_LINES_SECONDS)
    return 0


async def _tell_of_links(node: Node, lines: LineQueue, output: Output) -> None:
    with node.network.link_events() as events:
        introduce(node, lines)
        # Printed even if a program reads stdout: nobody should be in an open run unawares.
        lines.say(in_one_line(node.status().membership))
        if not output.json:
            lines.say("Listening. From another machine: potluck ping ADDRESS. Ctrl-C ends it.")
        async with counted(node, lines):
            async for event in events:
                _tell(event, node.network, lines)


def counted(node: Node, lines: LineQueue) -> AbstractAsyncContextManager[WatchedCaps]:
    """Count the traffic while the block runs. The other caps are about training."""
    quota = Caps(quota_bytes=caps_of(node.configuration).quota_bytes)
    return open_caps(
        quota, Gate(), node.configuration.places, traffic=node.network.traffic, told=lines.say
    )


def introduce(node: Node, lines: LineQueue) -> None:
    """Print the node's addresses, ready to paste."""
    status = node.status()
    started = {
        "event": "started",
        "time": round(time.time(), 3),
        "peer_id": status.peer_id,
        "pid": status.pid,
        "version": status.version,
        "addresses": list(status.addresses),
        "control_socket": str(node.control.path),
        "open_run": status.membership.open,
        "membership": msgspec.to_builtins(status.membership),
    }
    lines.data(started, "\n".join(status.addresses) or f"/p2p/{status.peer_id}")


def _tell(event: LinkEvent, network: Network, lines: LineQueue) -> None:
    link = network.link(event.peer) if event.reach is not Reach.NONE else None
    name = _name_of(event)
    value: dict[str, Any] = {
        "event": name,
        "time": round(time.time(), 3),
        "peer": event.peer,
        "reach": event.reach.value if link is None else link.way,
        "was": event.was.value,
    }
    words = [time.strftime("%H:%M:%S"), name, event.peer]
    if link is not None:
        direction = "in" if link.inbound else "out"
        value |= {"direction": direction, "address": link.remote_address}
        words += [link.way, "from" if link.inbound else "to", link.remote_address]
    lines.data(value, " ".join(words))


def _name_of(event: LinkEvent) -> str:
    if event.was is Reach.NONE:
        return "connected"
    return "disconnected" if event.reach is Reach.NONE else "changed"
