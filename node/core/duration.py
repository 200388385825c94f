"""Durations in words for a person."""

from __future__ import annotations


def span(seconds: float) -> str:
    """A duration in words: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
