"""Which slots a node keeps or refuses, and why, and that no peer can push out another's."""

from __future__ import annotations

import msgspec
import pytest

from protocols.dht import Families, Family, Slot, SlotRefused
from protocols.dht.ids import distance, node_id_of, position_of
from protocols.dht.slots import SlotRefusal
from protocols.dht.storage import (
    EXPIRED_AT_ONCE,
    SLOT_OVERHEAD_BYTES,
    Sender,
    Storage,
    StorageLimits,
    Stored,
    slot_bytes,
)
from tests.dht.publishers import ALICE, BOB, CAROL, DAY, HOUR, NOW, SECOND, note, publisher


@pytest.fixture
def storage() -> Storage:
    return Storage(Families())


def refusal(storage: Storage, slot: Slot, now: int = NOW) -> SlotRefusal:
    """Why this slot is refused; and that being refused changed nothing."""
    before = (storage.total_bytes, len(storage), list(storage.slots(now)))
    with pytest.raises(SlotRefused) as caught:
        storage.store(slot, now)
    assert (storage.total_bytes, len(storage), list(storage.slots(now))) == before
    assert len(str(caught.value)) > 20, "a refusal says what and why"
    return caught.value.refusal


def test_a_stored_slot_is_found_until_it_expires(storage: Storage) -> None:
    slot = note()
    assert storage.store(slot, NOW) is Stored.NEW
    assert storage.get("note/hello", NOW) == [slot]
    assert storage.get("note/hello", slot.expires - 1) == [slot]
    assert storage.get("note/hello", slot.expires) == []
    assert storage.get("note/other", NOW) == []


def test_every_publisher_has_its_own_slot_under_a_key(storage: Storage) -> None:
    slots = [note(ALICE), note(BOB), note(CAROL)]
    for slot in slots:
        storage.store(slot, NOW)
    assert storage.get("note/hello", NOW) == slots
    assert storage.slot_of("note/hello", BOB.public_key, NOW) == slots[1]


def test_the_newest_sequence_replaces_what_was_there(storage: Storage) -> None:
    storage.store(note(sequence=1), NOW)
    newer = note(value="newer", sequence=2)
    assert storage.store(newer, NOW) is Stored.REPLACED
    assert storage.get("note/hello", NOW) == [newer]


def test_a_replayed_older_sequence_is_refused(storage: Storage) -> None:
    storage.store(note(sequence=2), NOW)
    assert refusal(storage, note(sequence=1)) is SlotRefusal.OLDER_SEQUENCE


def test_two_contents_of_one_sequence_end_the_same_in_whichever_order_they_come() -> None:
    pair = [note(value="one"), note(value="two")]
    held: list[Slot] = []
    refused: list[SlotRefusal] = []
    for first, second in (pair, reversed(pair)):
        storage = Storage(Families())
        storage.store(first, NOW)
        try:
            storage.store(second, NOW)
        except SlotRefused as error:
            refused.append(error.refusal)
        held += storage.get("note/hello", NOW)
    assert refused == [SlotRefusal.OLDER_SEQUENCE], "in one of the two orders"
    assert len(held) == 2
    assert held[0] == held[1]


def test_the_same_slot_again_changes_nothing_and_costs_no_signature(storage: Storage) -> None:
    storage.store(note(), NOW)
    storage.verified = type(storage.verified)()  # not even by its digest
    assert storage.store(note(), NOW) is Stored.UNCHANGED
    assert storage.verified.signatures_checked == 0


def test_a_forged_signature_is_refused(storage: Storage) -> None:
    forged = msgspec.structs.replace(note(), signature=bytes(64))
    assert refusal(storage, forged) is SlotRefusal.BAD_SIGNATURE


def test_a_slot_in_anothers_name_is_refused(storage: Storage) -> None:
    storage.store(note(ALICE, sequence=1), NOW)
    in_alices_name = msgspec.structs.replace(
        note(BOB, value="mine", sequence=2), publisher=ALICE.public_key
    )
    assert refusal(storage, in_alices_name) is SlotRefusal.BAD_SIGNATURE
    assert storage.get("note/hello", NOW) == [note(ALICE, sequence=1)]


