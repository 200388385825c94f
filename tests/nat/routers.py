"""Routers on loopback that map ports, or refuse, or lie, or are silent.

They run in the trio run of the test, so with a virtual clock too: a datagram on loopback has
arrived when the sender goes on.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trio

LOOPBACK = "127.0.0.1"
PUBLIC_HOST = "9.8.7.6"

PCP_REQUEST = struct.Struct("!BBHI16s12sB3xHH16s")
PCP_ANSWER = struct.Struct("!BBBBII12x12sB3xHH16s")


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Table:
    """What a router holds: external port to internal port, and how it behaves."""

    external_host: str = PUBLIC_HOST
    taken: set[int] = field(default_factory=set)  # external ports of other machines
    mappings: dict[int, int] = field(default_factory=dict)
    lifetime_seconds: int = 1200
    epoch_seconds: Callable[[], float] = lambda: 1000 + trio.current_time()

    def choose(self, internal: int, wanted: int) -> int:
        held = [external for external, ours in self.mappings.items() if ours == internal]
        external = held[0] if held else wanted
        while external in self.taken:
            external += 1
        self.mappings[external] = internal
        return external

    def delete(self, internal: int) -> None:
        self.mappings = {one: ours for one, ours in self.mappings.items() if ours != internal}


Answering = Callable[["PortControl", bytes], list[bytes]]


class PortControl:
    """A server of NAT-PMP, PCP, both or neither, at a UDP port. `heard` has what came in."""

    def __init__(self, link: trio.socket.SocketType, table: Table, answering: Answering) -> None:
        self.link = link
        self.table = table
        self.answering = answering
        self.heard: list[bytes] = []
        self.speaks_from = link

    @property
    def port(self) -> int:
        port: int = self.link.getsockname()[1]
        return port

    async def run(self) -> None:
        while True:
            data, source = await self.link.recvfrom(2048)
            self.heard.append(data)
            for answer in self.answering(self, data):
                await self.speaks_from.sendto(answer, source)


@asynccontextmanager
async def port_control(table: Table, answering: Answering) -> AsyncIterator[PortControl]:
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        await link.bind((LOOPBACK, 0))
        server = PortControl(link, table, answering)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            yield server
            nursery.cancel_scope.cancel()


def silence(_server: PortControl, _data: bytes) -> list[bytes]:
    return []


def nat_pmp_only(server: PortControl, data: bytes) -> list[bytes]:
    table, epoch = server.table, int(server.table.epoch_seconds())
    if data[0] != 0:  # RFC 6886, 3.5: another version
        return [struct.pack("!BBHI", 0, data[1] | 128, 1, epoch)]
    if data == b"\0\0":
        host = ipaddress.IPv4Address(table.external_host).packed
        return [struct.pack("!BBHI4s", 0, 128, 0, epoch, host)]
    _, _, _, internal, external, lifetime = struct.unpack("!BBHHHI", data)
    if lifetime == 0:
        table.delete(internal)
    else:
        external, lifetime = table.choose(internal, external), table.lifetime_seconds
    return [struct.pack("!BBHIHHI", 0, 130, 0, epoch, internal, external, lifetime)]


def pcp_only(server: PortControl, data: bytes) -> list[bytes]:
    table, epoch = server.table, int(server.table.epoch_seconds())
    if data[0] != 2:
        return []
    _, _, _, lifetime, ours, nonce, protocol, internal, external, _ = PCP_REQUEST.unpack(data)
    assert ours == ipaddress.IPv6Address(f"::ffff:{LOOPBACK}").packed
    if lifetime == 0:
        table.delete(internal)
    else:
        external, lifetime = table.choose(internal, external), table.lifetime_seconds
    host = ipaddress.IPv6Address(f"::ffff:{table.external_host}").packed
    return [
        PCP_ANSWER.pack(2, 129, 0, 0, lifetime, epoch, nonce, protocol, internal, external, host)
    ]


def both(server: PortControl, data: bytes) -> list[bytes]:
    return pcp_only(server, data) if data[0] == 2 else nat_pmp_only(server, data)


def pcp_refuses(code: int) -> Answering:
    """PCP answers with an error; NAT-PMP works."""

    def answering(server: PortControl, data: bytes) -> list[bytes]:
        if data[0] != 2:
            return nat_pmp_only(server, data)
        return [struct.pack("!BBBBII12x", 2, 129, 0, code, 30, 0) + data[24:]]

    return answering


# -- UPnP ------------------------------------------------------------------------------------

IGD = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
WAN_IP = "urn:schemas-upnp-org:service:WANIPConnection:1"

DESCRIPTION = f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><device><deviceType>{IGD}</deviceType>
<serviceList><service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType>
<controlURL>/l3f</controlURL></service></serviceList><deviceList><device><deviceList><device>
<serviceList><service><serviceType>{WAN_IP}</serviceType><SCPDURL>/wan.xml</SCPDURL>
<controlURL>/control</controlURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>
"""

