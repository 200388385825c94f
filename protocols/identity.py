"""A node's identity: an Ed25519 key, and the libp2p peer id that names it.

A peer id contains the public key: it is the base58 of the identity multihash of the
protobuf-encoded Ed25519 key (libp2p "peer-ids" specification). So `public_key_of` needs no
directory, and nobody can claim an id without its key. libp2p allows other kinds of keys (RSA,
secp256k1); potluck refuses them, to have one kind of signature.

A signature without a *domain* could be replayed as something else. So `sign` and `verify` take the
domain as their first argument and include it in what is signed. And some 32-byte strings are not
safe as keys: for the few points of small order on the curve, anybody can make signatures that
Ed25519 accepts. Such keys are refused. `auth.keys` does both; this module turns its errors into
those that parsers of network bytes raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NewType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from auth import keys
from auth.errors import NotAKey
from auth.keys import LONGEST_PEER_ID, PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from protocols.errors import MalformedMessage

__all__ = [
    "LONGEST_PEER_ID",
    "PUBLIC_KEY_BYTES",
    "SIGNATURE_BYTES",
    "Identity",
    "PeerId",
    "peer_id_of",
    "public_key_of",
    "verify",
    "verify_with_key",
]

PeerId = NewType("PeerId", str)


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id that belongs to a raw 32-byte Ed25519 public key."""
    try:
        return PeerId(keys.peer_id_of(public_key))
    except NotAKey as error:
        raise MalformedMessage(error.what) from None


def public_key_of(peer: str) -> bytes:
    """The raw public key inside a peer id; MalformedMessage if it is not an Ed25519 peer id."""
    try:
        return keys.public_key_of(peer)
    except NotAKey as error:
        raise MalformedMessage(error.what, why=error.why, advice=error.advice) from None


def verify(domain: bytes, peer: str, signature: bytes, message: bytes) -> bool:
    """Whether `signature` was made by the owner of `peer` over this message in this domain."""
    return verify_with_key(domain, public_key_of(peer), signature, message)


def verify_with_key(domain: bytes, public_key: bytes, signature: bytes, message: bytes) -> bool:
    """As `verify`, for a raw public key of 32 bytes; ValueError for another length."""
    return keys.VerifyingKey(public_key).verify(domain, signature, message)


@dataclass(frozen=True)
class Identity:
    """This node's own key. It holds the secret: never log it, never send it."""

    private_key: Ed25519PrivateKey

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @staticmethod
    def generate() -> Identity:
        return Identity(Ed25519PrivateKey.generate())

    @staticmethod
    def from_seed(seed: bytes) -> Identity:
        """The identity whose Ed25519 seed is these 32 bytes (for files and simulations)."""
        return Identity(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        return self.private_key.private_bytes_raw()

    @cached_property
    def signing_key(self) -> keys.SigningKey:
        """The same key in the type that auth uses."""
        return keys.SigningKey(self.seed)

    @property
    def public_key(self) -> bytes:
        return self.signing_key.public_key

    @cached_property
    def peer_id(self) -> PeerId:
        return peer_id_of(self.public_key)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return self.signing_key.sign(domain, message)
