"""When a token is renewed: two thirds of its life, growing delays, and grace to the end."""

from __future__ import annotations

import random

import pytest

from node.core.access.renewal import (
    JITTER,
    LONGEST_RETRY_SECONDS,
    RENEWED_AT,
    SHORTEST_RETRY_SECONDS,
    RenewalSchedule,
    TokenStanding,
    Validity,
)

HOUR = Validity(issued_ms=1_000_000, expires_ms=4_600_000, grace_ms=600_000)


def schedule(validity: Validity = HOUR, seed: int = 1) -> RenewalSchedule:
    return RenewalSchedule(validity, random.Random(seed))


def test_a_token_is_renewed_at_two_thirds_of_its_life_with_jitter() -> None:
    parts = [(schedule(seed=seed).next_ms - HOUR.issued_ms) / HOUR.life_ms for seed in range(1_000)]
    assert min(parts) >= RENEWED_AT - JITTER - 0.001
    assert max(parts) <= RENEWED_AT + JITTER
    assert sum(parts) / len(parts) == pytest.approx(2 / 3, abs=0.005)
    assert max(parts) - min(parts) > 1.8 * JITTER, "they are spread"


def test_an_outage_is_met_with_growing_delays_up_to_a_limit() -> None:
    renewal = schedule()
    delays = [renewal.failed(2_000_000) for _ in range(40)]
    assert delays[0] <= 5.0
    assert max(delays) <= LONGEST_RETRY_SECONDS
    assert sum(delays[20:]) / 20 > 60.0, "two minutes at most for an hour's token, half by chance"
    assert all(delay >= SHORTEST_RETRY_SECONDS for delay in delays)


def test_a_short_life_has_short_delays() -> None:
    renewal = schedule(Validity(0, 60_000, 0))
    assert max(renewal.failed(50_000) for _ in range(20)) <= 2.0


def test_the_delay_that_a_busy_server_asks_for_is_respected_within_limits() -> None:
    renewal = schedule()
    assert renewal.failed(0, server_said_seconds=30.0) == 30.0
    assert renewal.failed(0, server_said_seconds=1e9) == LONGEST_RETRY_SECONDS


@pytest.mark.parametrize(
    ("now_ms", "standing"),
    [
        (4_599_999, TokenStanding.VALID),
        (4_600_000, TokenStanding.GRACE),
        (5_199_999, TokenStanding.GRACE),
        (5_200_000, TokenStanding.OVER),
    ],
)
def test_a_token_is_good_until_expiry_and_then_for_the_grace(
    now_ms: int, standing: TokenStanding
) -> None:
    assert HOUR.standing(now_ms) is standing


def test_it_says_how_long_the_standing_lasts() -> None:
    renewal = schedule()
    assert renewal.seconds_until_standing_changes(4_599_000) == 1.0
    assert renewal.seconds_until_standing_changes(4_600_000) == 600.0
    assert renewal.seconds_until_standing_changes(5_200_000) == float("inf")
