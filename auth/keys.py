"""Ed25519 keys: signing in a domain, verifying, and the names that keys have.

A signature without a *domain* can be replayed as something else: a signed request would do as a
token, if the bytes happened to fit. So `sign` and `verify` take the domain first and include its
length and its bytes in the signed message; no two domains can overlap.

A key has three names. The *peer id* is the whole key in libp2p's form; nobody can claim one without
the key. The *key id* (8 bytes) says which of a few trusted keys to try, and proves nothing. The
*fingerprint* (16 bytes of its SHA-256) is pinned in an invite: long enough that nobody finds a
second key with the same one.

Signing and verifying is libsodium's: 15 and 40 microseconds where OpenSSL takes 22 and 65, and a
call needs two of each. It is also the strictest about signatures: one byte form of each, and none
by keys that nobody owns.

Easy to get wrong: not every 32 bytes are a key with an owner. For the few points of small order
on the curve anybody can make signatures that plain Ed25519 accepts. A `VerifyingKey` of one of them
verifies nothing, and a token that names one is refused (`is_nobodys_key`).
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache

import base58
from nacl.bindings import crypto_sign, crypto_sign_open, crypto_sign_seed_keypair
from nacl.exceptions import BadSignatureError

from auth.errors import NotAKey

PUBLIC_KEY_BYTES = 32
SEED_BYTES = 32
SIGNATURE_BYTES = 64
KEY_ID_BYTES = 8  # tells a run's few auth keys apart; trust never rests on it
FINGERPRINT_BYTES = 16  # 128 bits against a second key with the same one; 26 characters to type
PEERS_REMEMBERED = 8192  # base58 takes 20 µs each way, and the same peers come again; 2 MB
LONGEST_PEER_ID = 64  # base58 of 38 bytes is 52 characters; anything much longer is not one
LONGEST_DOMAIN_BYTES = 255  # its length is bound as one byte

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


def is_nobodys_key(public_key: bytes) -> bool:
    """Whether these 32 bytes are a point for which anybody can make signatures."""
    return public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _NOBODYS_KEYS


def key_id(public_key: bytes) -> bytes:
    """The 8 bytes that identify one of a few keys."""
    return hashlib.sha256(public_key).digest()[:KEY_ID_BYTES]


def fingerprint(public_key: bytes) -> str:
    """The 26 characters (base32, lower case) that pin a key in an invite."""
    return fingerprint_text(hashlib.sha256(public_key).digest()[:FINGERPRINT_BYTES])


def fingerprint_text(digest: bytes) -> str:
    """The characters for a fingerprint's bytes."""
    return base64.b32encode(digest).decode("ascii").rstrip("=").lower()


def fingerprint_bytes(text: str) -> bytes:
    """The bytes of a fingerprint in characters; ValueError if it is none."""
    try:
        raw = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError:
        raw = b""
    if len(raw) != FINGERPRINT_BYTES:
        raise ValueError("the fingerprint of a key has 26 characters of base32")
    return raw


@lru_cache(PEERS_REMEMBERED)
def peer_id_of(public_key: bytes) -> str:
    """The peer id that belongs to a raw 32-byte public key; NotAKey for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise NotAKey(
            f"An Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, this one has {len(public_key)}."
        )
    return str(base58.b58encode(_PEER_ID_PREFIX + public_key), "ascii")


@lru_cache(PEERS_REMEMBERED)
def public_key_of(peer: str) -> bytes:
    """The raw public key inside a peer id; NotAKey if it is not an Ed25519 peer id."""
    raw = b""
    if len(peer) <= LONGEST_PEER_ID and peer.isalnum():  # base58 would skip white space
        try:
            raw = base58.b58decode(peer)
        except ValueError:
            raw = b""
    if len(raw) != len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise NotAKey(
            f"{peer[:LONGEST_PEER_ID]!r} is not the peer id of an Ed25519 key.",
            why="It may be cut short, mistyped, or name a libp2p node with another kind of key.",
            advice="A potluck peer id starts with 12D3KooW; `potluck id` over there prints it.",
        )
    return raw[len(_PEER_ID_PREFIX) :]


def bound(domain: bytes, message: bytes) -> bytes:
    """The bytes that are signed: the domain's length, the domain, the message."""
    if not 0 < len(domain) <= LONGEST_DOMAIN_BYTES:
        raise ValueError(f"a signature domain has 1 to {LONGEST_DOMAIN_BYTES} bytes")
    return bytes((len(domain),)) + domain + message


class VerifyingKey:
    """A public key to verify with. Equal to another of the same bytes."""

    __slots__ = ("_is_nobodys", "key_id", "public_key")

    def __init__(self, public_key: bytes) -> None:
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise NotAKey(
                f"An Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, "
                f"this one has {len(public_key)}."
            )
        self.public_key = bytes(public_key)
        self.key_id = key_id(self.public_key)
        self._is_nobodys = is_nobodys_key(self.public_key)

    def verify(self, domain: bytes, signature: bytes, message: bytes) -> bool:
        """Whether the owner of this key signed this message in this domain."""
        # check the length first: the code below reads signature and message as one
        if len(signature) != SIGNATURE_BYTES or self._is_nobodys:
            return False
        try:
            crypto_sign_open(signature + bound(domain, message), self.public_key)
        except BadSignatureError:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerifyingKey) and other.public_key == self.public_key

    def __hash__(self) -> int:
        return hash(self.public_key)

    def __repr__(self) -> str:
        return f"VerifyingKey({fingerprint(self.public_key)})"


class SigningKey:
    """A key pair. Holds the secret: it is not in the repr; never log or send the seed."""

    __slots__ = ("_secret", "key_id", "public_key", "verifying_key")

    def __init__(self, seed: bytes) -> None:
        """From 32 secret random bytes; NotAKey for another length."""
        if len(seed) != SEED_BYTES:
            raise NotAKey(f"A seed has {SEED_BYTES} bytes, this one has {len(seed)}.")
        self.public_key: bytes
        self._secret: bytes  # the seed, then the public key
        self.public_key, self._secret = crypto_sign_seed_keypair(bytes(seed))
        self.verifying_key = VerifyingKey(self.public_key)
        self.key_id = self.verifying_key.key_id

    @property
    def seed(self) -> bytes:
        return self._secret[:SEED_BYTES]

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return bytes(crypto_sign(bound(domain, message), self._secret)[:SIGNATURE_BYTES])

    def __repr__(self) -> str:
        return f"SigningKey({fingerprint(self.public_key)})"
