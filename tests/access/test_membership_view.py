"""The text of a membership for people."""

from __future__ import annotations

import pytest

from node.app.views.status_view import clock_words, in_one_line
from node.core.status import MembershipStatus


def status(**changes: object) -> MembershipStatus:
    usual: dict[str, object] = {
        "open": False,
        "run": "albert",
        "username": "github:alice",
        "roles": ("volunteer",),
        "standing": "valid",
        "expires_in_seconds": 2_400.0,
        "grace_seconds": 3_600.0,
        "renewed_in_seconds": 1_200.0,
    }
    return MembershipStatus(**{**usual, **changes})  # type: ignore[arg-type]


def test_an_open_run_is_called_so_loudly() -> None:
    assert in_one_line(MembershipStatus()).startswith("OPEN RUN: there is no auth server")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "token valid for 40 min, renewed in 20 min"),
        ({"renewed_in_seconds": 0.0}, "token valid for 40 min, being renewed"),
        (
            {"standing": "grace", "expires_in_seconds": -600.0},
            "token expired 10 min ago; accepted for another 50 min",
        ),
        (
            {"standing": "over", "expires_in_seconds": -7_200.0},
            "token expired 2 h ago: outside the run until it is renewed",
        ),
    ],
)
def test_a_token_is_described_with_what_comes_next(changes: dict[str, object], words: str) -> None:
    line = in_one_line(status(**changes))
    assert line == f"github:alice (volunteer) in albert, {words}"


@pytest.mark.parametrize(
    ("offset_ms", "words"),
    [
        (0, ""),
        (-1_999, ""),
        (600_000, "this machine's is 10.0 minutes behind the auth server's"),
        (-7_200_000, "this machine's is 2.0 hours ahead of the auth server's"),
    ],
)
def test_a_clock_is_mentioned_when_it_is_off(offset_ms: int, words: str) -> None:
    assert clock_words(status(clock_offset_ms=offset_ms, clock_measured=True)) == words
    if words:
        assert clock_words(status(clock_offset_ms=offset_ms)).endswith("(at the last measurement)")
