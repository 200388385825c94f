"""Only the publisher can write its slot, and no two slots are the same bytes."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as some

from protocols.dht import LARGEST_VALUE_BYTES, LONGEST_KEY_BYTES, Slot, SlotRefused, check_key
from protocols.dht.slots import (
    DOMAIN,
    LARGEST_NUMBER,
    SlotRefusal,
    canonical_bytes,
    check_form,
    check_signature,
    digest_of,
    sign_slot,
    supersedes,
)
from protocols.errors import MalformedMessage
from protocols.identity import Identity, peer_id_of
from protocols.rpc import decode, encode
from tests.dht.publishers import ALICE, BOB, note


def is_authentic(slot: Slot) -> bool:
    try:
        check_signature(slot)
    except SlotRefused:
        return False
    return True


def refusal(slot: Slot) -> SlotRefusal:
    with pytest.raises(SlotRefused) as caught:
        check_signature(slot)
    return caught.value.refusal


# One worked vector, so that another implementation can be checked against ours.
SEED = bytes(range(32))
SIGNED_BYTES = (
    "12" "706f746c75636b2f6468742f736c6f742f31"  # length of the domain, domain
    "000a" "6e6f74652f68656c6c6f"  # length of the key, "note/hello"
    "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"  # publisher
    "0000000000000007"  # sequence 7
    "000001ba6833ba15"  # expires at 1,900,123,765,269
    "00"  # not withdrawn
    "00000006" "a568656c6c6f"  # length of the value, MessagePack of "hello"
)  # fmt: skip
SIGNATURE = (
    "6c85c6b2399ba55c088bb7142f3c05fbf2005dc54d7573530e49a5433266438c"
    "e3d6b2e32213edbf9decdc0c83bed51fc3d29de45a6f3c71ff417dedf17c690a"
)


def test_the_worked_vector() -> None:
    slot = sign_slot(Identity.from_seed(SEED), "note/hello", encode("hello"), 7, 1_900_123_765_269)
    signed = bytes([len(DOMAIN)]) + DOMAIN + canonical_bytes(slot)
    assert signed.hex() == SIGNED_BYTES
    assert slot.signature.hex() == SIGNATURE
    Ed25519PublicKey.from_public_bytes(slot.publisher).verify(slot.signature, signed)
    assert digest_of(slot) == hashlib.sha256(canonical_bytes(slot) + slot.signature).digest()


keys = some.builds("{}/{}".format, some.text("abc/", min_size=1), some.text("abc/é", min_size=1))
numbers = some.integers(0, LARGEST_NUMBER)
slots = some.builds(
    Slot,
    key=keys.filter(lambda key: not key.startswith("/")),
    publisher=some.sampled_from([ALICE.public_key, BOB.public_key]) | some.binary(
        min_size=32, max_size=32
    ),
    sequence=numbers,
    expires=numbers,
    value=some.binary(max_size=40),
    withdrawn=some.booleans(),
    signature=some.just(bytes(64)),
)  # fmt: skip


def read_canonical(raw: bytes) -> Slot:
    """The other way round: that this works for every slot is why no two have the same bytes."""
    key_end = 2 + int.from_bytes(raw[:2], "big")
    key, rest = raw[2:key_end].decode(), raw[key_end:]
    value_length = int.from_bytes(rest[49:53], "big")
    assert rest[48] in (0, 1)
    assert len(rest) == 53 + value_length
    return Slot(
        key,
        rest[:32],
        int.from_bytes(rest[32:40], "big"),
        int.from_bytes(rest[40:48], "big"),
        rest[53:],
        bool(rest[48]),
        bytes(64),
    )


@given(slots)
def test_the_canonical_bytes_say_everything_and_say_it_in_one_way(slot: Slot) -> None:
    assert read_canonical(canonical_bytes(slot)) == slot


@given(slots, slots)
def test_different_slots_have_different_canonical_bytes(one: Slot, other: Slot) -> None:
    assert (canonical_bytes(one) == canonical_bytes(other)) == (one == other)


def test_a_piece_of_the_key_cannot_be_moved_into_the_value() -> None:
    slot = note()
    for moved in range(1, len(slot.key) - 5):
        value = slot.key[-moved:].encode() + slot.value
        forged = msgspec.structs.replace(slot, key=slot.key[:-moved], value=value)
        assert not is_authentic(forged)


def test_a_slot_that_was_signed_is_authentic_before_and_after_its_journey() -> None:
    slot = note()
    check_signature(slot)
    arrived = decode(Slot, encode(slot))
    assert arrived == slot
    check_signature(arrived)
    assert slot.publisher_peer == ALICE.peer_id


def test_no_bit_of_a_slot_can_be_flipped_on_the_wire() -> None:
    slot = note()
    raw = encode(slot)
    arrived_whole = 0
    for bit in range(8 * len(raw)):
        mutated = bytearray(raw)
        mutated[bit // 8] ^= 1 << bit % 8
        try:
            arrived = decode(Slot, mutated)
        except MalformedMessage:
            continue
        arrived_whole += 1
        assert not is_authentic(arrived), f"bit {bit}"
    assert arrived_whole > 900, "most flips must reach the check, or this shows nothing"


def test_a_signature_is_not_another_publishers_nor_another_keys() -> None:
    slot = note(ALICE)
    replace = msgspec.structs.replace
    assert refusal(replace(slot, publisher=BOB.public_key)) is SlotRefusal.BAD_SIGNATURE
    assert refusal(replace(slot, key="note/other")) is SlotRefusal.BAD_SIGNATURE
    assert refusal(replace(slot, withdrawn=True, value=b"")) is SlotRefusal.BAD_SIGNATURE
    assert refusal(replace(slot, expires=slot.expires + 1)) is SlotRefusal.BAD_SIGNATURE
    assert refusal(replace(slot, sequence=slot.sequence + 1)) is SlotRefusal.BAD_SIGNATURE


def test_a_signature_from_another_domain_is_not_valid_here() -> None:
    slot = note(ALICE)
    elsewhere = ALICE.sign(b"potluck/other/1", canonical_bytes(slot))
    assert refusal(msgspec.structs.replace(slot, signature=elsewhere)) is SlotRefusal.BAD_SIGNATURE


def test_a_key_that_belongs_to_nobody_publishes_nothing() -> None:
    nobody = bytes.fromhex("01" + "00" * 31)
    fits_everything = nobody + bytes(32)
    slot = msgspec.structs.replace(note(), publisher=nobody, signature=fits_everything)
    assert slot.publisher_peer == peer_id_of(nobody)
    assert refusal(slot) is SlotRefusal.BAD_SIGNATURE


def test_thirty_two_bytes_that_are_no_key_sign_nothing() -> None:
    no_point = b"\x02" + bytes(31)
    assert refusal(msgspec.structs.replace(note(), publisher=no_point)) is SlotRefusal.BAD_SIGNATURE


@pytest.mark.parametrize(
    "key",
    ["", "note", "note/", "/hello", "/", "note/" + "x" * 252, "note/" + "é" * 126, "note/\ud800"],
)
def test_an_invalid_key_is_malformed(key: str) -> None:
    with pytest.raises(SlotRefused) as caught:
        check_key(key)
    assert caught.value.refusal is SlotRefusal.MALFORMED
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["a/b", "note/a/b/c", "note/" + "x" * 251, "note/" + "é" * 125])
def test_a_valid_key_is_accepted(key: str) -> None:
    assert len(check_key(key)) <= LONGEST_KEY_BYTES


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"publisher": bytes(31)}, SlotRefusal.MALFORMED),
        ({"signature": bytes(63)}, SlotRefusal.MALFORMED),
        ({"sequence": -1}, SlotRefusal.MALFORMED),
        ({"sequence": LARGEST_NUMBER + 1}, SlotRefusal.MALFORMED),
        ({"expires": -1}, SlotRefusal.MALFORMED),
        ({"expires": LARGEST_NUMBER + 1}, SlotRefusal.MALFORMED),
        ({"withdrawn": True}, SlotRefusal.MALFORMED),
        ({"value": bytes(LARGEST_VALUE_BYTES + 1)}, SlotRefusal.TOO_LARGE),
    ],
)
def test_a_field_out_of_bounds_is_refused_before_any_signature(
    change: dict[str, object], wanted: SlotRefusal
) -> None:
    with pytest.raises(SlotRefused) as caught:
        check_form(msgspec.structs.replace(note(), **change))
    assert caught.value.refusal is wanted
    assert refusal(msgspec.structs.replace(note(), **change)) is wanted


def test_a_publisher_is_told_at_once_that_its_slot_could_not_be_one() -> None:
    with pytest.raises(SlotRefused):
        sign_slot(ALICE, "nokey", b"", 1, 1)
    with pytest.raises(SlotRefused):
        sign_slot(ALICE, "note/x", b"value", 1, 1, withdrawn=True)


def test_the_higher_sequence_holds() -> None:
    old, new = note(sequence=1), note(sequence=2)
    assert supersedes(new, old)
    assert not supersedes(old, new)
    assert not supersedes(new, new)


@given(some.text(max_size=5), some.text(max_size=5))
def test_of_one_sequence_all_replicas_choose_the_same(one: str, other: str) -> None:
    first, second = note(value=one), note(value=other)
    assert supersedes(first, second) + supersedes(second, first) == (one != other)
    assert not supersedes(first, note(value=one)), "equal, though not the same object"
