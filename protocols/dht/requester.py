"""Sends one request to one peer, and notes whether the peer is alive.

After any request, a peer that answered counts as heard from, and its clock is sampled. One that
failed is marked in the routing table. The caller uses the content of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import trio

from auth.refusals import Reason
from protocols.dht.acquaintances import Acquaintances
from protocols.dht.contacts import Contact
from protocols.dht.ids import ID_BYTES
from protocols.dht.messages import (
    FIND,
    GREET,
    PACKED_BYTES_PER_ANSWER,
    PROTOCOL,
    SLOTS_STORED_AT_ONCE,
    STORE,
    STORE_MANY,
    VOUCH,
    VOUCHED_AT_ONCE,
    FindRequest,
    FindResponse,
    Found,
    GreetRequest,
    GreetResponse,
    Query,
    StoreRequest,
    StoreResponse,
    VouchRequest,
    unpack_slots,
)
from protocols.dht.slots import Slot
from protocols.dht.state import DhtState
from protocols.errors import Busy, MalformedMessage, PotluckError, ProtocolNotServed
from protocols.identity import peer_id_of
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import Method

Asked = TypeVar("Asked", FindRequest, StoreRequest, GreetRequest)
Answer = TypeVar("Answer", FindResponse, StoreResponse, GreetResponse)


class Requester:
    """Sends requests for all parts of the directory."""

    def __init__(self, state: DhtState, acquaintances: Acquaintances) -> None:
        self._state = state
        self._acquaintances = acquaintances

    async def find(self, contact: Contact, queries: Sequence[Query]) -> FindResponse:
        self._state.counts.finds_sent += 1
        sender = self._acquaintances.introduction_for(contact.peer)
        response = await self._ask(contact, FIND, FindRequest(tuple(queries), sender))
        if len(response.answers) != len(queries):
            self._state.table.failed(contact)
            raise MalformedMessage(f"{contact.peer} answered fewer queries than it was asked.")
        try:
            answers = _unpacked(response.answers)
        except MalformedMessage as error:
            self._state.table.failed(contact)
            self._state.rpc.blame(contact.peer, PROTOCOL, error)
            raise
        return msgspec.structs.replace(response, answers=answers)

    async def store(
        self, contact: Contact, slots: Sequence[Slot], known: bytes = b"", *, copies: bool = False
    ) -> StoreResponse:
        counts = self._state.counts
        counts.stores_sent += 1
        counts.slots_sent += len(slots)
        sender = self._acquaintances.introduction_for(contact.peer)
        others = {one.publisher for one in slots} - {self._state.own_key}
        tokens = self._state.rpc.guard.shown_by(map(peer_id_of, sorted(others)))
        request = StoreRequest(tuple(slots), known, copies, sender, tokens)
        method = STORE if len(slots) <= SLOTS_STORED_AT_ONCE else STORE_MANY
        response = await self._ask(contact, method, request)
        if len(response.refusals) != len(slots):
            self._state.table.failed(contact)
            raise MalformedMessage(f"{contact.peer} did not give a result for each slot.")
        return response

    async def greet(self, contact: Contact) -> GreetResponse:
        self._state.counts.greets_sent += 1
        sender = self._acquaintances.introduction_for(contact.peer)
        return await self._ask(contact, GREET, GreetRequest(sender))

    async def vouch(self, contact: Contact, publishers: Sequence[bytes]) -> Sequence[bytes]:
        """Have this peer show the tokens of these publishers. Returns those of them for whom it has
        answered that it cannot."""
        state = self._state
        without: list[bytes] = []
        for start in range(0, len(publishers), VOUCHED_AT_ONCE):
            some = publishers[start : start + VOUCHED_AT_ONCE]
            request = VouchRequest(tuple(some))
            seconds = state.settings.call_seconds
            response = await state.rpc.call(contact.peer, VOUCH, request, timeout=seconds)
            state.rpc.guard.vouched(response.tokens)
            strangers = [one for one in some if not state.may_publish(one)]
            without += strangers
            if len(strangers) == len(some):
                break  # most of them are invented
        return without

    async def probe(self, contact: Contact) -> None:
        """Find out whether a peer still answers, and update the routing table.

        A greeting would not be enough: a peer may answer that and be too slow, or too broken, for
        more.
        """
        state = self._state
        await self.find(contact, [Query(state.own_id.to_bytes(ID_BYTES, "big"), contacts=0)])

    async def _ask(self, contact: Contact, method: Method[Asked, Answer], request: Asked) -> Answer:
        state = self._state
        peer = contact.peer
        we_open_link = False
        if contact.addresses and self._acquaintances.is_stranger(peer):
            state.network.learn_addresses(peer, contact.addresses)
            we_open_link = state.network.link(peer) is None
        # While a link is made, an answer does not show how long its way was.
        asked_ms = None if state.network.link(peer) is None else state.local_ms()
        try:
            response = await state.rpc.call(
                peer, method, request, timeout=state.settings.call_seconds
            )
        except Busy:
            raise  # it is there: this is its answer
        except ProtocolNotServed:
            if contact.node_id in state.table:
                state.lost.add(contact)  # so its requests do not let it back in
            state.table.remove(contact)
            raise
        except PotluckError as error:
            if not _shows_peer_alive(error):
                state.counts.calls_failed += 1
                if contact.node_id in state.table:
                    state.lost.add(contact)
                state.table.failed(contact)
            raise
        state.heard_at = trio.current_time()
        self._acquaintances.answered(peer, response, asked_ms, request.sender)
        if we_open_link:
            self._acquaintances.we_opened(peer)
        return response


def _unpacked(answers: Iterable[Found]) -> tuple[Found, ...]:
    """Answers with their slots as such, all together no more than may be packed."""
    room, whole = PACKED_BYTES_PER_ANSWER, []
    for found in answers:
        if found.packed:
            if found.slots:
                raise MalformedMessage("An answer has its slots both packed and as such.")
            slots, size = unpack_slots(found.packed, room)
            room -= size
            found = msgspec.structs.replace(found, slots=slots, packed=b"")
        whole.append(found)
    return tuple(whole)


def _shows_peer_alive(error: PotluckError) -> bool:
    """Whether a failed request shows that the peer is alive.

    It does if the peer does not let us take part, if we may not ask, or if the peer is a monitor,
    which keeps no slots.
    """
    if isinstance(error, AnswerNotAllowed):
        return error.reason is Reason.ROLE
    return isinstance(error, NotAllowed)
