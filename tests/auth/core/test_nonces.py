"""No live nonce is forgotten, and a flood takes room from nobody but the flooder."""

from __future__ import annotations

import pytest

from auth.nonces import FORGET_AT_ONCE, MEMORY_MS, NonceWindow
from auth.refusals import AccessRefused, Reason
from tests.auth.core.people import NOW, N, nonce
from tests.auth.core.refused import refused

ALICE, BOB, MALLORY = b"alice", b"bob", b"mallory"


def take(window: NonceWindow, sender: bytes, number: int, now_ms: int = NOW) -> None:
    window.check(sender, nonce(number), now_ms, now_ms)
    window.remember(sender, nonce(number), now_ms)


def flood(window: NonceWindow, sender: bytes, now_ms: int = NOW, first: int = 0) -> int:
    """Requests until one is refused; how many went through."""
    number = first
    while True:
        try:
            take(window, sender, number, now_ms)
        except AccessRefused as refusal:
            assert refusal.reason is Reason.TOO_MANY_REQUESTS, refusal  # noqa: PT017
            return number - first
        number += 1


def test_a_flooder_fills_its_share_and_others_do_not_notice() -> None:
    window = NonceWindow(0, share=50, pool=200, reserved=5)
    take(window, ALICE, 1)
    assert flood(window, MALLORY) == 50
    assert flood(window, ALICE, first=2) == 49
    assert flood(window, BOB) == 50


def test_a_flooder_is_let_in_again_as_its_nonces_run_out() -> None:
    window = NonceWindow(0, share=50, pool=200, reserved=5)
    for number in range(50):
        take(window, MALLORY, number, NOW + number)
    with refused(Reason.TOO_MANY_REQUESTS):
        take(window, MALLORY, 50, NOW + MEMORY_MS)
    take(window, MALLORY, 50, NOW + MEMORY_MS + 1)
    with refused(Reason.TOO_MANY_REQUESTS):
        take(window, MALLORY, 51, NOW + MEMORY_MS + 1)


def test_a_flood_does_not_make_the_flooders_nonces_forgotten() -> None:
    window = NonceWindow(0, share=50, pool=200, reserved=5)
    flood(window, MALLORY)
    for number in range(50):
        with refused(Reason.REPLAY):
            take(window, MALLORY, number)


def test_when_many_flood_everybody_still_has_a_reserve() -> None:
    window = NonceWindow(0, share=50, pool=100, reserved=5)
    assert flood(window, b"flooder 1") == 50
    assert flood(window, b"flooder 2") == 50
    assert flood(window, b"flooder 3") == 5
    assert flood(window, ALICE) == 5
    assert len(window) == 110


def test_there_are_only_so_many_senders_at_a_time() -> None:
    window = NonceWindow(0, most_senders=3)
    for sender in (b"1", b"2", b"3"):
        take(window, sender, 1)
    with refused(Reason.TOO_MANY_REQUESTS):
        take(window, b"4", 1)
    take(window, b"3", 2)
    take(window, b"4", 1, NOW + MEMORY_MS + 1)


@pytest.mark.slow
def test_five_thousand_calls_a_second_for_half_a_minute_pass() -> None:
    window = NonceWindow(0)
    number = 0
    for millisecond in range(30_000):
        for _ in range(5):
            take(window, ALICE, number, NOW + millisecond)
            number += 1
    assert len(window) == 150_000


def test_forgetting_goes_in_small_steps_and_is_exact_nevertheless() -> None:
    window = NonceWindow(0, share=10_000)
    for number in range(1_000):
        take(window, ALICE, number)
    later = NOW + MEMORY_MS + 1
    take(window, BOB, 1, later)
    assert len(window) == 1_000 - FORGET_AT_ONCE + 1
    take(window, ALICE, 999, later)  # due, though not yet forgotten
    assert len(window) == 2


def test_a_clock_that_is_set_forward_and_back_opens_no_door() -> None:
    window = NonceWindow(0)
    window.check(ALICE, nonce(1), NOW + N, NOW)
    window.remember(ALICE, nonce(1), NOW)
    take(window, BOB, 1, NOW + 10 * MEMORY_MS)  # everything before is forgotten
    assert len(window) == 1
    for now_ms in (NOW, NOW + N, NOW + 2 * N):
        with refused(Reason.REPLAY):
            window.check(ALICE, nonce(1), NOW + N, now_ms)
    # what cannot have been there before is taken
    window.check(ALICE, nonce(2), NOW + N + 1, NOW + N)


def test_a_clock_that_is_set_back_forgets_nothing() -> None:
    window = NonceWindow(0)
    take(window, ALICE, 1)
    earlier = NOW - 10 * MEMORY_MS
    take(window, ALICE, 2, earlier)
    with refused(Reason.REPLAY):
        take(window, ALICE, 1, NOW)
    with refused(Reason.REPLAY):
        take(window, ALICE, 2, earlier)


def test_the_start_can_be_corrected_when_the_clock_was_wrong() -> None:
    an_hour_ahead = NOW + 3_600_000
    window = NonceWindow(an_hour_ahead)
    with refused(Reason.REPLAY):
        take(window, ALICE, 1)
    window.started_ms = NOW
    take(window, ALICE, 1)


def test_checking_alone_uses_nothing_up() -> None:
    window = NonceWindow(0)
    for _ in range(3):
        window.check(ALICE, nonce(1), NOW, NOW)
    assert len(window) == 0
