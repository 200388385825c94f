"""Ids are hashes of public keys, positions are hashes of keys, and XOR tells how far they are."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocols.dht.ids import (
    ID_BITS,
    distance,
    node_id_of,
    node_id_of_key,
    position_of,
)
from protocols.errors import MalformedMessage
from tests.dht.publishers import ALICE

ids = some.integers(0, 2**ID_BITS - 1)


def test_the_id_of_a_peer_is_the_hash_of_its_public_key() -> None:
    wanted = int(hashlib.sha256(ALICE.public_key).hexdigest(), 16)
    assert node_id_of(ALICE.peer_id) == node_id_of_key(ALICE.public_key) == wanted


def test_the_position_of_a_key_is_the_hash_of_its_text() -> None:
    assert position_of("note/größe") == int(
        hashlib.sha256(b"note/gr\xc3\xb6\xc3\x9fe").hexdigest(), 16
    )


def test_other_text_than_a_peer_id_has_no_node_id() -> None:
    with pytest.raises(MalformedMessage):
        node_id_of("12D3KooWnobody")


@given(ids, ids, ids)
def test_distance_is_a_metric_in_which_no_two_are_equally_far(a: int, b: int, c: int) -> None:
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a)
    assert distance(a, c) <= distance(a, b) + distance(b, c)
    assert (distance(a, b) == distance(a, c)) == (b == c)
