"""The guard of a run with an auth server: every message proves who sent it and that they may.

Threats: someone without a token who wants a word; someone with a token who wants to speak as
another, pass on what others said, send something twice, or go on after being revoked. The channel
has proven the other end's key before the first byte; this adds the person (a token that names
that key, signed by the run's auth server) and the message (DeDLOC I.5: for this recipient, now,
once, about this, answered by that). docs/protocols.md, "Envelopes", has the bytes.

A REQUEST or an OPENING goes in a request envelope: token, recipient, time, nonce, signature. All
that follows in the exchange, in either direction, goes in a response envelope: token, the same
nonce, signature. Tokens are verified once and remembered, so each message costs one signature and
one verification.

What is open when a token runs out: a call that was accepted is answered, a transfer that was
accepted goes on; but every *message* carries the token of its moment, and one that has run out is
refused. A transfer may outlive many tokens, as long as its closing messages carry one that counts
then: whoever renews notices nothing, whoever cannot fails at the end with `token-expired`. A
revoked party is not waited for (revoking.py).

Easy to get wrong: an ERROR says why a request was refused, so it answers envelopes that did not
verify, or were none. It carries the nonce that the request *claimed*: the asker can then tell
that its own request is meant, and everything else in an error is proven like any answer.
"""

from __future__ import annotations

import random

import trio

from auth.envelopes import (
    Topic,
    claimed_nonce,
    open_request,
    open_response,
    seal_request,
    seal_response,
)
from auth.nonces import NONCE_BYTES, NonceWindow
from auth.refusals import AccessRefused, Reason
from auth.roles import may_train
from auth.tokens import Token
from protocols.access import Access
from protocols.complaints import Complaints
from protocols.errors import Refused
from protocols.guard import Exchange, Part
from protocols.identity import PeerId, public_key_of
from protocols.not_allowed import (
    AnswerNotAllowed,
    MalformedAnswerEnvelope,
    MalformedEnvelope,
    NotAllowed,
)

NO_NONCE = bytes(NONCE_BYTES)  # of an ERROR about a whole stream, and to what claimed no nonce

BEGINNINGS = frozenset({Part.REQUEST, Part.OPENING})

MOST_KEYS = 4096  # peers whose key is kept beside its name: decoding base58 takes 20 microseconds

STARTED_BEFORE_MS = 500
"""How long before its start a node takes requests from: clocks differ by some milliseconds, and
nobody ends and is up again, with all that it imports, in half a second."""

JUDGED_AT_ONCE = 4
"""Messages that are verified in one go: 0.3 ms. Both sides of sixteen calls in flight then work at
the same time, instead of one waiting until the other has judged all sixteen."""

CLOCK_STEP_MS = 5_000
"""By how much the clock must jump for requests to be remembered anew. Set back by more than this,
a window that starts in what is now the future would refuse everybody for that long."""


