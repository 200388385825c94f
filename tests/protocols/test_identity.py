"""A signature belongs to one key, one domain and one message; and some keys belong to nobody."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocols.errors import MalformedMessage
from protocols.identity import Identity, peer_id_of, public_key_of, verify, verify_with_key

ALICE = Identity.from_seed(bytes(31) + b"\1")
BOB = Identity.from_seed(bytes(31) + b"\2")

NEUTRAL_POINT = bytes.fromhex("01" + "00" * 31)
FITS_EVERYTHING = NEUTRAL_POINT + bytes(32)


def test_a_signature_verifies_for_its_key_domain_and_message_only() -> None:
    signature = ALICE.sign(b"domain", b"message")
    assert verify(b"domain", ALICE.peer_id, signature, b"message")
    assert verify_with_key(b"domain", ALICE.public_key, signature, b"message")
    assert not verify(b"domain", BOB.peer_id, signature, b"message")
    assert not verify(b"domain", ALICE.peer_id, signature, b"massage")
    assert not verify(b"domainm", ALICE.peer_id, signature, b"essage")


def test_a_peer_id_and_its_key_name_each_other() -> None:
    assert public_key_of(ALICE.peer_id) == ALICE.public_key
    assert peer_id_of(ALICE.public_key) == ALICE.peer_id


def test_a_key_of_the_wrong_length_has_no_peer_id_and_verifies_nothing() -> None:
    with pytest.raises(MalformedMessage):
        peer_id_of(bytes(31))
    with pytest.raises(ValueError, match="32 bytes"):
        verify_with_key(b"domain", b"", bytes(64), b"")


@pytest.mark.parametrize("sign_bit", [0x00, 0x80])
def test_a_key_for_which_anybody_can_sign_verifies_nothing(sign_bit: int) -> None:
    key = NEUTRAL_POINT[:-1] + bytes([sign_bit])
    message = b"anything"
    # what Ed25519 itself says: the library takes this signature, and not only this once
    Ed25519PublicKey.from_public_bytes(key).verify(FITS_EVERYTHING, message)
    assert not verify_with_key(b"domain", key, FITS_EVERYTHING, message)
    assert not verify(b"domain", peer_id_of(key), FITS_EVERYTHING, message)
