"""The cache of peers: bounded, replaced whole, and never a reason not to start."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.peer_cache import KEPT_CONTACTS, LARGEST_FILE_BYTES, PeerCache, _contacts_in
from protocols.dht import ADDRESSES_PER_CONTACT, Contact, Keeper, KeepingFailed, contact_of
from protocols.errors import MalformedMessage
from protocols.identity import Identity


def contact(number: int, *addresses: str) -> Contact:
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    return contact_of(identity.peer_id, addresses or (f"/ip4/127.0.0.1/tcp/{1000 + number}",))


@pytest.fixture
def cache(tmp_path: Path) -> PeerCache:
    return PeerCache(tmp_path / "data" / "peers.json")


def test_it_is_a_keeper_of_contacts_alone(cache: PeerCache) -> None:
    keeper: Keeper = cache
    keeper.save_slots([], 0)
    assert (keeper.load_contacts(), keeper.load_slots()) == ([], [])
    assert not cache.path.exists()


def test_contacts_come_back_in_their_order(cache: PeerCache) -> None:
    cache.save_contacts([contact(2), contact(1)])
    assert PeerCache(cache.path).load_contacts() == [contact(2), contact(1)]


def test_earlier_contacts_stay_behind_the_newer_ones(cache: PeerCache) -> None:
    cache.save_contacts([contact(1), contact(2)])
    cache.save_contacts([contact(3), contact(2, "/ip4/10.0.0.1/tcp/5")])
    assert cache.load_contacts() == [contact(3), contact(2, "/ip4/10.0.0.1/tcp/5"), contact(1)]


def test_knowing_nobody_does_not_erase_whom_it_knew(cache: PeerCache) -> None:
    cache.save_contacts([contact(1)])
    cache.save_contacts([])
    assert cache.load_contacts() == [contact(1)]


def test_it_is_bounded(cache: PeerCache) -> None:
    longest = [
        contact(number, *(f"/dns4/{'x' * 240}/tcp/{port}" for port in range(10, 30)))
        for number in range(1, KEPT_CONTACTS + 50)
    ]
    cache.save_contacts(longest)
    kept = cache.load_contacts()
    assert kept == longest[:KEPT_CONTACTS]
    assert cache.path.stat().st_size < LARGEST_FILE_BYTES
    assert {len(one.addresses) for one in kept} == {ADDRESSES_PER_CONTACT}


def test_an_unchanged_cache_is_not_written_again(cache: PeerCache) -> None:
    cache.save_contacts([contact(1), contact(2)])
    before = cache.path.stat()
    cache.save_contacts([contact(1), contact(2)])
    cache.save_contacts([contact(1)])
    assert cache.path.stat().st_ino == before.st_ino


def test_nobody_else_can_read_it_and_no_draft_stays(cache: PeerCache) -> None:
    cache.save_contacts([contact(1)])
    assert cache.path.stat().st_mode & 0o077 == 0
    assert [file.name for file in cache.path.parent.iterdir()] == ["peers.json"]


def test_a_path_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeepingFailed, match="may not find the others"):
        PeerCache(tmp_path / "file" / "peers.json").save_contacts([contact(1)])


ENTRY = {"peer": contact(1).peer, "addresses": ["/ip4/127.0.0.1/tcp/1"]}

HOSTILE = {
    "nothing": b"",
    "garbage": os.urandom(1000),
    "cut short": json.dumps({"potluck_peers": 1, "peers": [ENTRY]}).encode()[:-9],
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "wrong types": b'{"potluck_peers": 1, "peers": [{"peer": 5}]}',
    "too many addresses": json.dumps(
        {"potluck_peers": 1, "peers": [{**ENTRY, "addresses": ["/ip4/127.0.0.1/tcp/1"] * 999}]}
    ).encode(),
    "no version": b'{"peers": []}',
    "too long": b" " * (LARGEST_FILE_BYTES + 1),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_is_not_a_cache_is_not_used_and_is_replaced_later(
    content: bytes, cache: PeerCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path.parent.mkdir()
    cache.path.write_bytes(content)
    cache.path.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert cache.load_contacts() == []
    assert "is not used" in caplog.text
    cache.save_contacts([contact(1)])
    assert cache.load_contacts() == [contact(1)]


def test_a_link_or_a_pipe_in_its_place_is_not_followed(cache: PeerCache, tmp_path: Path) -> None:
    other = PeerCache(tmp_path / "other.json")
    other.save_contacts([contact(1)])
    cache.path.parent.mkdir()
    cache.path.symlink_to(other.path)
    assert cache.load_contacts() == []
    cache.save_contacts([contact(2)])
    assert (cache.load_contacts(), other.load_contacts()) == ([contact(2)], [contact(1)])
    cache.path.unlink()
    os.mkfifo(cache.path, 0o600)
    assert cache.load_contacts() == []


def test_a_cache_that_others_may_write_is_not_used(cache: PeerCache) -> None:
    cache.save_contacts([contact(1)])
    cache.path.chmod(0o666)
    assert cache.load_contacts() == []


def test_an_impossible_peer_does_not_hide_the_others(cache: PeerCache) -> None:
    cache.path.parent.mkdir()
    peers = [{"peer": "QmSomebody", "addresses": []}, ENTRY]
    cache.path.write_text(json.dumps({"potluck_peers": 1, "peers": peers}))
    cache.path.chmod(0o600)
    assert cache.load_contacts() == [contact(1, "/ip4/127.0.0.1/tcp/1")]


def test_a_later_version_with_more_fields_can_be_read(cache: PeerCache) -> None:
    cache.path.parent.mkdir()
    later = {"potluck_peers": 2, "peers": [{**ENTRY, "seen": 5}], "swarm": "x"}
    cache.path.write_text(json.dumps(later))
    cache.path.chmod(0o600)
    assert cache.load_contacts() == [contact(1, "/ip4/127.0.0.1/tcp/1")]


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["potluck_peers", "peers", "peer", "addresses"]), inner, max_size=4),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_contacts_or_malformed(content: bytes) -> None:
    try:
        contacts = _contacts_in(content)
    except MalformedMessage:
        return
    assert len(contacts) <= KEPT_CONTACTS
