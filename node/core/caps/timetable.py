"""When this machine may train: "22:00-07:00", "Mon-Fri 22:00-07:00, weekends 00:00-24:00".

    timetable = parse_timetable("22:00-07:00")
    timetable.is_open(wall_clock(time.time()))
    timetable.next_change(time.time(), wall_clock)      # when it opens or closes next

Local time counts. A span that crosses midnight belongs to the day on which it begins. A night in
which the clocks go forward is an hour shorter, and one in which they go back is an hour longer.
There is no clock here: moments, and local time at them, are arguments.

The next change is not simply so many minutes from now. Clocks may jump before it, and the jump
itself may open or close the timetable.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from node.core.wrong_use import WrongUse

ALWAYS = "always"
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
MINUTE = 60.0

MOST_ENTRIES = 64
"""Nine for each day; a timetable that a person remembers has three."""

FURTHEST_LOOK_SECONDS = 8 * 24 * 3600.0
"""A week and a day: every change happens within a week, and clocks may jump meanwhile."""

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_WORDS = {"weekdays": range(5), "weekends": range(5, 7), "daily": range(7)}
_ENTRY = re.compile(
    r"(?:(?P<days>[A-Za-z]+(?:\s*-\s*[A-Za-z]+)?)\s+)?"
    r"(?P<from>[0-9]{1,2}:[0-9]{2})\s*-\s*(?P<to>[0-9]{1,2}:[0-9]{2})"
)
_HOURS_ONLY = re.compile(
    r"([0-9]{1,2})(?:[:h.]?([0-9]{2})?)\s*-\s*([0-9]{1,2})(?:[:h.]?([0-9]{2})?)"
)

Wall = Callable[[float], datetime]
"""Local time at a moment (seconds since 1970), without a time zone."""


def wall_clock(moment: float) -> datetime:
    """This machine's local time. A changed time zone counts at once."""
    if hasattr(time, "tzset"):
        time.tzset()
    return datetime.fromtimestamp(moment)


@dataclass(frozen=True)
class Timetable:
    """Spans of minutes of the week, from Monday's midnight, separate and in order."""

    spans: tuple[tuple[int, int], ...]
    text: str

    def is_open(self, wall: datetime) -> bool:
        minute = _minute_of_week(wall)
        place = bisect_right(self.spans, (minute, WEEK_MINUTES + 1)) - 1
        return place >= 0 and minute < self.spans[place][1]

    def next_change(self, moment: float, wall: Wall) -> float | None:
        """The next moment at which it opens, if closed now, or closes, if open.

        None if that never happens.
        """
        is_open, end = self.is_open(wall(moment)), moment + FURTHEST_LOOK_SECONDS
        while moment < end:
            ahead = moment + self._to_boundary(wall(moment))
            if _offset(ahead, wall) != _offset(moment, wall):
                ahead = _jump_between(moment, ahead, wall)
            if self.is_open(wall(ahead)) != is_open:
                return ahead
            moment = ahead
        return None

    def _to_boundary(self, wall: datetime) -> float:
        """Seconds until local time reaches the next minute at which a span begins or ends."""
        minute = _minute_of_week(wall)
        boundaries = sorted({edge % WEEK_MINUTES for span in self.spans for edge in span})
        later = next((edge for edge in boundaries if edge > minute), None)
        minutes = boundaries[0] + WEEK_MINUTES - minute if later is None else later - minute
        return minutes * MINUTE - wall.second - wall.microsecond / 1e6


def parse_timetable(text: str) -> Timetable:
    """Parse a timetable; WrongUse with the nearest valid form. `always` is open all week."""
    if text.strip().lower() in ("", ALWAYS):
        return Timetable(((0, WEEK_MINUTES),), ALWAYS)
    plain = text.replace("\u2013", "-").replace("\u2014", "-")
    entries = [entry.strip() for entry in plain.split(",")]
    if len(entries) > MOST_ENTRIES:
        raise WrongUse(f"A schedule has at most {MOST_ENTRIES} entries; this has {len(entries)}.")
    spans: list[tuple[int, int]] = []
    written: list[str] = []
    for entry in entries:
        days_text, days, begins, ends = _parse_entry(entry)
        written.append(f"{days_text}{_clock(begins)}-{_clock(ends)}")
        length = ends - begins if ends > begins else ends - begins + DAY_MINUTES
        for day in days:
            start = day * DAY_MINUTES + begins
            spans += _within_week(start, start + length)
    return Timetable(_joined(spans), ", ".join(written))


