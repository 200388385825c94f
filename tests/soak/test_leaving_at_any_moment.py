"""Ctrl-C at a hundred moments of a start, of calls and of a transfer. (F22)

The short form of this is tests/processes/test_leaving.py.

Easy to get wrong: moments that are evenly spread on the clock are not evenly spread over what a
process does. Each sweep therefore covers the time that its process needs on this machine.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.processes.children import Child, PeerProcess, running_peer
from tests.processes.commands import (
    SIGNALS,
    leaves_in_time,
    nothing_on_disk_but_a_key,
    running_command,
    running_listener,
)

MOMENTS: Final = 100
LISTEN: Final = ("listen", "--json", "--listen", "/ip4/127.0.0.1/tcp/0")
PINGS: Final = 20


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS)
async def test_a_hundred_moments_of_a_start(tmp_path: Path, number: signal.Signals) -> None:
    """F22"""
    began_at = trio.current_time()
    measured = folder(tmp_path, "measured")
    async with running_listener(measured):
        start_seconds = trio.current_time() - began_at
    for moment in range(MOMENTS):
        place = folder(tmp_path, str(moment))
        async with running_command(place, *LISTEN) as node:
            await trio.sleep(1.2 * start_seconds * moment / MOMENTS)
            await leaves_in_time(node, number)
        nothing_on_disk_but_a_key(place)


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS)
async def test_a_hundred_moments_of_a_caller(tmp_path: Path, number: signal.Signals) -> None:
    """F22: its start, its dial, its calls."""
    async with running_peer() as other:
        began_at = trio.current_time()
        async with pinging(folder(tmp_path, "measured"), other) as caller:
            for _ in range(PINGS):
                await caller.read_line()
            whole_seconds = trio.current_time() - began_at
        for moment in range(MOMENTS):
            place = folder(tmp_path, str(moment))
            async with pinging(place, other) as caller, trio.open_nursery() as nursery:
                nursery.start_soon(caller.read_rest)
                await trio.sleep(whole_seconds * moment / MOMENTS)
                await leaves_in_time(caller, number)
            nothing_on_disk_but_a_key(place)


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGNALS)
async def test_a_hundred_moments_of_a_transfer(tmp_path: Path, number: signal.Signals) -> None:
    """F22: from before the first byte to when nothing more fits between the two."""
    for moment in range(MOMENTS):
        place = folder(tmp_path, str(moment))
        async with (
            running_listener(place) as node,
            running_peer("--exchange-with", node.addresses[0]),
        ):
            await trio.sleep(0.5 * moment / MOMENTS)
            await leaves_in_time(node, number)
        nothing_on_disk_but_a_key(place)


@asynccontextmanager
async def pinging(place: Path, other: PeerProcess) -> AsyncIterator[Child]:
    arguments = ("ping", "--count", "100000", "--interval", "0.001", other.addresses[0])
    async with running_command(place, *arguments) as caller:
        yield caller


def folder(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made
