"""When training is allowed: over midnight, over the week's end, and while clocks jump."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.caps.timetable import Wall, parse_timetable, wall_clock
from node.core.wrong_use import WrongUse

MONDAY = datetime(2026, 11, 23)  # without a zone, as the wall shows it


def wall_in(zone: str) -> Wall:
    where = ZoneInfo(zone)
    return lambda moment: datetime.fromtimestamp(moment, where).replace(tzinfo=None)


def moment(zone: str, *wall: int, fold: int = 0) -> float:
    return datetime(*wall, tzinfo=ZoneInfo(zone), fold=fold).timestamp()  # type: ignore[misc, arg-type]


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


def test_a_night_crosses_midnight() -> None:
    night = parse_timetable("22:00-07:00")
    assert [night.is_open(at(2, hour)) for hour in (21, 22, 23, 0, 6, 7, 12)] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert not night.is_open(at(2, 21, 59))
    assert night.is_open(at(2, 6, 59))


def test_a_night_belongs_to_the_day_on_which_it_begins() -> None:
    sunday_night = parse_timetable("Sun 22:00-07:00")
    assert sunday_night.is_open(at(6, 23))
    assert sunday_night.is_open(at(7, 6))  # Monday's morning, over the end of the week
    assert not sunday_night.is_open(at(6, 6))
    assert not sunday_night.is_open(at(1, 23))


def test_entries_add_up_and_days_have_names() -> None:
    both = parse_timetable("weekdays 22:00–07:00, Sat-Sun 00:00-24:00")
    assert both.text == "weekdays 22:00-07:00, Sat-Sun 00:00-24:00"
    assert both.is_open(at(5, 12))
    assert not both.is_open(at(4, 12))
    assert both.is_open(at(7, 6)) is False  # Sunday has no night of its own
    assert parse_timetable(both.text) == both


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("22-7", "Did you mean 22:00-07:00?"),
        ("22.30-7", "Did you mean 22:30-07:00?"),
        ("night", "always"),
        ("22:00", "22:00-07:00"),
        ("25:00-07:00", "not a time"),
        ("22:60-07:00", "not a time"),
        ("22:00-22:00", "00:00-24:00"),
        ("24:00-07:00", "00:00-24:00"),
        ("Mo-Fr 22:00-07:00", "not a day"),
        ("Mon-Fri-Sun 22:00-07:00", "always"),
        (", ".join(["22:00-07:00"] * 65), "at most 64"),
    ],
)
def test_an_invalid_schedule_is_refused_with_a_valid_example(text: str, says: str) -> None:
    with pytest.raises(WrongUse) as caught:
        parse_timetable(text)
    assert says in str(caught.value)


def test_always_never_changes() -> None:
    for text in ("always", "", "00:00-24:00", "daily 12:00-00:00, daily 00:00-12:00"):
        timetable = parse_timetable(text)
        assert timetable.is_open(at(3, 3))
        assert timetable.next_change(0.0, wall_in("UTC")) is None


def test_the_next_change_is_told_to_the_second() -> None:
    night, berlin = parse_timetable("22:00-07:00"), "Europe/Berlin"
    wall = wall_in(berlin)
    noon = moment(berlin, 2026, 7, 1, 12, 0, 31)
    assert night.next_change(noon, wall) == moment(berlin, 2026, 7, 1, 22)
    assert night.next_change(noon + 11 * 3600, wall) == moment(berlin, 2026, 7, 2, 7)


def test_a_night_in_which_clocks_go_forward_is_an_hour_shorter() -> None:
    night, berlin = parse_timetable("22:00-07:00"), "Europe/Berlin"
    begins = moment(berlin, 2026, 3, 28, 22)
    ends = night.next_change(begins, wall_in(berlin))
    assert ends == moment(berlin, 2026, 3, 29, 7)
    assert ends - begins == 8 * 3600


def test_a_night_in_which_clocks_go_back_is_an_hour_longer() -> None:
    night, berlin = parse_timetable("22:00-07:00"), "Europe/Berlin"
    begins = moment(berlin, 2026, 10, 24, 22)
    assert night.next_change(begins, wall_in(berlin)) == begins + 10 * 3600


def test_a_time_that_the_jump_leaves_out_does_not_come() -> None:
    skipped, berlin = parse_timetable("02:15-02:45"), "Europe/Berlin"
    before = moment(berlin, 2026, 3, 29, 1)
    assert skipped.next_change(before, wall_in(berlin)) == moment(berlin, 2026, 3, 30, 2, 15)


def test_the_jump_itself_may_open_and_close() -> None:
    berlin = "Europe/Berlin"
    jump = moment(berlin, 2026, 3, 29, 3)
    late = parse_timetable("02:30-05:00")
    assert late.next_change(jump - 3000, wall_in(berlin)) == jump
    early = parse_timetable("00:00-02:30")
    assert early.next_change(jump - 3000, wall_in(berlin)) == jump


def test_an_hour_that_comes_twice_counts_twice() -> None:
    twice, berlin = parse_timetable("02:00-02:30"), "Europe/Berlin"
    wall = wall_in(berlin)
    first = moment(berlin, 2026, 10, 25, 2)
    assert twice.next_change(first, wall) == first + 1800
    assert twice.next_change(first + 1800, wall) == first + 3600
    assert twice.next_change(first + 3600, wall) == first + 5400


def test_another_time_zone_is_another_wall() -> None:
    night = parse_timetable("22:00-07:00")
    now = moment("Europe/Berlin", 2026, 7, 1, 23)
    assert night.is_open(wall_in("Europe/Berlin")(now))
    assert not night.is_open(wall_in("America/New_York")(now))


def test_this_machines_wall_follows_its_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    noon = datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()
    for zone, hour in (("Europe/Berlin", 14), ("America/New_York", 8), ("UTC", 12)):
        monkeypatch.setenv("TZ", zone)
        assert wall_clock(noon).hour == hour
    monkeypatch.undo()
    wall_clock(noon)


MINUTES = st.integers(0, 1439)


@given(
    st.lists(st.tuples(st.integers(0, 6), MINUTES, MINUTES), min_size=1, max_size=4),
    st.integers(0, 366 * 24 * 60),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
)
def test_until_the_next_change_nothing_changes(
    entries: list[tuple[int, int, int]], minutes: int, zone: str
) -> None:
    days = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
    text = ", ".join(
        f"{days[day]} {a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}"
        for day, a, b in entries
        if a != b
    )
    timetable, wall = parse_timetable(text), wall_in(zone)
    now = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + minutes * 60.0
    change = timetable.next_change(now, wall)
    if change is None:
        assert len(timetable.spans) == 1
        return
    is_open = timetable.is_open(wall(now))
    assert timetable.is_open(wall(change)) is not is_open
    for sixth in range(60):
        between = now + (change - now) * sixth / 60
        assert timetable.is_open(wall(between)) is is_open
    assert timetable.is_open(wall(change - 1)) is is_open
