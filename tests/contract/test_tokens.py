"""Calls and transfers between nodes with tokens, on both networks: admitted, refused, revoked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from auth.refusals import Reason
from protocols.access import end_refused
from protocols.errors import PotluckError
from protocols.guard import Caller
from protocols.network import Network
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import BulkMethod, Method, Rpc, Transfer, open_rpc
from tests.chunks import next_chunk
from tests.contract.neighbourhood import PROTOCOL, Neighbourhood, on_both
from tests.protocols.admitted import Admission
from tests.protocols.pair import Number, Text
from tests.waiting import PATIENCE_SECONDS, until

DOUBLE = Method(PROTOCOL, "double", Number, Number)
SLEEP = Method(PROTOCOL, "sleep", Number, Number)
UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, hashed=True
)


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def sleep(_caller: Caller, _request: Number) -> Number:
    await trio.sleep_forever()
    raise AssertionError


async def count(
    _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
) -> None:
    await transfer.accept(Number(0))
    while await next_chunk(transfer) is not None:
        pass
    await transfer.finish(Number(transfer.bytes_received))


@dataclass
class Two:
    """Alice asks, Bob answers."""

    admission: Admission
    alice: Network
    bob: Network
    asking: Rpc
    answering: Rpc

    async def call(self) -> None:
        answer = await self.asking.call(self.bob.peer_id, DOUBLE, Number(4), timeout=10)
        assert answer == Number(8)

    async def upload(self) -> None:
        peer = self.bob.peer_id
        async with self.asking.open_bulk(peer, UPLOAD, Text(), timeout=10) as transfer:
            await transfer.send_chunk(bytes(200_000))
            assert await transfer.finish(Number(0)) == Number(200_000)


@asynccontextmanager
async def two(place: Neighbourhood, *careless: str) -> AsyncIterator[Two]:
    admission = Admission(*careless)
    alice, bob = await place.pair()
    async with (
        open_rpc(alice, admission.admit(alice, "alice")) as asking,
        open_rpc(bob, admission.admit(bob, "bob")) as answering,
    ):
        answering.serve(DOUBLE, double)
        answering.serve(SLEEP, sleep)
        answering.serve_bulk(UPLOAD, count)
        yield Two(admission, alice, bob, asking, answering)


@on_both
async def test_admitted_nodes_call_and_transfer(place: Neighbourhood) -> None:
    async with two(place) as those:
        for _ in range(20):
            await those.call()
        await those.upload()
        assert those.answering.statistics().requests_served == 20
        assert those.answering.statistics().transfers_served == 1


@on_both
async def test_a_node_without_a_token_is_told_so(place: Neighbourhood) -> None:
    async with two(place, "alice") as those:
        those.admission.of(those.alice).token = None
        for ask in (those.call, those.upload):
            with pytest.raises(NotAllowed) as refused:
                await ask()
            assert (refused.value.reason, refused.value.by_peer) == (Reason.TOKEN_MISSING, True)
        assert those.answering.statistics().requests_served == 0


@on_both
async def test_an_answer_without_a_token_is_not_believed(place: Neighbourhood) -> None:
    async with two(place, "bob") as those:
        those.admission.of(those.bob).token = None
        for ask in (those.call, those.upload):
            with pytest.raises(AnswerNotAllowed) as refused:
                await ask()
            assert refused.value.reason is Reason.TOKEN_MISSING


@on_both
async def test_everything_with_a_revoked_party_ends_with_the_reason_and_the_link_is_closed(
    place: Neighbourhood,
) -> None:
    async with two(place) as those:
        errors: list[PotluckError] = []

        async def call() -> None:
            try:
                await those.asking.call(those.bob.peer_id, SLEEP, Number(0), timeout=20)
            except PotluckError as error:
                errors.append(error)

        async def upload() -> None:
            peer = those.bob.peer_id
            try:
                async with those.asking.open_bulk(peer, UPLOAD, Text(), timeout=10) as transfer:
                    await transfer.send_chunk(bytes(1000))
                    await next_chunk(transfer)
            except PotluckError as error:
                errors.append(error)

        def both_are_under_way() -> bool:
            statistics = those.answering.statistics()
            return statistics.requests_in_flight == 1 and statistics.chunk_bytes_received == 1000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(upload)
            await until(both_are_under_way, PATIENCE_SECONDS)
            bob = those.admission.of(those.bob)
            listed = those.admission.authority.revoke("alice", at_ms=bob.clock_ms() + 1)
            bob.revocations.accept(listed, bob.keyring)
            assert await end_refused(those.answering, bob) == (those.alice.peer_id,)
            await those.bob.disconnect(those.alice.peer_id)
        assert len(errors) == 2
        for error in errors:
            assert isinstance(error, NotAllowed), error
            assert error.reason is Reason.REVOKED
        assert those.bob.link(those.alice.peer_id) is None
        assert those.answering.statistics().requests_in_flight == 0
        assert those.answering.statistics().transfers_open == 0
