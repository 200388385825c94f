"""Times as moderators type them, and as they read them."""

from __future__ import annotations

import argparse

import pytest

from node.app.views.auth_moments import LONGEST_MS, ago, ahead, life, since, utc


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1s", 1_000),
        ("30min", 1_800_000),
        ("12h", 43_200_000),
        ("7d", 604_800_000),
        ("2 w", 1_209_600_000),
    ],
)
def test_a_life_has_a_unit(text: str, ms: int) -> None:
    assert life(text) == ms


@pytest.mark.parametrize(
    "text", ["7", "5m", "0d", "-1d", "1.5h", "", "d", "9" * 400 + "d", "11000d"]
)
def test_an_ambiguous_or_meaningless_life_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        life(text)


def test_the_longest_life_is_ten_years() -> None:
    assert life("3660d") == LONGEST_MS


def test_since_takes_a_span_or_a_date() -> None:
    assert since("2d") == ("ago", 172_800_000)
    assert since("1970-01-02") == ("at", 86_400_000)
    assert since("1970-01-01T00:00:01+00:00") == ("at", 1_000)
    assert since("1970-01-01T02:00:01+02:00") == ("at", 1_000)


@pytest.mark.parametrize("text", ["yesterday", "2026-13-01", "21.11.2026", ""])
def test_since_refuses_what_is_neither(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        since(text)


def test_moments_are_shown_in_utc_to_the_second() -> None:
    assert utc(0) == "1970-01-01 00:00:00 UTC"
    assert utc(None) == "never"
    assert utc(10**20) == "at an impossible time"


def test_distances_in_time_are_shown_in_words() -> None:
    assert ago(0, 3_600_000) == "1 h ago"
    assert ago(None, 0) == "never"
    assert ago(5_000, 0) == "0 s ago", "a clock that went back shows no negative time"
    assert ahead(90_000, 0) == "1 min 30 s left"
    assert ahead(0, 1) == "over"
