"""Copies of hot keys live for seconds, in little memory, and never keep an old value alive."""

from __future__ import annotations

from protocols.dht.storage import MOST_COPIES_OF_A_KEY, SlotCache
from tests.dht.publishers import ALICE, BOB, HOUR, NOW, SECOND, note, publisher

SIZE = 100


def cache(copies: int = 10) -> SlotCache:
    return SlotCache(limit_bytes=copies * SIZE, seconds=30)


def test_a_copy_lives_for_seconds_whatever_its_publisher_asked_for() -> None:
    area, slot = cache(), note(expires=NOW + HOUR)
    assert area.keep(slot, SIZE, NOW)
    assert area.get(slot.key, NOW + 30 * SECOND - 1) == [slot]
    assert area.get(slot.key, NOW + 30 * SECOND) == []
    assert (len(area), area.total_bytes) == (0, 0)


def test_a_copy_does_not_outlive_its_slot() -> None:
    area, slot = cache(), note(expires=NOW + SECOND)
    area.keep(slot, SIZE, NOW)
    assert area.get(slot.key, NOW + SECOND) == []


def test_a_copy_that_is_brought_again_does_not_live_longer() -> None:
    area, slot = cache(), note()
    area.keep(slot, SIZE, NOW)
    assert not area.keep(slot, SIZE, NOW + 20 * SECOND)
    assert area.get(slot.key, NOW + 30 * SECOND) == []
    assert area.keep(slot, SIZE, NOW + 30 * SECOND), "from then on it is a new copy"


def test_a_newer_copy_replaces_an_older_one_and_not_the_other_way_round() -> None:
    area, old, new = cache(), note(sequence=1), note(sequence=2)
    area.keep(old, SIZE, NOW)
    assert area.keep(new, SIZE, NOW)
    assert not area.keep(old, SIZE, NOW)
    assert area.get(new.key, NOW) == [new]
    assert area.total_bytes == SIZE


def test_when_it_is_full_the_key_goes_that_was_not_read_for_longest() -> None:
    area = cache(copies=3)
    first, second, third, fourth = (note(key=f"note/{number}") for number in range(4))
    for slot in (first, second, third):
        area.keep(slot, SIZE, NOW)
    area.get(first.key, NOW)
    area.keep(fourth, SIZE, NOW)
    assert area.get(second.key, NOW) == []
    assert [area.get(slot.key, NOW) for slot in (first, third, fourth)] == [
        [first], [third], [fourth],
    ]  # fmt: skip
    assert area.total_bytes == 3 * SIZE


def test_a_key_has_only_so_many_copies() -> None:
    """Or one request could have a node go through thousands, again and again."""
    area = cache(copies=1000)
    slots = [note(publisher(number)) for number in range(MOST_COPIES_OF_A_KEY + 1)]
    assert [area.keep(slot, SIZE, NOW) for slot in slots] == [*[True] * (len(slots) - 1), False]
    newer = note(publisher(0), sequence=2)
    assert area.keep(newer, SIZE, NOW)
    assert len(area.get(newer.key, NOW)) == MOST_COPIES_OF_A_KEY


def test_a_key_that_fills_it_makes_room_for_itself() -> None:
    area = cache(copies=1)
    assert area.keep(note(ALICE), SIZE, NOW)
    assert area.keep(note(BOB), SIZE, NOW)
    assert area.get("note/hello", NOW) == [note(BOB)]
    assert area.total_bytes == SIZE


def test_a_copy_larger_than_the_cache_is_not_kept_and_displaces_nothing() -> None:
    area = cache(copies=1)
    area.keep(note(), SIZE, NOW)
    assert not area.keep(note(key="note/large"), SIZE + 1, NOW)
    assert len(area) == 1


def test_all_expired_copies_can_be_dropped_at_once() -> None:
    area = cache()
    area.keep(note(ALICE), SIZE, NOW)
    area.keep(note(BOB, key="note/later"), SIZE, NOW + SECOND)
    area.expire(NOW + 30 * SECOND)
    assert (len(area), area.total_bytes) == (1, SIZE)


def test_copies_do_not_live_for_hours_when_the_clock_is_put_back() -> None:
    area, slot = cache(), note(expires=NOW + HOUR)
    area.keep(slot, SIZE, NOW)
    assert area.get(slot.key, NOW - HOUR) == []
