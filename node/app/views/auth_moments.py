"""Times as a moderator types them: `7d`, `12h`, `30min`, or a date.

`5m` could be minutes or months, and nobody notices a duration that is a thousand times too long. So
`m` is not a unit, and a number without a unit is refused.
"""

from __future__ import annotations

import argparse
import datetime
import re
import time

UNITS_MS = {
    "s": 1_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
LONGEST_MS = 10 * 366 * UNITS_MS["d"]  # ten years: nothing here is meant to outlive that

_LIFE = re.compile(r"(?P<count>[0-9]{1,9}) ?(?P<unit>s|min|h|d|w)")


def life(text: str) -> int:
    """An argparse type: a time span, in milliseconds."""
    match = _LIFE.fullmatch(text)
    span_ms = int(match["count"]) * UNITS_MS[match["unit"]] if match else 0
    if not 0 < span_ms <= LONGEST_MS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time span such as 30min, 12h, 7d or 4w, of ten years at most"
        )
    return span_ms


def since(text: str) -> tuple[str, int]:
    """An argparse type: ("ago", milliseconds) or ("at", milliseconds since 1970, UTC)."""
    if _LIFE.fullmatch(text):
        return "ago", life(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time span such as 12h nor a date such as 2026-11-21"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return "at", int(moment.timestamp() * 1000)


def utc(ms: int | None) -> str:
    """A moment for a person, to the second."""
    if ms is None:
        return "never"
    try:
        moment = datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "at an impossible time"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(ms: int | None, now_ms: int) -> str:
    """How long ago a moment was, for a person."""
    from node.app.views.status_view import duration

    if ms is None:
        return "never"
    return f"{duration(max(now_ms - ms, 0) / 1000)} ago"


def ahead(ms: int, now_ms: int) -> str:
    """How far away a future moment is, for a person; "over" if it is past."""
    from node.app.views.status_view import duration

    return f"{duration((ms - now_ms) / 1000)} left" if ms > now_ms else "over"


def now_ms() -> int:
    return time.time_ns() // 1_000_000
