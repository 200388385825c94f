"""Open calls, transfers and streams while a token is renewed, expires, or is revoked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from auth.refusals import AccessRefused, Reason
from auth.revocations import PeerEntry, SerialEntry
from auth.tokens import read_token
from protocols.access import end_refused
from protocols.errors import PotluckError, Unreachable
from protocols.guard import Caller
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import BulkMethod, Transfer
from protocols.rpc.peers import LET_IN_EVERY_SECONDS
from tests.chunks import next_chunk
from tests.protocols.admitted import FOREVER_MS, Admission
from tests.protocols.pair import DOUBLE, PROTOCOL, SLEEP, Number, Pair, Text, between_two

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, hashed=True
)
LIFE_SECONDS = 10


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def sleep(_caller: Caller, request: Number) -> Number:
    await trio.sleep(request.value)
    return request


class Counting:
    """Takes uploads, and keeps how each of them ended here."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def take(
        self, _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
    ) -> None:
        try:
            await transfer.accept(Number(0))
            while await next_chunk(transfer) is not None:
                pass
            await transfer.finish(Number(transfer.bytes_received))
        except PotluckError as error:
            self.ends.append(type(error).__name__)
            raise
        except trio.Cancelled:
            self.ends.append("cancelled")
            raise
        self.ends.append("finished")


async def long_upload(pair: Pair, seconds: int) -> None:
    """A transfer that takes so long."""
    async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
        for _ in range(seconds):
            await transfer.send_chunk(b"abc")
            await trio.sleep(1)
        assert await transfer.finish(Number(0)) == Number(3 * seconds)


def give_short_tokens(admission: Admission, pair: Pair, *names: str) -> None:
    for name in names:
        network = pair.alice if name == "alice" else pair.bob
        admission.renew(network, name, life_ms=1000 * LIFE_SECONDS)


# Renewed


@pytest.mark.slow
def test_a_token_is_renewed_while_a_hundred_calls_run() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, sleep)
        give_short_tokens(admission, pair, "alice", "bob")
        answered = 0

        async def keep_calling(number: int) -> None:
            nonlocal answered
            await trio.sleep(number / 100)
            for _ in range(3 * LIFE_SECONDS):
                await pair.asking.call(pair.bob_id, SLEEP, Number(1), timeout=5)
                answered += 1

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(keep_calling, number)
            for _ in range(10 * LIFE_SECONDS):
                await trio.sleep(LIFE_SECONDS * 2 / 3)
                give_short_tokens(admission, pair, "alice", "bob")
                if len(nursery.child_tasks) == 0:
                    break
        assert answered == 100 * 3 * LIFE_SECONDS
        for access in admission.accesses.values():
            assert not access.refused_requests
            assert not access.refused_answers

    between_two(scenario, guards=admission.pair)


def test_a_transfer_outlives_many_tokens_if_they_are_renewed() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        counting = Counting()
        pair.answering.serve_bulk(UPLOAD, counting.take)
        give_short_tokens(admission, pair, "alice", "bob")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_upload, pair, 5 * LIFE_SECONDS)
            while len(nursery.child_tasks):
                await trio.sleep(LIFE_SECONDS * 2 / 3)
                give_short_tokens(admission, pair, "alice", "bob")
        assert counting.ends == ["finished"]

    between_two(scenario, guards=admission.pair)


def test_a_token_of_another_key_is_not_taken_for_ones_own() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        with pytest.raises(AccessRefused) as refused:
            admission.of(pair.alice).token = admission.of(pair.bob).token
        assert refused.value.reason is Reason.NOT_THE_PEER
        assert admission.of(pair.alice).token is not None, "and the former one stays"

    between_two(scenario, guards=admission.pair)


# Expired


@pytest.mark.parametrize("who", ["alice", "bob"])
def test_a_transfer_whose_token_ran_out_fails_at_its_closing(who: str) -> None:
    """Fault F14. A transfer that has begun may go on, but it cannot finish without a token."""
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        counting = Counting()
        pair.answering.serve_bulk(UPLOAD, counting.take)
        give_short_tokens(admission, pair, who)
        expected = NotAllowed if who == "alice" else AnswerNotAllowed
        with pytest.raises(expected) as refused:
            await long_upload(pair, LIFE_SECONDS + 5)
        assert refused.value.reason is Reason.TOKEN_EXPIRED
        assert refused.value.by_peer == (who == "alice")
        assert counting.ends == (["NotAllowed"] if who == "alice" else ["finished"])
        assert pair.asking.statistics().misbehaviours == 0
        assert pair.answering.statistics().misbehaviours == 0

    between_two(scenario, guards=admission.pair)


