"""A signature belongs to one key, one domain and one message; and some keys belong to nobody."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as some

from auth.errors import NotAKey
from auth.keys import (
    SigningKey,
    VerifyingKey,
    bound,
    fingerprint,
    key_id,
    peer_id_of,
    public_key_of,
)
from protocols.identity import Identity
from tests.auth.core.people import ALICE, BOB

# every encoding of a point whose order divides 8, sign bit and second spellings included
NOBODYS = [
    bytes.fromhex(point)[:-1] + bytes([bytes.fromhex(point)[-1] | sign])
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
    for sign in (0x00, 0x80)
]
FITS_EVERYTHING = bytes.fromhex("01" + "00" * 31) + bytes(32)


def test_a_signature_verifies_for_its_key_domain_and_message_only() -> None:
    signature = ALICE.sign(b"domain", b"message")
    assert ALICE.verifying_key.verify(b"domain", signature, b"message")
    assert not BOB.verifying_key.verify(b"domain", signature, b"message")
    assert not ALICE.verifying_key.verify(b"domain", signature, b"massage")
    assert not ALICE.verifying_key.verify(b"domainm", signature, b"essage")


@given(
    some.binary(min_size=1, max_size=20),
    some.binary(max_size=40),
    some.binary(min_size=1, max_size=20),
    some.binary(max_size=40),
)
def test_no_two_pairs_of_domain_and_message_are_signed_alike(
    domain: bytes, message: bytes, other_domain: bytes, other_message: bytes
) -> None:
    same = (domain, message) == (other_domain, other_message)
    assert (bound(domain, message) == bound(other_domain, other_message)) is same


@pytest.mark.parametrize("domain", [b"", bytes(256)])
def test_a_domain_has_a_length_that_can_be_bound(domain: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 255"):
        ALICE.sign(domain, b"")
    with pytest.raises(ValueError, match="1 to 255"):
        ALICE.verifying_key.verify(domain, bytes(64), b"")


def test_a_signature_of_the_noise_handshake_is_no_message_in_any_domain() -> None:
    # libp2p signs this prefix and a 32-byte key with the same identity; read as ours, its first
    # byte would announce a domain that is longer than all of it
    signed_by_noise = b"noise-libp2p-static-key:" + bytes(32)
    assert signed_by_noise[0] > len(signed_by_noise)


@pytest.mark.parametrize("public_key", NOBODYS, ids=lambda key: key.hex()[-4:])
def test_a_key_for_which_anybody_can_sign_verifies_nothing(public_key: bytes) -> None:
    key = VerifyingKey(public_key)
    for number in range(32):  # a point of order 8 takes the forgery for one message in eight
        assert not key.verify(b"domain", FITS_EVERYTHING, number.to_bytes(2, "big"))


@given(some.binary(max_size=80))
def test_any_bytes_are_a_wrong_signature_and_cause_no_other_error(signature: bytes) -> None:
    assert not ALICE.verifying_key.verify(b"domain", signature, b"message")


def test_the_other_spelling_of_a_signature_is_refused() -> None:
    # s and s + L sign alike in careless implementations; then one request has two spellings
    order = 2**252 + 27742317777372353535851937790883648493
    signature = ALICE.sign(b"domain", b"message")
    s = int.from_bytes(signature[32:], "little") + order
    assert s < 2**256
    respelled = signature[:32] + s.to_bytes(32, "little")
    assert not ALICE.verifying_key.verify(b"domain", respelled, b"message")


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_has_32_bytes(length: int) -> None:
    with pytest.raises(NotAKey):
        VerifyingKey(bytes(length))
    with pytest.raises(NotAKey):
        SigningKey(bytes(length))
    with pytest.raises(NotAKey):
        peer_id_of(bytes(length))


def test_a_peer_id_and_its_key_name_each_other() -> None:
    assert public_key_of(peer_id_of(ALICE.public_key)) == ALICE.public_key


@given(some.text(max_size=80))
def test_any_text_is_a_peer_id_or_refused(text: str) -> None:
    try:
        public_key = public_key_of(text)
    except NotAKey:
        return
    assert peer_id_of(public_key) == text


@pytest.mark.parametrize("around", [" {}", "{} ", "{}\n", "1{}", "{}1", "{}\u0661"])
def test_a_peer_id_has_one_spelling(around: str) -> None:
    with pytest.raises(NotAKey):
        public_key_of(around.format(peer_id_of(ALICE.public_key)))


def test_an_identity_is_the_same_key() -> None:
    identity = Identity.from_seed(ALICE.seed)
    assert identity.public_key == ALICE.public_key
    assert identity.peer_id == peer_id_of(ALICE.public_key)
    assert identity.sign(b"domain", b"message") == ALICE.sign(b"domain", b"message")


def test_the_secret_is_not_shown() -> None:
    assert ALICE.seed.hex() not in repr(ALICE)
    assert repr(ALICE.seed) not in repr(ALICE)


def test_keys_are_equal_by_their_bytes() -> None:
    assert VerifyingKey(ALICE.public_key) == ALICE.verifying_key
    assert len({VerifyingKey(ALICE.public_key), ALICE.verifying_key, BOB.verifying_key}) == 2


def test_names_of_a_key_are_short_and_different() -> None:
    assert len(key_id(ALICE.public_key)) == 8
    assert len(fingerprint(ALICE.public_key)) == 26
    assert fingerprint(ALICE.public_key) != fingerprint(BOB.public_key)


def test_signatures_are_those_of_everybodys_ed25519() -> None:
    # RFC 8032, and so OpenSSL, libp2p and a second implementation in Go
    theirs = Ed25519PrivateKey.from_private_bytes(ALICE.seed)
    assert theirs.public_key().public_bytes_raw() == ALICE.public_key
    assert theirs.sign(bound(b"domain", b"message")) == ALICE.sign(b"domain", b"message")


@pytest.mark.parametrize("cut", [0, 1, 32, 63])
def test_a_signature_that_is_cut_or_goes_on_is_refused(cut: int) -> None:
    signature = ALICE.sign(b"domain", b"message")
    assert not ALICE.verifying_key.verify(b"domain", signature[:cut], b"message")
    assert not ALICE.verifying_key.verify(b"domain", signature + b"\0", b"message")


def test_a_signature_does_not_run_on_into_what_is_signed() -> None:
    # of something without a domain, that ends in what should be the domain's length
    raw = Ed25519PrivateKey.from_private_bytes(ALICE.seed)
    for number in range(1000):
        message = number.to_bytes(2, "big")
        signature = raw.sign(b"domain" + message)
        if signature[-1] == len(b"domain"):
            assert not ALICE.verifying_key.verify(b"domain", signature[:-1], message)
            return
    pytest.fail("no signature ended in 6, though one in sixteen does")


@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("above", range(19))
def test_a_key_that_is_spelled_beyond_the_field_verifies_nothing(above: int, sign: int) -> None:
    # y and y + p are one point and would be two peer ids
    spelled = bytearray((2**255 - 19 + above).to_bytes(32, "little"))
    spelled[-1] |= sign
    key = VerifyingKey(bytes(spelled))
    for number in range(8):
        assert not key.verify(b"domain", FITS_EVERYTHING, number.to_bytes(2, "big"))
