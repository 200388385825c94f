"""Checks of the network: names, IPv6, MTU, ports, and whether the run's peers can be reached.

Only addresses of the run are contacted: those that a node of this home would join at. A connection
is opened and closed again, so a peer answers if something accepts TCP there; `potluck ping` also
verifies who it is.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import ifaddr
import trio

from node.app.cli.output import counted
from node.app.doctor.finding import Finding, FindingLevel
from node.app.doctor.surroundings import Surroundings, measured
from node.core.peer_address import PeerAddress
from protocols.errors import PotluckError

NEW_INVITE = "Ask the organiser of the run for a new invite."

# -- names

NAME_SECONDS = 4.5  # resolvers ask again after 5 s: one that needs longer has failed once
SLOW_NAME_SECONDS = 2.0  # most names take less than a tenth; every new link waits for this


async def check_names(surroundings: Surroundings) -> Sequence[Finding]:
    names = dict.fromkeys(_names_in(surroundings))
    if not names:
        return [Finding("dns", FindingLevel.OK, "No name has to be looked up.")]
    found: list[Finding] = []

    async def look_up(name: str) -> None:
        found.append(await _looked_up(name))

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(look_up, name)
    return sorted(found, key=lambda finding: finding.says)


def _names_in(surroundings: Surroundings) -> Iterator[str]:
    """The names in the addresses of the run and in the node's own."""
    texts = [*surroundings.configuration.announce_addresses]
    texts += [peer.text for peer in surroundings.peers]
    for text in texts:
        kind, host = text.split("/")[1:3]
        if kind.startswith("dns"):
            yield host
    server = surroundings.auth_server
    with suppress(ValueError):
        host = (urlsplit(server.url).hostname if server is not None else "") or ""
        if host and not _is_number(host):
            yield host


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _looked_up(name: str) -> Finding:
    began = trio.current_time()
    try:
        with trio.fail_after(NAME_SECONDS):
            infos = await trio.socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except trio.TooSlowError:
        says = f"The name {name} was not found within {NAME_SECONDS:g} seconds."
        return Finding("dns", FindingLevel.ERROR, says, _CHECK_RESOLVER)
    except (OSError, UnicodeError) as error:
        return judge_lookup_error(name, error)
    seconds = trio.current_time() - began
    hosts = ", ".join(dict.fromkeys(str(info[4][0]) for info in infos))
    says = f"{name} is {hosts}, looked up in {1000 * seconds:.0f} ms."
    if seconds > SLOW_NAME_SECONDS:
        return Finding("dns", FindingLevel.WARNING, says, _CHECK_RESOLVER)
    return Finding("dns", FindingLevel.OK, says)


_CHECK_RESOLVER = "Check the DNS server that this machine is set to use."


def judge_lookup_error(name: str, error: OSError | UnicodeError) -> Finding:
    reason = getattr(error, "strerror", None) or str(error)
    says = f"The name {name} cannot be looked up: {reason}."
    return Finding("dns", FindingLevel.ERROR, says, _to_find_names(error))


def _to_find_names(error: OSError | UnicodeError) -> str:
    """A resolver that cannot be reached is this machine's fault, a name that is gone the run's."""
    is_temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
    return _CHECK_RESOLVER if is_temporary else _CORRECT_NAME


_CORRECT_NAME = "Correct the name in the settings, or ask the organiser for a new invite."

# -- IPv6

# For finding a route only: connecting a UDP socket sends nothing.
ANYWHERE_IN_IPV6 = "2000::1"


@dataclass(frozen=True)
class Ipv6Facts:
    """`addresses`: the global ones of this machine. `has_route`: to the internet."""

    addresses: tuple[str, ...]
    has_route: bool


async def check_ipv6(_: Surroundings) -> Sequence[Finding]:
    facts = await measured(_ipv6_facts)
    return [judge_ipv6(facts)]


def judge_ipv6(facts: Ipv6Facts) -> Finding:
    if not facts.addresses:
        says = "This machine has no global IPv6 address: it uses IPv4 alone."
        return Finding("ipv6", FindingLevel.NOTE, says)
    count = counted(len(facts.addresses), "global IPv6 address", "global IPv6 addresses")
    says = f"This machine has {count}"
    if not facts.has_route:
        says += ", but no route to the internet by IPv6."
        return Finding(
            "ipv6", FindingLevel.WARNING, says, "Restart the router, or switch IPv6 off in it."
        )
    return Finding("ipv6", FindingLevel.OK, f"{says}, and a route to the internet.")


