"""The messages of `/potluck/dht/1.0.0`: five methods, and the limits of each.

`find` asks for the peers closest to some positions, and for the slots under some keys. `store`
carries a few slots, `store-many` a batch of them. `greet` only introduces a node. Every answer
carries the answerer's swarm time. The first request to a peer on a link carries an introduction,
and the answer carries the other's introduction. From then on the answers also say whether the
introduced addresses were `dialled` in vain.

In a run with tokens, only slots of members count, and whoever passes on the slots of others shows
their publishers' tokens: in a store at once (`tokens`), to a reader when it asks (`vouch`).

Both sides save bytes. A query names the peers that the asker has spoken with itself (`known`), so
that an answer in a settled swarm names nobody. A repeated read asks each replica only for what is
new `since` the last request: the answer says how far it goes (`cursor`), and the next query repeats
that. Only one of several replicas sends slots; the others only name them, in 8 bytes each. Slots
that are then still missing are asked for by these names (`wanted`). The slots of an answer are much
alike, so several are compressed together (`packed`), which nearly halves them.

`known` may only name peers that answered the asker themselves. With hearsay in it, a liar could
name a peer with a wrong address first, and nobody would correct it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta

from auth.tokens import LIMIT_BYTES as TOKEN_BYTES
from protocols.dht.contacts import ADDRESSES_PER_CONTACT, LONGEST_ADDRESS, Contact
from protocols.dht.dialability import Dialled
from protocols.dht.ids import ID_BYTES, node_id_of_key
from protocols.dht.publisher import SLOTS_PER_BATCH
from protocols.dht.slots import LONGEST_KEY_BYTES, PublicKey, Slot, SlotNumber
from protocols.errors import MalformedMessage
from protocols.identity import PeerId, peer_id_of, public_key_of
from protocols.rpc import Message, MessageType, Method, encode

PROTOCOL = "/potluck/dht/1.0.0"

QUERIES_PER_REQUEST = 64  # keys in one message; each costs the other side some 50 µs
CONTACTS_PER_ANSWER = 20  # k: a lookup has no use for more
CONTACTS_PER_STORED = 40  # for a whole batch: contacts new to a node that knows the neighbourhood

# `store` is answered at once, so it may take a millisecond of signatures, and no more. For more
# slots there is `store-many`, which pauses between them.
SLOTS_STORED_AT_ONCE = 8

VOUCHED_AT_ONCE = 32  # two milliseconds of signatures

PREFIX_BYTES = 8  # of a node id or a signature: long enough to make collisions expensive
KNOWN_PER_QUERY = 64  # more than lie between an asker and its target
CURSOR_BYTES = 32  # at most; only the answerer knows what is in it

# As many publishers as a run may have. With the limit of a request, no message makes the answerer
# look for more than 16,384 names.
WANTED_PER_QUERY = 1024
# Names in one answer, of all its queries: every slot of the fullest key, and some more.
NAMES_PER_ANSWER = 8192

# Of the slots in one answer. The rest is asked for again, from the end of this answer. A slow
# uplink sends this in a second or two.
SLOT_BYTES_PER_ANSWER = 128 << 10
# Of those, so many are packed at most: more than the slots of a large cohort. They take some 200
# microseconds. A try takes 20 in any case, so it counts for at least some bytes. A stranger should
# not cost more.
PACKED_BYTES_PER_ANSWER = 32 << 10
PACKED_BYTES_AT_LEAST = 2 << 10
PACKING_EFFORT: Final = 1  # of 9; the others take up to twice the time for a hundredth of the bytes
# Beside the slots: 64 answers with 20 contacts, mostly with two addresses each. An answer could
# hold more at most, so the answering side counts as well.
CONTACT_BYTES_PER_ANSWER = 256 << 10

FIND_REQUEST_BYTES = 128 << 10
FIND_RESPONSE_BYTES = 512 << 10
STORE_REQUEST_BYTES = 192 << 10  # of values and keys 64 KiB; a single slot may exceed that
STORE_RESPONSE_BYTES = 256 << 10
GREET_BYTES = 4096
VOUCH_REQUEST_BYTES = 4096
VOUCH_RESPONSE_BYTES = 32 << 10

REASONS_PER_ANSWER = 8
LONGEST_REASON = 300
NEWER_PER_ANSWER = 16
NEWER_BYTES_PER_ANSWER = 64 << 10  # but a single slot may exceed that

AddressText = Annotated[str, Meta(max_length=LONGEST_ADDRESS)]
AddressTexts = Annotated[tuple[AddressText, ...], Meta(max_length=ADDRESSES_PER_CONTACT)]
Position = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
DialledNumber = Annotated[int, Meta(ge=0, le=255)]  # of a Dialled, or of a newer node's
Known = Annotated[bytes, Meta(max_length=KNOWN_PER_QUERY * PREFIX_BYTES)]
Wanted = Annotated[bytes, Meta(max_length=WANTED_PER_QUERY * PREFIX_BYTES)]
Cursor = Annotated[bytes, Meta(max_length=CURSOR_BYTES)]
TokenBytes = Annotated[bytes, Meta(max_length=TOKEN_BYTES)]


class Named(Message, frozen=True, gc=False):
    """A peer as it is passed on: its key, and its addresses (without `/p2p/…`)."""

    public_key: PublicKey
    addresses: AddressTexts


class Introduction(Message, frozen=True, gc=False):
    """The sender's addresses; without any it cannot be dialled (client mode)."""

    addresses: AddressTexts = ()


