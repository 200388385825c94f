"""Who a node is: an Ed25519 key, and the libp2p peer id that names it.

A peer id is not looked up, it *is* the public key: base58 of the identity multihash of the
protobuf-encoded Ed25519 key (libp2p "peer-ids" specification). So `public_key_of` needs no
directory, and nobody can claim an id without its key. Keys of other kinds (RSA, secp256k1) are
legal in libp2p and refused here: one kind of key, one kind of signature.

Easy to get wrong: a signature without a *domain* can be replayed as something else. `sign` and
`verify` therefore take the domain as their first argument and bind it into what is signed. And
not every 32 bytes are a key with an owner: for the few points of small order on the curve,
anybody can make signatures that Ed25519 accepts, so nothing is ever signed by those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocols.errors import MalformedMessage

PeerId = NewType("PeerId", str)

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
LONGEST_PEER_ID = 64  # base58 of 38 bytes is 52 characters; anything much longer is not one

# identity multihash (0x00) of 36 bytes (0x24) of protobuf: field 1 = Ed25519 (1), field 2 = key
_PEER_ID_PREFIX = bytes.fromhex("002408011220")

# Points of small order (8 or less), as y with the sign bit cleared, the two spellings of 0 and 1
# included. 32 bytes of zeros after such a point is a signature that verifies for any message.
_NOBODYS_KEYS = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id that belongs to a raw 32-byte Ed25519 public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise MalformedMessage(
            f"An Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this one has {len(public_key)}."
        )
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode("ascii"))


def public_key_of(peer: str) -> bytes:
    """The raw public key inside a peer id; MalformedMessage if it is not an Ed25519 peer id."""
    raw = b""
    if len(peer) <= LONGEST_PEER_ID:
        try:
            raw = base58.b58decode(peer)
        except ValueError:
            raw = b""
    if len(raw) != len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise MalformedMessage(
            f"{peer[:LONGEST_PEER_ID]!r} is not the peer id of an Ed25519 key.",
            why="It may be cut short, mistyped, or name a libp2p node with another kind of key.",
            advice="A potluck peer id starts with 12D3KooW; `potluck id` over there prints it.",
        )
    return raw[len(_PEER_ID_PREFIX) :]


def verify(domain: bytes, peer: str, signature: bytes, message: bytes) -> bool:
    """Whether `signature` was made by the owner of `peer` over this message in this domain."""
    return verify_with_key(domain, public_key_of(peer), signature, message)


def verify_with_key(domain: bytes, public_key: bytes, signature: bytes, message: bytes) -> bool:
    """As `verify`, for a raw public key of 32 bytes."""
    key = Ed25519PublicKey.from_public_bytes(public_key)  # ValueError unless it has 32 bytes
    if public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _NOBODYS_KEYS:
        return False
    try:
        key.verify(signature, _bound(domain, message))
    except InvalidSignature:
        return False
    return True


def _bound(domain: bytes, message: bytes) -> bytes:
    if not domain or len(domain) > 255:
        raise ValueError("a signature domain has 1 to 255 bytes")
    return bytes([len(domain)]) + domain + message


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

    @property
    def public_key(self) -> bytes:
        return self.private_key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> PeerId:
        return peer_id_of(self.public_key)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return self.private_key.sign(_bound(domain, message))
