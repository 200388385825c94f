"""Answers to requests of other nodes: the closest peers, the stored slots, refusals to store.

Most requests are answered in the reader of the stream: a find takes some 50 microseconds, storing a
slot a tenth of a millisecond, most of it for the signature. Only batches have a task of their own,
which lets other tasks run in between. Every refusal gives its reason.

Strangers choose the requests. The most expensive one that fits in a message (many queries for a
full key) takes a few milliseconds. No request may take more, because all other peers wait
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import trio

from protocols.dht.acquaintances import Acquaintances
from protocols.dht.contacts import Contact, network_of
from protocols.dht.ids import position_of
from protocols.dht.messages import (
    CONTACT_BYTES_PER_ANSWER,
    CONTACTS_PER_STORED,
    FIND,
    GREET,
    LONGEST_REASON,
    NAMES_PER_ANSWER,
    NEWER_BYTES_PER_ANSWER,
    NEWER_PER_ANSWER,
    PACKED_BYTES_PER_ANSWER,
    PROTOCOL,
    REASONS_PER_ANSWER,
    SLOT_BYTES_PER_ANSWER,
    SLOTS_STORED_AT_ONCE,
    STORE,
    STORE_MANY,
    VOUCH,
    FindRequest,
    FindResponse,
    Found,
    GreetRequest,
    GreetResponse,
    Introduction,
    Named,
    Query,
    StoreRequest,
    StoreResponse,
    VouchRequest,
    VouchResponse,
    named,
    pack_slots,
    prefix_of_id,
    prefix_of_slot,
    prefixes,
)
from protocols.dht.slots import Slot, SlotRefusal, SlotRefused
from protocols.dht.state import DhtState, count, is_dishonest
from protocols.dht.storage import Sender
from protocols.errors import LimitExceeded, MalformedMessage
from protocols.guard import Caller
from protocols.identity import peer_id_of, public_key_of
from protocols.network import Reach

# A peer that sends more than this on one link is avoided. A few may come from faulty software.
FORGED_SLOTS_ALLOWED = 32

# For all queries of one message, half a microsecond each. The peer asks again for the rest.
SLOTS_LOOKED_AT = 12_288

_CHANGE_BYTES = 8  # of a cursor, after the id of the storage's life


class RequestHandlers:
    """The handlers. They keep no state between two requests."""

    def __init__(self, state: DhtState, acquaintances: Acquaintances) -> None:
        self._state = state
        self._acquaintances = acquaintances

    def serve(self) -> None:
        rpc = self._state.rpc
        rpc.serve(FIND, self.find)
        rpc.serve(STORE, self.store)
        rpc.serve(STORE_MANY, self.store_many)
        rpc.serve(GREET, self.greet)
        rpc.serve(VOUCH, self.vouch)

    def find(self, caller: Caller, request: FindRequest) -> FindResponse:
        responder = self._asked_by(caller, request.sender)
        self._state.counts.finds_served += 1
        now_ms = self._state.now_ms()
        budget = _AnswerBudget()
        answers = tuple(
            budget.packed(query, self._found(caller, query, now_ms, budget))
            for query in request.queries
        )
        dialled = self._acquaintances.dialled(caller.peer)
        return FindResponse(now_ms, answers, responder, dialled)

    def store(self, caller: Caller, request: StoreRequest) -> StoreResponse:
        if len(request.slots) > SLOTS_STORED_AT_ONCE:
            raise LimitExceeded(f"{len(request.slots)} slots are for the method store-many.")
        if len(request.tokens) > len(request.slots):
            raise LimitExceeded("One token for each slot is enough.")
        self._state.rpc.guard.vouched(request.tokens)
        results = _StoreResults()
        sender = self._sender(caller)
        responder = self._asked_by(caller, request.sender)
        for slot in request.slots:
            self._store_one(slot, results, request.copies, sender)
        self._blame(caller, results)
        return self._stored(caller, request, results, responder)

    async def store_many(self, caller: Caller, request: StoreRequest) -> StoreResponse:
        for start in range(0, len(request.tokens), SLOTS_STORED_AT_ONCE):
            self._state.rpc.guard.vouched(request.tokens[start : start + SLOTS_STORED_AT_ONCE])
            await trio.lowlevel.checkpoint()
        results = _StoreResults()
        sender = self._sender(caller)
        responder = self._asked_by(caller, request.sender)
        for place, slot in enumerate(request.slots):
            if place and place % SLOTS_STORED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
            self._store_one(slot, results, request.copies, sender)
        self._blame(caller, results)
        return self._stored(caller, request, results, responder)

    def _blame(self, caller: Caller, results: _StoreResults) -> None:
        """Avoid a peer that keeps sending forged slots: each costs a signature check."""
        if not results.forged:
            return
        brought = self._acquaintances.brought_forged(caller.peer, results.forged)
        if brought > FORGED_SLOTS_ALLOWED:
            error = MalformedMessage(f"{caller.peer} has sent {brought} forged slots.")
            self._state.rpc.blame(caller.peer, PROTOCOL, error)

    def _sender(self, caller: Caller) -> Sender:
        """The sender whose share of this node's memory the slots count for."""
        link = self._state.network.link(caller.peer)
        share = None
        if link is not None and link.reach is Reach.DIRECT:  # else the address is a relay's
            share = network_of(link.remote_address)
        return Sender(public_key_of(caller.peer), share or caller.peer)

    def _store_one(self, slot: Slot, results: _StoreResults, copies: bool, sender: Sender) -> None:
        state = self._state
        try:
            self._keep(slot, copies, sender)
        except SlotRefused as refused:
            held = None
            if refused.refusal is SlotRefusal.OLDER_SEQUENCE:
                held = state.storage.slot_of(slot.key, slot.publisher, state.now_ms())
            results.refused(refused, held)
            results.forged += is_dishonest(refused)
            count(state.counts.slots_refused, refused.refusal.name.lower())
        else:
            results.refusals.append(0)
            state.counts.slots_taken += 1

    def _stored(
        self,
        caller: Caller,
        request: StoreRequest,
        results: _StoreResults,
        responder: Introduction | None,
    ) -> StoreResponse:
        self._state.counts.stores_served += 1
        return StoreResponse(
            self._state.now_ms(),
            bytes(results.refusals),
            tuple(results.reasons),
            tuple(results.newer),
            () if request.copies else self._closer(caller, request),
            responder,
            self._acquaintances.dialled(caller.peer),
        )

    def greet(self, caller: Caller, request: GreetRequest) -> GreetResponse:
        responder = self._asked_by(caller, request.sender)
        self._state.counts.greets_served += 1
        dialled = self._acquaintances.dialled(caller.peer)
        return GreetResponse(self._state.now_ms(), responder, dialled)

    def vouch(self, _caller: Caller, request: VouchRequest) -> VouchResponse:
        peers = map(peer_id_of, dict.fromkeys(request.publishers))
        return VouchResponse(self._state.rpc.guard.shown_by(peers))

    def _asked_by(self, caller: Caller, sender: Introduction | None) -> Introduction | None:
        self._acquaintances.asked_us(caller.peer, sender)
        return self._acquaintances.introduction() if sender is not None else None

    def _found(self, caller: Caller, query: Query, now_ms: int, budget: _AnswerBudget) -> Found:
        state = self._state
        contacts: tuple[Named, ...] = ()
        if not (query.since or query.wanted):
            position = int.from_bytes(query.position, "big")
            closest = state.table.closest(position, state.replicas_of(query.key))
            contacts = self._named(caller, closest, query.known)[: query.contacts]
            if not budget.take_contacts(contacts):
                contacts = ()
        if not query.key:
            return Found(contacts)
        if not budget.has_work_left:
            return Found(contacts, cursor=query.since, more=True)
        if query.wanted:
            return self._wanted(query, now_ms, budget)
        slots = state.storage.since(query.key, self._change_in(query.since), now_ms)
        budget.spend_work(len(slots))
        if not slots and query.copies and not query.since:
            cached = state.storage.cache.get(query.key, now_ms)
            budget.spend_work(len(cached))
            copies = budget.take_slots(cached)
            return Found(contacts, copies, copied=bool(copies))
        sent = budget.take_names(slots) if query.named else budget.take_slots(slots)
        told = state.storage.changes
        if len(sent) < len(slots):
            if not sent:
                return Found(contacts, cursor=query.since, more=True)
            told = state.storage.change_of(sent[-1])
        cursor = state.storage.life + told.to_bytes(_CHANGE_BYTES, "big")
        more = len(sent) < len(slots)
        if query.named:
            names = b"".join(map(prefix_of_slot, sent))
            return Found(contacts, names=names, cursor=cursor, more=more)
        return Found(contacts, sent, cursor=cursor, more=more)

    def _wanted(self, query: Query, now_ms: int, budget: _AnswerBudget) -> Found:
        """The slots that the query names and that are still here."""
        wanted = set(prefixes(query.wanted))
        slots = self._state.storage.get(query.key, now_ms)
        budget.spend_work(len(slots) + len(wanted))
        slots = [slot for slot in slots if prefix_of_slot(slot) in wanted]
        sent = budget.take_slots(slots)
        return Found(slots=sent, more=len(sent) < len(slots))

    def _change_in(self, cursor: bytes) -> int:
        """The change that our cursor stands for; 0 if it is invalid or of an earlier life."""
        life = self._state.storage.life
        if len(cursor) != len(life) + _CHANGE_BYTES or not cursor.startswith(life):
            return 0
        return int.from_bytes(cursor[len(life) :], "big")

    def _keep(self, slot: Slot, copies: bool, sender: Sender) -> None:
        state = self._state
        state.check_publisher(slot)
        if copies:
            state.storage.cache_copies([slot], state.now_ms())
        elif state.is_client:
            raise SlotRefused(
                SlotRefusal.MEMORY, "This node keeps nothing for others: it is in client mode."
            )
        else:
            state.keep(slot, sender)

    def _closer(self, caller: Caller, request: StoreRequest) -> tuple[Named, ...]:
        """Peers that the asker does not know and that should have one of these slots."""
        found: dict[int, Contact] = {}
        known = set(prefixes(request.known))
        for slot in request.slots:
            replicas = self._state.replicas_of(slot.key)
            for contact in self._state.table.closest(position_of(slot.key), replicas):
                if contact.node_id not in found and prefix_of_id(contact.node_id) not in known:
                    found[contact.node_id] = contact
            if len(found) > CONTACTS_PER_STORED:
                break
        return self._named(caller, found.values(), b"")[:CONTACTS_PER_STORED]

    def _named(
        self, caller: Caller, contacts: Iterable[Contact], known: bytes
    ) -> tuple[Named, ...]:
        skip = set(prefixes(known)) if known else ()
        return tuple(
            named(contact)
            for contact in contacts
            if contact.peer != caller.peer and prefix_of_id(contact.node_id) not in skip
        )


