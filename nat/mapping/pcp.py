"""PCP (RFC 6887): a port mapping by the successor of NAT-PMP, from the same port of the router.

A mapping belongs to the node that knows its nonce: 12 random bytes, kept for as long as the node
runs. A request with the same nonce renews it, and with a lifetime of 0 deletes it. An answer with
another nonce is not for us.

Addresses are 16 bytes; those of IPv4 are written as IPv6 ones (::ffff:192.0.2.1). Opening the
firewall of a router for IPv6 is left out: it would need a second lease, towards another gateway,
for each global address that this machine has.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

import trio

from nat.mapping.datagrams import ask, local_host_towards
from nat.mapping.lease import (
    WANTED_LIFETIME_SECONDS,
    Grant,
    Mapping,
    MappingFailed,
    MappingProtocol,
    clamped_lifetime,
)

NONCE_BYTES: Final = 12

_VERSION: Final = 2
_ANNOUNCE: Final = 0
_MAP: Final = 1
_IS_ANSWER: Final = 128
_TCP: Final = 6

# version, opcode, reserved, lifetime, our address
_REQUEST_HEADER: Final = struct.Struct("!BBHI16s")
# version, opcode, reserved, result, lifetime, epoch, reserved
_ANSWER_HEADER: Final = struct.Struct("!BBBBII12x")
# nonce, protocol, reserved, internal port, external port, external address
_MAP_PART: Final = struct.Struct("!12sB3xHH16s")
_WHOLE_ANSWER_BYTES: Final = _ANSWER_HEADER.size + _MAP_PART.size

_ANY_IPV4: Final = ipaddress.IPv6Address("::ffff:0.0.0.0").packed

_UNSUPPORTED_VERSION: Final = 1
_REFUSALS: Final = {
    _UNSUPPORTED_VERSION: "the router does not speak this version",
    2: "the router's owner has switched it off",
    3: "the router calls our request malformed",
    4: "the router maps no ports",
    7: "the router itself has no address yet",
    8: "the router has no room for more mappings",
    9: "the router maps no TCP ports",
    10: "the router allows this machine no more mappings",
    11: "the router cannot give that external port",
    12: "another router lies between this machine and the one that answers",
}


@dataclass(frozen=True)
class MappedPort:
    """The answer to a request for a mapping."""

    epoch_seconds: int
    external_host: str
    external_port: int
    lifetime_seconds: int


def map_request(
    nonce: bytes, our_host: str, internal_port: int, external_port: int, lifetime_seconds: int
) -> bytes:
    ours = ipaddress.IPv6Address(f"::ffff:{our_host}").packed
    header = _REQUEST_HEADER.pack(_VERSION, _MAP, 0, lifetime_seconds, ours)
    return header + _MAP_PART.pack(nonce, _TCP, internal_port, external_port, _ANY_IPV4)


def read_mapped_port(data: bytes, nonce: bytes, internal_port: int) -> MappedPort | None:
    """What was mapped; None if this is no answer to us. MappingFailed if it refuses.

    A router that speaks only NAT-PMP answers in version 0, and one that speaks another version of
    PCP answers with its header alone. Both count as a refusal.
    """
    if len(data) < 4 or not data[1] & _IS_ANSWER:
        return None
    if data[0] != _VERSION:
        raise MappingFailed(_REFUSALS[_UNSUPPORTED_VERSION])
    if len(data) < _ANSWER_HEADER.size or len(data) % 4 or data[1] != _MAP | _IS_ANSWER:
        return None
    *_, result, lifetime, epoch = _ANSWER_HEADER.unpack_from(data)
    if len(data) >= _WHOLE_ANSWER_BYTES:
        theirs, protocol, internal, external, host = _MAP_PART.unpack_from(
            data, _ANSWER_HEADER.size
        )
        if (theirs, protocol, internal) != (nonce, _TCP, internal_port):
            return None
    elif result == 0:
        return None
    if result != 0:
        raise MappingFailed(_REFUSALS.get(result, f"the router refuses with code {result}"))
    return MappedPort(epoch, _readable(host), external, lifetime)


def announced_epoch(data: bytes) -> int | None:
    """How long ago the router began, if this is its announcement (RFC 6887, 14.1)."""
    if len(data) < _ANSWER_HEADER.size:
        return None
    version, opcode, _, result, _, epoch = _ANSWER_HEADER.unpack_from(data)
    is_ours = (version, opcode, result) == (_VERSION, _ANNOUNCE | _IS_ANSWER, 0)
    return int(epoch) if is_ours else None


def _readable(packed: bytes) -> str:
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)


class Pcp:
    """PCP with one router, for one of our ports.

    `may_hold` says whether the router may have a mapping that is to be deleted.
    """

    protocol = MappingProtocol.PCP

    def __init__(self, host: str, port: int, internal_port: int, nonce: bytes) -> None:
        self._at = (host, port)
        self._internal_port = internal_port
        self._nonce = nonce
        self.may_hold = False

    async def look(self) -> None:
        """Nothing to do: PCP is preferred, so its mapping is asked for at once."""
        await trio.lowlevel.checkpoint()

    async def map(self, external_port: int) -> Grant:
        """Ask for the mapping, or for its renewal. The router may choose another external port."""
        held, self.may_hold = self.may_hold, True
        try:
            mapped = await self._ask(external_port, WANTED_LIFETIME_SECONDS)
        except MappingFailed:
            self.may_hold = held
            raise
        if mapped.external_port == 0 or mapped.lifetime_seconds == 0:
            raise MappingFailed("the router grants a mapping without a port or a life")
        mapping = Mapping(
            self.protocol,
            mapped.external_host,
            mapped.external_port,
            self._internal_port,
            clamped_lifetime(mapped.lifetime_seconds),
        )
        return Grant(mapping, mapped.epoch_seconds)

    async def unmap(self) -> None:
        """Delete the mapping, also one whose grant we never heard of."""
        await self._ask(0, 0)

    async def _ask(self, external_port: int, lifetime_seconds: int) -> MappedPort:
        try:
            our_host = await local_host_towards(*self._at)
        except OSError as error:
            raise MappingFailed("there is no route to the router", silent=True) from error
        ours, nonce = self._internal_port, self._nonce
        request = map_request(nonce, our_host, ours, external_port, lifetime_seconds)
        return await ask(*self._at, request, lambda data: read_mapped_port(data, nonce, ours))
