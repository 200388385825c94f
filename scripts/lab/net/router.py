"""A home's router: what it lets pass, its line to the provider, and the network inside.

For IPv6 it is a firewall: it lets the inside begin connections, and nothing unsolicited in, unless
it is an open one. All of
the laboratory's IPv6 is one segment, so it answers on its outside for the machines inside (proxy
neighbour discovery) and no other router needs a route to them.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lab.bench.own_network import NetworkCommandFailed, NoOwnNetwork
from lab.net.addresses import (
    FIRST_HOST,
    GATEWAY,
    AddressFamilies,
    AddressLease,
    carrier_lease,
    home_lease,
    numbers,
    router_line,
)
from lab.net.cable import Cable
from lab.net.internet import Internet
from lab.net.namespace import SETTINGS, Namespace
from lab.net.rules import (
    ASKED_FOR,
    TABLE,
    RouterKind,
    forgetting_rule,
    forwarding_rule,
    mapped_places,
    mapping_daemon_settings,
    router_rules,
)
from protocols.errors import ProtocolMisuse

MAPPING_DAEMON = "miniupnpd"
MAPPING_HTTP_PORT = 5000
MAPPING_START_SECONDS = 10.0
LOOK_SECONDS = 0.01

# Where the kernel has br_netfilter.
BRIDGE_FILTERING = ("bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables")

# Of `lan`. Without it, it has that of one of its ports, and changes when a machine leaves.
HARDWARE = "02:00:00:00:00:01"


class Lan:
    """The network of a home, an `Outlet`: a bridge in its router."""

    def __init__(self, namespace: Namespace, families: AddressFamilies) -> None:
        self.namespace = namespace
        self.families = families
        self.hosts = numbers("addresses in a home", first=FIRST_HOST)
        self._interfaces = numbers("cables to a router")
        # what two machines inside say to each other does not concern the router's rules
        if namespace.inside((SETTINGS / BRIDGE_FILTERING[0]).exists):
            namespace.set(dict.fromkeys(BRIDGE_FILTERING, 0))
        namespace.ip(
            f"link add lan address {HARDWARE} type bridge mcast_snooping 0", "link set lan up"
        )

    def new_interface(self) -> str:
        return f"port{next(self._interfaces)}"

    def connect(self, interface: str) -> None:
        self.namespace.ip(f"link set {interface} master lan")

    def disconnect(self, interface: str) -> None:
        self.namespace.ip(f"link set {interface} nomaster")


class HomeRouter:
    """The router of `Machine.router`. Its outside is `wan`, its inside `lan`.

    A carrier's NAT is a router too, whose inside has no machines but a home's router.
    """

    def __init__(
        self,
        namespace: Namespace,
        nat: RouterKind,
        families: AddressFamilies,
        home: int,
        internet: Internet,
        folder: Path,
        *,
        carrier: HomeRouter | None = None,
        is_carrier: bool = False,
        udp_blocked: bool = False,
        ipv6_open: bool = False,
    ) -> None:
        if nat is RouterKind.MAPPED and shutil.which(MAPPING_DAEMON) is None:
            raise NoOwnNetwork(
                f"A home of the kind {RouterKind.MAPPED.value} needs {MAPPING_DAEMON}.",
                advice="apt-get install miniupnpd-nftables, or take the kind forwarded.",
            )
        self.nat = nat
        self.families = families
        self.home = home
        self.carrier = carrier
        self.lan = Lan(namespace, families)
        self.renewals: list[Callable[[], None]] = []  # of the machines inside
        self._namespace, self._internet, self._folder = namespace, internet, folder
        self._is_carrier = is_carrier
        self._udp_blocked = udp_blocked
        self._ipv6_open = ipv6_open
        self._forwards: dict[int, str] = {}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._cable: Cable | None = None
        self._number = 0
        self._outside: AddressLease | None = None
        namespace.set(
            {
                "ipv4/ip_forward": 1,
                "ipv6/conf/all/forwarding": 1,
                # a connection that it has forgotten is over, also if the inside goes on sending
                "netfilter/nf_conntrack_tcp_loose": 0,
            }
        )

    def start(self, upload: float | None = None, download: float | None = None) -> None:
        """Plug it in at its provider and let it work."""
        outlet = self._internet if self.carrier is None else self.carrier.lan
        self._load_rules()
        self._cable = Cable(self._namespace, "wan", outlet, upload, download)
        if self.families.ipv6:
            self._namespace.set(
                {
                    "ipv6/conf/wan/proxy_ndp": 1,
                    "ipv6/neigh/wan/proxy_delay": 0,  # else it hesitates for up to 0.8 s
                }
            )
        self._take_line()
        self._start_daemon()

    @property
    def public_address(self) -> str:
        """What the internet sees as the source of IPv4 packets; a carrier's, if there is one."""
        if self.carrier is not None:
            return self.carrier.public_address
        assert self._outside is not None
        return str(self._outside.ipv4.ip)

    def forget(self) -> None:
        """Reboot it, in no time: it has forgotten every connection, contact and mapping. Ports that
        its owner has forwarded stay so."""
        self._stop_daemon()
        self._load_rules()
        self._namespace.inside(forget_connections)
        self._start_daemon()

    def change_address(self) -> None:
        """Let the provider give it another public address, and IPv6 prefix, if it has one.

        The connections of the old address are dead. Behind a carrier it is the carrier's address
        that changes.
        """
        if self.carrier is not None:
            self.carrier.change_address()
            return
        self._take_line()
        self._namespace.inside(forget_connections)
        if self.nat is RouterKind.CONE:
            self._namespace.nft(forgetting_rule())
        if self.families.ipv6:
            for renew in self.renewals:
                renew()

    def forward(self, port: int, address: str) -> None:
        """Give an inside address this port of the public address, over TCP and UDP. A carrier is
        not asked."""
        if self._forwards.setdefault(port, address) != address:
            raise ProtocolMisuse(f"Port {port} is forwarded to {self._forwards[port]} already.")
        self._namespace.nft(forwarding_rule(port, address))

    def mapped(self) -> list[str]:
        """The addresses and ports inside that it forwards to, because machines have asked for it.
        For the kind MAPPED."""
        return mapped_places(self._namespace.nft(f"list chain inet {TABLE} {ASKED_FOR}\n"))

    def unplug(self) -> None:
        """Let the provider's line go down."""
        self._line().pull()

    def plug_in(self) -> None:
        self._line().plug_in()

    def lease(self, host: int) -> AddressLease:
        """The addresses of a machine inside; from now on packets for them arrive here."""
        lease = home_lease(self.home, self._number, host)
        if self.families.ipv6:
            self._namespace.ip(f"neigh replace proxy {lease.ipv6.ip} dev wan")
        return lease

    def close(self) -> None:
        self._stop_daemon()

    def _line(self) -> Cable:
        assert self._cable is not None
        return self._cable

    def _take_line(self) -> None:
        if self.carrier is None:
            self._number = next(self._internet.lines)
            outside = router_line(self._number)
        else:
            outside = carrier_lease(self.carrier.home, next(self.carrier.lan.hosts))
        inside = self._inside()
        self._outside = outside
        self._namespace.ip(
            *outside.commands("wan", self.families), *inside.commands("lan", self.families)
        )

    def _inside(self) -> AddressLease:
        if self._is_carrier:
            own = carrier_lease(self.home, GATEWAY)
        else:
            own = home_lease(self.home, self._number, GATEWAY)
        return replace(own, gateway_ipv4="", gateway_ipv6="")  # it is the gateway

    def _load_rules(self) -> None:
        rules = router_rules(
            self.nat,
            udp_blocked=self._udp_blocked,
            ipv6_open=self._ipv6_open,
            forwards=self._forwards,
        )
        self._namespace.nft(rules)

    def _start_daemon(self) -> None:
        if self.nat is not RouterKind.MAPPED:
            return
        address = str(self._inside().ipv4.ip)
        settings = self._folder / f"{MAPPING_DAEMON}-{self.home}.conf"
        settings.write_text(mapping_daemon_settings(address, MAPPING_HTTP_PORT))
        command = [MAPPING_DAEMON, "-d", "-f", str(settings), "-P", f"{settings}.pid"]
        with open(f"{settings}.log", "wb") as log:
            self._daemon = subprocess.Popen(
                self._namespace.command(command), stdout=log, stderr=log, start_new_session=True
            )
        self._namespace.inside(lambda: wait_for_listener(address, MAPPING_HTTP_PORT))

    def _stop_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._daemon = None


