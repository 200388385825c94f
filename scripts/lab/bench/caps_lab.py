"""A run of real `potluck` processes, each in a network of its own, on one bridge.

          organiser's network                     a volunteer's network
    bridge0 (HOST) ═ port1 ═════ cable ═════ eth0, and the loopback
                   ═ port2 ═════ …

Packets on the cables have the size of a provider's, so an interface counts what a provider would.
Everything is set up by the processes that it belongs to, and gone with them.

A volunteer's commands (`potluck pause`) run in the machine's own network: the control socket is a
file, and files are the same in all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from lab.bench.caps_meter import Meter
from lab.bench.processes import BenchFailed, BenchProcess, open_process

HOST: Final = "10.79.0.1"
NET_BITS: Final = 24
PORT: Final = 4001  # in a network of one's own no port is taken
KEEPER: Final = ("-m", "lab.bench.caps_peer")
LOOK_SECONDS: Final = 0.1  # between two looks at what a process has said
COMMAND_SECONDS: Final = 60.0
LINES_SHOWN: Final = 12  # of what a process said last, where something fails

Told = dict[str, Any]


class LabPeer:
    """One `potluck` that trains. `told` is its output, each event with the moment (`at`, of
    time.monotonic) at which it was read."""

    def __init__(self, name: str, folder: Path, keeper: BenchProcess) -> None:
        self.name, self.folder, self.keeper = name, folder, keeper
        self.home = folder / "home"
        self.told: list[Told] = []
        self.meter: Meter | None = None
        self.began_at = 0.0
        self._read = 0

    async def begin(
        self, nursery: trio.Nursery, words: list[str], environment: Mapping[str, str]
    ) -> None:
        """Start it, read what it says, and look at what it uses."""
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.began_at = time.monotonic()
        begun = await self.keeper.ask(
            "begin",
            words=[*words, "--json"],
            environment={"POTLUCK_HOME": str(self.home), **environment},
            folder=str(self.folder),
        )
        self.meter = Meter(begun["process_id"])
        nursery.start_soon(self.meter.run)
        nursery.start_soon(self._follow)

    async def until(
        self, wanted: Callable[[Told], bool], what: str, seconds: float, after: float = 0.0
    ) -> Told:
        """The first wanted event after that moment; BenchFailed without one, and as soon as the
        process has ended with an error."""
        with trio.move_on_after(seconds):
            while True:
                for one in self.told:
                    if one["at"] >= after and wanted(one):
                        return one
                    if "error" in one:
                        raise BenchFailed(f"{self.name} has ended.", why=one["error"]["what"])
                await trio.sleep(LOOK_SECONDS)
        raise BenchFailed(
            f"{self.name} has not {what} within {seconds:g} seconds.",
            why="It said last: " + "; ".join(self.last_words()),
        )

    async def command(self, *words: str) -> Any:
        """The answer of `potluck WORDS --json` in its home."""
        done = await trio.run_process(
            [sys.executable, "-m", "node", *words, "--home", str(self.home), "--json"],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            raise BenchFailed(f"`potluck {' '.join(words)}` failed at {self.name}.", why=text)
        return json.loads(text)

    def last_words(self) -> list[str]:
        errors = self.folder / "errors"
        said = errors.read_text(errors="replace").splitlines() if errors.exists() else []
        return [*(str(one) for one in self.told[-LINES_SHOWN:]), *said[-LINES_SHOWN:]]

    async def _follow(self) -> None:
        """Read its file as it grows."""
        held = b""
        with (self.folder / "told").open("rb") as file:
            while True:
                *lines, held = (held + file.read()).split(b"\n")
                now = time.monotonic()
                self.told += [{"at": now, "event": "", **json.loads(line)} for line in lines]
                await trio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def open_lab(folder: Path, names: tuple[str, ...]) -> AsyncIterator[list[LabPeer]]:
    """A keeper for each name, all on one bridge in the first one's network; not started yet."""
    peers: list[LabPeer] = []
    async with trio.open_nursery() as nursery:
        for name in names:
            place = folder / name
            place.mkdir()
            keeper = await nursery.start(_keep, name)
            await keeper.ask("leave")
            peers.append(LabPeer(name, place, keeper))
        hub, *others = peers
        await hub.keeper.ask("configure", commands=_hub_commands())
        for number, one in enumerate(others, start=2):
            port = _port_commands(number, one.keeper.process_id)
            await hub.keeper.ask("configure", commands=port)
            await one.keeper.ask("configure", commands=_peer_commands(number))
        yield peers
        nursery.cancel_scope.cancel()


async def _keep(name: str, task_status: Any) -> None:
    async with open_process(name, KEEPER) as keeper:
        task_status.started(keeper)
        await trio.sleep_forever()


def _hub_commands() -> list[str]:
    return [
        "ip link set lo up",
        "ip link add bridge0 type bridge",
        f"ip addr add {HOST}/{NET_BITS} dev bridge0",
        "ip link set bridge0 up",
    ]


def _port_commands(number: int, process_id: int) -> list[str]:
    port = f"port{number}"
    return [
        f"ip link add {port} type veth peer name eth0 netns {process_id}",
        f"ip link set {port} gso_max_segs 1 master bridge0 up",
    ]


def _peer_commands(number: int) -> list[str]:
    return [
        "ip link set lo up",
        f"ip addr add {host_of(number)}/{NET_BITS} dev eth0",
        "ip link set eth0 gso_max_segs 1 up",
    ]


def host_of(number: int) -> str:
    """The address of the second, the third, … in the lab."""
    return f"{HOST.rpartition('.')[0]}.{number}"


def listen_on(host: str) -> list[str]:
    return ["--listen", f"/ip4/{host}/tcp/{PORT}"]
