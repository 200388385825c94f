"""The laboratory as a whole: it builds homes, and is gone afterwards, however its owner ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lab.net import removal
from lab.net.addresses import AddressFamilies, check_name, numbers
from lab.net.internet import Internet
from lab.net.machine import Machine
from lab.net.namespace import Namespace, check_lab
from lab.net.router import HomeRouter
from lab.net.rules import RouterKind
from protocols.errors import ProtocolMisuse

WATCHMAN = Path(removal.__file__)

_labs = itertools.count(1)  # of this process


class NetworkLab:
    """An internet, and the homes on it. It exists in the `with` block.

    `round_trip_seconds` is the time from one place on the internet to another and back. Inside of a
    home there is no delay.

    Its methods block for some hundredths of a second, because they run programs. NoOwnNetwork if
    this machine or process cannot have one.
    """

    def __init__(self, *, round_trip_seconds: float = 0.0) -> None:
        self._round_trip_seconds = round_trip_seconds
        self._prefix = ""
        self._namespaces: dict[str, Namespace] = {}
        self._machines: list[Machine] = []
        self._routers: list[HomeRouter] = []
        self._homes = numbers("homes in a laboratory")

    def __enter__(self) -> Self:
        check_lab()
        removal.remove_orphans()
        self._prefix = removal.prefix_for(os.getpid(), next(_labs))
        self._watchman = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHMAN), self._prefix, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends the owner must not end it
        )
        try:
            self._folder = removal.lab_folder(self._prefix)
            self._folder.mkdir(mode=0o700)
            # it carries frames, and has no address itself
            self._internet = Internet(
                self._namespace("internet", AddressFamilies.IPV4), self._round_trip_seconds
            )
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self._machines:
            machine.close()
        for router in self._routers:
            router.close()
        self._internet.close()
        for namespace in self._namespaces.values():
            namespace.close()
        self._remove()

    @property
    def prefix(self) -> str:
        """What the names of all its namespaces begin with."""
        return self._prefix

    def host(
        self,
        name: str,
        *,
        families: AddressFamilies = AddressFamilies.IPV4,
        upload_bits_per_second: float | None = None,
        download_bits_per_second: float | None = None,
    ) -> Machine:
        """A machine on the internet itself."""
        return self.home(
            name,
            RouterKind.NONE,
            families=families,
            upload_bits_per_second=upload_bits_per_second,
            download_bits_per_second=download_bits_per_second,
        )

    def home(
        self,
        name: str,
        nat: RouterKind,
        *,
        families: AddressFamilies = AddressFamilies.IPV4,
        upload_bits_per_second: float | None = None,
        download_bits_per_second: float | None = None,
        udp_blocked: bool = False,
        ipv6_open: bool = False,
        forwarded_ports: Sequence[int] = (),
    ) -> Machine:
        """A machine in a home of its own. The rates are those of the home's line.

        `forwarded_ports` are for homes of the kind FORWARDED. For IPv6, the router of any kind is a
        firewall that lets nothing unsolicited in, or everything if it is `ipv6_open`.
        """
        check_name(name)
        if (nat is RouterKind.FORWARDED) != bool(forwarded_ports):
            raise ProtocolMisuse("Homes of the kind forwarded have forwarded ports, and no others.")
        if nat is RouterKind.NONE and udp_blocked:
            raise ProtocolMisuse("A router blocks UDP, and a machine on the internet has none.")
        if nat is RouterKind.DOUBLE and families.ipv6:
            raise ProtocolMisuse("A home behind a carrier's NAT has no IPv6 here.")
        if ipv6_open and (nat is RouterKind.NONE or not families.ipv6):
            raise ProtocolMisuse("Only a router with IPv6 has a firewall for it that can be open.")
        rates = upload_bits_per_second, download_bits_per_second
        namespace = self._namespace(name, families)
        if nat is RouterKind.NONE:
            return self._add(Machine(name, namespace, families, self._internet, *rates))
        carrier = None
        if nat is RouterKind.DOUBLE:
            carrier = self._router(
                f"{name}.carrier", RouterKind.PORT_RESTRICTED, families, is_carrier=True
            )
            carrier.start()
        router = self._router(
            f"{name}.router",
            nat,
            families,
            carrier=carrier,
            udp_blocked=udp_blocked,
            ipv6_open=ipv6_open,
        )
        router.start(*rates)
        machine = self._add(Machine(name, namespace, families, router))
        for port in forwarded_ports:
            router.forward(port, machine.address)
        return machine

    def housemate(self, name: str, machine: Machine) -> Machine:
        """One more machine in the home of another one."""
        check_name(name)
        router = machine.router
        namespace = self._namespace(name, machine.families)
        return self._add(Machine(name, namespace, machine.families, router))

    def _namespace(self, name: str, families: AddressFamilies) -> Namespace:
        if name in self._namespaces:
            raise ProtocolMisuse(f"There is a machine {name} already.")
        made = Namespace(f"{self._prefix}{name}", ipv6=families.ipv6)
        self._namespaces[name] = made
        return made

    def _router(
        self,
        name: str,
        nat: RouterKind,
        families: AddressFamilies,
        *,
        carrier: HomeRouter | None = None,
        is_carrier: bool = False,
        udp_blocked: bool = False,
        ipv6_open: bool = False,
    ) -> HomeRouter:
        router = HomeRouter(
            self._namespace(name, families),
            nat,
            families,
            next(self._homes),
            self._internet,
            self._folder,
            carrier=carrier,
            is_carrier=is_carrier,
            udp_blocked=udp_blocked,
            ipv6_open=ipv6_open,
        )
        self._routers.append(router)
        return router

    def _add(self, machine: Machine) -> Machine:
        self._machines.append(machine)
        return machine

    def _remove(self) -> None:
        """Let the watchman do it, which would also do it if we died now."""
        # a word, because the end of the pipe does not reach it while a forked child has the pipe
        self._watchman.communicate(b"remove\n")
