"""Which peers a routing table keeps and drops, and that it agrees with a naive one."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocols.dht import Contact, contact_of
from protocols.dht.contacts import network_of
from protocols.dht.ids import ID_BITS
from protocols.dht.routing import (
    FAILURES_TO_FORGET,
    PEERS_PER_NETWORK,
    PING_SECONDS,
    QUIET_SECONDS,
    REFRESH_SECONDS,
    SURELY_THERE_SECONDS,
    RoutingTable,
)
from protocols.errors import MalformedMessage
from protocols.identity import Identity
from tests.dht.swarm import beginning, contact, nearest, scattered

OWN = 0  # so that an id's leading bits say which bucket it belongs to


def far(number: int, *addresses: str) -> Contact:
    """A contact of the farthest bucket, always of the same part of its range."""
    return contact(beginning("1000", number), *addresses)


def full_far_bucket(k: int = 4) -> RoutingTable:
    """A table whose farthest bucket has k peers, heard of at 0, 1, 2, …, and was split off."""
    table = RoutingTable(OWN, k)
    table.heard_from(contact(1), 0)
    for number in range(k):
        assert table.heard_from(far(number), number) is None
    assert table.bucket_sizes == [k, 1]
    return table


LATER = 1000.0


def test_the_closest_come_first_and_exactly_as_many_as_asked_for() -> None:
    contacts = scattered(500)
    table = RoutingTable(OWN)
    for one in contacts:
        table.heard_from(one, 0)
    known = list(table)
    for target in (0, 1, beginning("1"), beginning("0101"), contacts[7].node_id):
        assert table.closest(target, 7) == nearest(known, target, 7)
        assert len(table.closest(target)) == 20
    assert table.closest(0, 10_000) == nearest(known, 0, 10_000)


def test_the_own_neighbourhood_is_known_in_full() -> None:
    contacts = scattered(1000)
    table = RoutingTable(OWN)
    for one in contacts:
        table.heard_from(one, 0)
    assert table.closest(OWN) == nearest(contacts, OWN, 20)
    assert len(table) < 200


def test_a_node_does_not_know_itself() -> None:
    table = RoutingTable(OWN)
    table.heard_from(contact(OWN), 0)
    assert len(table) == 0


def test_the_last_bucket_splits_as_often_as_it_takes() -> None:
    table = RoutingTable(OWN, k=2)
    for node_id in (1, 2, 3):
        table.heard_from(contact(node_id), 0)
    assert len(table) == 3
    assert len(table.bucket_sizes) == ID_BITS


def test_the_peer_heard_of_least_recently_is_pinged_before_a_newcomer_takes_its_place() -> None:
    table = full_far_bucket()
    table.heard_from(far(0), 10)
    assert table.heard_from(far(9), LATER) == far(1)
    assert far(9).node_id not in table


def test_a_newcomer_takes_the_place_of_one_that_does_not_answer() -> None:
    table = full_far_bucket()
    table.heard_from(far(9), LATER)
    table.failed(far(0))
    assert far(9).node_id in table
    assert far(0).node_id not in table


def test_a_newcomer_does_not_take_the_place_of_one_that_answers() -> None:
    table = full_far_bucket()
    in_the_way = table.heard_from(far(9), LATER)
    assert in_the_way is not None
    table.heard_from(in_the_way, LATER)
    assert in_the_way.node_id in table
    assert far(9).node_id not in table


def test_nobody_is_pinged_who_was_heard_of_a_moment_ago() -> None:
    table = full_far_bucket()
    assert table.heard_from(far(9), SURELY_THERE_SECONDS - 1) is None
    assert table.heard_from(far(9), SURELY_THERE_SECONDS) == far(0)


def test_nobody_is_pinged_twice_at_once() -> None:
    table = full_far_bucket()
    assert table.heard_from(far(8), LATER) == far(0)
    assert table.heard_from(far(9), LATER + PING_SECONDS - 1) is None
    assert table.heard_from(far(9), LATER + PING_SECONDS) == far(0)


def test_the_newest_spare_steps_in() -> None:
    table = full_far_bucket()
    for number in (7, 8, 9):
        table.heard_from(far(number), LATER)
    table.heard_from(far(7), LATER)
    table.failed(far(2))
    assert far(7).node_id in table


def test_spares_are_few() -> None:
    table = full_far_bucket()
    for number in range(100, 200):
        table.heard_from(far(number), LATER)
    for number in range(4):
        table.failed(far(number))
    newest = {far(number) for number in range(196, 200)}
    for one in newest:
        table.failed(one)  # and stays, for nobody else is left who could step in
    assert set(table) == newest | {contact(1)}


def test_without_a_spare_a_peer_that_fails_stays_for_a_while_but_is_not_passed_on() -> None:
    table = full_far_bucket()
    for _ in range(FAILURES_TO_FORGET - 1):
        table.failed(far(0))
    assert far(0).node_id in table
    assert far(0) not in table.closest(beginning("1"))
    assert far(0) in table.closest(beginning("1"), even_failing=True)
    table.failed(far(0))
    assert far(0).node_id not in table


def test_a_peer_that_answers_again_is_as_good_as_before() -> None:
    table = full_far_bucket()
    for _ in range(10):
        table.failed(far(0))
        table.heard_from(far(0), LATER)
    assert far(0) in table.closest(beginning("1"))


def test_a_newcomer_takes_the_place_of_one_that_failed_at_once() -> None:
    table = full_far_bucket()
    table.failed(far(3))
    assert table.heard_from(far(9), LATER) is None
    assert far(9).node_id in table
    assert far(3).node_id not in table


def test_a_peer_that_says_that_it_leaves_is_removed() -> None:
    table = full_far_bucket()
    table.heard_from(far(9), 5)
    table.remove(far(0))
    table.remove(far(0))
    assert far(0).node_id not in table
    assert far(9).node_id in table


def test_the_newest_addresses_are_kept() -> None:
    table = full_far_bucket()
    moved = far(0, "elsewhere")
    table.heard_from(moved, LATER)
    assert moved in list(table)


def test_one_network_cannot_keep_a_bucket_to_itself() -> None:
    k = 8
    table = RoutingTable(OWN, k)
    table.heard_from(contact(1), 0)
    for number in range(k):
        table.heard_from(far(number, f"/ip4/11.2.3.{number}/tcp/1"), number)
    for number in range(k):
        table.heard_from(far(50 + number, f"/ip4/11.2.{50 + number}.1/tcp/1"), 20)
    own = [one for one in table if one.node_id < far(50).node_id and one.node_id != 1]
    assert own == [far(0, "/ip4/11.2.3.0/tcp/1"), far(1, "/ip4/11.2.3.1/tcp/1")]
    assert len(own) == PEERS_PER_NETWORK


def test_a_swarm_of_one_network_fills_its_tables_all_the_same() -> None:
    table = RoutingTable(OWN)
    table.heard_from(contact(1), 0)
    for number in range(20):
        table.heard_from(far(number, f"/ip4/11.2.3.{number}/tcp/1"), 0)
    assert len(table) == 21


def test_a_crowded_network_pushes_nobody_out() -> None:
    table = RoutingTable(OWN, 4)
    table.heard_from(contact(1), 0)
    for number in range(4):
        table.heard_from(far(number, f"/ip4/11.2.{number // 2}.{number}/tcp/1"), 0)
    other_part = contact(beginning("1111"), "/ip4/11.2.1.9/tcp/1")
    table.heard_from(other_part, 0)
    assert other_part.node_id not in table


def test_contacts_of_a_bucket_lie_apart() -> None:
    table = RoutingTable(OWN, 8)
    table.heard_from(contact(1), 0)
    for number in range(8):
        table.heard_from(far(number), number)
    for part in ("1001", "1010", "1011", "1100", "1101", "1110", "1111"):
        table.heard_from(contact(beginning(part, 5)), 20)
    tops = {one.node_id >> (ID_BITS - 4) for one in table if one.node_id != 1}
    assert tops == set(range(8, 16))


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/ip4/11.2.3.4/tcp/4001", "11.2.3.0/24"),
        ("/ip4/11.2.3.4/tcp/4001/p2p/x/p2p-circuit", "11.2.3.0/24"),
        ("/ip6/2a01:4f8:1:2::3/tcp/4001", "2a01:4f8:1::/48"),
        ("/dns4/many.names.example.org/tcp/1", "example.org"),
        ("/ip4/127.0.0.1/tcp/4001", None),
        ("/ip4/192.168.1.7/tcp/4001", None),
        ("/ip6/fe80::1/tcp/4001", None),
        ("/ip4/300.1.1.1/tcp/4001", None),
        ("/memory/7", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_network_of_an_address(address: str, network: str | None) -> None:
    assert network_of(address) == network


def test_a_contact_has_few_and_short_addresses_and_a_place_that_follows_from_its_key() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    made = contact_of(peer, ["/long" * 100, *(f"/a/{number % 20}" for number in range(100))])
    assert made.addresses == tuple(f"/a/{number}" for number in range(8))
    assert made.with_more_addresses(["/b", "/a/3"]).addresses[:3] == ("/b", "/a/3", "/a/0")
    with pytest.raises(MalformedMessage):
        contact_of("12D3KooWshort", [])


def test_a_bucket_is_due_when_there_was_no_lookup_in_its_range_for_long() -> None:
    table = full_far_bucket()
    chance = random.Random(1)
    table.looked_up(OWN, 10)
    assert table.buckets_to_refresh(10) == [0]
    table.looked_up(table.target_in(0, chance), 20)
    assert table.buckets_to_refresh(20) == []
    assert table.buckets_to_refresh(10 + REFRESH_SECONDS) == [1]
    assert table.buckets_to_refresh(20 + REFRESH_SECONDS) == [0, 1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_newcomer_that_looks_itself_up_has_all_but_its_last_bucket_left(moment: str) -> None:
    table = RoutingTable(OWN)
    if moment == "before":
        table.looked_up(OWN, 5)  # all there is then is one bucket, which splits meanwhile
    for one in scattered(300):
        table.heard_from(one, 5)
    if moment == "after":
        table.looked_up(OWN, 5)
    assert len(table.bucket_sizes) > 3
    assert table.buckets_to_refresh(5) == list(range(len(table.bucket_sizes) - 1))


def test_a_peer_that_was_quiet_for_long_is_pinged_once() -> None:
    table = full_far_bucket()  # heard of at 0, 1, 2, 3, and the near one at 0
    table.heard_from(far(0), 5)
    assert table.quiet(QUIET_SECONDS - 1) == []
    assert table.quiet(QUIET_SECONDS + 1) == [far(1), contact(1)]
    assert table.quiet(QUIET_SECONDS + 3) == [far(2), far(3)]
    assert table.quiet(QUIET_SECONDS + 1 + PING_SECONDS) == [far(1), far(0), contact(1)]
    table.heard_from(far(1), QUIET_SECONDS + 1 + PING_SECONDS)
    assert far(1) not in table.quiet(2 * QUIET_SECONDS)


def test_a_target_to_refresh_a_bucket_lies_in_it() -> None:
    table = RoutingTable(beginning("1011"))
    for one in scattered(300):
        table.heard_from(one, 0)
    chance = random.Random(2)
    for index in range(len(table.bucket_sizes)):
        for _ in range(20):
            table.looked_up(table.target_in(index, chance), 5)
            assert index not in table.buckets_to_refresh(5, older_than=1)
        table.looked_up(table.own_id, 0)
    assert len(table.bucket_sizes) > 3


# A table against a naive one

SMALL_K = 4
IDS = [beginning(f"{number:06b}", 1) for number in range(64)]
NETWORKS = ("/ip4/11.1.1.1/tcp/1", "/ip4/12.1.1.1/tcp/1", "/ip4/127.0.0.1/tcp/1")


class NaiveEntry:
    def __init__(self, one: Contact, heard: float) -> None:
        self.contact, self.heard = one, heard
        self.failures = 0
        self.pinged = float("-inf")


class NaiveTable:
    """Two lists, least recently heard first, and a number of splits; all else is worked out."""

    def __init__(self) -> None:
        self.splits = 0
        self.entries: list[NaiveEntry] = []
        self.spares: list[NaiveEntry] = []

    def index(self, node_id: int) -> int:
        bits = f"{node_id ^ OWN:0256b}"
        return min(len(bits) - len(bits.lstrip("0")), self.splits)

    def bucket(self, node_id: int) -> list[NaiveEntry]:
        wanted = self.index(node_id)
        return [one for one in self.entries if self.index(one.contact.node_id) == wanted]

    def spares_of(self, node_id: int) -> list[NaiveEntry]:
        wanted = self.index(node_id)
        return [one for one in self.spares if self.index(one.contact.node_id) == wanted]

    def find(self, node_id: int) -> NaiveEntry | None:
        return next((one for one in self.entries if one.contact.node_id == node_id), None)

    def drop_spare(self, node_id: int) -> None:
        self.spares = [one for one in self.spares if one.contact.node_id != node_id]

    def crowding(self, one: Contact) -> int:
        """How many peers of its bucket the fullest of this contact's networks has."""
        return max(
            (
                sum(network in other.contact.networks for other in self.bucket(one.node_id))
                for network in one.networks
            ),
            default=0,
        )

    def part(self, node_id: int) -> str:
        start = self.index(node_id) + 1
        return f"{node_id:0256b}"[start : start + 3]

    def heard_from(self, one: Contact, now: float) -> Contact | None:
        known = self.find(one.node_id)
        if known is not None:
            self.entries.remove(known)
            fresh = NaiveEntry(one, now)
            fresh.pinged = known.pinged
            self.entries.append(fresh)
            return None
        if one.node_id == OWN:
            return None
        while len(self.bucket(one.node_id)) == SMALL_K and self.index(one.node_id) == self.splits:
            self.splits += 1
        self.drop_spare(one.node_id)
        bucket = self.bucket(one.node_id)
        leaves = self.leaves_for(one, bucket) if len(bucket) == SMALL_K else None
        if len(bucket) < SMALL_K or leaves is not None:
            if leaves is not None:
                self.entries.remove(leaves)
            self.entries.append(NaiveEntry(one, now))
            return None
        self.spares.append(NaiveEntry(one, now))
        if len(self.spares_of(one.node_id)) > SMALL_K:
            self.spares.remove(self.spares_of(one.node_id)[0])
        oldest = bucket[0]
        if now - oldest.heard >= SURELY_THERE_SECONDS and now - oldest.pinged >= PING_SECONDS:
            oldest.pinged = now
            return oldest.contact
        return None

    def leaves_for(self, one: Contact, bucket: list[NaiveEntry]) -> NaiveEntry | None:
        failing = [other for other in bucket if other.failures]
        if failing:
            return failing[0]
        if self.crowding(one) >= PEERS_PER_NETWORK:
            return None
        crowded = [other for other in bucket if self.crowding(other.contact) > PEERS_PER_NETWORK]
        if crowded:  # of four peers only one network can have three
            return crowded[-1]
        parts = [self.part(other.contact.node_id) for other in bucket]
        fullest = max(sorted(set(parts)), key=parts.count)
        if parts.count(fullest) < parts.count(self.part(one.node_id)) + 2:
            return None
        return next(
            other for other in reversed(bucket) if self.part(other.contact.node_id) == fullest
        )

    def failed(self, node_id: int) -> None:
        self.drop_spare(node_id)
        known = self.find(node_id)
        if known is not None:
            known.failures += 1
            if self.spares_of(node_id) or known.failures == FAILURES_TO_FORGET:
                self.remove(node_id)

    def remove(self, node_id: int) -> None:
        self.drop_spare(node_id)
        known = self.find(node_id)
        if known is None:
            return
        self.entries.remove(known)
        spares = self.spares_of(node_id)[::-1]
        if spares:
            free = [one for one in spares if self.crowding(one.contact) < PEERS_PER_NETWORK]
            chosen = (free or spares)[0]
            self.spares.remove(chosen)
            later = [one.heard > chosen.heard for one in self.entries]
            place = later.index(True) if True in later else len(later)
            self.entries.insert(place, chosen)


