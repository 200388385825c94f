"""A family says which values its keys may have; others are refused with a reason."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.dht import LARGEST_VALUE_BYTES, Families, Family, Slot, SlotRefused
from protocols.dht.families import (
    CLOCK_TOLERANCE_MS,
    LONGEST_TTL_SECONDS,
    VALUE_LIMIT_BYTES,
    check_time,
    check_value,
)
from protocols.dht.slots import SlotRefusal
from protocols.errors import ProtocolMisuse
from protocols.rpc import Message
from tests.dht.publishers import DAY, HOUR, NOW, note, text

LONGEST_LIFE_MS = int(LONGEST_TTL_SECONDS * 1000) + CLOCK_TOLERANCE_MS


class Progress(Message, frozen=True):
    epoch: int
    samples: int = 0


class OlderProgress(Message, frozen=True):
    epoch: int


PROGRESS = Family("progress", Progress)


@pytest.fixture
def families() -> Families:
    return Families([PROGRESS])


def refusal_of(caught: pytest.ExceptionInfo[SlotRefused]) -> SlotRefusal:
    assert str(caught.value).startswith(caught.value.what)
    return caught.value.refusal


def test_a_value_survives_its_journey(families: Families) -> None:
    raw = families.encode("progress/run", Progress(3, 32))
    assert PROGRESS.decode(raw) == Progress(3, 32)


def test_notes_are_always_there(families: Families) -> None:
    assert families.decode(note(value="hello")) == "hello"
    assert {family.name for family in families} == {"note", "progress"}


def test_a_key_of_a_family_that_nobody_declared_is_refused(families: Families) -> None:
    with pytest.raises(SlotRefused) as caught:
        families.family_of("expert/ffn.1.2")
    assert refusal_of(caught) is SlotRefusal.UNKNOWN_FAMILY


def test_the_family_is_all_before_the_first_slash_and_nothing_less(families: Families) -> None:
    assert families.family_of("progress/a/b").name == "progress"
    with pytest.raises(SlotRefused):
        families.family_of("progress2/a")


@pytest.mark.parametrize(
    "raw",
    [
        text("not a progress"),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["3", 32]),
        msgspec.msgpack.encode([3.0]),
        msgspec.msgpack.encode([3, 32]) + b"\x00",
        msgspec.msgpack.encode([3, 32])[:-1],
        b"",
        b"\x91" * 4000,
        b"\xc1",
    ],
)
def test_bytes_that_are_not_of_the_type_are_refused(raw: bytes) -> None:
    with pytest.raises(SlotRefused) as caught:
        PROGRESS.decode(raw)
    assert refusal_of(caught) is SlotRefusal.WRONG_SCHEMA


@given(some.binary(max_size=200))
def test_whatever_the_bytes_only_a_refusal_comes_out(raw: bytes) -> None:
    for family in (PROGRESS, Family("map", dict[str, set[tuple[int, ...]]])):
        with suppress(SlotRefused):
            family.decode(raw)


def test_a_type_may_grow_by_fields_with_defaults() -> None:
    older, newer = Family("progress", OlderProgress), PROGRESS
    assert newer.decode(older.encode(OlderProgress(3))) == Progress(3, 0)
    assert older.decode(newer.encode(Progress(3, 32))) == OlderProgress(3)


@pytest.mark.parametrize("value", [3, "text", None, object(), Progress("3"), 2**70])  # type: ignore[arg-type]
def test_a_publisher_is_told_when_its_own_value_does_not_fit(value: object) -> None:
    with pytest.raises(SlotRefused) as caught:
        PROGRESS.encode(value)
    assert refusal_of(caught) is SlotRefusal.WRONG_SCHEMA


def test_a_value_may_have_so_many_bytes_and_not_one_more(families: Families) -> None:
    header = 3  # MessagePack's, for a text of this length
    longest = "x" * (VALUE_LIMIT_BYTES - header)
    assert len(families.encode("note/x", longest)) == VALUE_LIMIT_BYTES
    with pytest.raises(SlotRefused) as caught:
        families.encode("note/x", longest + "x")
    assert refusal_of(caught) is SlotRefusal.TOO_LARGE


def test_a_family_may_declare_larger_values() -> None:
    large = Family("large", bytes, value_limit_bytes=LARGEST_VALUE_BYTES)
    assert large.encode(bytes(50_000))
    with pytest.raises(ProtocolMisuse):
        Family("larger", bytes, value_limit_bytes=LARGEST_VALUE_BYTES + 1)


@pytest.mark.parametrize("name", ["", "Note", "a/b", "a b", "-a", "x" * 33, "ñ"])
def test_a_family_has_a_plain_name(name: str) -> None:
    with pytest.raises(ProtocolMisuse):
        Family(name, str)


def test_one_name_is_one_family(families: Families) -> None:
    families.declare(Family("progress", Progress))
    with pytest.raises(ProtocolMisuse):
        families.declare(Family("progress", OlderProgress))


def time_refusal(slot: Slot) -> SlotRefusal | None:
    try:
        check_time(Families().family_of(slot.key), slot, NOW)
    except SlotRefused as refused:
        return refused.refusal
    return None


@pytest.mark.parametrize(
    ("expires", "wanted"),
    [
        (0, SlotRefusal.EXPIRED),
        (NOW, SlotRefusal.EXPIRED),
        (NOW + 1, None),
        (NOW + HOUR, None),
        (NOW + LONGEST_LIFE_MS, None),
        (NOW + LONGEST_LIFE_MS + 1, SlotRefusal.EXPIRY_TOO_FAR),
        (NOW + 365 * DAY, SlotRefusal.EXPIRY_TOO_FAR),
    ],
)
def test_a_slot_may_live_so_long_and_not_longer(expires: int, wanted: SlotRefusal | None) -> None:
    assert time_refusal(note(expires=expires)) is wanted


def test_a_withdrawn_slot_needs_no_value_of_any_type() -> None:
    check_value(PROGRESS, note(withdrawn=True))
    with pytest.raises(SlotRefused):
        check_value(PROGRESS, note())
