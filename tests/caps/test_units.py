"""Amounts as people write them, and what is said to those who wrote something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.caps.units import Measure, amount, as_written, in_words
from node.core.wrong_use import WrongUse

RATE, SIZE, QUOTA = Measure.RATE, Measure.SIZE, Measure.QUOTA


@pytest.mark.parametrize(
    ("text", "measure", "expected"),
    [
        ("2MB/s", RATE, 2e6),
        ("2 MB/s", RATE, 2e6),
        ("16 Mbit/s", RATE, 2e6),
        ("0.5Gbit/s", RATE, 62.5e6),
        ("100KiB/s", RATE, 102_400.0),
        ("none", RATE, None),
        ("", RATE, None),
        ("8GB", SIZE, 8e9),
        ("8gb", SIZE, 8e9),
        ("1.5 GiB", SIZE, 1.5 * 2**30),
        ("None", SIZE, None),
        ("200GB/month", QUOTA, 200e9),
        ("1.5TB/month", QUOTA, 1.5e12),
        ("200gb/mo", QUOTA, 200e9),
    ],
)
def test_units_are_read_exactly(text: str, measure: Measure, expected: float) -> None:
    assert amount(text, measure) == expected


@pytest.mark.parametrize(
    ("text", "measure", "advice"),
    [
        ("2mb/s", RATE, "2MB/s (bytes) or 2Mbit/s (bits)"),
        ("2Mb/s", RATE, "2MB/s (bytes) or 2Mbit/s (bits)"),
        ("16mbit/s", RATE, "16Mbit/s"),
        ("16Mbps", RATE, "16MB/s (bytes) or 16Mbit/s (bits)"),
        ("2M", RATE, "2MB/s (bytes) or 2Mbit/s (bits)"),
        ("2MB", RATE, "2MB/s"),
        ("2MBs", RATE, "2MB/s"),
        ("2mbs", RATE, "2MB/s (bytes) or 2Mbit/s (bits)"),
        ("2", RATE, "2MB/s (bytes) or 2Mbit/s (bits)"),
        ("8G", SIZE, "8GB"),
        ("8", SIZE, "8GB"),
        ("8Gb", SIZE, "8GB"),
        ("8Gi", SIZE, "8GiB"),
        ("200GB", QUOTA, "200GB/month"),
        ("200 GB/s", QUOTA, "200GB/month"),
    ],
)
def test_an_ambiguous_amount_is_refused_with_the_right_form(
    text: str, measure: Measure, advice: str
) -> None:
    with pytest.raises(WrongUse) as caught:
        amount(text, measure)
    assert f"Did you mean {advice}?" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["-2MB/s", "nanMB/s", "1e9MB/s", "2MB/s/s", "MB/s", "٢MB/s", "9" * 400]
)
def test_text_that_is_not_an_amount_is_refused(text: str) -> None:
    with pytest.raises(WrongUse):
        amount(text, RATE)


@pytest.mark.parametrize(
    ("text", "measure"),
    [("1B/s", RATE), ("100MB", SIZE), ("5MB/month", QUOTA), ("0", RATE), ("0", SIZE), ("0", QUOTA)],
)
def test_too_little_to_take_part_with_is_refused_with_the_least(
    text: str, measure: Measure
) -> None:
    with pytest.raises(WrongUse, match="a node cannot take part"):
        amount(text, measure)


@given(
    st.floats(0.1, 1e6).map(lambda number: round(number, 3)), st.sampled_from(["MB/s", "Mbit/s"])
)
def test_a_shown_amount_reads_as_the_written_one(number: float, unit: str) -> None:
    text = f"{number}  {unit}"
    if number * (1 if unit == "MB/s" else 1 / 8) >= 0.032:
        assert amount(as_written(text, RATE), RATE) == amount(text, RATE)


def test_amounts_are_shown_in_three_digits() -> None:
    assert [in_words(one) for one in (5, 1500, 2e6, 999_999, 200e9, 5e15)] == [
        "5 B",
        "1.5 kB",
        "2 MB",
        "1000 kB",
        "200 GB",
        "5000 TB",
    ]
