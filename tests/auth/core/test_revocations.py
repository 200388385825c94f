"""The newest genuine list says who is out, and says it for tokens issued before, not after."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from auth.documents import encode
from auth.errors import MalformedDocument, UntrustedDocument
from auth.fields import LARGEST_COUNT
from auth.keyring import endorse
from auth.keys import SigningKey
from auth.revocations import (
    DOMAIN,
    LIMIT_BYTES,
    Entry,
    NameEntry,
    PeerEntry,
    RevocationList,
    Revocations,
    RevocationsFull,
    SerialEntry,
    collapsed,
    read_list,
    sign_list,
)
from auth.tokens import read_token
from tests.auth.core.people import (
    ALICE,
    ALICES_TOKEN,
    AUTH,
    BOB,
    BOBS_TOKEN,
    HOUR,
    NEXT_AUTH,
    NOW,
    OTHER_AUTH,
    RUN,
    YEAR,
    keyring_of,
    root_record,
    token_of,
)

ALICES = read_token(ALICES_TOKEN)
BOBS = read_token(BOBS_TOKEN)


def listed(
    *entries: Entry,
    number: int = 1,
    run: str = RUN,
    withdrawn: tuple[bytes, ...] = (),
    by: SigningKey = AUTH,
    issued_ms: int = NOW,
) -> bytes:
    return sign_list(RevocationList(run, number, issued_ms, entries, withdrawn, by.key_id), by)


def revocations(*entries: Entry) -> Revocations:
    held = Revocations(RUN)
    assert held.accept(listed(*entries), keyring_of())
    return held


def test_nobody_is_revoked_at_first() -> None:
    held = Revocations(RUN)
    assert not held.refuses(ALICES)
    assert len(held) == 0
    assert held.newest == b""


@pytest.mark.parametrize(
    "entry",
    [
        NameEntry("github:alice", NOW, NOW + HOUR),
        PeerEntry(ALICE.public_key, NOW, NOW + HOUR),
        SerialEntry(ALICES.serial, NOW, NOW + HOUR),
    ],
    ids=["name", "peer", "serial"],
)
def test_the_named_is_refused_and_nobody_else(entry: Entry) -> None:
    held = revocations(entry)
    assert held.refuses(ALICES)
    assert not held.refuses(BOBS)
    assert len(held) == 1


@pytest.mark.parametrize("kind", [NameEntry, PeerEntry])
def test_a_token_issued_at_or_after_the_revocation_counts_again(kind: type[Entry]) -> None:
    named: Any = "github:alice" if kind is NameEntry else ALICE.public_key
    held = revocations(kind(named, NOW, NOW + HOUR))
    assert held.refuses(read_token(token_of(ALICE, issued_ms=NOW - 1)))
    assert not held.refuses(read_token(token_of(ALICE, issued_ms=NOW)))


def test_a_name_is_revoked_with_all_its_peers_and_a_peer_under_all_its_names() -> None:
    by_name = revocations(NameEntry("github:alice", NOW, NOW + HOUR))
    assert by_name.refuses(read_token(token_of(BOB, username="github:alice")))
    by_peer = revocations(PeerEntry(ALICE.public_key, NOW, NOW + HOUR))
    assert by_peer.refuses(read_token(token_of(ALICE, username="github:carol")))


def test_names_that_look_alike_are_not_the_same() -> None:
    held = revocations(NameEntry("github:Alice", NOW, NOW + HOUR))
    assert not held.refuses(ALICES)


def test_the_higher_number_wins_whatever_the_order() -> None:
    keyring = keyring_of()
    newer = listed(NameEntry("github:alice", NOW, NOW + HOUR), number=8)
    older = listed(NameEntry("code:bob", NOW, NOW + HOUR), number=7)
    held = Revocations(RUN)
    assert held.accept(older, keyring)
    assert held.accept(newer, keyring)
    assert not held.accept(older, keyring)
    assert not held.accept(newer, keyring)
    assert held.number == 8
    assert held.newest == newer
    assert held.refuses(ALICES)
    assert not held.refuses(BOBS)


def test_a_second_list_of_the_same_number_changes_nothing() -> None:
    held = revocations(NameEntry("github:alice", NOW, NOW + HOUR))
    assert not held.accept(listed(), keyring_of())
    assert held.refuses(ALICES)


def test_a_list_of_the_newer_key_wins_over_any_number_of_the_older() -> None:
    record = endorse(RUN, NEXT_AUTH.public_key, NOW - HOUR, NOW + YEAR, AUTH)
    keyring = keyring_of(root_record(), record)
    held = Revocations(RUN)
    assert held.accept(listed(number=LARGEST_COUNT), keyring)  # a thief's, to freeze it
    by_new = listed(
        NameEntry("github:alice", NOW, NOW + HOUR),
        number=1,
        by=NEXT_AUTH,
        withdrawn=(AUTH.key_id,),
    )
    assert held.accept(by_new, keyring)
    assert held.refuses(ALICES)
    assert keyring.find(AUTH.key_id) is None
    with pytest.raises(UntrustedDocument):
        held.accept(listed(number=LARGEST_COUNT - 1), keyring)


@pytest.mark.parametrize(
    "data",
    [
        listed(by=OTHER_AUTH),
        listed(run="another"),
        listed()[:-1] + bytes([listed()[-1] ^ 1]),
        listed(issued_ms=NOW + 2 * YEAR),
    ],
    ids=["unknown key", "another run", "changed", "after the key's time"],
)
def test_a_list_that_is_not_genuine_changes_nothing(data: bytes) -> None:
    held = revocations(NameEntry("github:alice", NOW, NOW + HOUR))
    with pytest.raises(UntrustedDocument):
        held.accept(data, keyring_of())
    assert held.refuses(ALICES)
    assert held.number == 1


def test_a_token_is_not_a_list() -> None:
    with pytest.raises(MalformedDocument):
        Revocations(RUN).accept(ALICES_TOKEN, keyring_of())


@given(some.binary(max_size=300))
def test_any_other_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedDocument):
        read_list(data)


@pytest.mark.parametrize(
    "entries",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff" + b"\x94\xa1s\x01\x00\x00" * 0xFFFF,
        b"\x91\x94\xa1q\x01\x00\x00",  # a kind that there is not
        b"\x91\x94\xa1s\x00\x00\x00",  # no serial
        b"\x91\x94\xa1s\xcc\x01\x00\x00",  # a number longer than it need be
        b"\x91\x95\xa1s\x01\x00\x00\x00",
        b"\x81\xa1s\x01",
    ],
    ids=lambda entries: entries[:6].hex(),
)
def test_a_list_in_any_other_form_is_malformed_even_if_signed(entries: bytes) -> None:
    empty = encode(RevocationList(RUN, 1, NOW, (), (), AUTH.key_id))
    behind = b"\x90\x90" + encode(AUTH.key_id)
    assert empty.endswith(behind)
    body = empty[: -len(behind)] + entries + behind[1:]
    with pytest.raises(MalformedDocument):
        read_list(body + AUTH.sign(DOMAIN, body))


def test_a_full_list_says_what_to_do() -> None:
    many = [PeerEntry(number.to_bytes(32, "big"), NOW, NOW + HOUR) for number in range(2000)]
    with pytest.raises(RevocationsFull, match="by name") as caught:
        listed(*many)
    assert "potluck auth keys withdraw" in caught.value.advice
    fits = listed(*many[:1000])
    assert len(fits) <= LIMIT_BYTES
    held = Revocations(RUN)
    assert held.accept(fits, keyring_of())
    assert len(held) == 1000


def test_entries_without_effect_are_dropped_and_the_latest_of_each_name_stays() -> None:
    alice_early = NameEntry("github:alice", NOW, NOW + HOUR)
    alice_late = NameEntry("github:alice", NOW + 5, NOW + HOUR + 5)
    over = NameEntry("code:bob", NOW - HOUR, NOW)
    serial = SerialEntry(7, NOW, NOW + 1)
    peer = PeerEntry(ALICE.public_key, NOW, NOW + HOUR)
    entries = [alice_late, over, serial, peer, alice_early]
    assert set(collapsed(entries, NOW)) == {alice_late, serial, peer}
    assert set(collapsed(entries, NOW + 1)) == {alice_late, peer}
    assert collapsed(entries, NOW + YEAR) == ()


times = some.integers(NOW - 1000, NOW + 1000)
entries_ = some.one_of(
    some.builds(NameEntry, some.sampled_from(["github:alice", "code:bob"]), times, times),
    some.builds(PeerEntry, some.sampled_from([ALICE.public_key, BOB.public_key]), times, times),
    some.builds(SerialEntry, some.integers(1, 3), times, times),
)


@given(some.lists(entries_, max_size=8), times)
@pytest.mark.slow
def test_collapsing_changes_no_answer(entries: list[Entry], issued_ms: int) -> None:
    kept = [msgspec.structs.replace(entry, forget_at_ms=NOW + YEAR) for entry in entries]
    token = msgspec.structs.replace(ALICES, issued_ms=issued_ms)
    before, after = revocations(*kept), revocations(*collapsed(kept, NOW))
    assert before.refuses(token) == after.refuses(token)
    naive = any(
        entry.serial == token.serial
        if isinstance(entry, SerialEntry)
        else issued_ms < entry.revoked_at_ms
        and (
            entry.username == token.username
            if isinstance(entry, NameEntry)
            else entry.peer == token.peer
        )
        for entry in kept
    )
    assert before.refuses(token) == naive