class TableAgainstNaive(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.table = RoutingTable(OWN, SMALL_K)
        self.naive = NaiveTable()
        self.now = 0.0

    @rule(node_id=st.sampled_from([*IDS, OWN]), address=st.sampled_from(NETWORKS))
    def hear(self, node_id: int, address: str) -> None:
        self.now += 1
        one = contact(node_id, address)
        assert self.table.heard_from(one, self.now) == self.naive.heard_from(one, self.now)

    @rule(
        node_ids=st.lists(st.sampled_from(IDS[32:]), max_size=6),
        address=st.sampled_from(NETWORKS),
    )
    def hear_a_crowd(self, node_ids: list[int], address: str) -> None:
        for node_id in node_ids:
            self.hear(node_id, address)

    @rule(seconds=st.sampled_from([PING_SECONDS, SURELY_THERE_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(node_id=st.sampled_from(IDS))
    def fail(self, node_id: int) -> None:
        self.table.failed(contact(node_id))
        self.naive.failed(node_id)

    @rule(seconds=st.integers(0, 100))
    def ping_the_quiet(self, seconds: int) -> None:
        expected = set()
        for one in self.naive.entries:
            if self.now - one.heard >= seconds and self.now - one.pinged >= PING_SECONDS:
                one.pinged = self.now
                expected.add(one.contact)
        assert set(self.table.quiet(self.now, seconds)) == expected

    @rule(node_id=st.sampled_from(IDS))
    def leave(self, node_id: int) -> None:
        self.table.remove(contact(node_id))
        self.naive.remove(node_id)

    @rule(sought=st.sampled_from(IDS), count=st.integers(1, 12), even_failing=st.booleans())
    def find(self, sought: int, count: int, even_failing: bool) -> None:
        fit = [one.contact for one in self.naive.entries if even_failing or not one.failures]
        found = self.table.closest(sought, count, even_failing=even_failing)
        assert found == nearest(fit, sought, count)

    @invariant()
    def both_know_the_same(self) -> None:
        known = {one.node_id: one for one in self.table}
        assert known == {one.contact.node_id: one.contact for one in self.naive.entries}
        assert len(self.table) == len(self.naive.entries)
        assert len(self.table.bucket_sizes) == self.naive.splits + 1
        assert max(self.table.bucket_sizes) <= SMALL_K


TestTableAgainstNaive = pytest.mark.slow(TableAgainstNaive.TestCase)
TestTableAgainstNaive.settings = settings(stateful_step_count=40, deadline=None)
