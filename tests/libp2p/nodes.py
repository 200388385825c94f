"""Real networks on loopback for the tests, and what they leave behind if they leak."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from node.net.network import Libp2pNetwork, Libp2pSettings, open_libp2p_network
from protocols.identity import Identity
from protocols.network import Stream

LOOPBACK = Libp2pSettings(listen_addresses=("/ip4/127.0.0.1/tcp/0",))


@asynccontextmanager
async def networks(
    count: int, settings: Libp2pSettings = LOOPBACK
) -> AsyncIterator[list[Libp2pNetwork]]:
    """That many networks which know one another's addresses."""
    async with AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(open_libp2p_network(Identity.generate(), settings))
            for _ in range(count)
        ]
        for one in made:
            for other in made:
                if one is not other:
                    one.learn_addresses(other.peer_id, other.addresses())
        yield made


async def echo(stream: Stream) -> None:
    """A handler that sends back what it reads."""
    while chunk := await stream.receive_some():
        await stream.send_all(chunk)


async def read_to_end(stream: Stream) -> bytes:
    collected = bytearray()
    while chunk := await stream.receive_some():
        collected += chunk
    return bytes(collected)


def open_descriptors() -> int:
    """File descriptors of this process; what only the collector holds is not counted."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def running_tasks() -> int:
    """Tasks of this trio run."""
    return trio.lowlevel.current_statistics().tasks_living
