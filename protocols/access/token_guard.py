"""The guard of a run with an auth server: every message proves its sender and their right.

The threats are a person without a token who wants to talk, and one with a token who wants to speak
as another, replay or forward messages, or go on after a revocation. The channel has proven the
other end's key before the first byte. This adds the person (a token that names that key, signed by
the run's auth server) and the message (DeDLOC I.5: for this recipient, now, once, about this,
answered by that). docs/protocols.md, "Envelopes", has the bytes.

A REQUEST or an OPENING has a request envelope: token, recipient, time, nonce, signature. Everything
after it in the exchange, in either direction, has a response envelope: token, the same nonce,
signature. A token is verified once and remembered, so each message costs one signature and one
verification.

When a token expires, accepted calls are still answered and accepted transfers go on. But each new
*message* carries the token of that moment, and an expired one is refused. A transfer may outlive
many tokens if its closing messages carry a valid one: a node that renews its token notices nothing,
and one that cannot fails at the end with `token-expired`. Everything with a revoked peer is ended
at once (access.py).

An ERROR gives the reason of a refusal, so it may answer an envelope that did not verify, or was
none. It carries the nonce that the request *claimed*, so that the caller knows which request is
meant. Everything else in an error is proven as in any answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import trio

from auth.bounded_map import BoundedMap
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
from protocols.access.access import Access
from protocols.errors import Refused
from protocols.guard import Exchange, Part
from protocols.identity import PeerId, public_key_of
from protocols.not_allowed import (
    AnswerNotAllowed,
    MalformedAnswerEnvelope,
    MalformedEnvelope,
    NotAllowed,
)

NO_NONCE = bytes(NONCE_BYTES)  # of an ERROR about a stream, or a request without a nonce

BEGINNINGS = frozenset({Part.REQUEST, Part.OPENING})

MOST_KEYS = 4096  # peers whose decoded key is kept: decoding base58 takes 20 microseconds

STARTED_BEFORE_MS = 500
"""From how long before its start a node accepts requests.

Clocks differ by some milliseconds, and no node restarts, with all its imports, in half a second.
"""

JUDGED_AT_ONCE = 4
"""Messages that are verified in one go: 0.3 ms.

With sixteen calls in flight both sides then work at the same time. Otherwise one would wait until
the other has judged all sixteen.
"""

CLOCK_STEP_MS = 5_000
"""A jump of the clock by more than this resets the memory of seen requests.

If the clock is set back further than this, a window that starts in the future would refuse
everybody for that long.
"""


class TokenGuard:
    """Signs and judges by tokens. Each Rpc has one."""

    judged_at_once = JUDGED_AT_ONCE
    hashes_chunks = True  # else the signature at the end would cover only counts

    def __init__(self, access: Access, chance: random.Random) -> None:
        self._access = access
        self._chance = chance
        self._complaints = GuardComplaints()
        self._keys: dict[PeerId, bytes] = {}
        self._nonces = NonceWindow(access.clock_ms() - STARTED_BEFORE_MS)
        self._clock_offset_ms = self._offset_of(access.clock_ms())

    def knows(self, peer: PeerId) -> bool:
        return self._access.is_member(peer)

    def may_publish(self, peer: PeerId) -> bool:
        access = self._access
        token = access.shown_by(peer)
        return token is not None and may_train(token.roles) and access.is_member(peer)

    def shown_by(self, peers: Iterable[PeerId]) -> tuple[bytes, ...]:
        return self._access.tokens_of(peers)

    def vouched(self, shown: Iterable[bytes]) -> None:
        for token in shown:
            self._access.note_vouched(token)

    # Sealing

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:
        """The envelope for a message of ours.

        NotAllowed if we have no valid token and the message begins something. An answer is always
        sealed, as well as possible: its reader says what is wrong with it.
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
        """Judge a message of a peer.

        If it is not allowed, raise NotAllowed for a message that begins an exchange, and
        AnswerNotAllowed for one that continues it.
        """
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
        access.note_shown(exchange.peer, opened.sender)
        self._check_can_answer(now_ms)
        return opened.sender.token

    def _check_can_answer(self, now_ms: int) -> None:
        """Fail if we have no valid token: no answer of ours would be accepted.

        This does not refuse the asker, so it is no NotAllowed.
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
        verified = open_response(
            envelope,
            topic,
            content,
            recipient=access.key.public_key,
            sender=self._key_of(exchange.peer),
            nonce=exchange.memory or NO_NONCE,
            tokens=access.tokens,
            now_ms=access.clock_ms(),
        )
        access.note_shown(exchange.peer, verified)
        return verified.token

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

    # Its memory of peers

    def _key_of(self, peer: PeerId) -> bytes:
        key = self._keys.get(peer)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            key = self._keys[peer] = public_key_of(peer)
        return key

    def _nonces_at(self, now_ms: int) -> NonceWindow:
        """The requests seen so far; a new window if the clock jumped."""
        offset_ms = self._offset_of(now_ms)
        if abs(offset_ms - self._clock_offset_ms) > CLOCK_STEP_MS:
            self._clock_offset_ms = offset_ms
            self._nonces = NonceWindow(now_ms - STARTED_BEFORE_MS)
        return self._nonces

    @staticmethod
    def _offset_of(now_ms: int) -> int:
        return now_ms - int(trio.current_time() * 1000)


# Logging refused peers: each peer and reason once, then rarely.
#
# A peer can be refused a thousand times a second, so the amount of log text must not depend on how
# often it tries. The name of a method is the peer's own text. The application, where it writes the
# log, limits peers that use a new key for each try.


log = logging.getLogger("potluck.access")

AGAIN_SECONDS = 600.0  # between lines about the same peer and reason: shows that it goes on
MOST_COMPLAINTS = 4096  # peers and reasons; well under 1 MiB


class GuardComplaints:
    """The refusals that were logged, with their times."""

    def __init__(self) -> None:
        self._said: BoundedMap[tuple[PeerId, Reason, bool], float] = BoundedMap(MOST_COMPLAINTS)

    def __len__(self) -> int:
        return len(self._said)

    def about_request(self, exchange: Exchange, refusal: AccessRefused) -> None:
        level = logging.INFO if self._is_news(exchange, refusal, answer=False) else logging.DEBUG
        log.log(
            level,
            "refused %r of %s to peer %s: %s",
            exchange.method,
            exchange.protocol,
            exchange.peer,
            refusal.what,
        )

    def about_answer(self, exchange: Exchange, refusal: AccessRefused) -> None:
        level = logging.WARNING if self._is_news(exchange, refusal, answer=True) else logging.DEBUG
        log.log(
            level,
            "peer %s answered %s of %s without proving that it may: %s",
            exchange.peer,
            exchange.method or "a stream",
            exchange.protocol,
            refusal.what,
        )

    def _is_news(self, exchange: Exchange, refusal: AccessRefused, *, answer: bool) -> bool:
        about = (exchange.peer, refusal.reason, answer)
        now = trio.current_time()
        said = self._said.get(about)
        if said is not None and now - said < AGAIN_SECONDS:
            return False
        self._said[about] = now
        return True
