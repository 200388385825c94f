"""One network namespace: the commands that configure it, and what runs inside of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lab.bench.own_network import NetworkCommandFailed, NoOwnNetwork
from lab.net.removal import NAMESPACES

CLONE_NEWNET = 0x40000000  # linux/sched.h
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux"}
SETTINGS = Path("/proc/sys/net")

Result = TypeVar("Result")


def missing_for_lab() -> str:
    """What this machine or this process lacks, or "" if a laboratory can be built."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"needs {program}: apt-get install {package}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        return "needs the right to make network namespaces (CAP_SYS_ADMIN)"
    return ""


def check_lab() -> None:
    """NoOwnNetwork if no laboratory can be built."""
    missing = missing_for_lab()
    if missing:
        raise NoOwnNetwork(
            f"A network lab {missing}.",
            why="It consists of network namespaces, shaped links and packet filters of Linux.",
            advice="It touches no interface of this machine.",
        )


class Namespace:
    """A network of its own, with a loopback that is up. Its name is the machine's business.

    Sockets that were opened in it are closed by `close`: an open one would keep it alive.
    """

    def __init__(self, name: str, *, ipv6: bool) -> None:
        self.name = name
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        _command(["ip", "netns", "add", name])

        def settle() -> None:
            # detecting duplicates would keep each new IPv6 address unusable for a second
            _write("ipv6/conf/default/accept_dad", 0)
            _write("ipv6/conf/default/dad_transmits", 0)
            _write("ipv6/conf/default/disable_ipv6", int(not ipv6))

        self.inside(settle)
        self.ip("link set lo up")

    def ip(self, *commands: str) -> None:
        """Run commands of `ip` here, in one go. NetworkCommandFailed if one fails."""
        _command(["ip", "-n", self.name, "-batch", "-"], "\n".join(commands))

    def tc(self, *commands: str) -> None:
        _command(["tc", "-n", self.name, "-batch", "-"], "\n".join(commands))

    def nft(self, text: str) -> str:
        """Run commands of nft here; what they print."""
        return _command(self.command(["nft", "-f", "-"]), text)

    def set(self, settings: Mapping[str, int]) -> None:
        """Write kernel settings, which are named as under /proc/sys/net."""

        def write() -> None:
            for name, value in settings.items():
                _write(name, value)

        self.inside(write)

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs these words here."""
        return ["nsenter", f"--net={NAMESPACES / self.name}", "--", *words]

    def inside(self, function: Callable[[], Result]) -> Result:
        """Call a function in a thread that is in this network, and wait for its result."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def enter_and_call() -> None:
            try:
                with (NAMESPACES / self.name).open("rb") as namespace:
                    _enter(namespace.fileno())
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                errors.append(error)

        thread = threading.Thread(target=enter_and_call)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def socket(self, family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
        made = self.inside(lambda: socket.socket(family, kind))
        self._sockets.add(made)
        return made

    def close(self) -> None:
        for one in list(self._sockets):
            one.close()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write(name: str, value: object) -> None:
    # which network's settings these are depends on the thread that opens the file
    (SETTINGS / name).write_text(str(value))


def _command(words: Sequence[str], text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkCommandFailed(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}",
            why=f"It was told: {text}" if text else "",
        )
    return done.stdout
