"""NAT-PMP (RFC 6886): a port mapping from a router of Apple's kind, by UDP.

All messages are of fixed size. A mapping is known by our address and internal port: whoever asks
for the same again renews it, and a lifetime of 0 deletes it.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

from nat.mapping.datagrams import ask
from nat.mapping.lease import (
    WANTED_LIFETIME_SECONDS,
    Grant,
    Mapping,
    MappingFailed,
    MappingProtocol,
    clamped_lifetime,
)

_VERSION: Final = 0
_ADDRESS: Final = 0
_MAP_TCP: Final = 2
_IS_ANSWER: Final = 128

# version, opcode, reserved, internal port, external port, lifetime
_MAP_REQUEST: Final = struct.Struct("!BBHHHI")
# version, opcode, result, epoch, internal port, external port, lifetime
_MAP_ANSWER: Final = struct.Struct("!BBHIHHI")
# version, opcode, result, epoch, external address
_ADDRESS_ANSWER: Final = struct.Struct("!BBHI4s")
# version, opcode, result: all that an answer which refuses must have
_REFUSAL: Final = struct.Struct("!BBH")

_REFUSALS: Final = {
    1: "the router does not speak this version",
    2: "the router's owner has switched it off",
    3: "the router itself has no address yet",
    4: "the router has no room for more mappings",
    5: "the router maps no TCP ports",
}


@dataclass(frozen=True)
class PmpMappedPort:
    """The answer to a request for a mapping."""

    epoch_seconds: int
    external_port: int
    lifetime_seconds: int


def address_request() -> bytes:
    return bytes((_VERSION, _ADDRESS))


def map_request(internal_port: int, external_port: int, lifetime_seconds: int) -> bytes:
    return _MAP_REQUEST.pack(_VERSION, _MAP_TCP, 0, internal_port, external_port, lifetime_seconds)


def read_address(data: bytes) -> str | None:
    """The external address; None if this is no answer. MappingFailed if it refuses."""
    if not _is_granted(data, _ADDRESS) or len(data) != _ADDRESS_ANSWER.size:
        return None
    *_, address = _ADDRESS_ANSWER.unpack(data)
    return str(ipaddress.IPv4Address(address))


def read_mapped_port(data: bytes, internal_port: int) -> PmpMappedPort | None:
    """What was mapped; None if this is no answer. MappingFailed if it refuses."""
    if not _is_granted(data, _MAP_TCP) or len(data) != _MAP_ANSWER.size:
        return None
    _, _, _, epoch, internal, external, lifetime = _MAP_ANSWER.unpack(data)
    return PmpMappedPort(epoch, external, lifetime) if internal == internal_port else None


def announced_epoch(data: bytes) -> int | None:
    """How long ago the router began, if this is its announcement (RFC 6886, 3.2.1)."""
    if len(data) != _ADDRESS_ANSWER.size:
        return None
    version, opcode, result, epoch, _ = _ADDRESS_ANSWER.unpack(data)
    is_ours = (version, opcode, result) == (_VERSION, _ADDRESS | _IS_ANSWER, 0)
    return int(epoch) if is_ours else None


def _is_granted(data: bytes, opcode: int) -> bool:
    if len(data) < _REFUSAL.size:
        return False
    version, answered, result = _REFUSAL.unpack_from(data)
    if version != _VERSION or answered != opcode | _IS_ANSWER:
        return False
    if result != 0:
        raise MappingFailed(_REFUSALS.get(result, f"the router refuses with code {result}"))
    return True


class NatPmp:
    """NAT-PMP with one router, for one of our ports.

    `may_hold` says whether the router may have a mapping that is to be deleted.
    """

    protocol = MappingProtocol.NAT_PMP

    def __init__(self, host: str, port: int, internal_port: int) -> None:
        self._at = (host, port)
        self._internal_port = internal_port
        self.may_hold = False

    async def look(self) -> None:
        """Find out whether the router speaks it, without changing anything there."""
        await ask(*self._at, address_request(), read_address)

    async def map(self, external_port: int) -> Grant:
        """Ask for the mapping, or for its renewal. The router may choose another external port."""
        host = await ask(*self._at, address_request(), read_address)
        held, self.may_hold = self.may_hold, True
        try:
            mapped = await self._ask(external_port, WANTED_LIFETIME_SECONDS)
        except MappingFailed:
            self.may_hold = held
            raise
        if mapped.external_port == 0 or mapped.lifetime_seconds == 0:
            raise MappingFailed("the router grants a mapping without a port or a life")
        life = clamped_lifetime(mapped.lifetime_seconds)
        mapping = Mapping(self.protocol, host, mapped.external_port, self._internal_port, life)
        return Grant(mapping, mapped.epoch_seconds)

    async def unmap(self) -> None:
        """Delete the mapping, also one whose grant we never heard of."""
        await self._ask(0, 0)

    async def _ask(self, external_port: int, lifetime_seconds: int) -> PmpMappedPort:
        ours = self._internal_port
        request = map_request(ours, external_port, lifetime_seconds)
        return await ask(*self._at, request, lambda data: read_mapped_port(data, ours))
