"""Places of peers and keys: 256-bit numbers, and the distance between them.

A peer's id is the hash of its public key, and a key's position is the hash of its text. So to
choose a place, one has to search for a key that hashes to it. Distance is XOR, read as a number. It
is symmetric, and no two ids are equally far from a position.

As bytes, ids are big-endian; the first bit is the most significant one.
"""

from __future__ import annotations

import hashlib

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
    """The position of a key. The peers with the closest ids keep its slots."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest(), "big")


def distance(one: int, other: int) -> int:
    return one ^ other