class TokenGuard:
    """Seals and judges by tokens. One for each Rpc."""

    judged_at_once = JUDGED_AT_ONCE
    hashes_chunks = True  # or the signature at the end would cover no more than counts

    def __init__(self, access: Access, chance: random.Random) -> None:
        self._access = access
        self._chance = chance
        self._complaints = Complaints()
        self._keys: dict[PeerId, bytes] = {}
        self._nonces = NonceWindow(access.clock_ms() - STARTED_BEFORE_MS)
        self._clock_offset_ms = self._offset_of(access.clock_ms())

    def knows(self, peer: PeerId) -> bool:
        return self._access.is_member(peer)

    # Sealing

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:
        """The envelope for a message of ours.

        NotAllowed if we have no token to begin something with. What answers is always sealed, as
        well as it goes: its reader says what is wrong with it.
        """
        topic = Topic(part.value, exchange.protocol, exchange.method)
        recipient = self._key_of(exchange.peer)
        access = self._access
        if part in BEGINNINGS:
            now_ms = access.clock_ms()
            token = self._own_token(now_ms)
            exchange.memory = nonce = self._chance.randbytes(NONCE_BYTES)
            return seal_request(
                access.key, token, topic, recipient, content, time_ms=now_ms, nonce=nonce
            )
        if access.token is None:
            return b""
        nonce = exchange.memory or NO_NONCE
        return seal_response(access.key, access.token, topic, recipient, content, nonce=nonce)

    def _own_token(self, now_ms: int) -> bytes:
        try:
            return self._access.own_token(now_ms)
        except AccessRefused as refusal:
            error = NotAllowed(
                f"Nothing was asked, for this node itself may not take part. {refusal.what}",
                why=refusal.why,
                advice=refusal.advice,
                reason=refusal.reason,
            )
            error.crosses = False
            error.surely_not_executed = True
            raise error from None

    # Judging

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None:
        """Judge a message of theirs. NotAllowed if it begins something and does not count;
        AnswerNotAllowed if it goes on with something and does not count."""
        topic = Topic(part.value, exchange.protocol, exchange.method)
        try:
            if part in BEGINNINGS:
                token = self._open_request(exchange, topic, content, envelope)
            else:
                token = self._open_response(exchange, topic, content, envelope)
            if exchange.training and part is not Part.ERROR and not may_train(token.roles):
                raise AccessRefused(Reason.ROLE)
        except AccessRefused as refusal:
            if part in BEGINNINGS or part is Part.CLOSING:
                raise self._refused_request(exchange, refusal) from None
            raise self._refused_answer(exchange, refusal) from None
        exchange.credentials = token

    def _open_request(
        self, exchange: Exchange, topic: Topic, content: bytes, envelope: bytes
    ) -> Token:
        access = self._access
        now_ms = access.clock_ms()
        try:
            opened = open_request(
                envelope,
                topic,
                content,
                recipient=access.key.public_key,
                sender=self._key_of(exchange.peer),
                tokens=access.tokens,
                nonces=self._nonces_at(now_ms),
                now_ms=now_ms,
            )
        except AccessRefused:
            exchange.memory = claimed_nonce(envelope)
            raise
        exchange.memory = opened.nonce
        access.note_shown(exchange.peer, opened.sender.token)
        self._check_can_answer(now_ms)
        return opened.sender.token

    def _check_can_answer(self, now_ms: int) -> None:
        """Without a token of our own that counts, no answer of ours would be taken.

        It is not the asker who is refused, so this is no NotAllowed.
        """
        try:
            self._access.own_token(now_ms)
        except AccessRefused as refusal:
            raise Refused(
                f"The node that was asked may not take part itself. {refusal.what}",
                why=refusal.why,
                advice=f"On that node: {refusal.advice}",
            ) from None

    def _open_response(
        self, exchange: Exchange, topic: Topic, content: bytes, envelope: bytes
    ) -> Token:
        access = self._access
        token = open_response(
            envelope,
            topic,
            content,
            recipient=access.key.public_key,
            sender=self._key_of(exchange.peer),
            nonce=exchange.memory or NO_NONCE,
            tokens=access.tokens,
            now_ms=access.clock_ms(),
        ).token
        access.note_shown(exchange.peer, token)
        return token

    # Refusing

    def _refused_request(self, exchange: Exchange, refusal: AccessRefused) -> NotAllowed:
        self._access.refused_requests[refusal.reason] += 1
        type_ = MalformedEnvelope if refusal.reason is Reason.MALFORMED else NotAllowed
        error = type_(
            f"Your request was refused. {refusal.what}",
            why=refusal.why,
            advice=refusal.advice,
            reason=refusal.reason,
        )
        self._complaints.about_request(exchange, refusal)
        return error

    def _refused_answer(self, exchange: Exchange, refusal: AccessRefused) -> AnswerNotAllowed:
        self._access.refused_answers[refusal.reason] += 1
        malformed = refusal.reason is Reason.MALFORMED
        type_ = MalformedAnswerEnvelope if malformed else AnswerNotAllowed
        why, advice = refusal.why, refusal.advice
        if refusal.reason is Reason.TOKEN_MISSING:
            why = "It is in an open run, without an auth server, or has not logged in to this one."
        error = type_(
            f"{exchange.peer} answered, but does not prove that it may. {refusal.what}",
            why=why,
            advice=f"On that node: {advice}",
            reason=refusal.reason,
        )
        self._complaints.about_answer(exchange, refusal)
        return error

    # What is kept

    def _key_of(self, peer: PeerId) -> bytes:
        key = self._keys.get(peer)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            key = self._keys[peer] = public_key_of(peer)
        return key

    def _nonces_at(self, now_ms: int) -> NonceWindow:
        """The requests that were seen, as long as the clock goes on; else from now on."""
        offset_ms = self._offset_of(now_ms)
        if abs(offset_ms - self._clock_offset_ms) > CLOCK_STEP_MS:
            self._clock_offset_ms = offset_ms
            self._nonces = NonceWindow(now_ms - STARTED_BEFORE_MS)
        return self._nonces

    @staticmethod
    def _offset_of(now_ms: int) -> int:
        return now_ms - int(trio.current_time() * 1000)
