"""Who a node is: an Ed25519 key, and the libp2p peer id that names it.

A peer id is not looked up, it *is* the public key: base58 of the identity multihash of the
protobuf-encoded Ed25519 key (libp2p "peer-ids" specification). So `public_key_of` needs no
directory, and nobody can claim an id without its key. Keys of other kinds (RSA, secp256k1) are
legal in libp2p and refused here: one kind of key, one kind of signature.

Easy to get wrong: a signature without a *domain* can be replayed as something else. `sign` and
`verify` therefore take the domain as their first argument and bind it into what is signed. And
not every 32 bytes are a key with an owner: for the few points of small order on the curve,
anybody can make signatures that Ed25519 accepts, so nothing is ever signed by those. Both are the
business of `auth.keys`, on which this stands; here its refusals become what parsers of network
bytes raise.
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
    """A node's own key. Holds the secret: never log it, never send it."""

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
        """The same key as auth knows it."""
        return keys.SigningKey(self.seed)

    @property
    def public_key(self) -> bytes:
        return self.signing_key.public_key

    @cached_property
    def peer_id(self) -> PeerId:
        return peer_id_of(self.public_key)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return self.signing_key.sign(domain, message)
