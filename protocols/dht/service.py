"""The directory on one node: `/potluck/dht/1.0.0`.

    async with open_dht(network, rpc, families=[PROGRESS], settings=DhtSettings(...)) as dht:
        await dht.put("progress/run", Progress(...), ttl=60)
        for peer, entry in (await dht.get("progress/run")).items():
            ...

A value that was put is kept up until it is withdrawn or this node ends: it is signed again before
it expires, and sent to the peers that are then closest. A read returns the newest value of each
publisher, checked against its signature, the family's type, and swarm time.

Everything ends with the `async with`. A write returns when the replicas have answered (slow ones
excepted), and raises if none of them holds the slot. Limits refuse with a reason (`SlotRefused`),
here and at every other node.

There is one slot for each key and publisher, so a second `put` under a key replaces the first. To
make a list, use many publishers, or many keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import trio

from protocols.dht.acquaintances import Acquaintances
from protocols.dht.bootstrap import Bootstrap, BootstrapState
from protocols.dht.contacts import Contact
from protocols.dht.families import Families, Family
from protocols.dht.handlers import RequestHandlers
from protocols.dht.keeper import Keeper
from protocols.dht.persistence import Persistence
from protocols.dht.reader import Breadth, SlotEntry, SlotReader
from protocols.dht.requester import Requester
from protocols.dht.settings import DhtSettings
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState, DhtStatistics
from protocols.dht.storage import EXPIRED_AT_ONCE
from protocols.dht.upkeep import Upkeep
from protocols.dht.watches import Change, Watches
from protocols.dht.writer import SIGNED_PER_CHECKPOINT, Publications, Writer, Written
from protocols.identity import PeerId
from protocols.network import LinkEvent, Network, Reach
from protocols.not_allowed import NotAllowed
from protocols.rpc import Rpc

KEYS_PER_CHECKPOINT = 128  # decoding one publisher's value takes some 10 microseconds
LAST_WRITES_SECONDS = 2.0  # for a node that ends to send its writes to the rest of the replicas


@asynccontextmanager
async def open_dht(
    network: Network,
    rpc: Rpc,
    *,
    families: Iterable[Family] = (),
    settings: DhtSettings | None = None,
    keeper: Keeper | None = None,
) -> AsyncIterator[Dht]:
    """Run the directory on this network for the length of the block.

    It does not wait for the swarm: see `Dht.joined`. Errors of the block are raised without an
    exception group.
    """
    failure: BaseException | None = None
    with network.link_events() as events:
        async with trio.open_nursery() as nursery:
            state = DhtState(network, rpc, Families(families), settings or DhtSettings(), nursery)
            dht = Dht(state, keeper)
            try:
                await dht.start(events)
                yield dht
            except BaseException as error:  # noqa: BLE001 - raised below, where no nursery wraps it
                failure = error
            await dht.end()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Dht:
    """The directory on one node. `open_dht` makes it."""

    def __init__(self, state: DhtState, keeper: Keeper | None) -> None:
        self._state = state
        self._persistence = None if keeper is None else Persistence(state, keeper)
        self._acquaintances = Acquaintances(state, self._contact_added, self._check_contact_soon)
        self._requester = Requester(state, self._acquaintances)
        self._reader = SlotReader(state, self._requester)
        self._writer = Writer(state, self._requester, self._reader)
        self._publications = Publications(state, self._writer)
        self._bootstrap = Bootstrap(state, self._requester, self._reader)
        self._upkeep = Upkeep(state, self._acquaintances, self._requester, self._reader)
        self._watches = Watches(state, self._reader)

    async def start(self, events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
        """Serve, and start the background tasks. `open_dht` calls it."""
        state = self._state
        RequestHandlers(state, self._acquaintances).serve()
        start = state.nursery.start_soon
        start(self._follow_links, events)
        if self._persistence is not None:
            self._bootstrap.add_cached(await self._persistence.load_contacts())
            start(self._persistence.run, self._bootstrap.joined)
        start(self._bootstrap.run)
        start(self._publications.keep_up)
        start(self._writer.write_the_rest)
        start(self._upkeep.refresh)
        start(self._upkeep.settle, self._bootstrap.joined)
        start(self._upkeep.find_lost_peers)
        start(self._upkeep.look_around)
        start(self._upkeep.check_links)
        start(self._upkeep.tidy)
        await trio.lowlevel.checkpoint()

    async def end(self) -> None:
        """Send the last writes and save the rest. `open_dht` calls it."""
        if not self._state.nursery.cancel_scope.cancel_called:
            with trio.CancelScope(shield=True), trio.move_on_after(LAST_WRITES_SECONDS):
                await self._writer.flush()
        if self._persistence is not None:
            with trio.CancelScope(shield=True):
                await self._persistence.save()

    # -- writing

    async def put(self, key: str, value: object, ttl: float, *, keep_up: bool = True) -> Written:
        """Publish this value under this key.

        `ttl` is for how many seconds others keep it after this node's last repetition; with
        `keep_up=False` it ends then. SlotRefused if it breaks a rule, or if every replica refused
        it. Unreachable if no replica holds it; then it is tried again until it ends.
        """
        self._state.counts.puts += 1
        slot = self._publications.prepare(key, value, ttl, keep_up=keep_up)
        return _checked((await self._publications.publish([slot]))[0])

    async def put_many(
        self, entries: Iterable[tuple[str, object, float]], *, keep_up: bool = True
    ) -> list[Written]:
        """`put` of many (key, value, ttl) at once: one message a neighbour for all of them.

        No error is raised for a slot that no replica took: each `Written` has the result of its
        slot.
        """
        entries = list(entries)
        self._publications.check_number(len(entries))  # before the first is kept up
        slots: dict[str, Slot] = {}
        for place, (key, value, ttl) in enumerate(entries):
            if place and place % SIGNED_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            slots[key] = self._publications.prepare(key, value, ttl, keep_up=keep_up)
        self._state.counts.puts += len(slots)
        return await self._publications.publish(list(slots.values()))

    async def withdraw(self, key: str) -> Written:
        """Withdraw this node's value under this key."""
        slot = self._publications.prepare_withdrawal(key)
        return _checked((await self._publications.publish([slot]))[0])

    async def withdraw_many(self, keys: Iterable[str]) -> list[Written]:
        """`withdraw` of many keys at once, as `put_many` writes. No error is raised."""
        slots = []
        for place, key in enumerate(dict.fromkeys(keys)):
            if place and place % SIGNED_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            slots.append(self._publications.prepare_withdrawal(key))
        return await self._publications.publish(slots)

    # -- reading

    async def get(self, key: str, *, latest_enough: bool = False) -> dict[PeerId, SlotEntry]:
        """Every publisher's value under this key.

        With `latest_enough` it takes what the first few replicas have: one round trip.
        """
        found = await self._reader.read([key], latest_enough=latest_enough)
        return self._entries(found[key])

    async def look(
        self, key: str, breadth: Breadth = Breadth.FEW
    ) -> tuple[dict[PeerId, SlotEntry], frozenset[PeerId]]:
        """`get` for repeated reads: it costs only what has changed since the last time.

        Also returns the publishers that have withdrawn their value. The reason why others are
        missing is not known.
        """
        found = await self._reader.look(key, breadth)
        gone = frozenset(slot.publisher_peer for slot in found if slot.withdrawn)
        return self._entries(found), gone

    async def get_many(
        self, keys: Sequence[str], *, latest_enough: bool = False
    ) -> dict[str, dict[PeerId, SlotEntry]]:
        """`get` of many keys at once, with shared messages."""
        found = await self._reader.read(keys, latest_enough=latest_enough)
        entries = {}
        for place, (key, slots) in enumerate(found.items()):
            if place and place % KEYS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            entries[key] = self._entries(slots)
        return entries

    def watch(self, key: str) -> AsyncGenerator[Change, None]:
        """Yield the changes under this key, beginning with what is there now.

            async for change in dht.watch("group/7"):
                ...

        After the loop the reading goes on for a while; `contextlib.aclosing` ends it at once.
        """
        self._state.check_open()
        return self._watches.watch(key)

    def _entries(self, slots: Iterable[Slot]) -> dict[PeerId, SlotEntry]:
        entries = {}
        for slot in slots:
            if not slot.withdrawn:
                peer = slot.publisher_peer
                value = self._state.families.decode(slot)
                entries[peer] = SlotEntry(peer, value, slot.expires, slot.sequence)
        return entries

    # -- state

    @property
    def heard_at(self) -> float:
        """When a peer last answered this node, in trio's clock; minus infinity before the first.

        A read while no peer answers only has what this node itself has kept.
        """
        return self._state.heard_at

    def seconds_left(self, entry: SlotEntry) -> float:
        """How long this slot still lives, in swarm time."""
        return (entry.expires - self._state.now_ms()) / 1000

    async def joined(self) -> None:
        """Wait until this node has met others and looked itself up."""
        await self._bootstrap.joined.wait()

    async def turned_away(self, after: NotAllowed | None = None) -> NotAllowed:
        """Wait until the last answer of all greeted peers is that this node may not take part. With
        `after`, the result of an earlier call, until they say so again.

        The node keeps trying: once it has a valid token it is let in.
        """
        return await self._bootstrap.turned_away(after)

    @property
    def refusal(self) -> NotAllowed | None:
        """What all greeted peers have answered last, if they refuse this node."""
        return self._bootstrap.refusal

    def try_again_now(self) -> None:
        """Retry unanswered peers now: this machine was away, or has moved."""
        self._bootstrap.try_again_now()
        self._upkeep.try_lost_peers_now()

    def bootstrap_state(self) -> BootstrapState:
        return self._bootstrap.state()

    def statistics(self) -> DhtStatistics:
        state = self._state
        storage = state.storage
        storage.expire(state.now_ms(), EXPIRED_AT_ONCE)
        return dataclasses.replace(
            state.counts,
            peers_in_table=len(state.table),
            buckets=tuple(state.table.bucket_sizes),
            slots_stored=len(storage),
            keys_stored=storage.key_count,
            bytes_stored=storage.total_bytes,
            bytes_stored_limit=storage.limits.total_bytes,
            copies_cached=len(storage.cache),
            slots_published=len(state.publisher),
            watched_keys=len(self._watches),
            can_be_dialled=not state.is_client and state.dialability.is_dialable,
            chores_dropped=state.chores.dropped + state.checks.dropped,
            peers_lost=len(state.lost),
            clock_offset_ms=state.swarm_time.offset_ms,
            clock_peers=state.swarm_time.peers,
            slots_refused=dict(state.counts.slots_refused),
            own_slots_refused=dict(state.counts.own_slots_refused),
        )

    # -- background work

    def _contact_added(self, contact: Contact) -> None:
        """A contact has come into the table."""
        self._upkeep.contact_added(contact)
        self._bootstrap.peer_added()

    def _check_contact_soon(self, contact: Contact) -> None:
        """A contact in the table may be gone."""
        self._state.chore(self._check_contact, contact)

    async def _check_contact(self, contact: Contact) -> None:
        try:
            await self._requester.probe(contact)
        finally:
            self._bootstrap.peer_lost()

    async def _follow_links(self, events: trio.MemoryReceiveChannel[LinkEvent]) -> None:
        async for event in events:
            if event.reach is Reach.NONE:
                self._acquaintances.link_lost(event.peer)
                continue
            if event.reach is Reach.DIRECT:
                self._bootstrap.linked(event.peer)
            if event.was is Reach.NONE:
                self._upkeep.linked(event.peer)


def _checked(written: Written) -> Written:
    if not written.replicas:
        raise written.error()
    return written