def test_a_forgery_under_the_sequence_that_is_here_is_refused(storage: Storage) -> None:
    storage.store(note(), NOW)
    for number in range(20):  # half of them would win the tie, were they not forged
        forged = msgspec.structs.replace(note(), signature=bytes([number]) * 64)
        assert refusal(storage, forged) in (SlotRefusal.BAD_SIGNATURE, SlotRefusal.OLDER_SEQUENCE)


def test_an_oversized_value_is_refused(storage: Storage) -> None:
    assert refusal(storage, note(value="x" * 4094)) is SlotRefusal.TOO_LARGE
    assert storage.store(note(value="x" * 4093), NOW) is Stored.NEW


def test_a_value_of_the_wrong_type_is_refused() -> None:
    storage = Storage(Families([Family("number", int)]))
    assert refusal(storage, note(key="number/x")) is SlotRefusal.WRONG_SCHEMA


def test_a_key_of_an_unknown_family_is_refused(storage: Storage) -> None:
    assert refusal(storage, note(key="unheard/of")) is SlotRefusal.UNKNOWN_FAMILY


def test_a_slot_of_impossible_form_is_refused(storage: Storage) -> None:
    malformed = msgspec.structs.replace(note(), publisher=b"short")
    assert refusal(storage, malformed) is SlotRefusal.MALFORMED


def test_a_slot_that_has_expired_or_expires_in_a_year_is_refused(storage: Storage) -> None:
    assert refusal(storage, note(expires=NOW)) is SlotRefusal.EXPIRED
    assert refusal(storage, note(expires=NOW + 365 * DAY)) is SlotRefusal.EXPIRY_TOO_FAR


def test_a_thousand_keys_of_one_publisher_are_too_many_and_push_out_nobody(
    storage: Storage,
) -> None:
    others = [note(BOB, key=f"note/{number}") for number in range(0, 1000, 10)]
    for slot in others:
        storage.store(slot, NOW)
    refused = []
    for number in range(1000):
        try:
            storage.store(note(ALICE, key=f"note/{number}"), NOW)
        except SlotRefused as error:
            refused.append(error.refusal)
    assert refused == [SlotRefusal.KEYS_PER_PUBLISHER] * (1000 - 512)
    for slot in others:
        assert slot in storage.get(slot.key, NOW)
    replacing = note(ALICE, key="note/0", sequence=2)
    assert storage.store(replacing, NOW) is Stored.REPLACED, "what it has it may still renew"


def test_a_full_key_takes_no_further_publisher_until_one_expires() -> None:
    storage = Storage(Families([Family("pair", str, slots_per_key=2)]))
    storage.store(note(ALICE, key="pair/x", expires=NOW + SECOND), NOW)
    storage.store(note(BOB, key="pair/x"), NOW)
    assert refusal(storage, note(CAROL, key="pair/x")) is SlotRefusal.SLOTS_PER_KEY
    assert storage.store(note(CAROL, key="pair/y"), NOW) is Stored.NEW
    assert storage.store(note(CAROL, key="pair/x"), NOW + SECOND) is Stored.NEW


def test_a_full_memory_refuses_newcomers_and_growth_and_takes_what_shrinks() -> None:
    slots = [note(publisher(number), value="x" * 20) for number in range(1, 4)]
    room = sum(slot_bytes(slot) for slot in slots)
    storage = Storage(Families(), StorageLimits(total_bytes=room))
    for slot in slots:
        storage.store(slot, NOW)
    assert storage.total_bytes == room
    assert refusal(storage, note(publisher(9), value="")) is SlotRefusal.MEMORY
    larger = note(publisher(1), value="x" * 21, sequence=2)
    assert refusal(storage, larger) is SlotRefusal.MEMORY
    assert storage.store(note(publisher(1), value="x" * 20, sequence=3), NOW) is Stored.REPLACED
    assert storage.store(note(publisher(1), value="x" * 19, sequence=4), NOW) is Stored.REPLACED
    assert storage.store(note(publisher(2), value="x" * 21, sequence=2), NOW) is Stored.REPLACED