Serving = Callable[["UpnpRouter", trio.SocketStream, bytes], Awaitable[None]]


@dataclass
class UpnpRouter:
    """A router that speaks UPnP: `actions` has the SOAP actions that it was asked for."""

    table: Table
    leases: bool = True
    silent: bool = False
    location_host: str = LOOPBACK
    description: bytes = DESCRIPTION.encode()
    serving: Serving | None = None
    ssdp_port: int = 0
    http_port: int = 0
    actions: list[str] = field(default_factory=list)
    connections: int = 0

    async def answer_searches(self, link: trio.socket.SocketType) -> None:
        while True:
            data, source = await link.recvfrom(2048)
            if self.silent or f"ST: {IGD}\r\n".encode() not in data:
                continue
            location = f"http://{self.location_host}:{self.http_port}/root.xml"
            answer = f"HTTP/1.1 200 OK\r\nST: {IGD}\r\nLOCATION: {location}\r\nEXT:\r\n\r\n"
            await link.sendto(answer.encode(), source)

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        with suppress(trio.BrokenResourceError):  # the client may hang up
            async with stream:
                request = await _whole_request(stream)
                await (self.serving or _serve_well)(self, stream, request)
        self.connections -= 1


async def _whole_request(stream: trio.SocketStream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some()
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length is not None and len(body) < int(length[1]):
        body += await stream.receive_some()
    return head + b"\r\n\r\n" + body


async def _serve_well(router: UpnpRouter, stream: trio.SocketStream, request: bytes) -> None:
    if request.startswith(b"GET /root.xml "):
        await stream.send_all(http_answer(200, router.description))
        return
    assert request.startswith(b"POST /control ")
    status, body = _act(router, request.decode())
    await stream.send_all(http_answer(status, body.encode()))


def http_answer(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _act(router: UpnpRouter, request: str) -> tuple[int, str]:
    found = re.search(rf'(?i)soapaction: "{re.escape(WAN_IP)}#(\w+)"', request)
    assert found is not None
    action, table = found[1], router.table
    router.actions.append(action)
    if action == "GetExternalIPAddress":
        host = f"<NewExternalIPAddress>{table.external_host}</NewExternalIPAddress>"
        return 200, _envelope(f'<u:{action}Response xmlns:u="{WAN_IP}">{host}</u:{action}Response>')
    external = int(_value(request, "NewExternalPort"))
    if external in table.taken:
        return 500, _fault(718)
    if action == "DeletePortMapping":
        if external not in table.mappings:
            return 500, _fault(714)
        del table.mappings[external]
    else:
        assert _value(request, "NewInternalClient") == LOOPBACK
        if not router.leases and _value(request, "NewLeaseDuration") != "0":
            return 500, _fault(725)
        table.mappings[external] = int(_value(request, "NewInternalPort"))
    return 200, _envelope(f'<u:{action}Response xmlns:u="{WAN_IP}"/>')


def _value(request: str, name: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", request)
    assert found is not None
    return found[1]


def _envelope(body: str) -> str:
    name = "http://schemas.xmlsoap.org/soap/envelope/"
    return f'<?xml version="1.0"?><s:Envelope xmlns:s="{name}"><s:Body>{body}</s:Body></s:Envelope>'


def _fault(code: int) -> str:
    return _envelope(
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
        "<errorDescription>no</errorDescription></UPnPError></detail></s:Fault>"
    )


@asynccontextmanager
async def upnp_router(router: UpnpRouter) -> AsyncIterator[UpnpRouter]:
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        await link.bind((LOOPBACK, 0))
        router.ssdp_port = link.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.answer_searches, link)
            (listener,) = await trio.open_tcp_listeners(0, host=LOOPBACK)
            router.http_port = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, router.serve, [listener])
            yield router
            nursery.cancel_scope.cancel()
