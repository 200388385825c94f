"""Signed requests and responses: sender, recipient, time and content, and only once.

The envelope of a message, and what its signature covers (DeDLOC I.5; arrays of MessagePack, each in
its shortest form):

    request    [token, recipient, time, nonce, signature]
    covers     [part, protocol, method, token, sender, recipient, time, nonce, hash of content]

    response   [token, nonce, signature]            the nonce is the request's
    covers     [part, protocol, method, token, sender, recipient, nonce, hash of content]

Sender and recipient are public keys, the hash is BLAKE3. The two kinds have signature domains of
their own, and the part (request, opening, closing, ...) is covered too. So no signature can be used
for another message, another peer, another method, or a second time. A response belongs to one
request of one peer, by its nonce and by that peer's key as recipient.

The cheap checks come first: sizes, then comparisons, then the token (verified once and remembered),
and the signature last. Only AccessRefused is raised, whatever the bytes.

Easy to get wrong: the nonce counts as used only after the signature was found good, or anybody
could use up the nonces of others; and it must count before the request is acted on.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta

from auth.documents import Canonical, encode
from auth.errors import MalformedDocument
from auth.fields import PublicKey, Signature, TimeMs
from auth.keys import SigningKey
from auth.nonces import NONCE_BYTES, NonceWindow
from auth.refusals import AccessRefused, Reason
from auth.tokens import LIMIT_BYTES as TOKEN_LIMIT_BYTES
from auth.verified_tokens import VerifiedToken, VerifiedTokens

REQUEST_DOMAIN = b"potluck request 1"
RESPONSE_DOMAIN = b"potluck response 1"
LIMIT_BYTES = TOKEN_LIMIT_BYTES + 256  # the other fields take 140 bytes with their headers

TokenBytes = Annotated[bytes, Meta(max_length=TOKEN_LIMIT_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Topic(NamedTuple):
    """The subject of a message, which both sides know without being told."""

    part: str  # which message of an exchange: request, response, opening, ...
    protocol: str
    method: str


class RequestEnvelope(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False
):
    """The envelope of a message that begins an exchange."""

    token: TokenBytes
    recipient: PublicKey
    time_ms: TimeMs
    nonce: Nonce
    signature: Signature


class ResponseEnvelope(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False
):
    """The envelope of a message that continues or ends an exchange."""

    token: TokenBytes
    nonce: Nonce
    signature: Signature


_REQUESTS = Canonical(RequestEnvelope, "request envelope", LIMIT_BYTES)
_RESPONSES = Canonical(ResponseEnvelope, "response envelope", LIMIT_BYTES)


def seal_request(
    key: SigningKey,
    token: bytes,
    topic: Topic,
    recipient: bytes,
    content: bytes,
    *,
    time_ms: int,
    nonce: bytes,
) -> bytes:
    """The envelope of a request to the owner of `recipient`. The nonce is 16 fresh random bytes."""
    signed = _request_transcript(topic, token, key.public_key, recipient, time_ms, nonce, content)
    signature = key.sign(REQUEST_DOMAIN, signed)
    return encode((token, recipient, time_ms, nonce, signature))


class OpenedRequest(NamedTuple):
    """An accepted request: its sender's token, and the nonce for its responses."""

    sender: VerifiedToken
    nonce: bytes


def open_request(
    envelope: bytes,
    topic: Topic,
    content: bytes,
    *,
    recipient: bytes,
    sender: bytes,
    tokens: VerifiedTokens,
    nonces: NonceWindow,
    now_ms: int,
) -> OpenedRequest:
    """Check a request to us (`recipient`) from the peer that the channel proved (`sender`).

    AccessRefused with the reason if it is not valid. If it is, its nonce is used up.
    """
    read = _read(_REQUESTS, envelope)
    if read.recipient != recipient:
        raise AccessRefused(Reason.WRONG_RECIPIENT)
    nonces.check(sender, read.nonce, read.time_ms, now_ms)
    verified = tokens.verify(read.token, now_ms, shown_by=sender)
    signed = _request_transcript(
        topic, read.token, sender, recipient, read.time_ms, read.nonce, content
    )
    if not verified.key.verify(REQUEST_DOMAIN, read.signature, signed):
        raise AccessRefused(Reason.SIGNATURE)
    nonces.remember(sender, read.nonce, now_ms)
    return OpenedRequest(verified, read.nonce)


def seal_response(
    key: SigningKey, token: bytes, topic: Topic, recipient: bytes, content: bytes, *, nonce: bytes
) -> bytes:
    """The envelope of a response to the other side; `nonce` is the request's."""
    signed = _response_transcript(topic, token, key.public_key, recipient, nonce, content)
    return encode((token, nonce, key.sign(RESPONSE_DOMAIN, signed)))


def open_response(
    envelope: bytes,
    topic: Topic,
    content: bytes,
    *,
    recipient: bytes,
    sender: bytes,
    nonce: bytes,
    tokens: VerifiedTokens,
    now_ms: int,
) -> VerifiedToken:
    """Check a response to us (`recipient`) for the request with this nonce.

    AccessRefused with the reason if it is not valid.
    """
    read = _read(_RESPONSES, envelope)
    if read.nonce != nonce:
        raise AccessRefused(Reason.WRONG_NONCE)
    verified = tokens.verify(read.token, now_ms, shown_by=sender)
    signed = _response_transcript(topic, read.token, sender, recipient, nonce, content)
    if not verified.key.verify(RESPONSE_DOMAIN, read.signature, signed):
        raise AccessRefused(Reason.SIGNATURE)
    return verified


def claimed_nonce(envelope: bytes) -> bytes | None:
    """The unverified nonce of a request, for the error that answers it."""
    try:
        return _read(_REQUESTS, envelope).nonce
    except AccessRefused:
        return None


T = TypeVar("T", bound=msgspec.Struct)


def _read(form: Canonical[T], envelope: bytes) -> T:
    if not envelope:
        raise AccessRefused(Reason.TOKEN_MISSING)
    try:
        return form.read(envelope)
    except MalformedDocument as error:
        raise AccessRefused(Reason.MALFORMED, why=error.what) from None


def _request_transcript(
    topic: Topic,
    token: bytes,
    sender: bytes,
    recipient: bytes,
    time_ms: int,
    nonce: bytes,
    content: bytes,
) -> bytes:
    digest = blake3(content).digest()
    return encode((*topic, token, sender, recipient, time_ms, nonce, digest))


def _response_transcript(
    topic: Topic, token: bytes, sender: bytes, recipient: bytes, nonce: bytes, content: bytes
) -> bytes:
    digest = blake3(content).digest()
    return encode((*topic, token, sender, recipient, nonce, digest))
