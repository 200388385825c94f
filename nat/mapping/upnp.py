"""UPnP IGD: a port mapping by SSDP (find the router), HTTP (its description) and SOAP (ask it).

Most routers in homes that map ports at all do it by this protocol.

Whoever is in the network can answer a search, so only the default gateway is believed: the answer
must come from its address, and every URL must lead to its address. A document is read up to a size,
within a time, without a tree, and without document types (which could make a small one expand).

Why not the library miniupnpc, which libp2p brings: its thread cannot be stopped. It waits for as
long as a device sends one byte now and then, and it believes every device and every URL.

A router forwards what it is told, so a mapping can be deleted by its external port alone. We delete
only what we have made, or asked for without hearing an answer.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import xml.parsers.expat
from collections.abc import Mapping as Items
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit

import h11
import trio

from nat.mapping.datagrams import local_host_towards, udp_socket
from nat.mapping.lease import (
    WANTED_LIFETIME_SECONDS,
    Grant,
    Mapping,
    MappingFailed,
    MappingProtocol,
)

_MULTICAST_HOST: Final = "239.255.255.250"
_STANDARD_SSDP_PORT: Final = 1900
_SEARCHED_DEVICES: Final = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",  # some answer to their own version only
)
# A device answers at a random moment within MX seconds. A search is repeated against losses.
_MX_SECONDS: Final = 1
_REPEAT_SEARCH_AFTER_SECONDS: Final = (1.2, 1.2)
_LARGEST_SEARCH_ANSWER_BYTES: Final = 2048

# Real descriptions have 2 to 30 KB, SOAP answers less than 1 KB.
LARGEST_DOCUMENT_BYTES: Final = 128 * 1024
# For one request, with connecting. Weak routers take half a second.
HTTP_SECONDS: Final = 3.0
# A router has a service for each of its ways to the internet; usually one or two.
_MOST_SERVICES: Final = 4

_SERVICE: Final = re.compile(
    r"urn:schemas-upnp-org:service:(?:WANIPConnection:[12]|WANPPPConnection:1)"
)

# If the external port belongs to another machine. Each try is a request of half a second.
OTHER_PORTS_TRIED: Final = 3
# Ports that no usual service has, and that no system needs a privilege for.
_LOWEST_OTHER_PORT: Final = 20000
_HIGHEST_OTHER_PORT: Final = 60000

_NO_SUCH_MAPPING: Final = 714
_TAKEN_BY_ANOTHER: Final = 718
_ONLY_FOR_EVER: Final = 725  # the router knows no leases: 0 seconds, and deleted by us alone
_REFUSALS: Final = {
    402: "the router calls our request malformed",
    501: "the router failed to map the port",
    606: "the router's owner has switched it off",
    724: "the router maps only equal ports, and that one is taken",
    728: "the router has no room for more mappings",
}


@dataclass(frozen=True)
class IgdService:
    """The part of a router that maps ports: its type, and where it takes requests."""

    kind: str
    port: int
    path: str


class SoapFault(MappingFailed):
    """The router refuses, with a code of UPnP."""

    def __init__(self, code: int) -> None:
        super().__init__(_REFUSALS.get(code, f"the router refuses with code {code}"))
        self.code = code


class Upnp:
    """UPnP with one router, for one of our ports."""

    protocol = MappingProtocol.UPNP

    def __init__(self, host: str, ssdp_port: int, internal_port: int) -> None:
        self._host = host
        self._ssdp_port = ssdp_port
        self._internal_port = internal_port
        self._service: IgdService | None = None
        self._our_host = ""
        self._to_delete: set[int] = set()

    @property
    def may_hold(self) -> bool:
        """Whether the router may have a mapping that is to be deleted."""
        return bool(self._to_delete)

    async def look(self) -> None:
        """Find the router's service, without changing anything there."""
        try:
            self._our_host = await local_host_towards(self._host, self._ssdp_port)
            location = await self._search()
        except OSError as error:
            raise MappingFailed("there is no route to the router", silent=True) from error
        at = _place(location, self._host)
        if at is None:
            raise MappingFailed("the router's description is elsewhere")
        port, path = at
        status, document = await _request(self._host, port, "GET", path, {}, b"")
        if status != 200:
            raise MappingFailed(f"the router answers {status} for its description")
        for service in read_services(document, location, self._host):
            self._service = service
            try:
                await self._external_host()
            except MappingFailed:  # a way to the internet that is not in use
                continue
            return
        self._service = None
        raise MappingFailed("the router offers no connection to the internet")

    async def map(self, external_port: int) -> Grant:
        """Ask for the mapping, or for its renewal.

        If another machine has the external port, a few others are tried.
        """
        host = await self._external_host()
        for port in (external_port, *_other_ports()):
            try:
                await self._add(port)
            except SoapFault as fault:
                if fault.code != _TAKEN_BY_ANOTHER:
                    raise
            else:
                ours, life = self._internal_port, float(WANTED_LIFETIME_SECONDS)
                return Grant(Mapping(self.protocol, host, port, ours, life))
        raise MappingFailed("other machines have all external ports that were tried")

    async def unmap(self) -> None:
        """Delete what `map` has made, or may have made."""
        for port in tuple(self._to_delete):
            fields = {
                "NewRemoteHost": "",
                "NewExternalPort": str(port),
                "NewProtocol": "TCP",
            }
            try:
                await self._call("DeletePortMapping", fields)
            except SoapFault as fault:
                if fault.code != _NO_SUCH_MAPPING:
                    raise
            self._to_delete.discard(port)

    async def _search(self) -> str:
        targets = [(self._host, self._ssdp_port), (_MULTICAST_HOST, self._ssdp_port)]
        with udp_socket() as link:
            await link.bind((self._our_host, 0))
            for seconds in _REPEAT_SEARCH_AFTER_SECONDS:
                for target in targets:
                    for device in _SEARCHED_DEVICES:
                        await _send_if_possible(link, search_request(device), target)
                with trio.move_on_after(seconds):
                    return await self._first_location(link)
        raise MappingFailed("the router does not answer", silent=True)

    async def _first_location(self, link: trio.socket.SocketType) -> str:
        while True:
            try:
                data, source = await link.recvfrom(_LARGEST_SEARCH_ANSWER_BYTES)
            except ConnectionResetError:  # Windows: an earlier datagram found nobody
                continue
            location = read_search_answer(data)
            if source[0] == self._host and location is not None:
                return location

    async def _external_host(self) -> str:
        answer = await self._call("GetExternalIPAddress", {})
        try:
            host = str(ipaddress.IPv4Address(answer.get("NewExternalIPAddress", "")))
        except ValueError as error:
            raise MappingFailed("the router itself has no address yet") from error
        if host == "0.0.0.0":
            raise MappingFailed("the router itself has no address yet")
        return host

    async def _add(self, port: int) -> None:
        was_ours = port in self._to_delete
        self._to_delete.add(port)  # before the answer: without one, the mapping may be there
        try:
            try:
                await self._call("AddPortMapping", self._wanted(port, WANTED_LIFETIME_SECONDS))
            except SoapFault as fault:
                if fault.code != _ONLY_FOR_EVER:
                    raise
                await self._call("AddPortMapping", self._wanted(port, 0))
        except SoapFault as fault:
            if fault.code == _TAKEN_BY_ANOTHER or not was_ours:
                self._to_delete.discard(port)
            raise

    def _wanted(self, port: int, lifetime_seconds: int) -> dict[str, str]:
        return {
            "NewRemoteHost": "",
            "NewExternalPort": str(port),
            "NewProtocol": "TCP",
            "NewInternalPort": str(self._internal_port),
            "NewInternalClient": self._our_host,
            "NewEnabled": "1",
            "NewPortMappingDescription": "potluck",
            "NewLeaseDuration": str(lifetime_seconds),
        }

    async def _call(self, action: str, fields: dict[str, str]) -> dict[str, str]:
        service = self._service
        if service is None:
            raise MappingFailed("the router's service was not found", silent=True)
        headers = {
            "SOAPAction": f'"{service.kind}#{action}"',
            "Content-Type": 'text/xml; charset="utf-8"',
        }
        body = soap_request(service.kind, action, fields)
        status, document = await _request(
            self._host, service.port, "POST", service.path, headers, body
        )
        return read_soap_answer(status, document)


