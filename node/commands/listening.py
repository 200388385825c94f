"""What `potluck listen` does while it runs: tell of the links, as they come and go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import trio

from node.commands.interruption import at_hard_exit
from node.commands.output import Output
from node.configuration import Configuration
from node.node import Node
from protocols.network import LinkEvent, Network, Reach

# A reader that pauses misses nothing for this many events; one that never comes back costs 1 MB.
EVENTS_IN_QUEUE = 1_000

Line = tuple[Mapping[str, Any], str]


async def listen(configuration: Configuration, output: Output) -> int:
    """Run a node until cancelled."""
    node = Node(configuration)
    with at_hard_exit(node.remove_run_files):
        async with node:
            with node.network.link_events() as events:
                _introduce(node, output)
                lines, to_print = trio.open_memory_channel[Line](EVENTS_IN_QUEUE)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_print_lines, to_print, output)
                    dropped = 0
                    async for event in events:
                        line = _line_of(event, node.network, dropped)
                        try:
                            lines.send_nowait(line)
                            dropped = 0
                        except trio.WouldBlock:
                            dropped += 1
    return 0


def _introduce(node: Node, output: Output) -> None:
    status = node.status()
    started = {
        "event": "started",
        "time": round(time.time(), 3),
        "peer_id": status.peer_id,
        "pid": status.pid,
        "version": status.version,
        "addresses": list(status.addresses),
        "control_socket": str(node.control.path),
    }
    output.data(started, "\n".join(status.addresses) or f"/p2p/{status.peer_id}")
    if not output.json:
        output.say("Listening. From another machine: potluck ping ADDRESS. Ctrl-C ends it.")


async def _print_lines(lines: trio.MemoryReceiveChannel[Line], output: Output) -> None:
    async for value, text in lines:
        # Abandoned on Ctrl-C: the thread may be waiting for a reader that never reads again.
        await trio.to_thread.run_sync(
            output.data,
            value,
            text,
            abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
        )


def _line_of(event: LinkEvent, network: Network, dropped: int) -> Line:
    link = network.link(event.peer) if event.reach is not Reach.NONE else None
    name = _name_of(event)
    value: dict[str, Any] = {
        "event": name,
        "time": round(time.time(), 3),
        "peer": event.peer,
        "reach": event.reach.value,
        "was": event.was.value,
    }
    words = [time.strftime("%H:%M:%S"), name, event.peer]
    if link is not None:
        direction = "in" if link.inbound else "out"
        value |= {"direction": direction, "address": link.remote_address}
        words += [event.reach.value, "from" if link.inbound else "to", link.remote_address]
    if dropped:
        value["dropped_before"] = dropped
        words.append(f"({dropped} lines before this were not printed in time)")
    return value, " ".join(words)


def _name_of(event: LinkEvent) -> str:
    if event.was is Reach.NONE:
        return "connected"
    return "disconnected" if event.reach is Reach.NONE else "changed"
