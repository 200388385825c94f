"""An invite pins one key; the keys that count are those that it reaches by endorsements."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from auth.errors import UntrustedDocument
from auth.keyring import MOST_BESIDE, MOST_KEYS, MOST_WITHDRAWN, KeyRecord, Keyring, endorse
from auth.keys import SigningKey, fingerprint
from auth.tokens import read_token
from tests.auth.core.people import (
    ALICE,
    AUTH,
    HOUR,
    NEXT_AUTH,
    NOW,
    OTHER_AUTH,
    RUN,
    THIRD_AUTH,
    YEAR,
    keyring_of,
    root_record,
    token_of,
)

PINNED = fingerprint(AUTH.public_key)
ROOT = root_record()
SECOND = endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)
THIRD = endorse(RUN, THIRD_AUTH.public_key, NOW, NOW + YEAR, NEXT_AUTH)


@pytest.mark.parametrize("records", list(itertools.permutations([ROOT, SECOND, THIRD])))
def test_an_old_invite_reaches_the_newest_key_in_whatever_order(
    records: tuple[KeyRecord, ...],
) -> None:
    keyring = Keyring.from_pinned(RUN, PINNED, records)
    for depth, key in enumerate((AUTH, NEXT_AUTH, THIRD_AUTH)):
        found = keyring.find(key.key_id)
        assert found is not None
        assert found.key.public_key == key.public_key
        assert found.depth == depth
    assert set(keyring.fingerprints) == {
        fingerprint(key.public_key) for key in (AUTH, NEXT_AUTH, THIRD_AUTH)
    }


def test_a_new_invite_pins_the_new_key_and_does_not_reach_back() -> None:
    pinned = fingerprint(NEXT_AUTH.public_key)
    keyring = Keyring.from_pinned(RUN, pinned, [ROOT, SECOND, THIRD])
    assert keyring.find(THIRD_AUTH.key_id) is not None
    assert keyring.find(AUTH.key_id) is None


def test_a_pin_that_no_record_has_is_refused() -> None:
    with pytest.raises(UntrustedDocument, match="fingerprint"):
        Keyring.from_pinned(RUN, fingerprint(OTHER_AUTH.public_key), [ROOT, SECOND])
    with pytest.raises(UntrustedDocument):
        Keyring.from_pinned(RUN, PINNED, [])


@pytest.mark.parametrize(
    "record",
    [
        endorse(RUN, THIRD_AUTH.public_key, NOW, NOW + YEAR, OTHER_AUTH),
        endorse(RUN, THIRD_AUTH.public_key, NOW, NOW + YEAR, THIRD_AUTH),
        endorse("another", THIRD_AUTH.public_key, NOW, NOW + YEAR, AUTH),
        msgspec.structs.replace(SECOND, public_key=THIRD_AUTH.public_key),
        msgspec.structs.replace(SECOND, from_ms=SECOND.from_ms - 1),
        msgspec.structs.replace(SECOND, until_ms=SECOND.until_ms + 1),
        msgspec.structs.replace(SECOND, endorsed_by=OTHER_AUTH.key_id),
        msgspec.structs.replace(SECOND, signature=bytes(64)),
        endorse(RUN, bytes(32), NOW, NOW + YEAR, AUTH),
    ],
    ids=[
        "by a stranger",
        "by itself",
        "in another run",
        "other key",
        "earlier",
        "longer",
        "other endorser",
        "no signature",
        "nobody's key",
    ],
)
def test_a_record_that_nothing_trusted_vouches_for_is_left_out(record: KeyRecord) -> None:
    keyring = Keyring.from_pinned(RUN, PINNED, [record, ROOT])
    assert keyring.records == (ROOT,)
    assert keyring.add([record]) == 0


def test_a_pinned_record_that_was_changed_is_not_taken() -> None:
    with pytest.raises(UntrustedDocument):
        Keyring.from_pinned(RUN, PINNED, [msgspec.structs.replace(ROOT, until_ms=NOW + 9 * YEAR)])
    with pytest.raises(UntrustedDocument):
        Keyring.from_pinned("another", PINNED, [ROOT])


def test_keys_that_come_later_are_added_once() -> None:
    keyring = keyring_of()
    assert keyring.add([THIRD]) == 0  # what vouches for it is not known yet
    assert keyring.add([THIRD, SECOND]) == 2
    assert keyring.add([THIRD, SECOND, ROOT]) == 0
    again = Keyring.from_pinned(RUN, PINNED, keyring.records)
    assert again.records == keyring.records


def test_a_chain_ends_somewhere() -> None:
    keys = [SigningKey(number.to_bytes(32, "big")) for number in range(1, MOST_KEYS + 10)]
    chain = [endorse(RUN, keys[0].public_key, NOW, NOW + YEAR, keys[0])]
    for older, newer in itertools.pairwise(keys):
        chain.append(endorse(RUN, newer.public_key, NOW, NOW + YEAR, older))
    keyring = Keyring.from_pinned(RUN, fingerprint(keys[0].public_key), chain)
    assert len(keyring.records) == MOST_KEYS
    keyring.add(chain[MOST_KEYS - 1 :])
    assert len(keyring.records) == MOST_KEYS


def test_a_withdrawn_key_counts_no_more_and_vouches_for_nobody_new() -> None:
    keyring = keyring_of(ROOT, SECOND)
    keyring.withdraw([AUTH.key_id], by=NEXT_AUTH.key_id)
    assert keyring.find(AUTH.key_id) is None
    assert keyring.allows(read_token(token_of(ALICE))) is None
    assert keyring.allows(read_token(token_of(ALICE, by=NEXT_AUTH))) is not None
    assert keyring.withdrawn == {AUTH.key_id}
    assert PINNED not in keyring.fingerprints
    thiefs = endorse(RUN, OTHER_AUTH.public_key, NOW, NOW + YEAR, AUTH)
    assert keyring.add([thiefs]) == 0
    assert keyring.add([ROOT]) == 0
    assert keyring.find(AUTH.key_id) is None
    assert keyring.add([THIRD]) == 1


def test_a_predecessor_does_not_withdraw_its_successor() -> None:
    keyring = keyring_of(ROOT, SECOND)
    keyring.withdraw([NEXT_AUTH.key_id], by=AUTH.key_id)
    assert keyring.find(NEXT_AUTH.key_id) is not None


def test_a_key_that_is_met_only_after_it_was_withdrawn_does_not_count() -> None:
    # published, lost and withdrawn while this node was away; an old copy of its record comes late
    lost = endorse(RUN, OTHER_AUTH.public_key, NOW, NOW + YEAR, AUTH)
    keyring = keyring_of(ROOT, SECOND)
    keyring.withdraw([OTHER_AUTH.key_id], by=NEXT_AUTH.key_id)
    keyring.add([lost, endorse(RUN, THIRD_AUTH.public_key, NOW, NOW + YEAR, OTHER_AUTH)])
    assert keyring.find(OTHER_AUTH.key_id) is None
    assert keyring.find(THIRD_AUTH.key_id) is None


def test_a_thief_of_an_old_key_cannot_withdraw_a_successor_beforehand() -> None:
    keyring = keyring_of(ROOT)
    keyring.withdraw([NEXT_AUTH.key_id], by=AUTH.key_id)
    assert keyring.add([SECOND]) == 1
    assert keyring.find(NEXT_AUTH.key_id) is not None


def thiefs_chain(stolen: SigningKey, length: int = 3) -> tuple[list[SigningKey], list[KeyRecord]]:
    keys = [SigningKey(bytes([100 + number]) * 32) for number in range(length)]
    records = [
        endorse(RUN, newer.public_key, NOW, NOW + YEAR, older)
        for older, newer in itertools.pairwise([stolen, *keys])
    ]
    return keys, records


def test_a_thief_of_an_old_key_gets_no_deeper_than_its_successor_however_long_his_chain() -> None:
    keyring = keyring_of(ROOT, SECOND)
    keys, records = thiefs_chain(AUTH)
    assert keyring.add(records) == len(records)
    for key in keys:
        keyring.withdraw([NEXT_AUTH.key_id, AUTH.key_id], by=key.key_id)
        found = keyring.find(key.key_id)
        assert found is None or found.depth == 0
    assert keyring.find(NEXT_AUTH.key_id) is not None


def test_with_a_withdrawn_key_falls_what_stands_beside_its_successor_and_not_the_successor() -> (
    None
):
    keyring = keyring_of(ROOT, SECOND, THIRD)
    keys, records = thiefs_chain(AUTH)
    keyring.add(records)
    keyring.withdraw([AUTH.key_id], by=NEXT_AUTH.key_id)
    for key in keys:
        assert keyring.find(key.key_id) is None
        keyring.withdraw([THIRD_AUTH.key_id], by=key.key_id)
    assert keyring.find(NEXT_AUTH.key_id) is not None
    assert keyring.find(THIRD_AUTH.key_id) is not None


def test_a_thief_does_not_take_the_place_of_the_keys_to_come() -> None:
    keyring = keyring_of(ROOT, SECOND)
    _, records = thiefs_chain(AUTH, length=2 * MOST_KEYS)
    for record in records:
        keyring.add([record])
    assert len(keyring.records) == 2 + MOST_BESIDE
    assert keyring.add([THIRD]) == 1
    again = Keyring.from_pinned(RUN, PINNED, keyring.records)
    assert set(again.records) == set(keyring.records)
    found = again.find(THIRD_AUTH.key_id)
    assert found is not None
    assert found.depth == 2


def test_a_second_successor_counts_beside_the_first() -> None:
    # the server was restored from a backup that is older than its last rotation, and rotated again
    keyring = keyring_of(ROOT, SECOND)
    assert keyring.add([endorse(RUN, OTHER_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)]) == 1
    assert keyring.allows(read_token(token_of(ALICE, by=OTHER_AUTH))) is not None


def test_only_so_many_withdrawals_are_kept() -> None:
    keyring = keyring_of(ROOT, SECOND)
    many = [number.to_bytes(8, "big") for number in range(2 * MOST_WITHDRAWN)]
    keyring.withdraw(many, by=NEXT_AUTH.key_id)
    assert len(keyring._withdrawn) == MOST_WITHDRAWN
    assert keyring.withdrawn == frozenset()


def test_junk_of_a_thief_leaves_room_to_withdraw_the_keys_that_are_known() -> None:
    """By lists of a stolen key, before its own withdrawal."""
    keyring = keyring_of(ROOT, SECOND)
    many = [number.to_bytes(8, "big") for number in range(2 * MOST_WITHDRAWN)]
    keyring.withdraw(many, by=AUTH.key_id)
    keyring.withdraw([AUTH.key_id], by=NEXT_AUTH.key_id)
    assert keyring.withdrawn == {AUTH.key_id}
    assert len(keyring._withdrawn) <= MOST_WITHDRAWN + MOST_KEYS


def test_a_withdrawn_or_unknown_key_withdraws_nothing_nor_does_a_key_itself() -> None:
    keyring = keyring_of(ROOT, SECOND, THIRD)
    keyring.withdraw([NEXT_AUTH.key_id], by=THIRD_AUTH.key_id)
    keyring.withdraw([AUTH.key_id], by=NEXT_AUTH.key_id)
    keyring.withdraw([AUTH.key_id], by=OTHER_AUTH.key_id)
    keyring.withdraw([THIRD_AUTH.key_id], by=THIRD_AUTH.key_id)
    assert keyring.withdrawn == {NEXT_AUTH.key_id}


def test_a_record_says_from_when_until_when() -> None:
    with pytest.raises(ValueError, match="before until after"):
        endorse(RUN, NEXT_AUTH.public_key, NOW, NOW, AUTH)
