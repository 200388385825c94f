"""The directory of experts: servers announce what they host, trainers find who is there.

    async with open_dht(network, rpc, families=[EXPERTS], …) as dht:
        experts = ExpertDirectory(network, dht, run="poem")
        lost = await experts.announce(uids, load=0.2)      # a server, every ANNOUNCE_SECONDS
        below = await experts.active([Uid("ffn"), Uid("ffn", (3,))])           # a trainer

A server has one slot under `experts/RUN/PREFIX` for each prefix of its experts. The slot under
`ffn` lists the first indices of its experts, the slot under `ffn.3` the second indices of those
that begin with 3. The publisher of a slot under the longest prefix hosts the experts themselves, so
the last step of a search brings the hosts as well, and no expert needs a slot of its own. That slot
also says where the server can be dialled, how much work is waiting there, and since when it hosts
all these experts. A slot lives for `RECORD_SECONDS`, so a dead server is soon forgotten.

One expert has one host. If two servers announce the same uid, both order the claims in the same way
(`claim_order`), and the later one learns from `announce` that it has to stop. If it has trained the
expert further than the other one, it claims it from a moment before instead, and the other one
stops. It asks for that: a slot has no room for the steps of all its experts.

Easy to get wrong: everything in a slot is a claim of its publisher. A false one costs a trainer
some calls that fail, after which the publisher is out of its searches until it announces itself
again (`forget`). For the server on the same node it still hosts what it announces: one call that
failed is no reason to take its experts.

Servers also keep copies of experts that others host (copies.py). They announce these in the same
way, in a tree of its own: `experts/RUN/~PREFIX`. `ExpertDirectory.of_copies` is the directory of
that tree, in which an expert may have several servers.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Annotated, Any, Final

import trio
from msgspec import Meta

from auth.bounded_map import BoundedMap
from protocols.dht import Dht, Family, SlotEntry
from protocols.experts.grid import (
    LARGEST_DIMENSION,
    MOST_DIMENSIONS,
    ExpertGrid,
    Uid,
    WrongUid,
    parse_uid,
)
from protocols.identity import PeerId
from protocols.network import Network
from protocols.rpc import Message

log = logging.getLogger("potluck.experts")

ANNOUNCE_SECONDS: Final = 10.0
"""How often a server announces its experts; up to a fifth sooner, so that servers that started
together do not all write at once."""

RECORD_SECONDS: Final = 3 * ANNOUNCE_SECONDS
"""How long a slot lives: two lost announcements in a row make no server disappear."""

CHECK_SECONDS: Final = 30.0
"""How often a server looks for others with its uids when nothing has changed. Two servers can only
come to share a uid later than at their start if the swarm was split."""

CACHED_SECONDS: Final = 5.0
"""How long a trainer uses what it has read. It hears of a new server this much later."""

STALE_SECONDS: Final = CACHED_SECONDS + ANNOUNCE_SECONDS
"""How long a trainer uses it while another task reads it anew. That takes seconds if nodes of the
directory have just died, and all batches in flight would wait for it."""

LEAVING_SECONDS = 2.0  # to withdraw everything; what is left then expires
CACHED_PAIRS = 1 << 19  # of an index and a host, in all prefixes: some 50 MB
MOST_PAIRS: Final = 1 << 19
"""In one reading, of however many prefixes. 1,024 servers with all the prefixes that each may have
make 376,000. When they are taken, each prefix that is left has an equal part as well."""
PAIRS_AT_ONCE: Final = 4096  # between two checkpoints: some 0.5 ms
SLOTS_AT_ONCE: Final = 64
KEYS_AT_ONCE = 1024  # read at once: a lookup each
MOST_PREFIXES = 8192  # of one length, read for all experts of a grid
REMEMBERED_SERVERS = 4096
SAME_ANNOUNCEMENT_MS = 1000  # between the first and the last signature of one announcement

MOST_SERVERS = 1024  # with experts below one prefix
MOST_RECORDS = 368  # of one server; with those of copies 480,
MOST_COPY_RECORDS = 112  # because a node of a small swarm keeps 512 slots of a publisher
COPIES: Final = "~"  # in front of the prefixes of copies; no grid's name begins so
MOST_ADDRESSES = 6  # direct ones of both families, and some relays
LONGEST_ADDRESS = 200  # characters; a relayed one has some 150
LONGEST_LOAD_SECONDS = 1e6
LATEST_SINCE = 1 << 53  # milliseconds; exact as a float, for all languages
LARGEST_BITMAP_BYTES = LARGEST_DIMENSION // 8
_IS_SET: Final = bytes.maketrans(b"01", b"\0\1")
RECORD_LIMIT_BYTES = 2048


class ExpertSlot(Message, frozen=True):
    """What one server has below one prefix.

    - `active`: a bitmap of the next indices: index i is bit i % 8 of byte i // 8. The last byte is
      not zero.

    Only under the longest prefixes, whose next index is the last one of a uid:

    - `load`: for how many seconds the requests that wait at the server will keep it busy.
    - `since`: when the server added the last of these experts, in milliseconds since 1970 by its
      own clock. From then on it has hosted all of them. Less while it contests one of them.
    - `addresses`: where it can be dialled.
    """

    active: Annotated[bytes, Meta(min_length=1, max_length=LARGEST_BITMAP_BYTES)]
    load: Annotated[float, Meta(ge=0.0, le=LONGEST_LOAD_SECONDS)] = 0.0
    since: Annotated[int, Meta(ge=0, le=LATEST_SINCE)] = 0
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=LONGEST_ADDRESS)], ...],
        Meta(max_length=MOST_ADDRESSES),
    ] = ()


def _check(key: str, slot: Any) -> str | None:
    """Checks what the types cannot express."""
    try:
        prefix = parse_uid(key.rpartition("/")[2].removeprefix(COPIES))
    except WrongUid as error:
        return str(error)
    if len(prefix.cells) >= MOST_DIMENSIONS:
        return "A uid with so many indices is no prefix."
    if not slot.active[-1]:
        return "The last byte of its bitmap is zero."
    if not math.isfinite(slot.load):
        return "Its load is not a finite number."
    return None


EXPERTS = Family(
    "experts",
    ExpertSlot,
    value_limit_bytes=RECORD_LIMIT_BYTES,
    slots_per_key=MOST_SERVERS,
    longest_ttl_seconds=120.0,
    check=_check,
)
"""Every node of a swarm declares it (node/core/directory.py)."""


def experts_key(run: str, prefix: Uid, tree: str = "") -> str:
    return f"{EXPERTS.name}/{run}/{tree}{prefix}"


# ---- pure


@dataclass(frozen=True)
class Host:
    """A server with experts below a prefix. `load` and `since`: see `ExpertSlot`."""

    peer: PeerId
    load: float = 0.0
    since: int = 0


Below = Mapping[int, tuple[Host, ...]]
"""The active next indices of a prefix, each with the servers that have experts there."""

Further = Callable[[PeerId, Collection[Uid]], Awaitable[Collection[Uid]]]
"""Which of these experts this server has trained further than that one."""


async def nothing_further(_peer: PeerId, _uids: Collection[Uid]) -> Collection[Uid]:
    return ()


def claim_order(uid: Uid, host: Host) -> tuple[int, bytes]:
    """Of two servers with one uid, the one for which this is smaller keeps it.

    It is the one that has hosted it longer; if both came in the same millisecond, the hash decides.
    Both servers, and all trainers, evaluate this alike.
    """
    return host.since, hashlib.sha256(f"{uid} {host.peer}".encode()).digest()


def in_order_of_claim(uid: Uid, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """These hosts of one expert, the one that keeps it first."""
    return tuple(sorted(hosts, key=lambda host: claim_order(uid, host)))


def slots_for(
    uids: Iterable[Uid], load: float, since: Mapping[Uid, int], addresses: Iterable[str]
) -> dict[Uid, ExpertSlot]:
    """The slots of a server with these experts, by prefix. `since`: by longest prefix."""
    uids = set(uids)
    indices: dict[Uid, set[int]] = {}
    for uid in uids:
        for length, index in enumerate(uid.cells):
            indices.setdefault(Uid(uid.grid, uid.cells[:length]), set()).add(index)
    longest = {uid.parent for uid in uids}
    short = [one for one in addresses if len(one) <= LONGEST_ADDRESS][:MOST_ADDRESSES]
    load = min(max(0.0, load), LONGEST_LOAD_SECONDS)
    return {
        prefix: ExpertSlot(bitmap_of(active), load, since[prefix], tuple(short))
        if prefix in longest
        else ExpertSlot(bitmap_of(active))
        for prefix, active in indices.items()
    }


def bitmap_of(indices: Iterable[int]) -> bytes:
    bits = sum(1 << index for index in set(indices))
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def indices_of(bitmap: bytes) -> list[int]:
    bits = f"{int.from_bytes(bitmap, 'little'):b}".encode()
    return list(compress(count(), reversed(bits.translate(_IS_SET))))


def index_count(slot: ExpertSlot) -> int:
    return int.from_bytes(slot.active, "little").bit_count()


async def hosts_by_index(
    slots: Iterable[tuple[PeerId, ExpertSlot]], most_pairs: int = MOST_PAIRS
) -> Below:
    """The content of these slots, which are all under one prefix. The event loop goes on meanwhile.
    If they have more than `most_pairs`, those with the most indices are left out."""
    alone: dict[int, tuple[Host, ...]] = {}  # mostly an index has one host: its tuple is shared
    several: dict[int, list[Host]] = {}
    room, since_pause = most_pairs, 0
    for peer, slot in sorted(slots, key=lambda one: index_count(one[1])):
        indices = indices_of(slot.active)
        room -= len(indices)
        if room < 0:
            break
        host = Host(peer, slot.load, slot.since)
        one = (host,)
        for index in indices:
            if index in several:
                several[index].append(host)
            elif index in alone:
                several[index] = [*alone[index], host]
            else:
                alone[index] = one
        since_pause += len(indices)
        if since_pause >= PAIRS_AT_ONCE:
            await trio.lowlevel.checkpoint()
            since_pause = 0
    await trio.lowlevel.checkpoint()
    return alone | {index: tuple(hosts) for index, hosts in several.items()}


async def _without(below: Below, failed: Set[PeerId], denied: Set[int]) -> Below:
    """The same without these servers and indices. The event loop goes on meanwhile."""
    left: dict[int, tuple[Host, ...]] = {}
    since_pause = 0
    for index, hosts in below.items():
        usable = tuple(host for host in hosts if host.peer not in failed)
        if usable and index not in denied:
            left[index] = usable
        since_pause += len(hosts)
        if since_pause >= PAIRS_AT_ONCE:
            await trio.lowlevel.checkpoint()
            since_pause = 0
    return left


# ---- the directory


@dataclass
class _Reading:
    below: Below
    sequences: Mapping[PeerId, int]
    """Of the announcement of each server."""
    read_at: float
    pairs: int  # of an index and a host, in `below`
    usable: Below
    """Without what had failed (`forget`, `forget_expert`) after so many failures in all."""
    failures: int = 0
    denied: set[int] = field(default_factory=set)
    left_out: tuple[Set[PeerId], Set[int]] = (frozenset(), frozenset())
    """The servers and indices that `usable` is without."""
    renewed: trio.Event | None = None
    """Set when the task that is making `usable` anew has ended."""


class ExpertDirectory:
    """The experts of a run, of all its grids. One object serves a node, as a server and as a
    trainer. Every task of the node may use it.

    Invariant: `_cache` has at most `CACHED_PAIRS`, the oldest readings first.
    """

    def __init__(self, network: Network, dht: Dht, run: str, tree: str = "") -> None:
        self._network = network
        self._dht = dht
        self._run = run
        self._tree = tree
        # as a server
        self._hosted: frozenset[Uid] = frozenset()
        self._since: dict[Uid, int] = {}
        """When each hosted expert was added."""
        self._won: dict[Uid, int] = {}
        """The claims to experts that another one still announces, and that stay here."""
        self._published: frozenset[Uid] = frozenset()
        self._check_at = -math.inf
        # as a trainer
        self._cache: dict[Uid, _Reading] = {}
        self._cached_pairs = 0
        self._reading: dict[Uid, trio.Event] = {}
        self._last_heard = BoundedMap[PeerId, int](REMEMBERED_SERVERS)
        self._forgotten = BoundedMap[PeerId, int](REMEMBERED_SERVERS)
        self._failures = 1
        self._said_of = 0
        """Of how many experts it was said that some are not announced."""

    def of_copies(self) -> ExpertDirectory:
        """The directory of the copies that servers of this run keep."""
        return ExpertDirectory(self._network, self._dht, self._run, COPIES)

    @property
    def heard_at(self) -> float:
        """When a peer last answered a question of this node; minus infinity before the first."""
        return self._dht.heard_at

    async def joined(self) -> None:
        """Wait until there are peers to read from. A node that is alone has nobody to meet, and
        waits only a moment."""
        with trio.move_on_after(ANNOUNCE_SECONDS):
            await self._dht.joined()

    # -- for servers

    async def keep_announcing(
        self,
        hosted: Callable[[], Iterable[Uid]],
        load: Callable[[], float],
        lost: Callable[[frozenset[Uid]], object],
        changed: Callable[[], Awaitable[object]] = trio.sleep_forever,
        further: Further = nothing_further,
    ) -> None:
        """Announce the experts that `hosted` returns, for ever. Withdraw them when cancelled.

        `lost` is called with the uids that other servers keep: `hosted` must not return them again.
        When `changed` returns, they are announced at once.
        """
        await self.joined()
        try:
            while True:
                while taken := await self.announce(hosted(), load(), further):
                    lost(taken)
                pause = ANNOUNCE_SECONDS * self._network.random.uniform(0.8, 1.0)
                with trio.move_on_after(pause):
                    await changed()
        finally:
            with (
                trio.CancelScope(shield=True),
                trio.move_on_after(LEAVING_SECONDS),
                suppress(trio.ClosedResourceError),  # the dht ended at the same time
            ):
                await self.withdraw()

    async def announce(
        self, uids: Iterable[Uid], load: float = 0.0, further: Further = nothing_further
    ) -> frozenset[Uid]:
        """Publish for `RECORD_SECONDS` that this node hosts these experts, and no others.

        Returns those of them that another server keeps (`claim_order`): stop serving them. What
        `further` says of these stays here: from the next time on it is announced with an earlier
        claim than the other server's, until that one has stopped. Cannot be called by two tasks at
        once. If peers refuse a slot, that is logged, and so is it if the experts have more prefixes
        than a server may have slots; then some are not announced.
        """
        uids = self._announceable(frozenset(uids))
        self._note_added(uids)
        slots = slots_for(uids, load, self._claims(uids), self._network.addresses())
        gone = self._published - slots.keys()
        self._hosted, self._published = uids, frozenset(slots)
        entries = [(self._key(prefix), slot, RECORD_SECONDS) for prefix, slot in slots.items()]
        written = await self._dht.put_many(entries, keep_up=False)
        if gone:
            await self._dht.withdraw_many(map(self._key, gone))
        for one in written:
            if not one.replicas and (one.refused or one.not_allowed):  # else they may be slow
                log.warning("These experts cannot be announced: %s", one.error())
                break
        return await self._lost(further)

    def _announceable(self, uids: frozenset[Uid]) -> frozenset[Uid]:
        """As many as there may be slots for; first those that were announced before."""
        most = MOST_COPY_RECORDS if self._tree else MOST_RECORDS
        if sum(len(one.cells) for one in uids) <= most:
            return uids
        chosen, prefixes = set[Uid](), set[Uid]()
        for uid in sorted(uids, key=lambda one: (one not in self._hosted, str(one))):
            with_it = prefixes.union(uid.prefixes())
            if len(with_it) <= most:
                chosen.add(uid)
                prefixes = with_it
        if len(chosen) < len(uids) != self._said_of:
            self._said_of = len(uids)
            log.warning(
                "%d of %d experts are not announced: a server may have slots under %d prefixes.",
                *(len(uids) - len(chosen), len(uids), most),
            )
        return frozenset(chosen)

    async def withdraw(self) -> None:
        """Withdraw what was announced: trainers need not wait until it expires."""
        published, self._published, self._hosted = self._published, frozenset(), frozenset()
        await self._dht.withdraw_many(map(self._key, published))

    def _note_added(self, uids: frozenset[Uid]) -> None:
        now_ms = max(0, int(self._network.wall_time() * 1000))
        added = uids - self._hosted
        self._since = {uid: now_ms if uid in added else self._since[uid] for uid in uids}
        self._won = {uid: claim for uid, claim in self._won.items() if uid in uids - added}
        if added:
            self._check_at = -math.inf

    def _claims(self, uids: Iterable[Uid]) -> dict[Uid, int]:
        """Since when this server claims these experts, by their longest prefixes."""
        claims: dict[Uid, int] = {}
        for uid in uids:
            claims[uid.parent] = max(claims.get(uid.parent, 0), self._since[uid])
        for uid, claim in self._won.items():
            claims[uid.parent] = min(claims[uid.parent], claim)
        return claims

    async def _lost(self, further: Further) -> frozenset[Uid]:
        """The hosted uids that another server keeps."""
        now = trio.current_time()
        if now < self._check_at or not self._hosted or self._tree:
            return frozenset()
        self._check_at = now + CHECK_SECONDS
        below = await self.read({uid.parent for uid in self._hosted})
        me = self._network.peer_id
        claims: dict[PeerId, dict[Uid, int]] = {}
        own_claims = self._claims(self._hosted)  # its slots may not have been read
        for uid in self._hosted:
            hosts = below[uid.parent].get(uid.cells[-1], ())
            others = [host for host in hosts if host.peer != me]
            own = Host(me, 0.0, own_claims[uid.parent])
            if not others:
                self._won.pop(uid, None)
            if (first := in_order_of_claim(uid, [own, *others])[0]) is not own:
                claims.setdefault(first.peer, {})[uid] = first.since
        lost = {uid for claimed in claims.values() for uid in claimed}

        async def contest(peer: PeerId, claimed: Mapping[Uid, int]) -> None:
            for uid in await further(peer, claimed.keys()):
                lost.discard(uid)
                self._won[uid] = max(0, claimed[uid] - 1)

        async with trio.open_nursery() as nursery:
            for peer, claimed in claims.items():
                nursery.start_soon(contest, peer, claimed)
        return frozenset(lost)

    # -- for trainers

    async def active(self, prefixes: Iterable[Uid]) -> dict[Uid, Below]:
        """The active next indices of each prefix, and the servers there that have not failed since
        they announced themselves.

        The prefixes that were not read in the last seconds are read together. Tasks that want the
        same ones at the same time share a reading; while one of them reads anew what it has read
        before, the others use the old reading.
        """
        readings = await self._recent(prefixes)
        return {prefix: await self._usable(reading) for prefix, reading in readings.items()}

    async def hosts(self, prefixes: Iterable[Uid]) -> dict[Uid, Below]:
        """The same with the servers that have failed: for a server that asks who hosts what."""
        readings = await self._recent(prefixes)
        return {prefix: reading.below for prefix, reading in readings.items()}

    async def _recent(self, prefixes: Iterable[Uid]) -> dict[Uid, _Reading]:
        prefixes = list(dict.fromkeys(prefixes))
        found: dict[Uid, _Reading] = {}
        most_unread = 0
        while True:
            now = trio.current_time()
            for prefix in prefixes:
                reading = self._cache.get(prefix)
                longest = STALE_SECONDS if prefix in self._reading else CACHED_SECONDS
                if reading is not None and reading.read_at >= now - longest:
                    found.setdefault(prefix, reading)
            missing = [prefix for prefix in prefixes if prefix not in found]
            if not missing:
                return found
            unread = [prefix for prefix in missing if prefix not in self._reading]
            if unread:
                most_unread = max(most_unread, len(unread))
                some = unread[:KEYS_AT_ONCE]
                found |= await self._read(some, MOST_PAIRS * len(some) // most_unread)
            else:
                await self._reading[missing[0]].wait()

    async def live(self, grid: ExpertGrid) -> dict[Uid, tuple[Host, ...]]:
        """All experts of a grid, with all their hosts: for a server that looks for free cells."""
        found: dict[Uid, tuple[Host, ...]] = {grid.root: ()}
        for size in grid.sizes:
            below = await self.hosts(list(found)[:MOST_PREFIXES])
            found = {}
            for prefix, indices in below.items():
                for index, hosts in indices.items():
                    if index < size:
                        found[prefix.child(index)] = hosts
                await trio.lowlevel.checkpoint()
        return found

    async def servers(self, grids: Iterable[ExpertGrid]) -> set[PeerId]:
        """All servers with experts of these grids, read anew."""
        readings = await self._read([grid.root for grid in grids])
        return {peer for reading in readings.values() for peer in reading.sequences}

    def forget(self, peer: PeerId) -> None:
        """A call to this server failed: trainers leave it out until it announces itself again."""
        heard = [reading.sequences.get(peer, 0) for reading in self._cache.values()]
        self._forgotten[peer] = max([self._last_heard.get(peer, 0), *heard]) + SAME_ANNOUNCEMENT_MS
        self._failures += 1

    def forget_expert(self, uid: Uid) -> None:
        """Its server answered that it does not host it: trainers leave it out until the next
        reading."""
        reading = self._cache.get(uid.parent)
        if reading is not None:
            reading.denied.add(uid.cells[-1])
            self._failures += 1

    async def _usable(self, reading: _Reading) -> Below:
        """What is below the prefix, without the servers and experts that failed before this call.
        Tasks that want it at the same time share it."""
        failures = self._failures
        while reading.failures < failures:
            if reading.renewed is None:
                await self._leave_out_failed(reading)
            else:
                await reading.renewed.wait()
        return reading.usable

    async def _leave_out_failed(self, reading: _Reading) -> None:
        renewed = reading.renewed = trio.Event()
        try:
            await trio.lowlevel.checkpoint()
            failures = self._failures
            failed = {
                peer
                for peer, sequence in reading.sequences.items()
                if sequence <= self._forgotten.get(peer, -1)
            }
            denied = frozenset(reading.denied)
            if (failed, denied) != reading.left_out:
                reading.usable = await _without(reading.below, failed, denied)
                reading.left_out = failed, denied
            reading.failures = failures
        finally:
            reading.renewed = None
            renewed.set()

    # -- reading

    async def read(self, prefixes: Iterable[Uid]) -> dict[Uid, Below]:
        """Read these prefixes now, whatever was read before: all servers, as `hosts`."""
        readings = await self._read(prefixes)
        return {prefix: reading.below for prefix, reading in readings.items()}

    async def _read(
        self, prefixes: Iterable[Uid], most_pairs: int = MOST_PAIRS
    ) -> dict[Uid, _Reading]:
        keys = {prefix: self._key(prefix) for prefix in prefixes}
        over = trio.Event()
        self._reading.update(dict.fromkeys(keys, over))
        began = trio.current_time()
        try:
            entries = await self._dht.get_many([*keys.values()], latest_enough=True)
            claimed: dict[Uid, int] = {}
            for prefix, key in keys.items():
                claimed[prefix] = sum(index_count(one.value) for one in entries[key].values())
                await trio.lowlevel.checkpoint()
            found = {}
            left = most_pairs
            for prefix in sorted(keys, key=claimed.__getitem__):
                room = max(left, most_pairs // len(keys))
                reading = await self._reading_of(entries.pop(keys[prefix]).values(), began, room)
                left -= reading.pairs
                found[prefix] = reading
                self._keep(prefix, reading)
            return found
        finally:
            for prefix in keys:
                if self._reading.get(prefix) is over:
                    del self._reading[prefix]
            over.set()

    async def _reading_of(
        self, entries: Collection[SlotEntry], read_at: float, most_pairs: int
    ) -> _Reading:
        """What these slots say, after noting where their publishers can be dialled."""
        for place, entry in enumerate(entries, 1):
            if place % SLOTS_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            peer, slot = entry.publisher, entry.value
            if entry.sequence > self._last_heard.get(peer, -1):
                self._last_heard[peer] = entry.sequence
            known = self._network.addresses_of(peer)
            if peer != self._network.peer_id and not set(slot.addresses) <= set(known):
                self._network.learn_addresses(peer, slot.addresses)
        slots = [(entry.publisher, entry.value) for entry in entries]
        below = await hosts_by_index(slots, most_pairs)
        sequences = {entry.publisher: entry.sequence for entry in entries}
        return _Reading(below, sequences, read_at, 1 + sum(map(len, below.values())), below)

    def _keep(self, prefix: Uid, reading: _Reading) -> None:
        self._drop(prefix)
        self._cache[prefix] = reading
        self._cached_pairs += reading.pairs
        while self._cached_pairs > CACHED_PAIRS:
            self._drop(next(iter(self._cache)))

    def _drop(self, prefix: Uid) -> None:
        reading = self._cache.pop(prefix, None)
        if reading is not None:
            self._cached_pairs -= reading.pairs

    def _key(self, prefix: Uid) -> str:
        return experts_key(self._run, prefix, self._tree)
