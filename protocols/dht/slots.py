"""A slot: one publisher's signed, expiring value under a key.

What is signed are the canonical bytes, never the MessagePack that travelled, so that any encoder
in any language agrees with ours. All numbers are big-endian; the two fields of varying length
carry their length before them, so no two slots have the same bytes:

    u8   length of the domain (18)     "potluck/dht/slot/1"
    u16  length of the key             the key in UTF-8
    32 bytes                           the publisher's raw Ed25519 public key
    u64                                sequence
    u64                                expires, in milliseconds since 1970 in swarm time
    u8                                 1 if withdrawn, 0 if not
    u32  length of the value           the value

The signature is plain Ed25519 (RFC 8032) over all of that. (`canonical_bytes` gives what comes
after the domain; `Identity.sign` puts the domain before it.) tests/dht/test_slots.py has a vector.

Of two slots of one publisher under one key the one with the higher sequence holds. A publisher
that signs two different ones with the same sequence has broken its own rule; then the one with
the lower digest (SHA-256 of canonical bytes and signature) holds, so that all replicas agree. A
withdrawn slot has no value and is kept like any other until it expires: it stands in the way of
older ones.

Easy to get wrong: a Slot that was decoded or built is only a claim. `check_form` is cheap and
says that it could be one; only `check_signature` says that its publisher wrote it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated

from msgspec import Meta

from protocols.dht.refusals import SlotRefusal, SlotRefused
from protocols.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    peer_id_of,
    verify_with_key,
)
from protocols.messages import Message

DOMAIN = b"potluck/dht/slot/1"

LONGEST_KEY_BYTES = 256  # of UTF-8: room for a run's name and an expert's uid, and no more
LARGEST_VALUE_BYTES = 1 << 16  # whatever a family declares: hundreds of slots fit in a message
LARGEST_NUMBER = 0x7FFF_FFFF_FFFF_FFFF  # what a signed 64-bit integer holds in every language

_LENGTH_OF_KEY = struct.Struct(">H")
_NUMBERS = struct.Struct(">QQ?I")

KeyText = Annotated[str, Meta(min_length=3, max_length=LONGEST_KEY_BYTES)]
PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
SlotNumber = Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)]
Value = Annotated[bytes, Meta(max_length=LARGEST_VALUE_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Slot(Message, frozen=True, gc=False):
    """What one publisher says under one key. `value` is MessagePack of the family's type."""

    key: KeyText
    publisher: PublicKey
    sequence: SlotNumber
    expires: SlotNumber
    value: Value
    withdrawn: bool
    signature: Signature

    @property
    def publisher_peer(self) -> PeerId:
        return peer_id_of(self.publisher)


def sign_slot(
    identity: Identity,
    key: str,
    value: bytes,
    sequence: int,
    expires_ms: int,
    withdrawn: bool = False,
) -> Slot:
    """A slot of our own. SlotRefused if it could not be one."""
    unsigned = Slot(
        key, identity.public_key, sequence, expires_ms, value, withdrawn, bytes(SIGNATURE_BYTES)
    )
    check_form(unsigned)
    signature = identity.sign(DOMAIN, canonical_bytes(unsigned))
    return Slot(key, unsigned.publisher, sequence, expires_ms, value, withdrawn, signature)


def check_key(key: str) -> bytes:
    """The bytes of a key; SlotRefused unless it is `family/rest` and not too long."""
    try:
        raw = key.encode("utf-8")
    except UnicodeEncodeError:
        raw = b""
    family, _, rest = raw.partition(b"/")
    if not family or not rest or len(raw) > LONGEST_KEY_BYTES:
        raise SlotRefused(
            SlotRefusal.MALFORMED,
            f"{key[:80]!r} is not a key.",
            why=f"A key is a family, a slash and a name, in at most {LONGEST_KEY_BYTES} bytes.",
            advice="For trying, take a key like note/hello.",
        )
    return raw


def check_form(slot: Slot) -> None:
    """SlotRefused unless every field is within its bounds. Says nothing of who made it."""
    check_key(slot.key)
    if not (
        len(slot.publisher) == PUBLIC_KEY_BYTES
        and len(slot.signature) == SIGNATURE_BYTES
        and 0 <= slot.sequence <= LARGEST_NUMBER
        and 0 <= slot.expires <= LARGEST_NUMBER
    ):
        raise SlotRefused(
            SlotRefusal.MALFORMED,
            f"A publisher, signature or number under {slot.key!r} is of impossible size.",
        )
    if len(slot.value) > LARGEST_VALUE_BYTES:
        raise SlotRefused(
            SlotRefusal.TOO_LARGE,
            f"This value under {slot.key!r} has {len(slot.value):,} bytes.",
            why=f"No slot may have more than {LARGEST_VALUE_BYTES:,}.",
        )
    if slot.withdrawn and slot.value:
        raise SlotRefused(
            SlotRefusal.MALFORMED, f"This slot under {slot.key!r} is withdrawn and has a value."
        )


def canonical_bytes(slot: Slot) -> bytes:
    """What is signed, after the domain. Only for a slot that passed `check_form`."""
    key = slot.key.encode("utf-8")
    return b"".join(
        (
            _LENGTH_OF_KEY.pack(len(key)),
            key,
            slot.publisher,
            _NUMBERS.pack(slot.sequence, slot.expires, slot.withdrawn, len(slot.value)),
            slot.value,
        )
    )


def digest_of(slot: Slot) -> bytes:
    """The name of exactly this slot, signature included."""
    return hashlib.sha256(canonical_bytes(slot) + slot.signature).digest()


def check_signature(slot: Slot) -> None:
    """SlotRefused unless the publisher signed exactly this. Costs most of a tenth of a ms."""
    check_form(slot)
    if not verify_with_key(DOMAIN, slot.publisher, slot.signature, canonical_bytes(slot)):
        raise SlotRefused(
            SlotRefusal.BAD_SIGNATURE,
            f"The slot under {slot.key!r} was not signed by {slot.publisher_peer}.",
            why="It was changed on its way, or somebody tried to write in another's name.",
        )


def supersedes(one: Slot, other: Slot) -> bool:
    """Whether `one` holds against another of the same key and publisher; never against itself."""
    if one.sequence != other.sequence:
        return one.sequence > other.sequence
    return one != other and digest_of(one) < digest_of(other)