def test_a_withdrawn_slot_stands_in_the_way_of_older_ones_until_it_expires(
    storage: Storage,
) -> None:
    storage.store(note(sequence=1), NOW)
    withdrawn = note(sequence=2, withdrawn=True)
    assert storage.store(withdrawn, NOW) is Stored.REPLACED
    assert storage.get("note/hello", NOW) == [withdrawn], "it has to reach other replicas"
    assert refusal(storage, note(sequence=1)) is SlotRefusal.OLDER_SEQUENCE
    assert storage.store(note(sequence=3), NOW) is Stored.REPLACED, "its publisher may come back"


def test_a_slot_that_a_short_lived_one_replaced_does_not_come_back_after_it(
    storage: Storage,
) -> None:
    long_lived = note(sequence=1, expires=NOW + HOUR)
    storage.store(long_lived, NOW)
    storage.store(note(sequence=2, value="brief", expires=NOW + SECOND), NOW)
    assert storage.expire(NOW + SECOND) == 1
    assert storage.get("note/hello", NOW + SECOND) == []
    assert refusal(storage, long_lived, NOW + SECOND) is SlotRefusal.OLDER_SEQUENCE
    assert (len(storage), storage.total_bytes) == (1, SLOT_OVERHEAD_BYTES), "the floor counts"
    assert storage.expire(NOW + HOUR) == 0, "a floor is no slot that expires"
    assert (len(storage), storage.total_bytes) == (0, 0)


def test_a_floor_is_as_high_as_the_last_slot_that_was_here(storage: Storage) -> None:
    long_lived = [note(sequence=number, expires=NOW + HOUR) for number in (1, 2)]
    for slot in long_lived:
        storage.store(slot, NOW)
    storage.store(note(sequence=3, expires=NOW + SECOND), NOW)
    storage.expire(NOW + SECOND)
    of_the_same_sequence = note(sequence=3, value="other", expires=NOW + HOUR)
    for slot in (*long_lived, of_the_same_sequence):
        assert refusal(storage, slot, NOW + SECOND) is SlotRefusal.OLDER_SEQUENCE


def test_above_a_floor_a_publisher_goes_on(storage: Storage) -> None:
    storage.store(note(sequence=1, expires=NOW + HOUR), NOW)
    storage.store(note(sequence=2, expires=NOW + SECOND), NOW)
    storage.expire(NOW + SECOND)
    newer = note(sequence=3, expires=NOW + HOUR)
    assert storage.store(newer, NOW + SECOND) is Stored.NEW
    assert storage.get("note/hello", NOW + SECOND) == [newer]


def test_nothing_is_left_of_what_expired(storage: Storage) -> None:
    for number in range(100):
        storage.store(note(publisher(number % 7 + 1), f"note/{number}"), NOW)
    assert storage.next_expiry() == NOW + HOUR
    assert (storage.key_count, storage.publisher_count) == (100, 7)
    assert storage.expire(NOW + HOUR) == 100
    assert (len(storage), storage.total_bytes, storage.key_count) == (0, 0, 0)
    assert storage.publisher_count == 0
    assert storage.next_expiry() is None


def test_a_newcomer_is_due_the_keys_that_lie_closer_to_it() -> None:
    own, newcomer = node_id_of(ALICE.peer_id), node_id_of(BOB.peer_id)
    storage = Storage(Families(), own_id=own)
    keys = [f"note/{number}" for number in range(50)]
    for key in keys:
        storage.store(note(key=key), NOW)
    wanted = [
        key
        for key in keys
        if distance(position_of(key), newcomer) < distance(position_of(key), own)
    ]
    assert [key for key in storage.all_keys() if storage.is_closer(key, newcomer)] == wanted
    assert not storage.is_closer("note/unheard", newcomer)
    assert 0 < len(wanted) < 50