class _StoreResults:
    """The results so far for the slots of one store request."""

    def __init__(self) -> None:
        self.refusals = bytearray()
        self.reasons: list[str] = []
        self.newer: list[Slot] = []
        self.forged = 0
        self._newer_bytes = 0

    def refused(self, refused: SlotRefused, held: Slot | None) -> None:
        self.refusals.append(refused.refusal)
        if len(self.reasons) < REASONS_PER_ANSWER:
            self.reasons.append(str(refused)[:LONGEST_REASON])
        if held is None or len(self.newer) >= NEWER_PER_ANSWER:
            return
        size = wire_bytes(held)
        if not self.newer or self._newer_bytes + size <= NEWER_BYTES_PER_ANSWER:
            self._newer_bytes += size
            self.newer.append(held)


class _AnswerBudget:
    """How many more bytes an answer may have, and how much more work it may cost."""

    def __init__(self) -> None:
        self._work_left = SLOTS_LOOKED_AT
        self._names = NAMES_PER_ANSWER
        self._slot_bytes = SLOT_BYTES_PER_ANSWER
        self._contact_bytes = CONTACT_BYTES_PER_ANSWER
        self._packed_bytes = PACKED_BYTES_PER_ANSWER
        self._has_slots = False

    def take_contacts(self, contacts: tuple[Named, ...]) -> bool:
        size = sum(40 + sum(len(one) + 4 for one in contact.addresses) for contact in contacts)
        if size > self._contact_bytes:
            return False
        self._contact_bytes -= size
        return True

    @property
    def has_work_left(self) -> bool:
        return self._work_left > 0

    def spend_work(self, number: int) -> None:
        self._work_left -= number

    def take_names(self, slots: list[Slot]) -> tuple[Slot, ...]:
        """As many of the first slots as there is room for."""
        taken = slots[: self._names]
        self._names -= len(taken)
        return tuple(taken)

    def take_slots(self, slots: list[Slot]) -> tuple[Slot, ...]:
        """As many of the first slots as fit. The very first of an answer always does."""
        for number, slot in enumerate(slots):
            size = wire_bytes(slot)
            if size > self._slot_bytes and self._has_slots:
                return tuple(slots[:number])
            self._slot_bytes -= size
            self._has_slots = True
        return tuple(slots)

    def packed(self, query: Query, found: Found) -> Found:
        """The same answer with its slots packed, if the asker allows it and it saves bytes."""
        if not query.packs:
            return found
        packed, took = pack_slots(found.slots, self._packed_bytes)
        self._packed_bytes -= took
        if not packed:
            return found
        return msgspec.structs.replace(found, slots=(), packed=packed)


# The size of a slot without key and value: its publisher's key, signature, two numbers, lengths.
SLOT_HEAD_BYTES = 140


def wire_bytes(slot: Slot) -> int:
    """An upper bound for the size of a slot in a message (a character has up to four bytes)."""
    return SLOT_HEAD_BYTES + len(slot.key.encode("utf-8")) + len(slot.value)