def _ipv6_facts() -> Ipv6Facts:
    addresses = []
    for adapter in ifaddr.get_adapters():
        for one in adapter.ips:
            if one.is_IPv6 and ipaddress.IPv6Address(one.ip[0].partition("%")[0]).is_global:
                addresses.append(one.ip[0])
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect((ANYWHERE_IN_IPV6, 9))
            has_route = True
    except OSError:
        has_route = False
    return Ipv6Facts(tuple(addresses), has_route)


# -- MTU

ETHERNET_MTU = 1500
LEAST_MTU = 1280  # IPv6 needs it; with less, networks drop packets that they should split
ROUTES = Path("/proc/net/route")
_SIOCGIFMTU, _IFREQ = 0x8921, struct.Struct("16si20x")  # Linux's, for netdevice(7)


async def check_mtu(_: Surroundings) -> Sequence[Finding]:
    """Of the interface of the default route. `check_peers` has that of the way to each peer."""
    name, mtu = await measured(_default_mtu)
    if mtu is not None:
        return [judge_mtu(mtu, f"of {name}")]
    if sys.platform == "linux" and not name:
        says = "This machine has no route to the internet by IPv4."
        advice = "Connect it to a network, unless all of the run is in this one."
        return [Finding("mtu", FindingLevel.WARNING, says, advice)]
    return [
        Finding("mtu", FindingLevel.NOTE, "The MTU of the way to the internet is not known here.")
    ]


def judge_mtu(mtu: int, where: str) -> Finding:
    says = f"The largest packet {where} has {mtu:,} bytes."
    if mtu < LEAST_MTU:
        advice = f"Set the MTU of the tunnel or VPN on the way to {LEAST_MTU} or more."
        return Finding("mtu", FindingLevel.WARNING, says, advice)
    if mtu < ETHERNET_MTU:
        return Finding("mtu", FindingLevel.NOTE, f"{says} A tunnel or a VPN is on the way.")
    return Finding("mtu", FindingLevel.OK, says)


def _default_mtu() -> tuple[str, int | None]:
    """The name and MTU of the default route's interface; "" and None if there is none."""
    import fcntl  # not on every platform

    name = ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = default_interface(ROUTES.read_text("ascii"))
        asked = _IFREQ.pack(name.encode(), 0)
        if name:
            return name, _IFREQ.unpack(fcntl.ioctl(probe, _SIOCGIFMTU, asked))[1]
    return name, None


def default_interface(routes: str) -> str:
    """The interface of the IPv4 default route, in the text of /proc/net/route."""
    for line in routes.splitlines()[1:]:
        columns = line.split()
        if len(columns) > 7 and columns[1] == columns[7] == "00000000":
            return columns[0]
    return ""


# -- ports


async def check_ports(surroundings: Surroundings) -> Sequence[Finding]:
    used = surroundings.node.addresses if surroundings.node is not None else ()
    own = {address.split("/")[4] for address in used if address.count("/") >= 4}
    found = []
    for text in surroundings.configuration.listen_addresses:
        port = text.split("/")[4]
        if port != "0":
            found.append(await measured(_examine_port, text, port in own))
    if not found:
        says = "Each start takes any free port. To forward one in a router, set network.listen."
        found.append(Finding("ports", FindingLevel.NOTE, says))
    return found


def _examine_port(text: str, is_own: bool) -> Finding:
    if is_own:
        return Finding("ports", FindingLevel.OK, f"The running node listens on {text}.")
    from node.net import check_listening  # loads libp2p, which takes half a second

    try:
        check_listening((text,))
    except PotluckError as error:
        holder = _holder_of(int(text.split("/")[4]))
        if holder:
            says = f"{text} is in use, by {holder}."
        else:
            says = " ".join(words for words in (error.what, error.why) if words)
        return Finding("ports", FindingLevel.ERROR, says, _ANOTHER_PORT)
    return Finding("ports", FindingLevel.OK, f"{text} is free.")


_ANOTHER_PORT = "Set network.listen to another port, or to 0 for any free one."
_LISTENING = "0A"  # in the fourth column of /proc/net/tcp