def test_a_transfer_whose_token_was_renewed_just_in_time_is_whole() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        counting = Counting()
        pair.answering.serve_bulk(UPLOAD, counting.take)
        give_short_tokens(admission, pair, "alice")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_upload, pair, LIFE_SECONDS + 5)
            await trio.sleep(LIFE_SECONDS + 3)  # long expired, and not asked for until the closing
            admission.renew(pair.alice, "alice")
        assert counting.ends == ["finished"]

    between_two(scenario, guards=admission.pair)


def test_a_call_that_was_accepted_is_answered_though_its_askers_token_runs_out() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, sleep)
        give_short_tokens(admission, pair, "alice")
        await pair.asking.call(pair.bob_id, SLEEP, Number(LIFE_SECONDS + 5), timeout=60)
        with pytest.raises(NotAllowed, match="this node itself") as refused:
            await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=60)
        assert refused.value.reason is Reason.TOKEN_EXPIRED

    between_two(scenario, guards=admission.pair)


def test_an_answer_whose_senders_token_ran_out_meanwhile_is_not_believed() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, sleep)
        give_short_tokens(admission, pair, "bob")
        with pytest.raises(AnswerNotAllowed) as refused:
            await pair.asking.call(pair.bob_id, SLEEP, Number(LIFE_SECONDS + 5), timeout=60)
        assert refused.value.reason is Reason.TOKEN_EXPIRED

    between_two(scenario, guards=admission.pair)


def test_tokens_count_for_as_long_as_the_run_grants_beyond_their_life() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        give_short_tokens(admission, pair, "alice", "bob")
        for access in admission.accesses.values():
            access.grace_ms = 60_000
        await trio.sleep(LIFE_SECONDS + 50)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        await trio.sleep(10)
        with pytest.raises(NotAllowed) as refused:
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        assert refused.value.reason is Reason.TOKEN_EXPIRED

    between_two(scenario, guards=admission.pair)


# Revoked


def by_name(admission: Admission, pair: Pair) -> bytes:
    return admission.authority.revoke("alice", at_ms=admission.of(pair.bob).clock_ms() + 1)


def by_peer(admission: Admission, pair: Pair) -> bytes:
    at_ms = admission.of(pair.bob).clock_ms() + 1
    entry = PeerEntry(pair.alice.identity.public_key, at_ms, FOREVER_MS)
    return admission.authority.revoke(at_ms=at_ms, entries=(entry,))


def by_serial(admission: Admission, pair: Pair) -> bytes:
    token = admission.of(pair.alice).token
    assert token is not None
    at_ms = admission.of(pair.bob).clock_ms() + 1
    entry = SerialEntry(read_token(token).serial, at_ms, FOREVER_MS)
    return admission.authority.revoke(at_ms=at_ms, entries=(entry,))


def by_key(admission: Admission, pair: Pair) -> bytes:
    """Bob has a token of a new key, and the old one is withdrawn."""
    old = admission.authority.key.key_id
    admission.authority.rotate()
    admission.renew(pair.bob, "bob")
    for access in admission.accesses.values():
        access.keyring.add(admission.authority.records)
    at_ms = admission.of(pair.bob).clock_ms() + 1
    return admission.authority.revoke(at_ms=at_ms, withdrawn=(old,))


Revoke = Callable[[Admission, Pair], bytes]
WAYS_TO_REVOKE = pytest.mark.parametrize("revoke", [by_name, by_peer, by_serial, by_key])


