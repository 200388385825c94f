"""An argparse type: how long, as a person types it: 90s, 30min, 2h, 1d, 1h30m."""

from __future__ import annotations

import argparse
import re

SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
LONGEST_CHARACTERS = 32
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(s|min|m|h|d|w)\s*")


def time_span(text: str) -> float:
    """In seconds; a bare number is too easily meant as something else."""
    rest, seconds = text.strip().lower(), 0.0
    while rest and len(text) <= LONGEST_CHARACTERS:
        found = _PART.match(rest)
        if found is None:
            break
        seconds += float(found[1]) * SECONDS[found[2]]
        rest = rest[found.end() :]
    if rest or seconds <= 0.0:
        raise argparse.ArgumentTypeError(
            f"{text[:LONGEST_CHARACTERS]!r} is not a length of time, such as 90s, 30min, 2h or 1d"
        )
    return seconds
