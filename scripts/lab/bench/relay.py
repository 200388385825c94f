"""`scripts/bench relay`: what a relay costs that carries many circuits.

The relay is a whole node in a process of its own, as `potluck backbone --relay-only` runs it. Two
other processes hold nodes that nobody can dial: one takes places at the relay, the other one dials
each of them through it. Then nothing is sent for a while, and then all circuits together send at
one rate.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any, Final

import trio

from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed, open_process

if TYPE_CHECKING:
    from node.app.commands.parser import Subparsers

CIRCUITS: Final = 100
RATE: Final = 50e6
IDLE_SECONDS: Final = 10.0
POUR_SECONDS: Final = 10.0
MOST_MEMORY_BYTES: Final = 200e6
MOST_IDLE_CORES: Final = 0.5
LEAST_SHARE_OF_RATE: Final = 0.95
LIMITS: Final = (
    "reservations=1000, reservations-per-site=1000, circuits=1000, circuits-per-peer=1000, "
    "circuit-rate=none"
)


def add_parser(kinds: Subparsers) -> None:
    from node.app.commands.parser import positive_count

    parser = kinds.add_parser(
        "relay",
        help="memory and processor time of a relay with many circuits",
        description="Start a relay, take places at it, connect as many pairs of nodes through it, "
        "and send 50 MB/s over all circuits together. Exit code 1 if the relay takes over 200 MB, "
        "or half a core while nothing is sent.",
        example="scripts/bench relay\nscripts/bench relay --circuits 20 --json",
    )
    parser.add_argument(
        "--circuits",
        type=positive_count,
        default=CIRCUITS,
        metavar="N",
        help=f"places and circuits ({CIRCUITS})",
    )
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    async def measure(talk: Talk) -> dict[str, Any]:
        return await measure_relay(arguments.circuits, talk)

    return report(arguments, measure, lines)


async def measure_relay(
    circuits: int, talk: Talk, *, idle_seconds: float = IDLE_SECONDS
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        home = trio.Path(folder, "relay")
        await home.mkdir()
        settings = f'[relay]\nserve = true\nlimits = "{LIMITS}"\n'
        await (home / "potluck.toml").write_text(settings)
        count = str(circuits)
        async with open_process("relay", ["-m", "lab.bench.nat_peer", str(home), "0"]) as relay:
            address = (await relay.ask("mode"))["addresses"][-1]
            clients = ["-m", "lab.bench.relay_peer", count, address]
            async with (
                open_process("those that are dialled", clients) as far,
                open_process("those that dial", clients) as near,
            ):
                talk(f"{circuits} places, and {circuits} circuits")
                reached = (await far.ask("reserve"))["addresses"]
                relayed = (await near.ask("dial", addresses=reached))["relayed"]
                if relayed != circuits:
                    raise BenchFailed(f"Only {relayed} of {circuits} links are relayed.")
                idle = (await relay.ask("used"))["cpu_seconds"]
                await trio.sleep(idle_seconds)
                idle_cores = ((await relay.ask("used"))["cpu_seconds"] - idle) / idle_seconds
                talk("50 MB/s over all of them")
                before = (await relay.ask("used"))["cpu_seconds"]
                poured = await near.ask("pour", bytes_per_second=RATE, seconds=POUR_SECONDS)
                after = await relay.ask("used")
                used, memory = after["cpu_seconds"] - before, after["memory_bytes"]
    rate = poured["bytes"] / poured["seconds"]
    return {
        "circuits": circuits,
        "memory_bytes": memory,
        "idle_cores": round(idle_cores, 3),
        "MB_per_s": round(rate / 1e6, 1),
        "cores": round(used / poured["seconds"], 3),
        "cpu_s_per_GB": round(used / (poured["bytes"] / 1e9), 2),
        "met": memory <= MOST_MEMORY_BYTES
        and idle_cores <= MOST_IDLE_CORES
        and rate >= LEAST_SHARE_OF_RATE * RATE,
        "machine": machine_facts(),
    }


def lines(result: dict[str, Any]) -> str:
    return (
        f"{result['circuits']} places and circuits: {result['memory_bytes'] / 1e6:.0f} MB, "
        f"{result['idle_cores']:g} cores while nothing is sent\n"
        f"{result['MB_per_s']:g} MB/s through it: {result['cores']:g} cores, "
        f"{result['cpu_s_per_GB']:g} CPU seconds for a GB"
    )
