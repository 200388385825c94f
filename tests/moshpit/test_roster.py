"""A list is as its members signed it, in the order of the hashes, or it is refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import MalformedMessage
from protocols.identity import Identity
from protocols.moshpit.roster import (
    LARGEST_RATE,
    NONCE_BYTES,
    ChangedEntry,
    Entry,
    ImpossibleNumber,
    NotAMember,
    NotSigned,
    Offer,
    OtherKey,
    OtherLayout,
    Roster,
    RosterRefused,
    StaleEpoch,
    Terms,
    TooMany,
    TwiceTheSame,
    WrongLeader,
    WrongOrder,
    canonical_entry,
    canonical_roster,
    check_entry,
    check_roster,
    hash_order,
    sign_entry,
    sign_roster,
)
from protocols.rpc import decode, encode

TERMS = Terms("group/poem/7/0/all", 7, bytes(range(32)))
OTHER_KEY = Terms("group/poem/7/1/all", 7, TERMS.layout_digest)
OLD = Terms(TERMS.key, 6, TERMS.layout_digest)
OTHER_TENSORS = Terms(TERMS.key, 7, bytes(32))
NONCE = bytes(range(NONCE_BYTES))
PEOPLE = sorted(
    (Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, 6)),
    key=lambda one: hash_order(TERMS.key, one.peer_id),
)
FIRST, SECOND, LAST = PEOPLE[0], PEOPLE[1], PEOPLE[-1]


OFFER = Offer(32.0)


def entry_of(
    who: Identity, leader: Identity = FIRST, terms: Terms = TERMS, offer: Offer = OFFER
) -> Entry:
    return sign_entry(who, terms, leader.peer_id, offer, NONCE)


def roster_of(*people: Identity, leader: Identity = FIRST, terms: Terms = TERMS) -> Roster:
    entries = [entry_of(one, leader, terms) for one in people]
    return sign_roster(leader, terms, entries, 1_800_000_000_000, NONCE)


def signed_again(roster: Roster, by: Identity = FIRST, **changes: Any) -> Roster:
    """The list with a change, and the leader's signature over the changed list."""
    changed = msgspec.structs.replace(roster, **changes)
    signature = by.sign(b"potluck moshpit roster 4", canonical_roster(changed))
    return msgspec.structs.replace(changed, signature=signature)


GOOD = roster_of(*PEOPLE)


def test_a_list_that_all_have_signed_is_accepted_by_each() -> None:
    for one in PEOPLE:
        check_roster(GOOD, TERMS, entry_of(one))
    assert GOOD.members == tuple(one.peer_id for one in PEOPLE)
    assert GOOD.index_of(LAST.peer_id) == 4


def test_the_leader_is_the_first_that_can_be_dialled() -> None:
    entries = [entry_of(FIRST, SECOND, offer=Offer(1.0, reduces=False)), entry_of(SECOND, SECOND)]
    check_roster(sign_roster(SECOND, TERMS, entries, 1, NONCE), TERMS)


def test_the_leader_changes_with_the_key() -> None:
    def first(key: str) -> str:
        return min(PEOPLE, key=lambda one: hash_order(key, one.peer_id)).peer_id

    assert len({first(f"group/poem/{epoch}/0/all") for epoch in range(50)}) == len(PEOPLE)


def test_a_list_survives_the_wire() -> None:
    assert decode(Roster, encode(GOOD)) == GOOD


def test_the_round_id_is_the_hash_of_exactly_this_list() -> None:
    again = sign_roster(FIRST, TERMS, GOOD.entries, GOOD.started_ms, bytes(NONCE_BYTES))
    assert GOOD.round_id != again.round_id
    assert GOOD.round_id == decode(Roster, encode(GOOD)).round_id
    assert len(GOOD.round_id) == 32


def test_the_canonical_bytes_are_those_of_the_documentation() -> None:
    """A test vector for implementations in other languages."""
    entry = canonical_entry(TERMS, FIRST.peer_id, entry_of(SECOND))
    terms = b"\x00\x12group/poem/7/0/all" + (7).to_bytes(8, "big") + TERMS.layout_digest
    own = (
        SECOND.public_key
        + bytes.fromhex("4040000000000000")
        + bytes(16)
        + b"\x01\x00\x00\x01\x00"
        + NONCE
    )
    assert entry == terms + FIRST.public_key + own
    listed = canonical_roster(roster_of(FIRST, SECOND))
    assert listed.startswith(
        terms + FIRST.public_key + (1_800_000_000_000).to_bytes(8, "big") + NONCE + b"\x00\x02"
    )
    assert listed.endswith(own + entry_of(SECOND).signature)
    assert hashlib.sha256(listed).hexdigest() == VECTOR


