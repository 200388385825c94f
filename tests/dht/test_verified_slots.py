"""The same slot is verified once; another one, however alike, is verified itself."""

from __future__ import annotations

import msgspec
import pytest

from protocols.dht import SlotRefused
from protocols.dht.slots import VerifiedSlots
from tests.dht.publishers import note


def test_the_same_slot_costs_one_signature() -> None:
    verified = VerifiedSlots()
    for _ in range(20):
        verified.check(note())
    assert verified.signatures_checked == 1


def test_a_slot_that_we_signed_costs_none() -> None:
    verified = VerifiedSlots()
    verified.remember(note())
    verified.check(note())
    assert verified.signatures_checked == 0


def test_a_slot_that_differs_in_one_bit_is_not_taken_for_the_verified_one() -> None:
    verified = VerifiedSlots()
    slot = note()
    verified.check(slot)
    for bit in range(8 * len(slot.signature)):
        signature = bytearray(slot.signature)
        signature[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SlotRefused):
            verified.check(msgspec.structs.replace(slot, signature=bytes(signature)))


def test_failures_are_not_remembered() -> None:
    verified = VerifiedSlots()
    forged = msgspec.structs.replace(note(), sequence=99)
    for _ in range(3):
        with pytest.raises(SlotRefused):
            verified.check(forged)
    assert len(verified) == 0
    assert verified.signatures_checked == 3


def test_the_memory_is_bounded_and_recent_slots_stay() -> None:
    verified = VerifiedSlots(limit=10)
    often = note(sequence=0)
    for sequence in range(1, 100):
        verified.check(often)
        verified.check(note(sequence=sequence))
        assert len(verified) <= 10
    assert verified.signatures_checked == 100
