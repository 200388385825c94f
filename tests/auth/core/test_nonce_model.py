"""The nonce window against the most naive one: a list of everything that was ever received."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from auth.nonces import MEMORY_MS, NonceWindow
from auth.refusals import AccessRefused, Reason
from tests.auth.core.people import N, nonce

SHARE, POOL, SENDERS, RESERVED = 6, 12, 4, 2
START = 1_000_000

senders = some.sampled_from([b"alice", b"bob", b"carol", b"mallory", b"trudy"])
nonces = some.integers(0, 9).map(nonce)
# the edges of N and 2N on both sides, and anything between
offsets = some.one_of(
    some.sampled_from([-N - 1, -N, -N + 1, -1, 0, 1, N - 1, N, N + 1]),
    some.integers(-N, N),
)
steps = some.one_of(
    some.sampled_from([0, 1, N - 1, N, N + 1, MEMORY_MS - 1, MEMORY_MS, MEMORY_MS + 1]),
    some.integers(0, N),
)


class NaiveWindow:
    """The specification, word for word; it never forgets anything."""

    def __init__(self, started_ms: int) -> None:
        self.started_ms = started_ms
        self.received: list[tuple[bytes, bytes, int]] = []

    def live(self, now_ms: int) -> list[tuple[bytes, bytes]]:
        return [(who, what) for who, what, when in self.received if now_ms - when <= MEMORY_MS]

    def judge(self, sender: bytes, used: bytes, time_ms: int, now_ms: int) -> Reason | None:
        live = self.live(now_ms)
        own = sum(who == sender for who, _ in live)
        if abs(time_ms - now_ms) > N:
            return Reason.CLOCK
        if time_ms < self.started_ms or (sender, used) in live:
            return Reason.REPLAY
        if own == 0 and len({who for who, _ in live}) >= SENDERS:
            return Reason.TOO_MANY_REQUESTS
        if own >= RESERVED and (own >= SHARE or len(live) >= POOL) and own > 0:
            return Reason.TOO_MANY_REQUESTS
        return None


class WindowAgainstNaive(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now_ms = START
        self.naive = NaiveWindow(START)
        self.window = NonceWindow(
            START, share=SHARE, pool=POOL, most_senders=SENDERS, reserved=RESERVED
        )

    @rule(step=steps)
    def time_passes(self, step: int) -> None:
        self.now_ms += step

    @rule(sender=senders, used=nonces, off=offsets)
    def a_request_comes(self, sender: bytes, used: bytes, off: int) -> None:
        time_ms = self.now_ms + off
        expected = self.naive.judge(sender, used, time_ms, self.now_ms)
        assert self.judged(sender, used, time_ms) is expected
        if expected is None:
            self.window.remember(sender, used, self.now_ms)
            self.naive.received.append((sender, used, self.now_ms))

    @rule(which=some.integers(0, 100))
    def an_old_one_is_sent_again(self, which: int) -> None:
        if self.naive.received:
            sender, used, received_ms = self.naive.received[which % len(self.naive.received)]
            for time_ms in (received_ms - N, received_ms, received_ms + N):
                if abs(time_ms - self.now_ms) <= N:
                    assert self.judged(sender, used, time_ms) is Reason.REPLAY

    def judged(self, sender: bytes, used: bytes, time_ms: int) -> Reason | None:
        try:
            self.window.check(sender, used, time_ms, self.now_ms)
        except AccessRefused as refusal:
            return refusal.reason
        return None

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "window"):
            assert len(self.window) <= POOL + SENDERS * RESERVED
            assert len(self.window) >= len(self.naive.live(self.now_ms))


WindowAgainstNaive.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None
)
TestWindowAgainstNaive = pytest.mark.slow(WindowAgainstNaive.TestCase)
