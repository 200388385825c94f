"""Sixteen bytes that are equal where the same steps were made, and nowhere else."""

from __future__ import annotations

from itertools import pairwise

from protocols.accumulation.lineage import (
    HISTORY_BYTES,
    first_history,
    history_after_parameters,
    next_history,
)


def test_histories_differ_in_whatever_made_them() -> None:
    start = first_history("poem", b"s" * 16, b"p" * 32)
    made = [
        start,
        first_history("prose", b"s" * 16, b"p" * 32),
        first_history("poem", b"t" * 16, b"p" * 32),
        first_history("poem", b"s" * 16, b"q" * 32),
        next_history(start, 0, b"d" * 32),
        next_history(start, 1, b"d" * 32),
        next_history(start, 0, b"e" * 32),
        history_after_parameters(start, 0, b"d" * 32),
    ]
    assert all(len(one) == HISTORY_BYTES for one in made)
    assert all(one != other for one, other in pairwise(sorted(made)))
    assert next_history(start, 0, b"d" * 32) == made[4]