class Query(Message, frozen=True, gc=False):
    """Asks for the peers closest to this position and, with a key, for its slots.

    `since` is the cursor of an earlier answer of this peer for this key: only newer slots are
    wanted. It is empty in the first query, whose answer also names peers; later answers do not.
    `named`: names of slots are enough. `wanted`: only the slots with these names. `copies` allows
    copies that are kept for a short while and may be incomplete. `contacts`: at most so many peers
    are of use. `packs`: the slots may come packed.
    """

    position: Position
    key: Annotated[str, Meta(max_length=LONGEST_KEY_BYTES)] = ""
    known: Known = b""
    since: Cursor = b""
    wanted: Wanted = b""
    named: bool = False
    copies: bool = False
    contacts: Annotated[int, Meta(ge=0, le=255)] = CONTACTS_PER_ANSWER
    packs: bool = False


class FindRequest(Message, frozen=True, gc=False):
    queries: Annotated[tuple[Query, ...], Meta(min_length=1, max_length=QUERIES_PER_REQUEST)]
    sender: Introduction | None = None


class Found(Message, frozen=True, gc=False):
    """The answer to one query.

    `contacts` are the closest k that the answerer has spoken with, without those named as known; of
    these the first that are of use. `slots` and `names` (8 bytes each) are in the order in which
    they came to the answerer. `cursor` is how far they go; with `more` there are others after it. A
    `since` from before the answerer's last start is unknown to it, so it sends everything.
    `copied`: these are only copies. `packed` (`pack_slots`) takes the place of `slots` if the query
    allows it.
    """

    contacts: Annotated[tuple[Named, ...], Meta(max_length=CONTACTS_PER_ANSWER)] = ()
    slots: tuple[Slot, ...] = ()
    names: Annotated[bytes, Meta(max_length=NAMES_PER_ANSWER * PREFIX_BYTES)] = b""
    cursor: Cursor = b""
    more: bool = False
    copied: bool = False
    packed: Annotated[bytes, Meta(max_length=PACKED_BYTES_PER_ANSWER)] = b""


class FindResponse(Message, frozen=True, gc=False):
    """Answers in the order of the queries. If one has `more` and no slots, ask again."""

    time_ms: SlotNumber
    answers: Annotated[tuple[Found, ...], Meta(max_length=QUERIES_PER_REQUEST)]
    responder: Introduction | None = None
    dialled: DialledNumber = Dialled.UNKNOWN


class StoreRequest(Message, frozen=True, gc=False):
    """Slots to keep; with `copies`, for a short while only. `known` as in a query. `tokens`: of the
    publishers other than the sender, at most one for each slot."""

    slots: Annotated[tuple[Slot, ...], Meta(min_length=1, max_length=SLOTS_PER_BATCH)]
    known: Known = b""
    copies: bool = False
    sender: Introduction | None = None
    tokens: Annotated[tuple[TokenBytes, ...], Meta(max_length=SLOTS_PER_BATCH)] = ()


class StoreResponse(Message, frozen=True, gc=False):
    """For each slot 0 or the number of a SlotRefusal, in the order of the request.

    `reasons` explain the first few refusals. `newer` has the newer slots that blocked older ones.
    `contacts` are peers closer to some slot than those that the asker knows.
    """

    time_ms: SlotNumber
    refusals: Annotated[bytes, Meta(max_length=SLOTS_PER_BATCH)]
    reasons: Annotated[
        tuple[Annotated[str, Meta(max_length=LONGEST_REASON)], ...],
        Meta(max_length=REASONS_PER_ANSWER),
    ] = ()
    newer: Annotated[tuple[Slot, ...], Meta(max_length=NEWER_PER_ANSWER)] = ()
    contacts: Annotated[tuple[Named, ...], Meta(max_length=CONTACTS_PER_STORED)] = ()
    responder: Introduction | None = None
    dialled: DialledNumber = Dialled.UNKNOWN


