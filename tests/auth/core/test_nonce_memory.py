"""Filled by as many senders as there may be, as full as it gets, the window takes under 64 MiB."""

from __future__ import annotations

import tracemalloc

import pytest

from auth.nonces import (
    MEMORY_MS,
    MOST_SENDERS,
    POOL_NONCES,
    RESERVED_NONCES,
    SHARE_NONCES,
    NonceWindow,
)
from auth.refusals import AccessRefused, Reason
from tests.auth.core.people import NOW, nonce

LIMIT_BYTES = 64 << 20
ROUNDING_BYTES = 15  # a nonce is an object of 49 bytes, and Python gives it 64
KEPT = 1 << 40


def fill(window: NonceWindow, sender: bytes, count: int, now_ms: int, first: int = 0) -> None:
    for number in range(first, first + count):
        used = nonce(number)
        window.check(sender, used, now_ms + number % 1000, now_ms + number % 1000)
        window.remember(sender, used, now_ms + number % 1000)


@pytest.mark.slow
def test_a_window_that_is_full_to_the_last_nonce_takes_less_than_64_mib() -> None:
    tracemalloc.start()
    try:
        window = NonceWindow(0)
        fill(window, b"flooder 1", SHARE_NONCES, NOW)
        fill(window, b"flooder 2", POOL_NONCES - SHARE_NONCES, NOW)
        for number in range(2, MOST_SENDERS):
            fill(window, b"sender %d" % number, RESERVED_NONCES, NOW)
        taken, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(window) == POOL_NONCES + (MOST_SENDERS - 2) * RESERVED_NONCES
    rounding = ROUNDING_BYTES * len(window)
    assert taken + rounding < LIMIT_BYTES
    assert peak + rounding < LIMIT_BYTES
    for sender in (b"flooder 1", b"sender 5", b"one more"):
        with pytest.raises(AccessRefused) as caught:
            window.check(sender, nonce(KEPT), NOW, NOW)
        assert caught.value.reason is Reason.TOO_MANY_REQUESTS


@pytest.mark.slow
def test_senders_that_flood_one_after_the_other_leave_no_room_taken() -> None:
    tracemalloc.start()
    try:
        window = NonceWindow(0)
        now_ms = NOW
        flooders = [b"flooder %d" % number for number in range(6)]
        for flooder in flooders:
            fill(window, flooder, 30_000, now_ms)
            for _ in range(3):
                now_ms += MEMORY_MS // 2
                for kept in flooders:  # a live nonce at any time keeps each of them known
                    fill(window, kept, 1, now_ms, first=now_ms)
        while len(window) > 3 * len(flooders):  # it forgets a few with every request
            window.check(b"somebody", nonce(1), now_ms, now_ms)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the sets of six that had room for a flood would be 12 MB, without anything in them
    assert taken < 3 << 20
