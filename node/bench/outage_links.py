"""Volunteers on cables of their own, that can be pulled, made to swallow, and plugged in elsewhere.

    hub (organiser, auth server)  10.78.0.1  ══ bridge ══╦═ cable ═ eth0 of ann   10.78.1.1
                                                         ╚═ cable ═ eth0 of cleo  10.78.1.2

    async with open_cables(("ann", "cleo")) as cables:
        run.join("cleo", code, place=cables.place_of("cleo"))
        await cables.pull("cleo")               # its interface is down, as in a plane
        await cables.swallow("cleo")            # it looks up, and nothing arrives anywhere
        await cables.plug("cleo")               # as it was
        await cables.move("cleo")               # another address, as in another house

Each network belongs to a process that does nothing but hold it, and ends with its stdin; it, its
cable and whatever was changed are gone with that. No interface of this machine is touched.

Easy to get wrong: a cable that is pulled is noticed by the kernel, which then refuses to send. One
that swallows is not noticed by anybody but those who wait for an answer.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from node.bench.closed_run import Place
from node.bench.own_network import NoOwnNetwork, check_own_networks
from node.bench.processes import BenchFailed

HUB: Final = "10.78.0.1"
PREFIX: Final = 16
HOLD: Final = ("unshare", "--net", "sh", "-c", "echo held; exec cat")
COMMAND_SECONDS: Final = 30.0


class Cables:
    """Made by `open_cables`. Invariant: `_hosts` has the address that each network has now."""

    def __init__(self, hub: int, holders: dict[str, int]) -> None:
        self._hub, self._holders = hub, holders
        self._hosts = {name: f"10.78.1.{number + 1}" for number, name in enumerate(holders)}
        self._moves = 0

    @property
    def hub(self) -> Place:
        return Place(HUB, _into(self._hub))

    def place_of(self, name: str) -> Place:
        """It listens on all its addresses, because they may change."""
        return Place("0.0.0.0", _into(self._holders[name]))

    async def lay(self) -> None:
        for command in (
            "link set lo up",
            "link add bridge0 type bridge",
            "link set bridge0 up",
            f"addr add {HUB}/{PREFIX} dev bridge0",
        ):
            await _ip(self._hub, command)
        for name, holder in self._holders.items():
            port = self._port(name)
            await _ip(self._hub, f"link add {port} type veth peer name eth0 netns {holder}")
            await _ip(self._hub, f"link set {port} master bridge0 up")
            await _ip(holder, "link set lo up")
            await _ip(holder, f"addr add {self._hosts[name]}/{PREFIX} dev eth0")
            await _ip(holder, "link set eth0 up")

    async def pull(self, name: str) -> None:
        await _ip(self._holders[name], "link set eth0 down")

    async def swallow(self, name: str) -> None:
        await _ip(self._hub, f"link set {self._port(name)} nomaster")

    async def plug(self, name: str) -> None:
        """In again, after either."""
        await _ip(self._hub, f"link set {self._port(name)} master bridge0")
        await _ip(self._holders[name], "link set eth0 up")

    async def move(self, name: str) -> None:
        """Another address, and the one before is gone."""
        holder, before = self._holders[name], self._hosts[name]
        self._moves += 1
        self._hosts[name] = f"10.78.2.{self._moves}"
        await _ip(holder, f"addr del {before}/{PREFIX} dev eth0")
        await _ip(holder, f"addr add {self._hosts[name]}/{PREFIX} dev eth0")

    def _port(self, name: str) -> str:
        return f"port{list(self._holders).index(name)}"


@asynccontextmanager
async def open_cables(names: Sequence[str]) -> AsyncIterator[Cables]:
    """A network for the hub and one for each name, until the block ends. NoOwnNetwork where this
    machine or this user cannot have them."""
    check_own_networks()
    holders: list[trio.Process] = []
    try:
        for _ in range(len(names) + 1):
            holders.append(await _held())
        hub, *others = (one.pid for one in holders)
        cables = Cables(hub, dict(zip(names, others, strict=True)))
        await cables.lay()
        yield cables
    finally:
        with trio.CancelScope(shield=True):
            for one in holders:
                one.kill()
                await one.wait()


async def _held() -> trio.Process:
    process = await trio.lowlevel.open_process(
        HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with trio.move_on_after(COMMAND_SECONDS):
        if await process.stdout.receive_some():
            return process
    process.kill()
    raise NoOwnNetwork(
        "A network of its own cannot be had.",
        why="`unshare --net` failed.",
        advice="Run it as root on the machine itself, or in a container with CAP_SYS_ADMIN.",
    )


def _into(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder}/ns/net", "--")


async def _ip(holder: int, command: str) -> None:
    """One command of iproute2 in that network."""
    with trio.fail_after(COMMAND_SECONDS):
        done = await trio.run_process(
            [*_into(holder), "ip", *command.split()], capture_stderr=True, check=False
        )
    if done.returncode:
        raise BenchFailed(
            f"`ip {command}` failed.", why=done.stderr.decode(errors="replace").strip()
        )
