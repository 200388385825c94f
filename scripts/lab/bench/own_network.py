"""A network of a process's own: Linux network namespaces without names.

`leave_for_own_network` takes the calling process out of the machine's network into an empty one.
Nothing has a name and nothing has to be removed: a namespace, its interfaces, its shaping and the
other ends of its cables are gone when its last process is, whatever ended that.

It moves one thread only. Call it in the process's only thread; later threads begin where their
maker is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path

import trio

from protocols.errors import PotluckError

CLONE_NEWNET = 0x40000000  # linux/sched.h

# Of the machine's choice nothing is known (BBR paces by models of its own); these fill a link until
# it drops something. A machine need not allow the first in a new network; it always has the second.
CONGESTION_CONTROLS = ("cubic", "reno")
_TCP = Path("/proc/sys/net/ipv4")
PROGRAMS = ("ip", "tc")  # of iproute2


class NoOwnNetwork(PotluckError):
    """This process may not have, or this machine does not know, namespaces and shaped links."""


class NetworkCommandFailed(PotluckError):
    """`ip` or `tc` did not do it."""


def check_own_networks() -> None:
    """NoOwnNetwork unless this process can have networks of its own, as far as can be told."""
    if not sys.platform.startswith("linux"):
        raise NoOwnNetwork(
            "Shaped links need Linux.",
            why="They are made of its network namespaces and its queues.",
            advice="Run it on a Linux machine as root; a virtual one will do.",
        )
    if os.geteuid() != 0:
        raise NoOwnNetwork(
            "Shaped links can only be made by root.",
            why="Each peer gets a network namespace of its own, with a cable of limited rate.",
            advice="Run it with sudo; it touches no interface of this machine.",
        )
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise NoOwnNetwork(
            f"There is no program {' and no '.join(missing)} here.",
            why="Cables between network namespaces are laid with iproute2.",
            advice="Install it: the package is called iproute2 nearly everywhere.",
        )


def leave_for_own_network() -> None:
    """From here on this process has an empty network: not even a loopback that is up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise NoOwnNetwork(
            f"This process cannot have a network of its own: {os.strerror(number)}.",
            why="It takes root's rights, which a container may have taken away.",
            advice="Run it as root on the machine itself, or in a container with CAP_SYS_ADMIN.",
        )
    choose_congestion_control()


def congestion_control() -> str:
    """The first of CONGESTION_CONTROLS that this machine has. A route may choose it, even one that
    the machine does not allow as a new network's choice."""
    offered = (_TCP / "tcp_available_congestion_control").read_text().split()
    return next(name for name in CONGESTION_CONTROLS if name in offered)


def choose_congestion_control() -> None:
    """Have this network's TCP fill its links, whatever the machine's choice is."""
    for name in CONGESTION_CONTROLS:
        with contextlib.suppress(OSError):
            (_TCP / "tcp_congestion_control").write_text(name)
            break


async def configure_network(commands: list[str]) -> None:
    """Run commands of iproute2 in this process's network."""
    for command in commands:
        done = await trio.run_process(
            command.split(), capture_stdout=True, capture_stderr=True, check=False
        )
        if done.returncode != 0:
            raise NetworkCommandFailed(
                f"`{command}` failed: {done.stderr.decode(errors='replace').strip()}",
                why="This machine's kernel may lack bridges, veth or tbf.",
                advice="Try the command by hand in `unshare --net`.",
            )


class InOwnNetwork:
    """The orders to a peer that may have a network of its own: each public coroutine is one."""

    async def leave_network(self, window: int, unsent: int) -> None:
        """Have an empty network, with TCP connections that hold this many bytes."""
        leave_for_own_network()
        limit_tcp(window, unsent)

    async def configure(self, commands: list[str]) -> None:
        """Run commands of iproute2 in this process's network."""
        await configure_network(commands)


def limit_tcp(window: int, unsent: int) -> None:
    """The most that a connection into this network has under way, and that waits to be sent."""
    (_TCP / "tcp_rmem").write_text(f"4096 {2 * window} {2 * window}")
    (_TCP / "tcp_notsent_lowat").write_text(str(unsent))


def resent_segments() -> int:
    """How many TCP segments this network has sent again since it began."""
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])
