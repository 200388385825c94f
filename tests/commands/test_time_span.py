"""How long, as a person types it."""

from __future__ import annotations

import argparse

import pytest

from node.app.commands.pause import time_span


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30min", 1800), ("2h", 7200), ("1h30m", 5400), ("1.5 h", 5400), ("1d", 86_400)],
)
def test_units_may_be_put_together(text: str, seconds: float) -> None:
    assert time_span(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "0s", "2 hours", "-1h", "1h?", "9" * 40 + "h"])
def test_an_ambiguous_span_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a length of time"):
        time_span(text)
