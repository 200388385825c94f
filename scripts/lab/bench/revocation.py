"""`scripts/bench revocation`: the time from a moderator's Enter until every peer refuses the
revoked.

A real auth server in a process of its own (HTTP on loopback: TLS is not what is measured), a swarm
of real nodes, each with a login of its own, and outlaws: members that take no notice of being
revoked and go on asking everybody. Each outlaw is revoked with `potluck auth revoke`, as a person
types it; the clock starts before that command does. First some while the server runs, which the
nodes poll; then others while it is stopped: the command works on the database, and the list
reaches the nodes through the directory alone.

The figures are over all pairs of an outlaw and a node. Up to sixteen nodes four share a process
(each with its own network, port, identity, home and control socket).

The command takes a second to start. That is in the figure, because the moderator waits for it, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from auth.invites import Invite, write_invite
from lab import Talk
from lab.bench.command import report
from lab.bench.machine import machine_facts
from lab.bench.processes import BenchFailed, BenchProcess, open_process
from node.app.demo import free_port
from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers

RUN = "bench"
NODES_PER_PROCESS = 4
REFUSED_WITHIN_SECONDS = 120.0  # twice the bar; after that a node was not reached
COMMAND_SECONDS = 60.0
BOOTSTRAP_PEERS = 2
LOGINS = 1000  # more nodes than any machine can run; uses of the one code that all have


@dataclass(frozen=True)
class RevocationEffort:
    """How much is measured."""

    nodes: int = 16
    outlaws: int = 2  # with the server up, and as many with it down

    @staticmethod
    def quick(nodes: int) -> RevocationEffort:
        return RevocationEffort(nodes=min(nodes, 6), outlaws=1)


async def measure_revocation(
    effort: RevocationEffort, say: Talk = lambda _line: None
) -> dict[str, Any]:
    """The figures, their spread, and what they were measured on."""
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="potluck-bench-")))
        server = _AuthServer(folder / "server")
        await server.make()
        await stack.enter_async_context(server.running())
        say(f"{effort.nodes} nodes log in and join")
        swarm = await _Swarm.start(stack, server, folder, effort)
        up, down = [], []
        for number in range(effort.outlaws):
            say(f"revoking with the server up, {number + 1} of {effort.outlaws}")
            up.append(await swarm.revoke_one(server, f"up{number}"))
        outlaws = [await swarm.add_outlaw(server, f"down{n}") for n in range(effort.outlaws)]
        await server.stop(list(swarm.peers.values()))
        for number, outlaw in enumerate(outlaws):
            say(f"revoking with the server down, {number + 1} of {effort.outlaws}")
            down.append(await swarm.revoke(server, outlaw))
    return {
        "revocation_seconds_p95": _p95(up),
        "revocation_seconds_server_down_p95": _p95(down),
        "refused_as_revoked_share": _share_with_reason([*up, *down]),
        "nodes": effort.nodes,
        "outlaws": 2 * effort.outlaws,
        "processes": swarm.process_count,
        "spread": {
            "revocation_seconds": _spread(up),
            "revocation_seconds_server_down": _spread(down),
        },
        "machine": machine_facts(),
        "seconds": round(time.monotonic() - began, 1),
    }


@dataclass(frozen=True)
class _Refusals:
    """After how many seconds each peer refused one outlaw, and whether it said why."""

    seconds: list[float]
    said_revoked: list[bool]


@dataclass(frozen=True)
class _Outlaw:
    name: str
    process: BenchProcess


class _Swarm:
    """The nodes, over their processes."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.peers: dict[str, str] = {}  # address by peer
        self.process_count = 0
        self._folder = folder
        self._stack = stack

    @staticmethod
    async def start(
        stack: AsyncExitStack, server: _AuthServer, folder: Path, effort: RevocationEffort
    ) -> _Swarm:
        swarm = _Swarm(folder, stack)
        processes = [
            await swarm.open_process() for _ in range(-(-effort.nodes // NODES_PER_PROCESS))
        ]
        invite = await server.invite(uses=LOGINS)
        for number in range(effort.nodes):
            joined = await processes[number % len(processes)].ask(
                "join",
                home=str(folder / f"node{number}"),
                invite=invite,
                bootstrap=list(swarm.peers.values())[:BOOTSTRAP_PEERS],
            )
            swarm.peers[joined["peer"]] = joined["address"]
        return swarm

    async def open_process(self) -> BenchProcess:
        self.process_count += 1
        return await self._stack.enter_async_context(
            open_process(f"process {self.process_count}", ["-m", "lab.bench.revocation_peer"])
        )

    async def add_outlaw(self, server: _AuthServer, name: str) -> _Outlaw:
        """A member that every node answers."""
        outlaw = _Outlaw(name, await self.open_process())
        await outlaw.process.ask(
            "become_outlaw",
            home=str(self._folder / name),
            invite=await server.invite(name=name),
            peers=self.peers,
        )
        return outlaw

    async def revoke_one(self, server: _AuthServer, name: str) -> _Refusals:
        return await self.revoke(server, await self.add_outlaw(server, name))

    async def revoke(self, server: _AuthServer, outlaw: _Outlaw) -> _Refusals:
        """Revoke an outlaw. Returns the answers that it gets from then on."""
        answer: dict[str, Any] = {}

        async def ask() -> None:
            answer.update(
                await outlaw.process.ask(
                    "ping_until_refused",
                    peers=list(self.peers),
                    seconds=REFUSED_WITHIN_SECONDS,
                )
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            began = time.monotonic()
            await server.command("auth", "revoke", f"code:{outlaw.name}")
        refused: Mapping[str, Any] = answer["refused"]
        if len(refused) < len(self.peers):
            raise BenchFailed(
                f"{len(self.peers) - len(refused)} of {len(self.peers)} nodes still answer "
                f"{outlaw.name} after {REFUSED_WITHIN_SECONDS:g} seconds."
            )
        return _Refusals(
            [one["at"] - began for one in refused.values()],
            ["revoked" in one["reasons"] for one in refused.values()],
        )


class _AuthServer:
    """An auth server in a home of its own."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._port = free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._fingerprint = ""
        self._process: trio.Process | None = None

    async def make(self) -> None:
        self._home.mkdir(parents=True)
        self._write_settings([])
        self._fingerprint = (await self.command("auth", "init"))["fingerprint"]

    def _write_settings(self, endpoints: list[str]) -> None:
        """Every node is at one address here, so the limits for an address are out of the way."""
        (self._home / "auth.toml").write_text(
            f'run = "{RUN}"\npublic_url = "{self._url}"\nendpoints = {json.dumps(endpoints)}\n'
            f'[server]\nlisten = ["127.0.0.1:{self._port}"]\n'
            "[limits]\nrequests_per_minute_per_address = 100000\n"
            "logins_per_hour_per_address = 100000\n"
            '[[provider]]\nid = "code"\nkind = "code"\n'
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """It serves until it is stopped, or the block is left."""
        words = ["-m", "node", "auth", "serve", "--insecure-http", "--json"]
        self._process = await trio.lowlevel.open_process(
            [sys.executable, *words, "--home", str(self._home)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert self._process.stdout is not None
            with trio.fail_after(COMMAND_SECONDS):
                if not await self._process.stdout.receive_some():
                    raise BenchFailed("The auth server did not start.")
            yield
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def stop(self, endpoints: list[str]) -> None:
        """End it. Where nodes can be met is written down, as a moderator would have done."""
        self._write_settings(endpoints[:BOOTSTRAP_PEERS])
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()

    async def invite(self, *, name: str = "", uses: int = 1) -> str:
        """An invite with a code in it."""
        words = ["auth", "codes", "new", "--uses", str(uses)]
        code = await self.command(*words, *(["--name", name] if name else []))
        return write_invite(Invite(RUN, (), self._url, self._fingerprint, code["code"]))

    async def command(self, *words: str) -> dict[str, Any]:
        """Run a moderator's command as a process of its own, and return its answer."""
        with trio.fail_after(COMMAND_SECONDS):
            done = await trio.run_process(
                [sys.executable, "-m", "node", *words, "--json", "--home", str(self._home)],
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
        if done.returncode:
            raise BenchFailed(
                f"`potluck {' '.join(words)}` ended with exit code {done.returncode}.",
                why=(done.stdout + done.stderr).decode(errors="replace")[-500:],
            )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def _p95(refusals: list[_Refusals]) -> float:
    ordered = sorted(seconds for one in refusals for seconds in one.seconds)
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2)


def _share_with_reason(refusals: list[_Refusals]) -> float:
    said = [each for one in refusals for each in one.said_revoked]
    return round(sum(said) / len(said), 3)


def _spread(refusals: list[_Refusals]) -> dict[str, float]:
    ordered = sorted(seconds for one in refusals for seconds in one.seconds)
    middle = statistics.median(ordered)
    values = {"min": ordered[0], "p50": middle, "p95": _p95(refusals), "max": ordered[-1]}
    return {name: round(value, 2) for name, value in values.items()}


# Flags and output


def add_parser(kinds: Subparsers) -> None:
    from node.app.cli.parser import add_flag, positive_count

    parser = kinds.add_parser(
        "revocation",
        help="how long it takes until every peer refuses a revoked member",
        description="Start an auth server and a swarm of real nodes on this machine, and let in "
        "members that ignore a revocation. Revoke them with `potluck auth revoke`, "
        "and measure the time from the start of that command until every node "
        "refuses them.\n\n"
        "  revocation_seconds_p95              with the auth server up\n"
        "  revocation_seconds_server_down_p95  with it stopped: through the "
        "directory only\n\n"
        "Four nodes share a process.",
        example="scripts/bench revocation --json\nscripts/bench revocation --quick",
    )
    parser.set_defaults(measure=run)
    outlaws = "how many members are revoked with the server up, and again with it down"
    add_flag(parser, "--nodes", positive_count, 16, "how many nodes")
    add_flag(parser, "--outlaws", positive_count, 2, outlaws)
    parser.add_argument("--quick", action="store_true", help="six nodes, one outlaw of each kind")


def run(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 2:
        raise WrongUse("A swarm has two nodes at least.", advice="Take --nodes 2 or more.")
    effort = RevocationEffort(arguments.nodes, arguments.outlaws)
    if arguments.quick:
        effort = RevocationEffort.quick(arguments.nodes)

    return report(arguments, partial(measure_revocation, effort), _lines)


def _lines(result: dict[str, Any]) -> str:
    lines = []
    for name in ("revocation_seconds", "revocation_seconds_server_down"):
        spread = result["spread"][name]
        lines.append(
            f"{name + '_p95':36}{result[name + '_p95']:>8.2f}"
            f"  ({spread['min']:.2f} to {spread['max']:.2f}, half within {spread['p50']:.2f})"
        )
    lines.append(
        f"{result['outlaws']} revoked, {result['nodes']} nodes in {result['processes']} processes"
    )
    return "\n".join(lines)