def wait_for_listener(address: str, port: int) -> None:
    """Return when something listens there. It must be called in the right network."""
    deadline = time.monotonic() + MAPPING_START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=MAPPING_START_SECONDS).close()
        except ConnectionRefusedError:
            time.sleep(LOOK_SECONDS)
        else:
            return
    raise NetworkCommandFailed(f"{MAPPING_DAEMON} does not listen on port {port} of {address}.")


NETLINK_NETFILTER = 12  # linux/netlink.h
DELETE_CONNECTIONS = 1 << 8 | 2  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE
REQUEST_WITH_ANSWER = 1 | 4  # NLM_F_REQUEST, NLM_F_ACK
NETLINK_HEADER = "=LHHLL"
NETLINK_ANSWER_BYTES = 4096


def forget_connections() -> None:
    """Empty the connection table of the network that the calling thread is in.

    `conntrack --flush` does the same, but that program is rarely installed.
    """
    body = bytes(4)  # struct nfgenmsg: of all families
    size = struct.calcsize(NETLINK_HEADER)
    header = struct.pack(
        NETLINK_HEADER, size + len(body), DELETE_CONNECTIONS, REQUEST_WITH_ANSWER, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.bind((0, 0))
        netlink.send(header + body)
        answer = netlink.recv(NETLINK_ANSWER_BYTES)
    (error,) = struct.unpack_from("=i", answer, size)
    if error:
        raise OSError(-error, "the kernel did not empty the connection table")
