"""Proof that a peer holds its key: it signs a challenge that the auth server made for it.

    challenge = expires (u64), 16 random bytes, 32 bytes of keyed BLAKE3 over both and the peer

The server stores nothing to make one: its secret tells its own challenges from others. A used
challenge is kept until it expires (`UsedChallenges`).

The proof is a signature in a domain of its own, over the challenge, the run, the fingerprint of the
auth key that the peer trusts, and the purpose of the proof. So a rogue server cannot pass on the
challenge of the real one and hand back the answer: the answer names the rogue's own key.

The peer uses the fingerprint from its *invite*, never one that the server has just sent.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable

from blake3 import blake3

from auth.bounded_map import BoundedMap
from auth.documents import encode
from auth.keys import SigningKey, VerifyingKey
from auth.refusals import AccessRefused, Reason

CHALLENGE_DOMAIN = b"potluck challenge 1"
PROOF_DOMAIN = b"potluck proof 1"

SECRET_BYTES = 32
RANDOM_BYTES = 16
MAC_BYTES = 32
CHALLENGE_BYTES = 8 + RANDOM_BYTES + MAC_BYTES
DEFAULT_LIFE_MS = 10 * 60 * 1000  # as long as a device login may take
MOST_USED = 100_000  # of about 150 bytes: 15 MB

LOGIN = "login"
RENEW = "renew"

_HEAD = struct.Struct(f">Q{RANDOM_BYTES}s")


def make_challenge(secret: bytes, peer: bytes, random: bytes, expires_ms: int) -> bytes:
    """A challenge for the owner of this public key. `random` is 16 fresh random bytes."""
    if len(random) != RANDOM_BYTES:
        raise ValueError(f"a challenge takes {RANDOM_BYTES} random bytes")
    head = _HEAD.pack(expires_ms, random)
    return head + _mac(secret, peer, head)


def check_challenge(secret: bytes, peer: bytes, challenge: bytes, now_ms: int) -> int:
    """Until when it is valid; AccessRefused(CHALLENGE) if we did not make it for this peer, or it
    has expired."""
    if len(challenge) != CHALLENGE_BYTES:
        raise AccessRefused(Reason.CHALLENGE)
    head, mac = challenge[: _HEAD.size], challenge[_HEAD.size :]
    if not hmac.compare_digest(mac, _mac(secret, peer, head)):
        raise AccessRefused(Reason.CHALLENGE)
    expires_ms = int(_HEAD.unpack(head)[0])
    if now_ms >= expires_ms:
        raise AccessRefused(Reason.CHALLENGE, why="It has expired.")
    return expires_ms


def prove(key: SigningKey, challenge: bytes, run: str, fingerprint: str, purpose: str) -> bytes:
    """The peer's answer, for the auth server that owns the key with this fingerprint."""
    return key.sign(PROOF_DOMAIN, encode((challenge, run, fingerprint, purpose)))


def check_proof(
    peer: VerifyingKey,
    proof: bytes,
    challenge: bytes,
    run: str,
    fingerprints: Iterable[str],
    purpose: str,
) -> None:
    """AccessRefused unless the peer's answer is for us: under the fingerprint of one of our
    keys."""
    for fingerprint in fingerprints:
        signed = encode((challenge, run, fingerprint, purpose))
        if peer.verify(PROOF_DOMAIN, proof, signed):
            return
    raise AccessRefused(
        Reason.SIGNATURE,
        "The peer did not prove that it holds its key.",
        why="The signature of the challenge does not match the key, this run and this server.",
    )


class UsedChallenges:
    """The challenges that were answered, each until it expires: none is accepted twice.

    When there are too many, the one that was used longest ago is forgotten. An answer is worthless
    without the peer's key, so nobody can exploit that.
    """

    def __init__(self, most: int = MOST_USED) -> None:
        self._expiries = BoundedMap[bytes, int](most)

    def __len__(self) -> int:
        return len(self._expiries)

    def use(self, challenge: bytes, expires_ms: int, now_ms: int) -> None:
        """Mark it as used; AccessRefused(CHALLENGE) if it was used before."""
        if challenge in self._expiries:
            raise AccessRefused(Reason.CHALLENGE, why="It was used before.")
        while self._expiries and next(iter(self._expiries.values())) <= now_ms:
            self._expiries.popitem(last=False)
        self._expiries[challenge] = expires_ms


def _mac(secret: bytes, peer: bytes, head: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret of challenges has {SECRET_BYTES} bytes")
    return blake3(encode((CHALLENGE_DOMAIN, peer, head)), key=secret).digest()
