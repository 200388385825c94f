"""The messages of circuit relay v2, DCUtR and AutoNAT v2, as libp2p's specifications define them.

Each is a protobuf behind its length as a varint. All of it comes from strangers: a message longer
than its limit is refused before it is read, more addresses than MOST_ADDRESSES are cut off, and an
address that is no multiaddr is left out. Anything else that is wrong raises MalformedMessage.

The schemas stand here as a table, from relay/circuit-v2.md, relay/DCUtR.md and
autonat/autonat-v2.md of libp2p's specifications. The library has some of them as modules, but
importing one of those loads its whole relay. Left out are AutoNAT's messages of ballast, for a dial
to another address than the asker's own: we never ask for that, and refuse it. One field is ours:
`nat` of a HolePunch tells how the sender's router maps ports (`kinds.py`); others skip it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from multiaddr import Multiaddr

from protocols.errors import LimitExceeded, MalformedMessage

LONGEST_MESSAGE_BYTES: Final = 4096  # what the specifications say, for all three
MOST_ADDRESSES: Final = 16
LONGEST_ADDRESS_BYTES: Final = 256

_Field = descriptor_pb2.FieldDescriptorProto
_UINT32, _UINT64 = _Field.TYPE_UINT32, _Field.TYPE_UINT64
_FIXED64, _BYTES, _ENUM = _Field.TYPE_FIXED64, _Field.TYPE_BYTES, _Field.TYPE_INT32

# message -> field -> (number, type); the name of another message is a nested one, `*` is repeated.
# Enumerations are declared as numbers, so that an unknown one is seen and not dropped.
_SCHEMAS: Final[dict[str, dict[str, tuple[int, int | str]]]] = {
    "Peer": {"id": (1, _BYTES), "addrs*": (2, _BYTES)},
    "Reservation": {"expire": (1, _UINT64), "addrs*": (2, _BYTES), "voucher": (3, _BYTES)},
    "Limit": {"duration": (1, _UINT32), "data": (2, _UINT64)},
    "Hop": {
        "type": (1, _ENUM),
        "peer": (2, "Peer"),
        "reservation": (3, "Reservation"),
        "limit": (4, "Limit"),
        "status": (5, _ENUM),
    },
    "Stop": {"type": (1, _ENUM), "peer": (2, "Peer"), "limit": (3, "Limit"), "status": (4, _ENUM)},
    "HolePunch": {"type": (1, _ENUM), "addrs*": (2, _BYTES), "nat": (100, _ENUM)},
    "DialRequest": {"addrs*": (1, _BYTES), "nonce": (2, _FIXED64)},
    "DialResponse": {"status": (1, _ENUM), "index": (2, _UINT32), "dial_status": (3, _ENUM)},
    "AutoNat": {"request": (1, "DialRequest"), "response": (2, "DialResponse")},
    "DialBack": {"nonce": (1, _FIXED64)},
    "DialBackResponse": {"status": (1, _ENUM)},
}
_PACKAGE = "potluck.nat"


def _classes() -> dict[str, Callable[..., Any]]:
    """The message classes, in a pool of their own: the library registers alike names in its own."""
    file = descriptor_pb2.FileDescriptorProto(name="nat.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SCHEMAS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated = field.endswith("*")
            entry = message.field.add(name=field.rstrip("*"), number=number)
            entry.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if isinstance(kind, str):
                entry.type, entry.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                entry.type = kind  # type: ignore[assignment]  # the stubs want their own enum
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMAS
    }


_CLASSES = _classes()
Hop, Stop, HolePunch = _CLASSES["Hop"], _CLASSES["Stop"], _CLASSES["HolePunch"]
AutoNat, DialBack = _CLASSES["AutoNat"], _CLASSES["DialBack"]
DialBackResponse = _CLASSES["DialBackResponse"]


class HopType(enum.IntEnum):
    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopType(enum.IntEnum):
    CONNECT = 0
    STATUS = 1


class PunchType(enum.IntEnum):
    CONNECT = 100
    SYNC = 300


class Status(enum.IntEnum):
    """What a relay or its client answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class ResponseStatus(enum.IntEnum):
    """What an AutoNAT server answers to a request."""

    INTERNAL_ERROR = 0
    REQUEST_REJECTED = 100
    DIAL_REFUSED = 101
    OK = 200


class DialStatus(enum.IntEnum):
    """How an AutoNAT server's dial back ended."""

    UNUSED = 0
    DIAL_ERROR = 100
    DIAL_BACK_ERROR = 101
    OK = 200


# ---- on a stream


class Duplex(Protocol):
    """The part of a stream that is used here."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes: ...

    async def send_all(self, data: bytes) -> None: ...


M = TypeVar("M")


async def read(
    stream: Duplex, kind: Callable[..., M], limit_bytes: int = LONGEST_MESSAGE_BYTES
) -> M:
    """Read one message, and not a byte beyond it. The caller sets the deadline.

    MalformedMessage or LimitExceeded if it is wrong; MalformedMessage, too, if the stream ends
    within it.
    """
    length = 0
    for shift in (0, 7, 14):
        byte = (await _exactly(stream, 1))[0]
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
    else:
        raise LimitExceeded("A message declares two megabytes or more.")
    if length > limit_bytes:
        raise LimitExceeded(f"A message declares {length} bytes; {limit_bytes} are allowed.")
    return decode(kind, await _exactly(stream, length))


async def send(stream: Duplex, message: Any) -> None:
    await stream.send_all(encode(message))


def encode(message: Message) -> bytes:
    """The message behind its length."""
    body = message.SerializeToString()
    length = len(body)
    prefix = bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + body


def decode(kind: Callable[..., M], body: bytes) -> M:
    """A message of this kind from its bytes, without their length."""
    message: Any = kind()
    try:
        message.ParseFromString(body)
    except (DecodeError, ValueError) as error:
        raise MalformedMessage("A message is not its protobuf.", why=str(error)) from None
    found: M = message
    return found


async def _exactly(stream: Duplex, count: int) -> bytes:
    """Bytes that follow the message belong to another protocol, so never more than `count`."""
    parts = bytearray()
    while len(parts) < count:
        part = await stream.receive_some(count - len(parts))
        if not part:
            raise MalformedMessage("The stream ended within a message.")
        parts += part
    return bytes(parts)


# ---- addresses in messages


def packed(addresses: Iterable[str]) -> list[bytes]:
    """Addresses as a message carries them; the first MOST_ADDRESSES."""
    return [Multiaddr(text).to_bytes() for text in list(addresses)[:MOST_ADDRESSES]]


def unpacked(addresses: Iterable[bytes]) -> tuple[str, ...]:
    """The valid addresses of a message, in their order; of the first MOST_ADDRESSES."""
    return tuple(text for text in unpacked_in_place(addresses) if text)


def unpacked_in_place(addresses: Iterable[bytes]) -> tuple[str, ...]:
    """The first MOST_ADDRESSES of a message, each at its index; empty where one is invalid."""
    return tuple(_unpacked_or_empty(raw) for raw in list(addresses)[:MOST_ADDRESSES])


def _unpacked_or_empty(raw: bytes) -> str:
    if len(raw) > LONGEST_ADDRESS_BYTES:
        return ""
    try:
        return str(Multiaddr(raw))
    except Exception:  # noqa: BLE001  the library raises many kinds for bytes that are no address
        return ""