def test_cached_copies_are_beside_what_is_stored(storage: Storage) -> None:
    slot = note()
    assert storage.cache_copies([slot], NOW) == 1
    assert storage.cache.get("note/hello", NOW) == [slot]
    assert storage.get("note/hello", NOW) == []
    assert storage.total_bytes == 0


def test_a_cached_copy_is_checked_like_any_slot(storage: Storage) -> None:
    for wrong in (
        msgspec.structs.replace(note(), signature=bytes(64)),
        note(expires=NOW),
        note(expires=NOW + 365 * DAY),
        note(key="unheard/of"),
        note(value="x" * 5000),
    ):
        with pytest.raises(SlotRefused):
            storage.cache_copies([note(BOB), wrong], NOW)
        assert len(storage.cache) == 0


def test_a_cached_copy_gives_way_to_what_is_stored(storage: Storage) -> None:
    storage.cache_copies([note(sequence=1)], NOW)
    storage.store(note(sequence=2), NOW)
    assert storage.cache.get("note/hello", NOW) == []
    assert storage.cache_copies([note(sequence=1)], NOW) == 0


# Over a restart


def test_a_sequence_is_remembered_over_a_restart_after_its_slot_has_expired() -> None:
    long_lived = note(sequence=1, expires=NOW + DAY)
    short_lived = note(sequence=2, expires=NOW + 10 * SECOND)
    before = Storage(Families())
    before.store(long_lived, NOW)
    before.store(short_lived, NOW)
    forget_at = before.forget_at("note/hello", ALICE.public_key)
    assert forget_at == long_lived.expires
    after = Storage(Families())
    later = NOW + 60 * SECOND
    after.restore(short_lived, forget_at, later)
    assert after.get("note/hello", later) == []
    assert refusal(after, long_lived, later) is SlotRefusal.OLDER_SEQUENCE
    assert after.expire(long_lived.expires) == 0
    assert (len(after), after.total_bytes, after.key_count, after.publisher_count) == (0, 0, 0, 0)


def test_a_restored_slot_stands_against_what_it_replaced_in_an_earlier_life() -> None:
    storage = Storage(Families())
    storage.restore(note(sequence=2, expires=NOW + 10 * SECOND), NOW + DAY, NOW)
    later = NOW + 20 * SECOND
    storage.expire(later)
    assert refusal(storage, note(sequence=1, expires=NOW + DAY), later) is (
        SlotRefusal.OLDER_SEQUENCE
    )


def test_a_slot_from_disk_is_checked_like_any_other() -> None:
    storage = Storage(Families())
    forged = msgspec.structs.replace(note(sequence=9, expires=NOW - 1), signature=bytes(64))
    with pytest.raises(SlotRefused):
        storage.restore(forged, NOW + DAY, NOW)
    assert len(storage) == 0
    storage.restore(note(sequence=9, expires=NOW - 1), NOW + 1000 * DAY, NOW)
    storage.expire(NOW + 2 * DAY)
    assert len(storage) == 0, "no floor is kept for longer than a slot could live"


def test_a_slot_stored_since_the_start_takes_precedence_over_the_disk() -> None:
    storage = Storage(Families())
    newer = note(sequence=3)
    storage.store(newer, NOW)
    storage.restore(note(sequence=2, expires=NOW + DAY), NOW + DAY, NOW)
    assert storage.get("note/hello", NOW) == [newer]
    assert storage.forget_at("note/hello", ALICE.public_key) == NOW + DAY


# Time


