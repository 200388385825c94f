"""A small run for the tests of auth's core: an auth server, Alice, Bob, and Mallory with her own
valid token. Everything is decided by constants; times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from auth.envelopes import (
    OpenedRequest,
    Topic,
    open_request,
    open_response,
    seal_request,
    seal_response,
)
from auth.keyring import KeyRecord, Keyring, endorse
from auth.keys import SigningKey, fingerprint
from auth.nonces import NonceWindow
from auth.revocations import Revocations
from auth.roles import Role
from auth.tokens import CLOCK_TOLERANCE_MS, DEFAULT_LIFE_MS, Token, sign_token
from auth.verified_tokens import VerifiedToken, VerifiedTokens

RUN = "sahajbert"
NOW = 1_700_000_000_000
N = CLOCK_TOLERANCE_MS
HOUR = 3600 * 1000
YEAR = 365 * 24 * HOUR

AUTH = SigningKey(b"auth key of the run sahajbert 01")
NEXT_AUTH = SigningKey(b"auth key of the run sahajbert 02")
THIRD_AUTH = SigningKey(b"auth key of the run sahajbert 03")
OTHER_AUTH = SigningKey(b"auth key of quite another server")

ALICE = SigningKey(b"alice".ljust(32, b"."))
BOB = SigningKey(b"bob".ljust(32, b"."))
MALLORY = SigningKey(b"mallory".ljust(32, b"."))

NAMES = {ALICE.public_key: "github:alice", BOB.public_key: "code:bob"}

TOPIC = Topic("request", "/potluck/ping/1.0.0", "echo")
ANSWER = Topic("response", "/potluck/ping/1.0.0", "echo")
CONTENT = b"what is asked"
ANSWERED = b"what is answered"


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


def root_record(key: SigningKey = AUTH, run: str = RUN) -> KeyRecord:
    return endorse(run, key.public_key, NOW - YEAR, NOW + YEAR, key)


def keyring_of(*records: KeyRecord) -> Keyring:
    return Keyring.from_pinned(RUN, fingerprint(AUTH.public_key), records or (root_record(),))


def token_of(
    peer: SigningKey,
    *,
    run: str = RUN,
    username: str = "",
    roles: tuple[Role, ...] = (Role.VOLUNTEER,),
    serial: int = 1,
    issued_ms: int = NOW - 60_000,
    life_ms: int = DEFAULT_LIFE_MS,
    by: SigningKey = AUTH,
) -> bytes:
    username = username or NAMES.get(peer.public_key, "github:mallory")
    return sign_token(
        Token(
            run=run,
            username=username,
            peer=peer.public_key,
            roles=roles,
            serial=serial,
            key_id=by.key_id,
            issued_ms=issued_ms,
            expires_ms=issued_ms + life_ms,
        ),
        by,
    )


ALICES_TOKEN = token_of(ALICE, serial=1)
BOBS_TOKEN = token_of(BOB, serial=2)
MALLORYS_TOKEN = token_of(MALLORY, serial=3)


def tokens_known_to_nobody() -> VerifiedTokens:
    return VerifiedTokens(RUN, keyring_of(), Revocations(RUN))


@dataclass
class Side:
    """One node's memory: what Bob needs to judge a request, and Alice to judge a response."""

    key: SigningKey
    tokens: VerifiedTokens = field(default_factory=tokens_known_to_nobody)
    nonces: NonceWindow = field(default_factory=lambda: NonceWindow(NOW - YEAR))

    def receive(
        self,
        envelope: bytes,
        *,
        topic: Topic = TOPIC,
        content: bytes = CONTENT,
        sender: SigningKey = ALICE,
        now_ms: int = NOW,
    ) -> OpenedRequest:
        """Judge a request that came over a channel on which `sender` proved its key."""
        return open_request(
            envelope,
            topic,
            content,
            recipient=self.key.public_key,
            sender=sender.public_key,
            tokens=self.tokens,
            nonces=self.nonces,
            now_ms=now_ms,
        )

    def receive_answer(
        self,
        envelope: bytes,
        *,
        asked: bytes,
        topic: Topic = ANSWER,
        content: bytes = ANSWERED,
        sender: SigningKey = BOB,
        now_ms: int = NOW,
    ) -> VerifiedToken:
        """Judge a response to the request with the nonce `asked`."""
        return open_response(
            envelope,
            topic,
            content,
            recipient=self.key.public_key,
            sender=sender.public_key,
            nonce=asked,
            tokens=self.tokens,
            now_ms=now_ms,
        )


def request(
    *,
    key: SigningKey = ALICE,
    token: bytes = ALICES_TOKEN,
    topic: Topic = TOPIC,
    recipient: SigningKey = BOB,
    content: bytes = CONTENT,
    time_ms: int = NOW,
    number: int = 1,
) -> bytes:
    """Alice's request to Bob, or with something wrong in it."""
    return seal_request(
        key, token, topic, recipient.public_key, content, time_ms=time_ms, nonce=nonce(number)
    )


def response(
    *,
    key: SigningKey = BOB,
    token: bytes = BOBS_TOKEN,
    topic: Topic = ANSWER,
    recipient: SigningKey = ALICE,
    content: bytes = ANSWERED,
    number: int = 1,
) -> bytes:
    """Bob's answer to Alice's request, or with something wrong in it."""
    return seal_response(key, token, topic, recipient.public_key, content, nonce=nonce(number))