def _holder_of(port: int) -> str:
    """The program that listens on this port; empty if it is another user's, or unknown."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text("ascii").splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{columns[9]}]")
    if not sockets:
        return ""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(one) in sockets for one in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""


# -- the run's peers

PEER_SECONDS = 4.5  # for one address: a name, and a handshake of TCP with one lost packet
MOST_PEERS = 16  # an invite has a handful; a pass has at most sixteen
_IP_MTU, _IPV6_MTU = 14, 24  # of Linux; Python does not name them


@dataclass(frozen=True)
class Reached:
    """An attempt to connect. `error`: why it failed. `mtu`: of the way, if the system says."""

    address: str
    milliseconds: float = 0.0
    mtu: int | None = None
    error: OSError | None = None


async def check_peers(surroundings: Surroundings) -> Sequence[Finding]:
    places = dict.fromkeys(_place_of(one) for one in surroundings.peers)
    if not places:
        return [Finding("peers", FindingLevel.NOTE, "No peer of a run is known in this home.")]
    results: list[Reached] = []

    async def connect(address: str) -> None:
        results.append(await _tried(address))

    async with trio.open_nursery() as nursery:
        for address in list(places)[:MOST_PEERS]:
            nursery.start_soon(connect, address)
    return list(judge_peers(sorted(results, key=lambda one: one.address)))


async def accepts(address: PeerAddress) -> bool:
    """Whether a TCP connection to this peer, or to its relay, is accepted in time."""
    return (await _tried(_place_of(address))).error is None


def _place_of(address: PeerAddress) -> str:
    """Where to connect to: of an address through a relay, this is the relay's."""
    return "/".join(address.text.split("/")[:5])


async def _tried(address: str) -> Reached:
    _, kind, host, _, port = address.split("/")
    family = {"4": socket.AF_INET, "6": socket.AF_INET6}.get(kind[-1], socket.AF_UNSPEC)
    failure: OSError = socket.gaierror(socket.EAI_AGAIN, "no answer")
    with trio.move_on_after(PEER_SECONDS):
        try:
            infos = await trio.socket.getaddrinfo(host, int(port), family, socket.SOCK_STREAM)
        except socket.gaierror as error:
            return Reached(address, error=error)
        except UnicodeError:
            return Reached(address, error=socket.gaierror(socket.EAI_NONAME, "it is no name"))
        failure = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        for family, kind_of_socket, protocol, _, where in infos:
            with (
                trio.move_on_after(PEER_SECONDS / len(infos)),
                trio.socket.socket(family, kind_of_socket, protocol) as connection,
            ):
                began = trio.current_time()
                try:
                    await connection.connect(where)
                except OSError as error:
                    failure = error
                    continue
                milliseconds = 1000 * (trio.current_time() - began)
                return Reached(address, milliseconds, _mtu_of(connection))
    return Reached(address, error=failure)


def _mtu_of(connection: trio.socket.SocketType) -> int | None:
    if sys.platform != "linux":
        return None
    is_ipv6 = connection.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_ipv6 else (socket.IPPROTO_IP, _IP_MTU)
    try:
        return connection.getsockopt(level, option)
    except OSError:
        return None


def judge_peers(results: Sequence[Reached]) -> Iterator[Finding]:
    """One peer that answers is enough to join: then the others are only warnings."""
    answered = [one for one in results if one.error is None]
    for one in answered:
        says = f"{one.address} accepts connections, after {one.milliseconds:.0f} ms."
        yield Finding("peers", FindingLevel.OK, says)
    level = FindingLevel.WARNING if answered else FindingLevel.ERROR
    for one in results:
        if one.error is not None:
            says = f"{one.address} cannot be reached: {_reason(one.error)}."
            yield Finding("peers", level, says, _what_to_do(one.error))
    mtus = {one.mtu for one in answered if one.mtu is not None and one.mtu < LEAST_MTU}
    for mtu in sorted(mtus):
        yield judge_mtu(mtu, "on the way to a peer")


def _reason(error: OSError) -> str:
    """trio's own text repeats the address."""
    if isinstance(error, socket.gaierror):
        return "its name is not found"
    reason = os.strerror(error.errno) if error.errno else error.strerror or str(error)
    return reason[:1].lower() + reason[1:]


_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_BLOCKED = {errno.EACCES, errno.EPERM}


def _what_to_do(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return _to_find_names(error)
    if error.errno == errno.ECONNREFUSED:
        return f"No node listens there: {NEW_INVITE[0].lower()}{NEW_INVITE[1:]}"
    if error.errno in _NO_ROUTE:
        return "Connect this machine to that network: it has no route there."
    if error.errno in _BLOCKED:
        return "Let potluck out in this machine's firewall."
    if error.errno == errno.ETIMEDOUT:
        return (
            "Let outgoing TCP to that port through the firewalls of this machine and its network."
        )
    return NEW_INVITE
