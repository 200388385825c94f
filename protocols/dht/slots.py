"""A slot: one publisher's signed, expiring value under a key.

The signature covers these canonical bytes, not the MessagePack on the wire, so that encoders in any
language agree. All numbers are big-endian. Each of the two fields of variable length has its length
before it, so no two slots have the same bytes:

    u8   length of the domain (18)     "potluck/dht/slot/1"
    u16  length of the key             the key in UTF-8
    32 bytes                           the publisher's raw Ed25519 public key
    u64                                sequence
    u64                                expires, in milliseconds since 1970 in swarm time
    u8                                 1 if withdrawn, 0 if not
    u32  length of the value           the value

The signature is plain Ed25519 (RFC 8032) over all of that. (`canonical_bytes` gives the part after
the domain; `Identity.sign` adds the domain.) tests/dht/test_slots.py has a test vector.

Of two slots of one publisher under one key, the one with the higher sequence wins. A publisher that
signs two different slots with the same sequence breaks the rules. Then the one with the lower
digest (SHA-256 of canonical bytes and signature) wins, so that all replicas agree. A withdrawn slot
has no value. It is kept like any other until it expires, because it blocks older ones.

A Slot that was decoded or built is only a claim. `check_form` is cheap and checks that it could be
a slot; only `check_signature` proves that its publisher wrote it.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Annotated

from msgspec import Meta

from protocols.errors import Refused
from protocols.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    PeerId,
    peer_id_of,
    verify_with_key,
)
from protocols.rpc import Message

DOMAIN = b"potluck/dht/slot/1"

LONGEST_KEY_BYTES = 256  # of UTF-8: room for a run's name and an expert's uid
LARGEST_VALUE_BYTES = 1 << 16  # whatever a family declares: hundreds of slots fit in a message
LARGEST_NUMBER = 0x7FFF_FFFF_FFFF_FFFF  # the largest signed 64-bit integer, for all languages

_LENGTH_OF_KEY = struct.Struct(">H")
_NUMBERS = struct.Struct(">QQ?I")

KeyText = Annotated[str, Meta(min_length=3, max_length=LONGEST_KEY_BYTES)]
PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES)]
SlotNumber = Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)]
Value = Annotated[bytes, Meta(max_length=LARGEST_VALUE_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Slot(Message, frozen=True, gc=False):
    """One publisher's value under one key. `value` is MessagePack of the family's type."""

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
    """Make a slot of our own. SlotRefused if it would be invalid."""
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
    """SlotRefused unless every field is within its bounds. Does not check the signature."""
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
    """The signed bytes after the domain. Only for a slot that passed `check_form`."""
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
    """The digest of exactly this slot, with its signature."""
    return hashlib.sha256(canonical_bytes(slot) + slot.signature).digest()


def check_signature(slot: Slot) -> None:
    """SlotRefused unless the publisher signed this. Takes almost a tenth of a millisecond."""
    check_form(slot)
    if not verify_with_key(DOMAIN, slot.publisher, slot.signature, canonical_bytes(slot)):
        raise SlotRefused(
            SlotRefusal.BAD_SIGNATURE,
            f"The slot under {slot.key!r} was not signed by {slot.publisher_peer}.",
            why="It was changed on its way, or somebody tried to write in another's name.",
        )


def supersedes(one: Slot, other: Slot) -> bool:
    """Whether `one` wins over another of the same key and publisher; never over itself."""
    if one.sequence != other.sequence:
        return one.sequence > other.sequence
    return one != other and digest_of(one) < digest_of(other)


# Why a slot is refused: a code for programs, and a sentence for people.
#
# A slot over a limit, or an invalid one, is refused, never silently dropped. Each refusal is a
# `SlotRefused` with one of these codes.
#
# The numbers are on the wire: append, never renumber. A reader takes an unknown number for a
# refusal of an unknown kind, not for a broken message.


class SlotRefusal(enum.IntEnum):
    """The reason of a refusal. 0 is unused: on the wire it can mean that nothing was refused."""

    MALFORMED = 1
    """The key, the publisher, a number or a length is invalid."""
    BAD_SIGNATURE = 2
    """The publisher's signature is not valid for this."""
    UNKNOWN_FAMILY = 3
    """No family with this beginning is declared here."""
    WRONG_SCHEMA = 4
    """The value is not of the type that the key's family declares."""
    TOO_LARGE = 5
    """The value has more bytes than the key's family allows."""
    EXPIRED = 6
    EXPIRY_TOO_FAR = 7
    """The slot would live longer than the key's family allows."""
    OLDER_SEQUENCE = 8
    """A newer slot of this publisher under this key is here, or was."""
    SLOTS_PER_KEY = 9
    """There are already as many publishers under this key as its family allows."""
    KEYS_PER_PUBLISHER = 10
    """This publisher has slots under as many keys as a publisher may have at one node."""
    MEMORY = 11
    """The node's memory for slots is full."""
    BYTES_PER_PUBLISHER = 12
    """This publisher has as many bytes at this node as a publisher may have."""
    BYTES_PER_KEY = 13
    """The slots under this key have as many bytes as its family allows."""
    BYTES_PER_SENDER = 14
    """The sender has sent as many bytes as one network may send to one node."""
    STRANGER = 15
    """Nobody has shown that the publisher may take part in the run."""


class SlotRefused(Refused):
    """This slot was refused. `refusal` is the code of the reason."""

    def __init__(self, refusal: SlotRefusal, what: str, *, why: str = "", advice: str = "") -> None:
        super().__init__(what, why=why, advice=advice)
        self.refusal = refusal


# Signatures that were already checked, so that each slot needs Ed25519 only once.
#
# The same slot arrives many times: from each of its replicas in one read, and again at every
# repetition. Verifying takes about 80 microseconds, hashing about 1. So verified slots are
# remembered by their digest, which covers the signature and everything that is signed.
#
# Only slots that *passed* are remembered. Otherwise a stranger could fill this with rubbish at the
# price of one message.


REMEMBERED_SLOTS = 16_384  # about 2.5 MiB; more than the replicas and reads of one node in a minute


class VerifiedSlots:
    """Invariant: at most `limit` digests, each of a slot with a valid signature.

    When it is full, the oldest half is forgotten at once, which is cheaper than to maintain an
    order.
    """

    def __init__(self, limit: int = REMEMBERED_SLOTS) -> None:
        if limit < 2:
            raise ValueError("remembering needs room for two")
        self._half = limit // 2
        self._recent: set[bytes] = set()
        self._before: set[bytes] = set()
        self.signatures_checked = 0
        """How often Ed25519 was really computed: for statistics and tests."""

    def __len__(self) -> int:
        return len(self._recent) + len(self._before)

    def check(self, slot: Slot) -> None:
        """SlotRefused unless the publisher signed exactly this."""
        check_form(slot)
        digest = digest_of(slot)
        if digest in self._recent:
            return
        if digest in self._before:
            self._before.discard(digest)
        else:
            self.signatures_checked += 1
            check_signature(slot)
        self._remember(digest)

    def remember(self, slot: Slot) -> None:
        """Count a slot that this node signed itself as verified."""
        self._remember(digest_of(slot))

    def _remember(self, digest: bytes) -> None:
        if len(self._recent) >= self._half:
            self._before = self._recent
            self._recent = set()
        self._recent.add(digest)