# -- messages: pure --------------------------------------------------------------------------


def search_request(device: str) -> bytes:
    return (
        "M-SEARCH * HTTP/1.1\r\n"
        f"HOST: {_MULTICAST_HOST}:{_STANDARD_SSDP_PORT}\r\n"
        'MAN: "ssdp:discover"\r\n'
        f"MX: {_MX_SECONDS}\r\n"
        f"ST: {device}\r\n\r\n"
    ).encode("ascii")


def read_search_answer(data: bytes) -> str | None:
    """The URL of a router's description; None if this is something else."""
    first, *lines = data.decode("latin-1").split("\r\n")
    if not re.fullmatch(r"HTTP/1\.[01] 200\b.*", first):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name.strip().lower(), value.strip())
    if headers.get("st") not in _SEARCHED_DEVICES:
        return None
    return headers.get("location")


def read_services(document: bytes, location: str, host: str) -> list[IgdService]:
    """The services that map ports, of a description that was found at `location`.

    Services whose URL leads to another host are left out.
    """
    found: list[IgdService] = []
    base, kind, url = location, "", ""
    for name, text in _elements(document):
        if name == "URLBase" and text:
            base = text
        elif name == "serviceType":
            kind = text
        elif name == "controlURL":
            url = text
        elif name == "service":
            at = _place(_joined(base, url), host)
            if at is not None and url and _SERVICE.fullmatch(kind):
                found.append(IgdService(kind, *at))
            kind, url = "", ""
    return found[:_MOST_SERVICES]


