"""Tokens for the bench's peers: an auth server's work without an auth server.

The bench makes an auth key for the run and gives its seed to every peer that needs a token; each
signs its own with it. From then on the peers handle every message exactly as in a real run.

A seed on a command line can be read by everybody on the machine. This one signs tokens of a run
that nobody else is in, and is forgotten with the bench.
"""

from __future__ import annotations

import time

from auth.keyring import Keyring, endorse
from auth.keys import SigningKey, fingerprint
from auth.revocations import Revocations
from auth.roles import Role
from auth.tokens import Token, sign_token
from protocols.access import Access
from protocols.identity import Identity

RUN = "bench"
LIFE_MS = 24 * 3600 * 1000  # no measurement waits for a renewal


def now_ms() -> int:
    return int(time.time() * 1000)


def admitted(identity: Identity, auth_seed: bytes) -> Access:
    """The access of a peer that has just logged in."""
    auth_key, now = SigningKey(auth_seed), now_ms()
    record = endorse(RUN, auth_key.public_key, now - LIFE_MS, now + LIFE_MS, auth_key)
    keyring = Keyring.from_pinned(RUN, fingerprint(auth_key.public_key), [record])
    token = Token(
        run=RUN,
        username="bench",
        peer=identity.public_key,
        roles=(Role.VOLUNTEER,),
        serial=1,
        key_id=auth_key.key_id,
        issued_ms=now,
        expires_ms=now + LIFE_MS,
    )
    signed = sign_token(token, auth_key)
    return Access(identity, RUN, keyring, Revocations(RUN), now_ms, token=signed)
