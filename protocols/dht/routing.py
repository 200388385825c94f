"""The routing table: many peers near this node, and ever fewer the farther away they are.

Bucket i holds peers whose ids share exactly the first i bits with ours; the last bucket holds all
that share more. Each has room for k. When the last one is full it is split. So the node knows its
own neighbourhood in full, and k peers of every other part of the swarm. In other buckets old peers
stay: a peer that has been there for long is likely to stay. A newcomer waits as a spare while the
peer heard of least recently is pinged, and takes its place if that one is gone.

Two kinds of newcomer do not wait. One from a new network (IPv4 /24, IPv6 /48) replaces a peer of a
network with more than its share, so that the owner of one network cannot fill a bucket. And one
from a part of the bucket's range with fewer peers replaces one from a part with more: contacts that
lie apart shorten the hops of a lookup. In both cases the newest peer of the crowd goes.

Call `heard_from` only for peers that we have spoken with and that can be dialled, never for hearsay
or for peers in client mode. Time is an argument, in seconds, and must not run backwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BITS

K = 20  # Kademlia's: enough that they hardly all fail within an hour

PEERS_PER_NETWORK = 2  # in one bucket, if others want the places
RANGE_BITS = 3  # a bucket's range has 8 parts: 2 or 3 of 20 places each

SURELY_THERE_SECONDS = 60.0  # a peer heard of since then is not pinged to make room
PING_SECONDS = 15.0  # the timeout of a ping

# Without a spare, a failing peer is kept for a while, since our own link may be at fault. But it is
# not passed on to others until it answers again.
FAILURES_TO_FORGET = 3

# A peer that was silent for so long is pinged even if there is a link, which would break if the
# peer went: it may be there and too broken to answer. With a hundred contacts that is a ping every
# ten seconds. If half of all nodes leave every 20 minutes, it halves the number of dead peers that
# a lookup meets.
QUIET_SECONDS = 900.0

REFRESH_SECONDS = 3600.0  # Kademlia's; half of all volunteers stay longer

# A lookup that only refreshes a bucket (also when joining) should meet some peers of its range; the
# k closest to a random target are not needed. With this as its k it costs half as much, and in a
# simulated swarm of 1,000 no lookup takes a hop more.
REFRESH_WIDTH = 8


class _Entry:
    __slots__ = ("contact", "failures", "last_heard", "pinged")

    def __init__(self, contact: Contact, now: float) -> None:
        self.contact = contact
        self.last_heard = now
        self.failures = 0
        self.pinged = float("-inf")


class _Bucket:
    """The peers of one range, by node id, least recently heard of first, and its spares.

    Invariant: `parts` counts the peers by the part of the range in which they lie, `networks` by
    network; `crowds` is the number of networks with more than their share.
    """

    __slots__ = (
        "crowds", "entries", "looked_up", "looked_up_target", "networks", "parts", "shift",
        "spares",
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.shift = max(0, ID_BITS - 1 - index - RANGE_BITS)
        self.entries: dict[int, _Entry] = {}
        self.spares: dict[int, _Entry] = {}
        self.parts = [0] * (1 << RANGE_BITS)
        self.networks: dict[str, int] = {}
        self.crowds = 0
        self.looked_up = float("-inf")
        self.looked_up_target = 0

    def part_of(self, node_id: int) -> int:
        return (node_id >> self.shift) & ((1 << RANGE_BITS) - 1)

    def add(self, entry: _Entry) -> None:
        self.entries[entry.contact.node_id] = entry
        self.count(entry.contact, +1)

    def remove(self, node_id: int) -> _Entry:
        entry = self.entries.pop(node_id)
        self.count(entry.contact, -1)
        return entry

    def count(self, contact: Contact, step: int) -> None:
        self.parts[self.part_of(contact.node_id)] += step
        for network in contact.networks:
            before = self.networks.get(network, 0)
            number = before + step
            self.crowds += (number > PEERS_PER_NETWORK) - (before > PEERS_PER_NETWORK)
            if number:
                self.networks[network] = number
            else:
                del self.networks[network]

    def is_welcome(self, contact: Contact) -> bool:
        """Whether the networks of a newcomer have less than their share."""
        counts = self.networks
        return not any(counts.get(one, 0) >= PEERS_PER_NETWORK for one in contact.networks)

    def surplus(self, newcomer: Contact) -> int | None:
        """The id of the live peer that should leave for this newcomer, if any."""
        if not self.is_welcome(newcomer):
            return None
        newest_first = reversed(self.entries.items())
        if self.crowds:
            network = max(self.networks, key=lambda one: (self.networks[one], one))
            return next(id_ for id_, one in newest_first if network in one.contact.networks)
        most = max(self.parts)
        if most < self.parts[self.part_of(newcomer.node_id)] + 2:
            return None
        crowded = self.parts.index(most)
        return next(id_ for id_, _ in newest_first if self.part_of(id_) == crowded)


class RoutingTable:
    """The contacts of a node.

    Invariants: no bucket holds more than k peers or more than k spares. No peer is in it twice, and
    our own id never is. Every peer is in the bucket for the number of bits that it shares with us.
    """

    def __init__(self, own_id: int, k: int = K) -> None:
        self.own_id = own_id
        self.k = k
        self._buckets = [_Bucket(0)]

    def __len__(self) -> int:
        return sum(len(bucket.entries) for bucket in self._buckets)

    def __iter__(self) -> Iterator[Contact]:
        """All contacts, those in the farthest bucket first."""
        for bucket in self._buckets:
            for entry in bucket.entries.values():
                yield entry.contact

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._buckets[self.bucket_of(node_id)].entries

    @property
    def bucket_sizes(self) -> list[int]:
        """The number of peers in each bucket, the farthest first."""
        return [len(bucket.entries) for bucket in self._buckets]

    def heard_from(self, contact: Contact, now: float) -> Contact | None:
        """Note that we have just spoken with this peer, and that it can be dialled.

        May return a contact that blocks this one and should be pinged. Then call `heard_from` or
        `failed` with that contact.
        """
        node_id = contact.node_id
        bucket = self._buckets[self.bucket_of(node_id)]
        entry = bucket.entries.get(node_id)
        if entry is not None:
            # out and in again, to keep the order of hearing
            del bucket.entries[node_id]
            bucket.entries[node_id] = entry
            entry.last_heard = now
            entry.failures = 0
            if entry.contact is not contact and entry.contact != contact:
                bucket.count(entry.contact, -1)
                entry.contact = contact
                bucket.count(contact, +1)
            return None
        if node_id == self.own_id:
            return None
        while len(bucket.entries) >= self.k and bucket is self._buckets[-1]:
            if not self._split_last():
                break
            bucket = self._buckets[self.bucket_of(node_id)]
        if len(bucket.entries) < self.k:
            bucket.spares.pop(node_id, None)
            bucket.add(_Entry(contact, now))
            return None
        return self._make_room_for(bucket, contact, now)

    def failed(self, contact: Contact) -> None:
        """This peer did not answer, or could not be dialled."""
        bucket = self._buckets[self.bucket_of(contact.node_id)]
        bucket.spares.pop(contact.node_id, None)
        entry = bucket.entries.get(contact.node_id)
        if entry is None:
            return
        entry.failures += 1
        if bucket.spares or entry.failures >= FAILURES_TO_FORGET:
            _replace(bucket, contact.node_id)

    def remove(self, contact: Contact) -> None:
        """This peer said that it leaves, or that it can no longer be dialled."""
        bucket = self._buckets[self.bucket_of(contact.node_id)]
        bucket.spares.pop(contact.node_id, None)
        if contact.node_id in bucket.entries:
            _replace(bucket, contact.node_id)

    def closest(
        self, target: int, count: int | None = None, *, even_failing: bool = False
    ) -> list[Contact]:
        """The contacts closest to a target, closest first: k of them, or `count`.

        Those that failed when we last spoke to them are left out. This node may ask them if there
        is no other (`even_failing`), but never passes them on.
        """
        wanted = self.k if count is None else count
        found: list[Contact] = []
        nearness = target.__xor__
        for bucket in self._by_distance(target):
            entries = bucket.entries
            in_order = [entries[node_id] for node_id in sorted(entries, key=nearness)]
            found += [one.contact for one in in_order if even_failing or not one.failures]
            if len(found) >= wanted:
                break
        return found[:wanted]

    def quiet(
        self, now: float, longer_than: float = QUIET_SECONDS, at_most: int | None = None
    ) -> list[Contact]:
        """Contacts that were silent for so long, at most `at_most`, to be pinged now.

        Then call `heard_from` or `failed` with each.
        """
        found: list[Contact] = []
        for bucket in self._buckets:
            for entry in bucket.entries.values():
                if len(found) == at_most:
                    return found
                if now - entry.last_heard < longer_than:
                    break  # they are in the order of hearing
                if now - entry.pinged >= PING_SECONDS:
                    entry.pinged = now
                    found.append(entry.contact)
        return found

    def looked_up(self, target: int, now: float) -> None:
        """There was a lookup for this target, so its bucket is fresh.

        If the bucket is split later, only the half with the target stays fresh.
        """
        bucket = self._buckets[self.bucket_of(target)]
        bucket.looked_up = now
        bucket.looked_up_target = target

    def buckets_to_refresh(self, now: float, older_than: float = REFRESH_SECONDS) -> list[int]:
        """The buckets without a lookup in their range for so long.

        Look up a `target_in` each of them, with REFRESH_WIDTH as k. A newcomer looks up its own id
        and then refreshes these, which are all but the last.
        """
        return [
            index
            for index, bucket in enumerate(self._buckets)
            if now - bucket.looked_up >= older_than
        ]

    def target_in(self, index: int, chance: random.Random) -> int:
        """A random id in the range of a bucket."""
        if index == len(self._buckets) - 1:
            return self.own_id ^ chance.getrandbits(ID_BITS - index)
        bit = 1 << (ID_BITS - 1 - index)
        return self.own_id ^ (bit | chance.getrandbits(ID_BITS - 1 - index))

    def bucket_of(self, node_id: int) -> int:
        """The number of the bucket for this id."""
        shared_bits = ID_BITS - (node_id ^ self.own_id).bit_length()
        last = len(self._buckets) - 1
        return shared_bits if shared_bits < last else last

    def _by_distance(self, target: int) -> Iterator[_Bucket]:
        """Buckets in an order such that every peer of one is closer to the target than any of the
        next.

        All peers of deeper buckets have our own bit i, those of bucket i have the other one. So
        bucket i comes before all deeper ones if the target's bit i differs from ours, and after
        them otherwise.
        """
        last = len(self._buckets) - 1
        difference = (target ^ self.own_id) >> (ID_BITS - last)
        for i in range(last):
            if difference >> (last - 1 - i) & 1:
                yield self._buckets[i]
        yield self._buckets[last]
        for i in reversed(range(last)):
            if not difference >> (last - 1 - i) & 1:
                yield self._buckets[i]

    def _split_last(self) -> bool:
        """Split the last bucket in two; False if no bits are left to tell ids apart."""
        old = self._buckets[-1]
        index = len(self._buckets) - 1
        if index == ID_BITS - 1:
            return False
        near, far = _Bucket(index + 1), _Bucket(index)
        self._buckets[-1:] = [far, near]
        self.looked_up(old.looked_up_target, old.looked_up)
        for node_id, entry in old.entries.items():
            self._buckets[self.bucket_of(node_id)].add(entry)
        return True

    def _make_room_for(self, bucket: _Bucket, newcomer: Contact, now: float) -> Contact | None:
        leaves = next((id_ for id_, one in bucket.entries.items() if one.failures), None)
        if leaves is None:
            leaves = bucket.surplus(newcomer)
        if leaves is not None:
            bucket.remove(leaves)
            bucket.spares.pop(newcomer.node_id, None)
            bucket.add(_Entry(newcomer, now))
            return None
        bucket.spares.pop(newcomer.node_id, None)
        bucket.spares[newcomer.node_id] = _Entry(newcomer, now)
        if len(bucket.spares) > self.k:
            del bucket.spares[next(iter(bucket.spares))]
        oldest = next(iter(bucket.entries.values()))
        if now - oldest.last_heard < SURELY_THERE_SECONDS or now - oldest.pinged < PING_SECONDS:
            return None
        oldest.pinged = now
        return oldest.contact


def _replace(bucket: _Bucket, node_id: int) -> None:
    """Replace a peer by its best spare: the newest whose network is not crowded."""
    bucket.remove(node_id)
    if not bucket.spares:
        return
    newest_first = list(reversed(bucket.spares.values()))
    chosen = next(
        (spare for spare in newest_first if bucket.is_welcome(spare.contact)), newest_first[0]
    )
    del bucket.spares[chosen.contact.node_id]
    bucket.add(chosen)
    in_order = sorted(bucket.entries.items(), key=lambda item: item[1].last_heard)
    bucket.entries = dict(in_order)


# Peers that were in the routing table and no longer answer, and when to try each again.
#
# Most are gone for good. But after a split of the network, each half can only find the other
# through the peers that it remembers. So lost peers are tried again, with growing delay. When one
# of them answers, the others are likely back as well, and all are tried within seconds.
#
# Pure: time and randomness are arguments.


LOST_PEERS = 256  # as many as the table holds in a swarm of ten thousand; the newest are kept
FIRST_RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 600.0  # 256 of them: a dial every two seconds, at the very most
FORGOTTEN_AFTER_TRIES = 150  # most of a day
REACHED_SECONDS = 1.0  # after its last try, if there is a link again; twice as long each time
HEARD_OF_SECONDS = 30.0  # a lost peer that sends a request is tried at once, this often
REUNION_SECONDS = 10.0  # the others are tried within this time when one has come back


class _Lost:
    __slots__ = ("contact", "due", "reached", "taken", "tries")

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.due: float | None = None
        self.taken = float("-inf")
        self.reached = 0
        self.tries = 0


class LostPeers:
    """Invariant: at most LOST_PEERS, in the order in which they were lost."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._lost: dict[int, _Lost] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def __contains__(self, contact: Contact) -> bool:
        return contact.node_id in self._lost

    def add(self, contact: Contact) -> None:
        """This peer did not answer. If it is lost already, nothing changes."""
        if contact.node_id not in self._lost:
            self._lost[contact.node_id] = _Lost(contact)
            if len(self._lost) > LOST_PEERS:
                del self._lost[next(iter(self._lost))]

    def discard(self, contact: Contact) -> None:
        """This peer has answered; it was not really lost."""
        self._lost.pop(contact.node_id, None)

    def heard_of(self, contact: Contact, now: float) -> None:
        """This peer sent a request, though it did not answer before: it may answer now."""
        lost = self._lost.get(contact.node_id)
        if lost is not None and now - lost.taken >= HEARD_OF_SECONDS:
            lost.due = now

    def reached(self, node_id: int, now: float) -> bool:
        """There is a link to this peer again: try it soon if it was lost, and now if it was not
        tried lately. Return whether now. (It may take every link and answer nothing.)"""
        lost = self._lost.get(node_id)
        if lost is None:
            return False
        soon = max(now, lost.taken + REACHED_SECONDS * 2 ** min(lost.reached, 20))
        if lost.due is None or soon < lost.due:
            lost.due = soon
            lost.reached += 1
        return lost.due <= now

    def found(self, contact: Contact, now: float) -> bool:
        """This peer is there again (or says so); return whether it was lost."""
        if self._lost.pop(contact.node_id, None) is None:
            return False
        for lost in self._lost.values():
            lost.due = now + REUNION_SECONDS * self._chance.random()
        return True

    def all_may_be_back(self, now: float) -> None:
        """Lost peers may answer again, because something has changed: try all of them soon."""
        for lost in self._lost.values():
            lost.due = now

    def due(self, now: float, at_most: int) -> list[Contact]:
        """The peers to try now, least tried first, as they are the likeliest to be there.

        Each then waits twice as long for its next turn.
        """
        taken: list[Contact] = []
        for node_id, lost in sorted(self._lost.items(), key=lambda one: one[1].tries):
            if lost.due is None:
                self._delay(lost, now)
            elif lost.due <= now and len(taken) < at_most:
                if lost.tries >= FORGOTTEN_AFTER_TRIES:
                    del self._lost[node_id]
                    continue
                self._delay(lost, now)
                lost.taken = now
                taken.append(lost.contact)
        return taken

    def _delay(self, lost: _Lost, now: float) -> None:
        delay = min(LONGEST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(lost.tries, 20))
        lost.due = now + delay * (0.5 + 0.5 * self._chance.random())
        lost.tries += 1