class GreetRequest(Message, frozen=True, gc=False):
    sender: Introduction | None = None


class GreetResponse(Message, frozen=True, gc=False):
    time_ms: SlotNumber
    responder: Introduction | None = None
    dialled: DialledNumber = Dialled.UNKNOWN


class VouchRequest(Message, frozen=True, gc=False):
    publishers: Annotated[tuple[PublicKey, ...], Meta(min_length=1, max_length=VOUCHED_AT_ONCE)]


class VouchResponse(Message, frozen=True, gc=False):
    """The tokens of those publishers that have shown one, in any order."""

    tokens: Annotated[tuple[TokenBytes, ...], Meta(max_length=VOUCHED_AT_ONCE)] = ()


FIND = Method(PROTOCOL, "find", FindRequest, FindResponse, FIND_REQUEST_BYTES, FIND_RESPONSE_BYTES)
# A monitor reads but does not write, nor does it keep what others write (`training`).
STORE = Method(
    PROTOCOL,
    "store",
    StoreRequest,
    StoreResponse,
    STORE_REQUEST_BYTES,
    STORE_RESPONSE_BYTES,
    training=True,
)
STORE_MANY = Method(
    PROTOCOL,
    "store-many",
    StoreRequest,
    StoreResponse,
    STORE_REQUEST_BYTES,
    STORE_RESPONSE_BYTES,
    training=True,
)
GREET = Method(PROTOCOL, "greet", GreetRequest, GreetResponse, GREET_BYTES, GREET_BYTES)
VOUCH = Method(
    PROTOCOL, "vouch", VouchRequest, VouchResponse, VOUCH_REQUEST_BYTES, VOUCH_RESPONSE_BYTES
)


_SLOTS = MessageType(tuple[Slot, ...], "packed slots")


def pack_slots(slots: tuple[Slot, ...], room_bytes: int) -> tuple[bytes, int]:
    """Slots as the `packed` of an answer, and how many of `room_bytes` this took. Empty if there is
    too little room, or if it saves nothing."""
    if len(slots) < 2:  # nothing is alike
        return b"", 0
    plain = encode(slots)
    took = max(len(plain), PACKED_BYTES_AT_LEAST)
    if took > room_bytes:
        return b"", 0
    packed = zlib.compress(plain, PACKING_EFFORT)
    return packed if len(packed) < len(plain) else b"", took


def unpack_slots(packed: bytes, room_bytes: int) -> tuple[tuple[Slot, ...], int]:
    """The packed slots, and how many bytes they have. MalformedMessage if they are no slots, or
    have more than `room_bytes`."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, room_bytes + 1)
    except zlib.error as error:
        raise MalformedMessage(f"Packed slots cannot be unpacked: {error}") from None
    if len(plain) > room_bytes or not unpacking.eof or unpacking.unused_data:
        raise MalformedMessage("Packed slots are cut off, too many, or followed by other bytes.")
    return _SLOTS.decode(plain), len(plain)


def contact_from(named: Named) -> Contact:
    key = named.public_key
    return Contact(peer_id_of(key), node_id_of_key(key), named.addresses)


def named(contact: Contact) -> Named:
    return Named(public_key_of(contact.peer), contact.addresses)


def without_peer(peer: PeerId, addresses: Iterable[str]) -> tuple[str, ...]:
    """Addresses as sent on the wire, without the peer id, which is sent beside them."""
    ending = f"/p2p/{peer}"
    short = (address.removesuffix(ending) for address in addresses)
    return tuple(one for one in short if len(one) <= LONGEST_ADDRESS)[:ADDRESSES_PER_CONTACT]


def prefix_of_id(node_id: int) -> bytes:
    return (node_id >> (ID_BYTES - PREFIX_BYTES) * 8).to_bytes(PREFIX_BYTES, "big")


def prefix_of_slot(slot: Slot) -> bytes:
    """A short name of exactly this slot: the first bytes of the second half of its signature.

    That half depends on every signed bit, and cannot be chosen. (The first half can, by a publisher
    that signs twice with one nonce.) The name costs nothing. A digest would cost a stranger's query
    some microseconds a slot.
    """
    return slot.signature[32 : 32 + PREFIX_BYTES]


def prefixes(packed: bytes) -> list[bytes]:
    return [packed[at : at + PREFIX_BYTES] for at in range(0, len(packed), PREFIX_BYTES)]
