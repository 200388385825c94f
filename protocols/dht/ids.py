"""Where peers and keys lie: 256-bit numbers, and how far apart they are.

A peer's id is the hash of its public key, and a key's position is the hash of its text, so nobody
chooses a place without searching for a key that hashes to it. Distance is XOR, read as a number:
it is symmetric, and for one position no two ids are equally far.

Easy to get wrong: as bytes, ids are big-endian; the first bit is the most significant one.
"""

from __future__ import annotations

import hashlib

from protocols.errors import MalformedMessage
from protocols.identity import public_key_of

ID_BITS = 256
ID_BYTES = ID_BITS // 8


def node_id_of(peer: str) -> int:
    """The id of a peer; MalformedMessage if this is not the peer id of an Ed25519 key."""
    return node_id_of_key(public_key_of(peer))


def node_id_of_key(public_key: bytes) -> int:
    """The id of the peer with this raw public key."""
    return int.from_bytes(hashlib.sha256(public_key).digest(), "big")


def position_of(key: str) -> int:
    """Where the slots of a key are kept: at the peers whose ids are closest to this."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest(), "big")


def distance(one: int, other: int) -> int:
    return one ^ other


def id_bytes(node_id: int) -> bytes:
    """An id as it travels."""
    return node_id.to_bytes(ID_BYTES, "big")


def id_from_bytes(raw: bytes) -> int:
    """An id as it arrived; MalformedMessage unless it has 32 bytes."""
    if len(raw) != ID_BYTES:
        raise MalformedMessage(f"An id has {ID_BYTES} bytes, this one has {len(raw)}.")
    return int.from_bytes(raw, "big")