VECTOR = "9dc2cb88bc8e45fe5762e8943cca21a58cb173fe3a7d644585348c36f19d99cf"

REFUSED: dict[str, tuple[type[RosterRefused], Callable[[], Roster]]] = {
    "another key": (OtherKey, lambda: roster_of(*PEOPLE, terms=OTHER_KEY)),
    "a stale epoch": (StaleEpoch, lambda: roster_of(*PEOPLE, terms=OLD)),
    "another layout": (OtherLayout, lambda: roster_of(*PEOPLE, terms=OTHER_TENSORS)),
    "one member": (TooMany, lambda: roster_of(FIRST)),
    "too many members": (TooMany, lambda: roster_of(*PEOPLE)),
    "a member twice": (
        TwiceTheSame,
        lambda: signed_again(GOOD, entries=(*GOOD.entries, GOOD.entries[-1])),
    ),
    "another order": (WrongOrder, lambda: signed_again(GOOD, entries=GOOD.entries[::-1])),
    "another leader": (WrongLeader, lambda: roster_of(*PEOPLE, leader=SECOND)),
    "a leader that is no member": (WrongLeader, lambda: roster_of(*PEOPLE[1:], leader=FIRST)),
    "a stranger's signature": (NotSigned, lambda: signed_again(GOOD, by=LAST)),
    "a signature over something else": (
        NotSigned,
        lambda: msgspec.structs.replace(GOOD, started_ms=GOOD.started_ms + 1),
    ),
    "an entry that its owner did not sign": (
        NotSigned,
        lambda: signed_again(
            GOOD,
            entries=(
                *GOOD.entries[:-1],
                msgspec.structs.replace(GOOD.entries[-1], weight=1e6),
            ),
        ),
    ),
    "entries that were meant for another leader": (
        NotSigned,
        lambda: sign_roster(
            FIRST, TERMS, [entry_of(FIRST), entry_of(SECOND, leader=LAST)], 1, NONCE
        ),
    ),
    "a weight that is no number": (
        ImpossibleNumber,
        lambda: signed_again(
            GOOD,
            entries=(
                *GOOD.entries[:-1],
                msgspec.structs.replace(GOOD.entries[-1], weight=float("nan")),
            ),
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_list_is_refused_by_name_for(what: str) -> None:
    error, make = REFUSED[what]
    largest = 4 if what == "too many members" else 64
    with pytest.raises(error) as caught:
        check_roster(make(), TERMS, largest=largest)
    assert caught.value.what
    assert caught.value.why
    assert caught.value.advice


def test_a_list_without_us_or_with_another_entry_of_ours_is_refused() -> None:
    with pytest.raises(NotAMember):
        check_roster(roster_of(*PEOPLE[:3]), TERMS, entry_of(LAST))
    with pytest.raises(ChangedEntry):
        check_roster(GOOD, TERMS, entry_of(LAST, offer=Offer(33.0)))


@pytest.mark.parametrize(
    "offer",
    [
        Offer(-1.0),
        Offer(float("inf")),
        Offer(float("nan")),
        Offer(1e16),
        Offer(1.0, up_bytes_per_second=-1),
        Offer(1.0, down_bytes_per_second=LARGEST_RATE + 1),
    ],
    ids=repr,
)
def test_impossible_numbers_are_not_even_signed(offer: Offer) -> None:
    with pytest.raises(ImpossibleNumber):
        entry_of(FIRST, offer=offer)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_byte_of_a_list_is_changed_it_is_not_the_list_any_more(
    data: st.DataObject,
) -> None:
    raw = bytearray(encode(GOOD))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    try:
        changed = decode(Roster, bytes(raw))
    except MalformedMessage:
        return
    if changed != GOOD:  # MessagePack can say the same in two ways
        with pytest.raises(RosterRefused):
            check_roster(changed, TERMS)


def test_an_entry_counts_for_one_leader_and_one_list_of_terms() -> None:
    entry = entry_of(SECOND)
    check_entry(entry, TERMS, FIRST.peer_id)
    for terms, leader in ((TERMS, LAST), (OLD, FIRST), (OTHER_KEY, FIRST), (OTHER_TENSORS, FIRST)):
        with pytest.raises(NotSigned):
            check_entry(entry, terms, leader.peer_id)