def soap_request(kind: str, action: str, fields: dict[str, str]) -> bytes:
    """A call. All values are our own: types that were matched, numbers, and our address."""
    values = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{kind}">{values}</u:{action}>'
        "</s:Body></s:Envelope>\r\n"
    ).encode("ascii")


def read_soap_answer(status: int, document: bytes) -> dict[str, str]:
    """The values of an answer. SoapFault if the router refuses with a code."""
    if status == 200:
        return dict(_elements(document))
    if status == 500:
        code = dict(_elements(document)).get("errorCode", "")
        if re.fullmatch("[0-9]{1,5}", code):
            raise SoapFault(int(code))
    raise MappingFailed(f"the router answers with the status {status}")


def _elements(document: bytes) -> list[tuple[str, str]]:
    """The name and text of each element, in the order in which they end."""
    found: list[tuple[str, str]] = []
    texts: list[list[str]] = []

    def begin(_name: str, _attributes: Items[str, str]) -> None:
        texts.append([])

    def add(text: str) -> None:
        if texts:
            texts[-1].append(text)

    def end(name: str) -> None:
        found.append((name.rpartition(":")[2], "".join(texts.pop()).strip()))

    def refuse(*_: object) -> None:
        raise MappingFailed("the router's document has a document type")

    parser = xml.parsers.expat.ParserCreate()
    parser.StartElementHandler = begin
    parser.CharacterDataHandler = add
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(document, True)
    except (xml.parsers.expat.ExpatError, ValueError, LookupError) as error:
        raise MappingFailed("the router's document is not XML") from error
    return found


def _joined(base: str, url: str) -> str:
    try:
        return urljoin(base, url)
    except ValueError:
        return ""


def _place(url: str, host: str) -> tuple[int, str] | None:
    """The port and path of a URL, if it is one of plain HTTP at that host."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        return None
    if parts.scheme != "http" or parts.hostname != host:
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return (port, path) if path.isascii() else None


def _other_ports() -> list[int]:
    span = _HIGHEST_OTHER_PORT - _LOWEST_OTHER_PORT
    return [_LOWEST_OTHER_PORT + secrets.randbelow(span) for _ in range(OTHER_PORTS_TRIED)]


# -- transport -------------------------------------------------------------------------------


async def _send_if_possible(
    link: trio.socket.SocketType, message: bytes, target: tuple[str, int]
) -> None:
    """A network without multicast refuses it, and the other target may still answer."""
    try:
        await link.sendto(message, target)
    except OSError:
        await trio.lowlevel.checkpoint()


async def _request(
    host: str, port: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    """One HTTP request on a connection of its own: the status and the body of the answer."""
    fields = [("Host", f"{host}:{port}"), ("Connection", "close"), *headers.items()]
    fields.append(("Content-Length", str(len(body))))
    http = h11.Connection(h11.CLIENT)
    try:
        head = http.send(h11.Request(method=method, target=path, headers=fields)) or b""
        with trio.fail_after(HTTP_SECONDS):
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(head + body)
                return await _answer(http, stream)
    except trio.TooSlowError as error:
        raise MappingFailed("the router does not answer in time") from error
    except (OSError, trio.BrokenResourceError) as error:
        raise MappingFailed("the connection to the router failed") from error
    except h11.ProtocolError as error:  # also a path that is none
        raise MappingFailed("the router does not speak HTTP") from error


async def _answer(http: h11.Connection, stream: trio.abc.ReceiveStream) -> tuple[int, bytes]:
    status, body = 0, bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some(16 * 1024))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > LARGEST_DOCUMENT_BYTES:
                raise MappingFailed("the router's document is too large")
        elif isinstance(event, h11.EndOfMessage):
            return status, bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise MappingFailed("the router hangs up without an answer")
