"""A machine of the laboratory: where programs run and sockets live."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, AddressFamily, SocketKind, socket
from typing import IO

from lab.bench.own_network import NetworkCommandFailed, congestion_control
from lab.net.addresses import AddressFamilies, AddressLease, machine_line
from lab.net.cable import Cable
from lab.net.internet import Internet
from lab.net.namespace import Namespace
from lab.net.router import HomeRouter
from lab.net.rules import RouterKind
from protocols.errors import ProtocolMisuse

INTERFACE = "eth0"
RUN_SECONDS = 60.0  # for a program that is run to its end
Stream = int | IO[str] | None


class Machine:
    """One computer, with one interface, `eth0`. Made by `NetworkLab.host` and `NetworkLab.home`.

    It is in a home, or on the internet itself. All that is started on it ends with the laboratory.
    """

    def __init__(
        self,
        name: str,
        namespace: Namespace,
        families: AddressFamilies,
        place: HomeRouter | Internet,
        upload: float | None = None,
        download: float | None = None,
    ) -> None:
        self.name = name
        self.families = families
        self._namespace = namespace
        self._processes: list[subprocess.Popen[str]] = []
        self._join(place, upload, download)

    # Where it is

    @property
    def router(self) -> HomeRouter:
        """Its home's router. ProtocolMisuse if it is on the internet itself."""
        if isinstance(self._place, Internet):
            raise ProtocolMisuse(f"{self.name} has no router: it is on the internet itself.")
        return self._place

    @property
    def nat(self) -> RouterKind:
        return RouterKind.NONE if isinstance(self._place, Internet) else self._place.nat

    @property
    def address(self) -> str:
        """Its own address; the IPv4 one, if it has both."""
        return str(self._lease.ipv4.ip) if self.families.ipv4 else self.ipv6_address

    @property
    def ipv6_address(self) -> str:
        """Its IPv6 address, which is always a public one. ProtocolMisuse if it has none."""
        if not self.families.ipv6:
            raise ProtocolMisuse(f"{self.name} has no IPv6.")
        return str(self._lease.ipv6.ip)

    @property
    def public_address(self) -> str:
        """The address that others on the internet see; the IPv4 one, if it has both."""
        if isinstance(self._place, Internet) or not self.families.ipv4:
            return self.address
        return self._place.public_address

    # What runs on it

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs these words on this machine, for any way to start a process."""
        return self._namespace.command(words)

    def popen(
        self,
        words: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program; it is killed with the laboratory. Its streams are text."""
        started = subprocess.Popen(
            self.command(words),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            text=True,
        )
        self._processes.append(started)
        return started

    def run(
        self, words: Sequence[str], *, input: str = "", timeout: float = RUN_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end. NetworkCommandFailed, with its own words, if its code is not
        0."""
        done = subprocess.run(
            self.command(words),
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise NetworkCommandFailed(
                f"`{' '.join(words)}` ended with {done.returncode} on {self.name}.",
                why=done.stderr.strip() or done.stdout.strip(),
            )
        return done

    def socket(self, family: AddressFamily = AF_INET, kind: SocketKind = SOCK_STREAM) -> socket:
        """A socket of this process that is in this machine's network. It is closed with the
        laboratory, if it was not before."""
        return self._namespace.socket(family, kind)

    # What happens to it

    def change_address(self) -> None:
        """Give it another address in the same place. Connections of the old one are dead."""
        self._host = self._next_host()
        self.renew()

    def move_to(self, other: Machine) -> None:
        """Take it to the place of another machine: to its home, or to the internet itself."""
        if other.families is not self.families:
            raise ProtocolMisuse(f"{self.name} has {self.families.value}; {other.name} has not.")
        self._leave()
        self._join(other._place)

    def unplug(self) -> None:
        """Pull its cable: it sees that it has no link. It keeps its address."""
        self._cable.pull()

    def plug_in(self) -> None:
        """Plug the cable in again."""
        self._cable.plug_in()

    @contextmanager
    def blackout(self) -> Iterator[None]:
        """Lose all its packets in silence during the block. Its link stays up."""
        self._cable.lose()
        try:
            yield
        finally:
            self._cable.carry()

    def renew(self) -> None:
        """Take the addresses that this place gives it now."""
        if isinstance(self._place, Internet):
            self._lease: AddressLease = machine_line(self._host)
        else:
            self._lease = self._place.lease(self._host)
        self._namespace.ip(*self._lease.commands(INTERFACE, self.families, congestion_control()))

    def close(self) -> None:
        """Kill what was started on it."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _join(
        self,
        place: HomeRouter | Internet,
        upload: float | None = None,
        download: float | None = None,
    ) -> None:
        self._place = place
        self._host = self._next_host()
        outlet = place if isinstance(place, Internet) else place.lan
        self._cable = Cable(self._namespace, INTERFACE, outlet, upload, download)
        self.renew()
        if isinstance(place, HomeRouter):
            place.renewals.append(self.renew)

    def _leave(self) -> None:
        if isinstance(self._place, HomeRouter):
            self._place.renewals.remove(self.renew)
        self._cable.remove()

    def _next_host(self) -> int:
        place = self._place
        return next(place.lines if isinstance(place, Internet) else place.lan.hosts)