def test_thousands_that_expire_in_one_instant_hold_nobody_up(storage: Storage) -> None:
    for number in range(1000):
        storage.store(note(publisher(number // 500 + 1), key=f"note/{number}"), NOW)
    over = NOW + HOUR
    storage.store(note(BOB, key="note/new", expires=over + 1), over)
    assert len(storage) == 1001 - EXPIRED_AT_ONCE
    while storage.expire(over, 100):
        pass
    assert len(storage) == 1


def test_a_slot_stored_while_the_clock_was_ahead_does_not_stay_for_ever(
    storage: Storage,
) -> None:
    ahead = NOW + 365 * DAY
    storage.store(note(ALICE, expires=ahead + HOUR), ahead)
    storage.store(note(BOB, sequence=1, expires=ahead + HOUR), ahead)
    storage.store(note(BOB, sequence=2, expires=ahead + SECOND), ahead)
    storage.store(note(CAROL), NOW)
    storage.clock_went_back(NOW)
    assert storage.get("note/hello", NOW) == [note(CAROL)]
    assert (len(storage), storage.total_bytes) == (1, slot_bytes(note(CAROL)))


# Limits for each sender

LIMITS = StorageLimits(bytes_per_sender=4 * slot_bytes(note()))
ALICES = Sender(ALICE.public_key, "192.0.2.0/24")
NEIGHBOURS = Sender(BOB.public_key, "192.0.2.0/24")


def test_one_network_cannot_fill_a_node_with_publishers_that_it_makes_up() -> None:
    storage = Storage(Families(), LIMITS)
    for number in range(10, 14):
        storage.store(note(publisher(number)), NOW, NEIGHBOURS)
    with pytest.raises(SlotRefused) as caught:
        storage.store(note(publisher(14)), NOW, ALICES)
    assert caught.value.refusal is SlotRefusal.BYTES_PER_SENDER
    elsewhere = Sender(CAROL.public_key, "198.51.100.0/24")
    assert storage.store(note(publisher(14)), NOW, elsewhere) is Stored.NEW
    assert storage.store(note(ALICE), NOW, ALICES) is Stored.NEW, "its own count apart"
    assert storage.store(note(publisher(15)), NOW) is Stored.NEW, "our own count for nobody"


def test_a_full_share_keeps_nobody_from_renewing_what_is_there() -> None:
    storage = Storage(Families(), LIMITS)
    storage.store(note(ALICE, sequence=1), NOW, Sender(CAROL.public_key, "carol"))
    for number in range(4):
        storage.store(note(BOB, key=f"note/{number}"), NOW, NEIGHBOURS)
    assert storage.store(note(ALICE, sequence=2), NOW, ALICES) is Stored.REPLACED


def test_a_slot_that_was_handed_over_counts_for_its_publisher_once_the_publisher_brings_it() -> (
    None
):
    storage = Storage(Families(), LIMITS)
    giver = Sender(CAROL.public_key, "carol")
    for number in range(4):
        storage.store(note(ALICE, key=f"note/{number}"), NOW, giver)
    with pytest.raises(SlotRefused):
        storage.store(note(BOB), NOW, giver)
    assert storage.store(note(ALICE, key="note/0"), NOW, ALICES) is Stored.UNCHANGED
    assert storage.store(note(BOB), NOW, giver) is Stored.NEW


def test_the_bytes_of_one_publisher_and_of_one_key_are_limited() -> None:
    families = Families([Family("list", str, 60_000, slots_per_key=256, bytes_per_key=200_000)])
    storage = Storage(families, StorageLimits(bytes_per_publisher=150_000))
    large = "x" * 50_000

    def bring(number: int, key: str) -> SlotRefusal | Stored:
        try:
            return storage.store(note(publisher(number), key, large), NOW)
        except SlotRefused as refused:
            return refused.refusal

    assert [bring(1, f"list/{name}") for name in "abc"] == [
        Stored.NEW,
        Stored.NEW,
        SlotRefusal.BYTES_PER_PUBLISHER,
    ]
    assert [bring(number, "list/a") for number in (2, 3, 4)] == [
        Stored.NEW,
        Stored.NEW,
        SlotRefusal.BYTES_PER_KEY,
    ]


def test_a_family_may_look_at_values_more_closely_than_their_type_can_say() -> None:
    def check(key: str, value: str) -> str | None:
        return None if value == key.partition("/")[2] else "It does not name its key."

    storage = Storage(Families([Family("name", str, check=check)]))
    assert storage.store(note(key="name/a", value="a"), NOW) is Stored.NEW
    assert refusal(storage, note(key="name/b", value="a")) is SlotRefusal.WRONG_SCHEMA
    gone = note(key="name/c", withdrawn=True)
    assert storage.store(gone, NOW) is Stored.NEW


def test_what_outranks_another_slot_has_a_place_under_a_full_key() -> None:
    def outranks(value: str, other: str | None) -> bool:
        return value == "newest" != other

    storage = Storage(Families([Family("list", str, slots_per_key=3, outranks=outranks)]))
    for number, value in enumerate(("old", "newest")):
        assert storage.store(note(publisher(number), "list/a", value), NOW) is Stored.NEW
    assert storage.store(note(publisher(2), "list/a", withdrawn=True), NOW) is Stored.NEW
    assert refusal(storage, note(publisher(3), "list/a", "old")) is SlotRefusal.SLOTS_PER_KEY
    gone = note(publisher(3), "list/a", withdrawn=True)
    assert refusal(storage, gone) is SlotRefusal.SLOTS_PER_KEY
    forged = msgspec.structs.replace(note(publisher(3), "list/a", "newest"), sequence=NOW + 7)
    assert refusal(storage, forged) is SlotRefusal.BAD_SIGNATURE
    assert len(storage) == 3, "nothing gave way to it"
    for number in (3, 4):
        assert storage.store(note(publisher(number), "list/a", "newest"), NOW) is Stored.NEW
    values = [msgspec.msgpack.decode(one.value) for one in storage.get("list/a", NOW)]
    assert values == ["newest"] * 3
    assert refusal(storage, note(publisher(5), "list/a", "newest")) is SlotRefusal.SLOTS_PER_KEY


def test_nothing_is_dropped_for_its_own_publisher_or_for_what_has_no_room_elsewhere() -> None:
    def outranks(value: str, other: str | None) -> bool:
        return value.startswith("new") and not (other or "").startswith("new")

    families = Families(
        [Family("list", str, 60_000, slots_per_key=2, bytes_per_key=110_000, outranks=outranks)]
    )
    storage = Storage(families, StorageLimits(bytes_per_publisher=100_000))
    large = "new" + "x" * 50_000
    for number, value in enumerate(("new" + "y" * 55_000, "old" + "z" * 40_000)):
        assert storage.store(note(publisher(number), "list/a", value), NOW) is Stored.NEW
    before, size = len(storage), storage.total_bytes
    own = note(publisher(1), "list/a", "new" + "w" * 59_000, sequence=NOW + 1)
    assert refusal(storage, own) is SlotRefusal.BYTES_PER_KEY
    assert (len(storage), storage.total_bytes) == (before, size)
    assert storage.store(note(publisher(2), "list/b", large), NOW) is Stored.NEW
    assert refusal(storage, note(publisher(2), "list/a", large)) is SlotRefusal.BYTES_PER_PUBLISHER
    assert storage.slot_of("list/a", publisher(1).public_key, NOW) is not None
    assert storage.store(note(publisher(3), "list/a", large), NOW) is Stored.NEW
    assert storage.slot_of("list/a", publisher(1).public_key, NOW) is None


def test_a_sender_without_room_costs_nobody_a_place_that_its_slot_outranks() -> None:
    families = Families(
        [Family("list", str, slots_per_key=1, outranks=lambda value, _other: value == "newest")]
    )
    room = 2 * slot_bytes(note(publisher(10), "list/11", "newest"))
    storage = Storage(families, StorageLimits(bytes_per_sender=room))
    assert storage.store(note(publisher(10), "list/a", "old"), NOW) is Stored.NEW
    for number in (11, 12):
        storage.store(note(publisher(number), f"list/{number}", "newest"), NOW, NEIGHBOURS)
    newest = note(publisher(13), "list/a", "newest")
    with pytest.raises(SlotRefused) as caught:
        storage.store(newest, NOW, NEIGHBOURS)
    assert caught.value.refusal is SlotRefusal.BYTES_PER_SENDER
    assert [one.publisher for one in storage.get("list/a", NOW)] == [publisher(10).public_key]
    assert storage.store(newest, NOW) is Stored.NEW
