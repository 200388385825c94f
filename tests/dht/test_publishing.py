"""Published slots stay published: they are repeated in time, in few messages, and never older."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.dht import Families, Slot, SlotRefused
from protocols.dht.publisher import (
    SLOTS_PER_BATCH,
    Publisher,
    PublishingSettings,
    batches,
    next_sequence,
    on_grid,
)
from protocols.dht.slots import LARGEST_NUMBER, check_signature, supersedes
from protocols.dht.storage import Storage
from protocols.errors import ProtocolMisuse
from protocols.identity import PeerId
from tests.dht.publishers import ALICE, BOB, DAY, HOUR, NOW, SECOND, note, text

MINUTE = 60 * SECOND
LONGEST_INTERVAL = 600 * SECOND
VALUE = text("hello")


def publisher(seed: int = 1, settings: PublishingSettings | None = None) -> Publisher:
    return Publisher(ALICE, random.Random(seed), settings)


def waves(own: Publisher, until: int) -> list[tuple[int, list[Slot]]]:
    """Everything that falls due up to a moment, when the shell wakes exactly in time."""
    found = []
    while (due := own.next_due()) is not None and due <= until:
        found.append((due, own.due(due)))
    return found


lives = some.integers(SECOND, DAY)


@given(lives, some.integers(0, 2**32))
def test_a_slot_that_is_kept_up_is_always_alive_with_half_its_life_to_go(
    ttl: int, seed: int
) -> None:
    own = publisher(seed)
    slot = own.put("note/x", VALUE, ttl, NOW)
    last = NOW
    for moment, slots in waves(own, NOW + min(20 * ttl, 10 * HOUR))[:60]:
        assert slot.expires - moment >= ttl // 2 - 1, "what is out there lives on meanwhile"
        assert last < moment <= last + min(ttl / 2, LONGEST_INTERVAL)
        (slot,) = slots
        check_signature(slot)
        assert slot.value == VALUE
        assert slot.expires <= moment + ttl
        last = moment


@given(lives, some.integers(0, 2**32))
def test_a_slot_is_signed_anew_only_with_a_higher_sequence(ttl: int, seed: int) -> None:
    own = publisher(seed)
    said = [own.put("note/x", VALUE, ttl, NOW)]
    for _, slots in waves(own, NOW + min(20 * ttl, 10 * HOUR))[:60]:
        said += slots
    for before, after in pairwise(said):
        assert after == before or after.sequence > before.sequence


def test_a_long_lived_slot_is_mostly_the_very_same_slot_sent_again() -> None:
    own = publisher()
    own.put("note/x", VALUE, DAY, NOW)
    said = [slot for _, slots in waves(own, NOW + DAY) for slot in slots]
    assert 144 <= len(said) <= 230
    assert len(set(said)) <= 3, "so that replicas check few signatures"


def test_a_slot_that_is_not_kept_up_is_repeated_unchanged_and_then_over() -> None:
    own = publisher()
    slot = own.put("note/x", VALUE, HOUR, NOW, keep_up=False)
    said = [one for _, slots in waves(own, NOW + DAY) for one in slots]
    assert set(said) == {slot}
    assert len(said) >= 5
    assert len(own) == 0
    assert own.next_due() is None


def test_five_hundred_slots_are_repeated_in_a_few_waves_spread_over_time() -> None:
    own = publisher()
    for number in range(500):
        own.put(f"note/{number}", VALUE, HOUR, NOW)
    first_round = waves(own, NOW + LONGEST_INTERVAL)
    sizes = [len(slots) for _, slots in first_round]
    assert sum(sizes) >= 500
    assert 3 <= len(sizes) <= 12
    assert max(sizes) < 250, "not all at once"
    assert first_round[-1][0] - first_round[0][0] >= 60 * SECOND


def test_publishers_that_started_together_do_not_speak_together() -> None:
    moments = []
    for seed in range(40):
        own = publisher(seed)
        for number in range(50):
            own.put(f"note/{number}", VALUE, HOUR, NOW)
        moments += [moment for moment, _ in waves(own, NOW + LONGEST_INTERVAL)]
    assert max(Counter(moments).values()) <= 3


@given(some.integers(0, 2**45), some.integers(1, LONGEST_INTERVAL), some.integers(0, 2**62))
def test_the_grid_rounds_down_by_at_most_a_sixteenth(
    moment: int, interval: int, phase: int
) -> None:
    instant = on_grid(moment, interval, phase)
    assert 0 <= moment - instant < max(1, interval / 16)
    assert on_grid(instant, interval, phase) == instant
    assert on_grid(instant, max(1, interval // 2), phase) == instant, "grids are nested"


def test_the_same_chance_gives_the_same_schedule() -> None:
    def told(seed: int) -> list[tuple[int, list[Slot]]]:
        own = publisher(seed)
        for number in range(20):
            own.put(f"note/{number}", VALUE, HOUR, NOW)
        return waves(own, NOW + HOUR)

    assert told(5) == told(5)
    assert told(5) != told(6)


def test_a_publisher_that_slept_says_everything_anew_at_once() -> None:
    own = publisher()
    own.put("note/x", VALUE, HOUR, NOW)
    (slot,) = own.due(NOW + DAY)
    assert slot.expires == NOW + DAY + HOUR


def test_a_clock_that_is_put_back_by_hours_does_not_silence_the_publisher() -> None:
    own = publisher()
    ahead = NOW + 5 * HOUR
    before = own.put("note/x", VALUE, HOUR, ahead)
    (slot,) = own.due(NOW)
    assert slot.expires == NOW + HOUR, "signed anew, for it would end five hours late"
    assert supersedes(slot, before)
    assert NOW < (own.next_due() or 0) <= NOW + LONGEST_INTERVAL


def test_small_corrections_of_the_clock_say_nothing_again() -> None:
    own = publisher()
    own.put("note/x", VALUE, HOUR, NOW)
    assert own.due(NOW - SECOND) == []


def test_a_failure_is_tried_again_soon_and_then_less_and_less() -> None:
    own = publisher(settings=PublishingSettings(jitter=0))
    own.put("note/x", VALUE, DAY, NOW)
    now, delays = NOW, []
    for _ in range(12):
        own.failed("note/x", now)
        due = own.next_due()
        assert due is not None
        delays.append((due - now) // SECOND)
        assert len(own.due(due)) == 1
        now = due
    assert delays[:8] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert all(500 <= delay <= 600 for delay in delays[9:])
    own.published("note/x")
    own.failed("note/x", now)
    assert own.next_due() == now + 2 * SECOND


def test_a_failure_never_delays_the_usual_time() -> None:
    own = publisher()
    own.put("note/x", VALUE, 2 * SECOND, NOW)
    usual = own.next_due()
    own.failed("note/x", NOW)
    assert usual is not None
    assert (own.next_due() or 0) <= usual


def test_failing_and_succeeding_with_what_was_never_published_is_harmless() -> None:
    own = publisher()
    own.published("note/x")
    own.failed("note/x", NOW)
    assert own.next_due() is None


def test_a_value_that_is_put_again_replaces_the_old_one() -> None:
    own = publisher()
    first = own.put("note/x", VALUE, HOUR, NOW)
    second = own.put("note/x", text("newer"), HOUR, NOW)
    assert supersedes(second, first)
    assert own.slots(NOW) == [second]
    assert {slot.value for _, slots in waves(own, NOW + HOUR) for slot in slots} == {text("newer")}


def test_a_withdrawal_is_repeated_for_as_long_as_the_withdrawn_slot_lives() -> None:
    own = publisher()
    long_lived = own.put("note/x", VALUE, HOUR, NOW)
    own.put("note/x", VALUE, 2 * MINUTE, NOW)
    withdrawn = own.withdraw("note/x", NOW + MINUTE, DAY)
    assert withdrawn.withdrawn
    assert withdrawn.expires == long_lived.expires
    assert own.slots(NOW + MINUTE) == []
    said = {slot for _, slots in waves(own, NOW + DAY) for slot in slots}
    assert said == {withdrawn}
    assert len(own) == 0


def test_a_withdrawal_stands_against_every_renewal_as_well() -> None:
    own = publisher()
    own.put("note/x", VALUE, HOUR, NOW)
    renewed = [slot for _, slots in waves(own, NOW + 3 * HOUR) for slot in slots]
    brief = own.put("note/x", VALUE, SECOND, NOW + 3 * HOUR)
    withdrawn = own.withdraw("note/x", NOW + 3 * HOUR, DAY)
    assert withdrawn.expires == max(slot.expires for slot in renewed) > brief.expires


def test_a_publisher_that_restarted_withdraws_for_as_long_as_anything_could_live() -> None:
    withdrawn = publisher().withdraw("note/x", NOW, DAY)
    assert withdrawn.expires == NOW + DAY


def test_a_node_that_holds_the_slot_takes_its_withdrawal_and_keeps_the_slot_out() -> None:
    own, storage = publisher(), Storage(Families())
    slot = own.put("note/x", VALUE, HOUR, NOW)
    storage.store(slot, NOW)
    storage.store(own.withdraw("note/x", NOW, DAY), NOW)
    with pytest.raises(SlotRefused):
        storage.store(slot, NOW)


def test_a_slot_can_be_put_again_after_it_was_withdrawn() -> None:
    own = publisher()
    own.put("note/x", VALUE, HOUR, NOW)
    withdrawn = own.withdraw("note/x", NOW, DAY)
    assert supersedes(own.put("note/x", VALUE, HOUR, NOW), withdrawn)


def test_a_restarted_publisher_goes_on_above_what_it_said_before() -> None:
    before = publisher().put("note/x", VALUE, HOUR, NOW)
    after = publisher().put("note/x", VALUE, HOUR, NOW + 1)
    assert supersedes(after, before)


def test_meeting_a_newer_slot_of_our_own_makes_us_speak_above_it() -> None:
    own = publisher()
    own.put("note/x", VALUE, HOUR, NOW)
    from_the_future = note(ALICE, key="note/x", sequence=NOW + DAY, expires=NOW + 2 * HOUR)
    said = own.met(from_the_future, NOW)
    assert said is not None
    assert supersedes(said, from_the_future)
    assert (said.value, said.expires) == (VALUE, NOW + HOUR)
    assert own.slots(NOW) == [said]
    withdrawn = own.withdraw("note/x", NOW, DAY)
    assert withdrawn.expires == from_the_future.expires, "it stands against that one as well"


def test_meeting_an_older_slot_or_one_of_another_key_or_publisher_changes_nothing() -> None:
    own = publisher()
    said = own.put("note/x", VALUE, HOUR, NOW)
    assert own.met(said, NOW) is None
    assert own.met(note(ALICE, key="note/x", sequence=1), NOW) is None
    assert own.met(note(BOB, key="note/x", sequence=NOW + DAY), NOW) is None
    assert own.met(note(ALICE, key="note/y", sequence=NOW + DAY), NOW) is None
    assert own.slots(NOW) == [said]


@given(some.integers(0, LARGEST_NUMBER - 1), some.integers(-DAY, 2**50))
def test_a_sequence_is_above_the_one_before_and_never_behind_the_clock(
    previous: int, now: int
) -> None:
    sequence = next_sequence(previous, now)
    assert sequence == max(previous + 1, now)


def test_there_is_nothing_above_the_largest_sequence() -> None:
    with pytest.raises(ProtocolMisuse):
        next_sequence(LARGEST_NUMBER, NOW)


@pytest.mark.parametrize("ttl", [0, -1, 999])
def test_a_slot_that_would_be_gone_before_it_arrives_is_a_mistake(ttl: int) -> None:
    with pytest.raises(ProtocolMisuse):
        publisher().put("note/x", VALUE, ttl, NOW)


def test_an_invalid_slot_is_not_scheduled() -> None:
    own = publisher()
    with pytest.raises(SlotRefused):
        own.put("nokey", VALUE, HOUR, NOW)
    assert len(own) == 0
    assert own.next_due() is None


@pytest.mark.parametrize(
    "settings", [{"of_life": 0.6}, {"of_life": 0}, {"jitter": 1.0}, {"longest_interval_seconds": 0}]
)
def test_settings_that_leave_no_time_are_a_mistake(settings: dict[str, float]) -> None:
    with pytest.raises(ProtocolMisuse):
        PublishingSettings(**settings)


PEERS = [PeerId(f"peer-{number}") for number in range(6)]
SLOTS = [note(key=f"note/{number}", value="x" * number) for number in range(40)]
plans = some.dictionaries(
    some.sampled_from(SLOTS), some.lists(some.sampled_from(PEERS), max_size=6), max_size=40
)


@given(plans, some.integers(1, 10), some.integers(1, 200))
def test_every_replica_gets_each_of_its_slots_once_in_batches_within_bounds(
    plan: dict[Slot, list[PeerId]], most_slots: int, most_bytes: int
) -> None:
    got: Counter[tuple[PeerId, Slot]] = Counter()
    for batch in batches(plan, most_slots, most_bytes):
        assert 1 <= len(batch.slots) <= most_slots
        size = sum(len(slot.key) + len(slot.value) for slot in batch.slots)
        assert size <= most_bytes or len(batch.slots) == 1
        got.update((peer, slot) for peer in batch.peers for slot in batch.slots)
    assert got == Counter({(peer, slot): 1 for slot, peers in plan.items() for peer in peers})


def test_hundreds_of_keys_are_one_message_for_each_neighbour() -> None:
    slots = SLOTS[:SLOTS_PER_BATCH]
    (batch,) = batches([(slot, PEERS) for slot in slots])
    assert batch.slots == tuple(slots)
    assert batch.peers == tuple(PEERS), "and one encoding serves them all"


def test_a_withdrawal_after_a_clock_that_was_ahead_lives_as_long_as_anything_could() -> None:
    publisher = Publisher(ALICE, random.Random(0))
    publisher.put("note/x", text("x"), HOUR, NOW + 365 * DAY)
    withdrawn = publisher.withdraw("note/x", NOW, DAY)
    assert withdrawn.expires == NOW + DAY


def test_due_slots_are_handed_out_a_few_at_a_time() -> None:
    publisher = Publisher(ALICE, random.Random(0))
    for number in range(20):
        publisher.put(f"note/{number}", text("x"), HOUR, NOW)
    later = NOW + HOUR
    found = []
    while (moment := publisher.next_due()) is not None and moment <= later:
        some = publisher.due(later, 3)
        assert len(some) <= 3
        found += some
    assert sorted(slot.key for slot in found) == sorted(f"note/{n}" for n in range(20))