@WAYS_TO_REVOKE
def test_everything_that_is_open_with_a_revoked_party_ends_at_once_with_the_reason(
    revoke: Revoke,
) -> None:
    """Alice is revoked, and Bob has heard of it."""
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        counting = Counting()
        pair.answering.serve(SLEEP, sleep)
        pair.answering.serve_bulk(UPLOAD, counting.take)
        pair.asking.serve(SLEEP, sleep)
        alices_errors: list[PotluckError] = []
        bobs_errors: list[tuple[float, PotluckError]] = []

        async def alice(ask: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(NotAllowed) as refused:
                await ask()
            alices_errors.append(refused.value)

        async def bob_calls() -> None:
            try:
                await pair.answering.call(pair.alice.peer_id, SLEEP, Number(60), timeout=90)
            except PotluckError as error:
                bobs_errors.append((trio.current_time(), error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                alice, lambda: pair.asking.call(pair.bob_id, SLEEP, Number(60), timeout=90)
            )
            nursery.start_soon(alice, lambda: long_upload(pair, 60))
            nursery.start_soon(bob_calls)
            await trio.sleep(5)
            bob = admission.of(pair.bob)
            listed = revoke(admission, pair)
            assert bob.revocations.accept(listed, bob.keyring)
            heard_at = trio.current_time()
            assert await end_refused(pair.answering, bob) == (pair.alice.peer_id,)
            assert trio.current_time() - heard_at <= 1.0
            assert pair.answering.statistics().requests_in_flight == 0
            assert pair.answering.statistics().transfers_open == 0
        assert counting.ends == ["cancelled"]
        [(when, bobs_error)] = bobs_errors
        assert when == heard_at
        reason = Reason.UNKNOWN_AUTH_KEY if revoke is by_key else Reason.REVOKED
        for error in (*alices_errors, bobs_error):
            assert isinstance(error, NotAllowed)
            assert error.reason is reason
            assert "alice" in error.what
        assert len(alices_errors) == 2
        assert await end_refused(pair.answering, bob) == (), "once"

    between_two(scenario, guards=admission.pair)


@WAYS_TO_REVOKE
def test_a_revoked_party_is_refused_and_let_in_again_with_a_new_token(revoke: Revoke) -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.asking.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        bob = admission.of(pair.bob)
        bob.revocations.accept(revoke(admission, pair), bob.keyring)
        for peer in await end_refused(pair.answering, bob):
            await pair.bob.disconnect(peer)
        began = trio.current_time()
        reasons = set()
        while trio.current_time() < began + 3 * LET_IN_EVERY_SECONDS:
            with pytest.raises((NotAllowed, Unreachable)) as refused:
                await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
            reasons.add(getattr(refused.value, "reason", None))
            with pytest.raises(NotAllowed):
                await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(4), timeout=5)
            await trio.sleep(1)
        reason = Reason.UNKNOWN_AUTH_KEY if revoke is by_key else Reason.REVOKED
        assert reasons == {None, reason}, "mostly reset, and now and then told why"
        assert pair.answering.shut_out(pair.alice.peer_id) is not None
        # a moderator allows her again
        admission.renew(pair.alice, "alice")
        with trio.fail_after(2 * LET_IN_EVERY_SECONDS):
            while True:
                try:
                    await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
                    break
                except Unreachable:
                    await trio.sleep(1)
        assert pair.answering.shut_out(pair.alice.peer_id) is None
        await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(4), timeout=5)

    between_two(scenario, guards=admission.pair)


@pytest.mark.parametrize("who", ["alice", "bob"])
def test_a_node_that_has_ended_nothing_yet_still_believes_no_message_of_a_revoked_party(
    who: str,
) -> None:
    """The list has come, and the ending has not."""
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        counting = Counting()
        pair.answering.serve(SLEEP, sleep)
        pair.answering.serve_bulk(UPLOAD, counting.take)
        judge = admission.of(pair.bob if who == "alice" else pair.alice)
        errors: list[NotAllowed] = []

        async def refused(ask: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(NotAllowed) as met:
                await ask()
            errors.append(met.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, lambda: long_upload(pair, 10))
            if who == "bob":
                nursery.start_soon(
                    refused, lambda: pair.asking.call(pair.bob_id, SLEEP, Number(10), timeout=20)
                )
            await trio.sleep(5)
            listed = admission.authority.revoke(who, at_ms=judge.clock_ms() + 1)
            judge.revocations.accept(listed, judge.keyring)
        assert [error.reason for error in errors] == [Reason.REVOKED] * len(errors)
        with pytest.raises(NotAllowed) as last:
            await pair.asking.call(pair.bob_id, SLEEP, Number(0), timeout=5)
        assert last.value.reason is Reason.REVOKED

    between_two(scenario, guards=admission.pair)


def test_nobody_else_is_ended() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, sleep)

        async def call() -> None:
            await pair.asking.call(pair.bob_id, SLEEP, Number(10), timeout=20)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await trio.sleep(5)
            bob = admission.of(pair.bob)
            listed = admission.authority.revoke("somebody", at_ms=bob.clock_ms() + 1)
            assert bob.revocations.accept(listed, bob.keyring)
            assert await end_refused(pair.answering, bob) == ()

    between_two(scenario, guards=admission.pair)