def _parse_entry(entry: str) -> tuple[str, Iterable[int], int, int]:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise _refused(entry)
    begins, ends = _minute_of_day(found["from"], entry), _minute_of_day(found["to"], entry)
    if begins in (ends, DAY_MINUTES):
        raise WrongUse(
            f"The schedule {entry!r} is empty.",
            why="It begins and ends at the same time.",
            advice='Write "00:00-24:00" for a whole day, or "always".',
        )
    if found["days"] is None:
        return "", range(7), begins, ends
    words = re.sub(r"\s+", "", found["days"])
    return f"{_days_written(words)} ", _days(words, entry), begins, ends


def _minute_of_day(text: str, entry: str) -> int:
    hours, minutes = (int(part) for part in text.split(":"))
    minute = hours * 60 + minutes
    if minutes > 59 or minute > DAY_MINUTES:
        raise WrongUse(
            f"{text} in the schedule {entry!r} is not a time.",
            why="Hours go from 00:00 to 24:00.",
        )
    return minute


def _days(words: str, entry: str) -> Iterable[int]:
    if words.lower() in _DAY_WORDS:
        return _DAY_WORDS[words.lower()]
    first, _, last = words.partition("-")
    begins = _day(first, entry)
    ends = _day(last, entry) if last else begins
    return [(begins + step) % 7 for step in range((ends - begins) % 7 + 1)]


def _days_written(words: str) -> str:
    if words.lower() in _DAY_WORDS:
        return words.lower()
    return "-".join(part[:3].capitalize() for part in words.split("-"))


def _day(word: str, entry: str) -> int:
    for number, day in enumerate(DAYS):
        if len(word) >= 3 and _DAY_NAMES[number].startswith(word.lower()):
            return number
        if word.lower() == day.lower():
            return number
    raise WrongUse(
        f"{word!r} in the schedule {entry!r} is not a day.",
        why=f"Days are {', '.join(DAYS)}, weekdays and weekends.",
    )


_DAY_NAMES = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def _refused(entry: str) -> WrongUse:
    advice = ""
    if loose := _HOURS_ONLY.fullmatch(entry):
        begin, begin_minutes, end, end_minutes = loose.groups()
        meant = f"{int(begin):02}:{begin_minutes or '00'}-{int(end):02}:{end_minutes or '00'}"
        if _ENTRY.fullmatch(meant):
            advice = f"Did you mean {meant}?"
    return WrongUse(
        f"{entry!r} is not a schedule.",
        why='It has to be like "22:00-07:00" or "Mon-Fri 22:00-07:00, weekends 00:00-24:00", '
        'or "always".',
        advice=advice,
    )


def _within_week(start: int, end: int) -> list[tuple[int, int]]:
    """The span, cut in two if it continues from Sunday to Monday."""
    if end <= WEEK_MINUTES:
        return [(start, end)]
    return [(start, WEEK_MINUTES), (0, end - WEEK_MINUTES)]


def _joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The spans in order, with touching ones joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _minute_of_week(wall: datetime) -> int:
    return wall.weekday() * DAY_MINUTES + wall.hour * 60 + wall.minute


def _offset(moment: float, wall: Wall) -> timedelta:
    """The offset of local time from UTC, to the minute."""
    away = wall(moment) - datetime.fromtimestamp(moment, UTC).replace(tzinfo=None)
    return timedelta(minutes=round(away.total_seconds() / MINUTE))


def _jump_between(before: float, after: float, wall: Wall) -> float:
    """The first whole minute after a jump of the clock."""
    offset = _offset(before, wall)
    low, high = int(before // MINUTE), -int(-after // MINUTE)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(middle * MINUTE, wall) == offset:
            low = middle
        else:
            high = middle
    return high * MINUTE
