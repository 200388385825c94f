"""The access pass: everything that a peer needs to take part, in one signed document.

    pass = array [run, token, endpoints, keys, server time, challenge, next challenge, auth url,
                  token grace, key id], signature of the auth key

It contains the challenge that the peer has just answered. This proves that it is fresh, so its
server time can be trusted, too: a node with a wrong clock corrects itself by it.

The keys inside a pass are trusted because a chain of endorsements leads to them from the key that
the *invite* pins, and never because the pass contains them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from auth.documents import DocumentType
from auth.errors import UntrustedDocument
from auth.fields import Addresses, KeyId, RunName, TimeMs, Url
from auth.keyring import KeyRecords, Keyring
from auth.keys import SigningKey
from auth.refusals import AccessRefused
from auth.tokens import LIMIT_BYTES as TOKEN_LIMIT_BYTES
from auth.tokens import LONGEST_LIFE_MS, Token, is_genuine, read_token

DOMAIN = b"potluck pass 1"
LIMIT_BYTES = 12 << 10  # in base64 just the 16 KiB that a body of the auth server may have
LONGEST_CHALLENGE_BYTES = 128
DEFAULT_GRACE_MS = 10 * 60 * 1000

ChallengeBytes = Annotated[bytes, Meta(max_length=LONGEST_CHALLENGE_BYTES)]


class AccessPass(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The document that the auth server gives to a peer that may take part."""

    run: RunName
    token: Annotated[bytes, Meta(min_length=1, max_length=TOKEN_LIMIT_BYTES)]
    endpoints: Addresses  # multiaddrs to join at
    keys: KeyRecords
    server_time_ms: TimeMs
    challenge: ChallengeBytes  # the one that this pass answers
    next_challenge: ChallengeBytes  # for the next renewal
    auth_url: Url
    token_grace_ms: Annotated[int, Meta(ge=0, le=LONGEST_LIFE_MS)]
    key_id: KeyId


_PASSES = DocumentType(AccessPass, "pass", DOMAIN, LIMIT_BYTES)


class OpenedPass(NamedTuple):
    """A valid pass, the keys that follow from it, and the token inside."""

    access_pass: AccessPass
    keyring: Keyring
    token: Token


def sign_pass(access_pass: AccessPass, key: SigningKey) -> bytes:
    """The signed bytes; ValueError for a pass that no reader would accept."""
    if access_pass.key_id != key.key_id:
        raise ValueError("the pass names another key than the one that signs it")
    return _PASSES.sign(access_pass, key)


def open_pass(
    data: bytes,
    *,
    run: str,
    fingerprint: str,
    peer: bytes,
    challenge: bytes | None,
    keyring: Keyring | None = None,
) -> OpenedPass:
    """Open a pass from the server that the invite pins, for us, in this run.

    `challenge` is the one that we answered; None for a pass from our own disk, which need not be
    fresh. `keyring` has the known keys at a renewal. It replaces the fingerprint, because it knows
    which keys were withdrawn since, and the pass's newer keys are added to it.

    MalformedDocument or UntrustedDocument if the pass is not valid. The token's expiry is not
    checked, because the correct time follows from the pass.
    """
    access_pass = _PASSES.read(data)
    if access_pass.run != run:
        raise _untrusted(f"It is for the run {access_pass.run}, not {run}.")
    if keyring is None:
        keyring = Keyring.from_pinned(run, fingerprint, access_pass.keys)
    else:
        keyring.add(access_pass.keys)
    trusted = keyring.find(access_pass.key_id)
    if (
        trusted is None
        or not trusted.signs_at(access_pass.server_time_ms)
        or not _PASSES.genuine(data, trusted.key)
    ):
        raise _untrusted("No key that the invite vouches for has signed it.")
    if challenge is not None and access_pass.challenge != challenge:
        raise _untrusted("It does not answer this request, but an older one.")
    try:
        token = read_token(access_pass.token)
    except AccessRefused as error:
        raise _untrusted(error.why) from None
    signer = keyring.allows(token)
    if token.run != run or token.peer != peer:
        raise _untrusted("The token in it is not for this node.")
    if signer is None or not is_genuine(access_pass.token, signer.key):
        raise _untrusted("The token in it is not signed by a key that the invite vouches for.")
    return OpenedPass(access_pass, keyring, token)


def _untrusted(why: str) -> UntrustedDocument:
    return UntrustedDocument(
        "The access pass does not count.",
        why=why,
        advice="Run `potluck login INVITE` again. If that does not help, ask the moderators of "
        "the run, and tell them what is written here.",
    )
