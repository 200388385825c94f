"""`scripts/bench relay`: what a relay costs that carries many circuits.

The relay is a whole node in a process of its own, as `potluck backbone --relay-only` runs it. Two
other processes hold nodes that nobody can dial: one takes places at the relay, the other one dials
each of them through it. Then nothing is sent for a while, and then all circuits together send at
one rate.

`--beside` names a p2pd, go-libp2p's daemon, as hivemind's wheel brings it. It then relays the same
load for the same nodes. Beside the relay with the limits of its flags p2pd starts one with
go-libp2p's own, and which of the two answers is a matter of luck. So it is started until one
carries more than the 128 KiB of the latter.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import START_SECONDS, BenchFailed, open_process

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

CIRCUITS: Final = 100
RATE: Final = 50e6
IDLE_SECONDS: Final = 10.0
POUR_SECONDS: Final = 10.0
WARM_UP_SECONDS: Final = 1.0
MOST_STARTS: Final = 20  # of p2pd; about one in six is lucky
MOST_MEMORY_BYTES: Final = 200e6
MOST_IDLE_CORES: Final = 0.5
LEAST_SHARE_OF_RATE: Final = 0.95
LIMITS: Final = (
    "reservations=1000, reservations-per-site=1000, circuits=1000, circuits-per-peer=1000, "
    "circuit-rate=none"
)


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import positive_count

    parser = kinds.add_parser(
        "relay",
        help="memory and processor time of a relay with many circuits",
        description="Start a relay, take places at it, connect as many pairs of nodes through it, "
        "and send 50 MB/s over all circuits together. Exit code 1 if the relay takes over 200 MB, "
        "or half a core while nothing is sent.",
        example="scripts/bench relay\nscripts/bench relay --circuits 20 --json\n"
        "scripts/bench relay --circuits 8 --beside ./p2pd",
    )
    parser.add_argument(
        "--circuits",
        type=positive_count,
        default=CIRCUITS,
        metavar="N",
        help=f"places and circuits ({CIRCUITS})",
    )
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="PROGRAM",
        help="afterwards let this p2pd relay the same; it takes up to 8 circuits from one machine",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        return await measure_relay(arguments.circuits, talk, beside=arguments.beside)

    return report(arguments, measure, lines)


async def measure_relay(circuits: int, talk: Talk, *, beside: Path | None = None) -> dict[str, Any]:
    async with _our_relay() as relay:
        ours = await _load(relay, circuits, talk)
    theirs = await _p2pd_loaded(beside, circuits, talk) if beside else None
    return {
        "circuits": circuits,
        **ours,
        "beside": theirs,
        "met": ours["memory_bytes"] <= MOST_MEMORY_BYTES
        and ours["idle_cores"] <= MOST_IDLE_CORES
        and ours["MB_per_s"] >= LEAST_SHARE_OF_RATE * RATE / 1e6,
        "machine": machine_facts(),
    }


@dataclass(frozen=True)
class RunningRelay:
    """Where a relay is reached, and how its processor seconds and its memory are read."""

    address: str
    used: Callable[[], Awaitable[dict[str, Any]]]


async def _load(relay: RunningRelay, circuits: int, talk: Talk) -> dict[str, Any]:
    """What the relay needs for the circuits, while nothing and while much is sent."""
    clients = ["-m", "lab.bench.relay_peer", str(circuits), relay.address]
    async with (
        open_process("those that are dialled", clients) as far,
        open_process("those that dial", clients) as near,
    ):
        talk(f"{circuits} places, and {circuits} circuits")
        reached = (await far.ask("reserve"))["addresses"]
        relayed = (await near.ask("dial", addresses=reached))["relayed"]
        if relayed != circuits:
            raise BenchFailed(f"Only {relayed} of {circuits} links are relayed.")
        await near.ask("pour", bytes_per_second=RATE, seconds=WARM_UP_SECONDS)
        before = await relay.used()
        await trio.sleep(IDLE_SECONDS)
        idle = await relay.used()
        talk("50 MB/s over all of them")
        poured = await near.ask("pour", bytes_per_second=RATE, seconds=POUR_SECONDS)
        after = await relay.used()
    used = after["cpu_seconds"] - idle["cpu_seconds"]
    return {
        "memory_bytes": after["memory_bytes"],
        "idle_cores": round((idle["cpu_seconds"] - before["cpu_seconds"]) / IDLE_SECONDS, 3),
        "MB_per_s": round(poured["bytes"] / poured["seconds"] / 1e6, 1),
        "cores": round(used / poured["seconds"], 3),
        "cpu_s_per_GB": round(used / (poured["bytes"] / 1e9), 2),
    }


@asynccontextmanager
async def _our_relay() -> AsyncIterator[RunningRelay]:
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        home = trio.Path(folder, "relay")
        await home.mkdir()
        settings = f'[relay]\nserve = true\nlimits = "{LIMITS}"\n'
        await (home / "potluck.toml").write_text(settings)
        async with open_process("relay", ["-m", "lab.bench.nat_peer", str(home), "0"]) as relay:
            reached_at = (await relay.ask("mode"))["addresses"]
            address = next(one for one in reached_at if one.startswith("/ip4/127."))
            yield RunningRelay(address, lambda: relay.ask("used"))


async def _p2pd_loaded(program: Path, circuits: int, talk: Talk) -> dict[str, Any]:
    for _ in range(MOST_STARTS):
        async with _p2pd(program, circuits) as relay:
            try:
                return await _load(relay, circuits, talk)
            except BenchFailed as error:
                talk(f"{program.name} does not carry the load, and is started anew: {error}")
    raise BenchFailed(
        f"{program} did not relay.",
        why=f"Of {MOST_STARTS} starts none carried the load. For peers of one address it has few "
        "places.",
        advice="Take up to 8 circuits, and try again.",
    )


@asynccontextmanager
async def _p2pd(program: Path, circuits: int) -> AsyncIterator[RunningRelay]:
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        command = [
            str(program),
            f"-listen=/unix{folder}/control",
            "-hostAddrs=/ip4/127.0.0.1/tcp/0",
            # TCP, Noise and Yamux, as we
            *("-quic=false", "-tls=false"),
            *("-relay=true", "-relayService=true", "-forceReachabilityPublic"),
            *(f"-relayMaxCircuits={circuits}", f"-relayMaxReservations={circuits}"),
        ]
        try:
            process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        except OSError as error:
            raise BenchFailed(
                f"{program} cannot be started.",
                why=str(error),
                advice="hivemind's wheel for Linux has it, as hivemind/hivemind_cli/p2pd.",
            ) from error
        try:
            yield RunningRelay(await _p2pd_address(process), partial(_used_by, process.pid))
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def _p2pd_address(process: trio.Process) -> str:
    """Of what it prints: Peer ID: ID, and below Peer Addrs: its addresses."""
    assert process.stdout is not None
    printed = b""
    with trio.move_on_after(START_SECONDS):
        async for data in process.stdout:
            printed += data
            found = re.search(rb"Peer ID: (\w+)\nPeer Addrs:\n(/ip4/\S+)\n", printed)
            if found:
                return f"{found[2].decode()}/p2p/{found[1].decode()}"
    raise BenchFailed("The program beside is no p2pd.", why=f"It printed {printed[:200]!r}.")


async def _used_by(process_id: int) -> dict[str, Any]:
    await trio.lowlevel.checkpoint()
    place = Path("/proc", str(process_id))
    # proc_pid_stat(5): utime and stime are the 14th and 15th field, and the 2nd may hold spaces
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int((place / "statm").read_text().split()[1])
    return {
        "cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def lines(result: dict[str, Any]) -> str:
    """For people."""
    told = f"{result['circuits']} places and circuits: {_line(result)}"
    if result["beside"]:
        told += f"\nthe other relay, for the same load: {_line(result['beside'])}"
    return told


def _line(one: dict[str, Any]) -> str:
    return (
        f"{one['memory_bytes'] / 1e6:.0f} MB, {one['idle_cores']:g} cores while nothing is sent\n"
        f"{one['MB_per_s']:g} MB/s through it: {one['cores']:g} cores, "
        f"{one['cpu_s_per_GB']:g} CPU seconds for a GB"
    )
