"""Peers without a token can make a node do little, and its members notice nothing of it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio

from auth.refusals import Reason
from auth.roles import Role
from protocols.access import end_refused, hang_up_on_strangers
from protocols.access.access import LOOK_SECONDS, MOST_STRANGERS, STRANGER_SECONDS
from protocols.errors import Unreachable
from protocols.guard import Caller
from protocols.identity import PeerId
from protocols.network import Stream
from protocols.not_allowed import NotAllowed
from protocols.rpc import BulkMethod, Method, Transfer, encode
from protocols.rpc.frames import OPEN, REQUEST, message_frame
from protocols.rpc.messages import OpenHead, RequestHead
from protocols.rpc.peers import (
    KNOCK_EVERY_SECONDS,
    LONGEST_PAUSE_SECONDS,
    MOST_PEERS,
    REFUSED_AT_ONCE,
    REFUSED_PER_SECOND,
    RefusalPace,
)
from protocols.rpc.state import RpcLimits
from protocols.testing.world import SimulatedNetwork
from tests.protocols.admitted import Admission
from tests.protocols.pair import BLOB, DOUBLE, PROTOCOL, SLEEP, Blob, Number, Pair, between_two

UPLOAD: BulkMethod[Number, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Number, Number, Number, Number
)
TRAIN = Method(PROTOCOL, "train", Number, Number, training=True)
BODY = encode(Number(4))


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def echo_blob(_caller: Caller, request: Blob) -> Blob:
    return request


async def sleep(_caller: Caller, request: Number) -> Number:
    await trio.sleep(request.value)
    return request


async def nobody_gets_here(
    _caller: Caller, _transfer: Transfer[Number, Number, Number], _opening: Number
) -> None:
    raise AssertionError


def a_request(call_id: int) -> bytes:
    return message_frame(REQUEST, encode(RequestHead(call_id, "double", 60_000)), BODY)


def add_mallory(pair: Pair, name: str = "mallory") -> SimulatedNetwork:
    mallory = pair.world.add_node(name)
    pair.world.introduce(mallory, pair.bob)
    return mallory


async def send_and_read_everything(stream: Stream, data: bytes) -> None:
    async def read() -> None:
        while await stream.receive_some(65_536):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await stream.send_all(data)


# How often they are refused


def test_refusals_have_a_burst_and_then_a_rate() -> None:
    patience, peer = RefusalPace(), PeerId("peer")
    pauses = [patience.refused(peer, 100.0) for _ in range(REFUSED_AT_ONCE + 1)]
    assert not any(pauses[:-1])
    assert pauses[-1] == pytest.approx(1 / REFUSED_PER_SECOND)
    now, refused = 100.0 + pauses[-1], 0
    while now < 110.0:
        now += patience.refused(peer, now)
        refused += 1
    assert refused == pytest.approx(10 * REFUSED_PER_SECOND, abs=2)


def test_no_pause_is_longer_than_ten_seconds_and_all_is_forgiven_soon() -> None:
    patience, peer = RefusalPace(), PeerId("peer")
    for _ in range(10_000):
        assert patience.refused(peer, 0.0) <= LONGEST_PAUSE_SECONDS
    later = REFUSED_AT_ONCE / REFUSED_PER_SECOND + LONGEST_PAUSE_SECONDS
    assert patience.refused(peer, later) == 0.0


def test_the_memory_of_refused_peers_is_bounded() -> None:
    patience = RefusalPace()
    for number in range(MOST_PEERS + 10):
        patience.refused(PeerId(str(number)), float(number))
    assert len(patience) == MOST_PEERS


def test_a_flood_of_requests_without_a_token_is_read_slowly_and_members_are_served() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        mallory = add_mallory(pair)
        bob = admission.of(pair.bob)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                stream = await mallory.open(pair.bob_id, PROTOCOL)
                flood = b"".join(a_request(number) for number in range(1, 5000))
                nursery.start_soon(send_and_read_everything, stream, flood)
            await trio.sleep(10)
            for _ in range(10):
                await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=1)
            refused = bob.refused_requests[Reason.TOKEN_MISSING]
            assert REFUSED_AT_ONCE < refused < REFUSED_AT_ONCE + 20 * REFUSED_PER_SECOND
            nursery.cancel_scope.cancel()

    between_two(scenario, guards=admission.pair)


@pytest.mark.slow
def test_a_flood_of_openings_without_a_token_is_refused_slowly() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, nobody_gets_here)
        mallory = add_mallory(pair)
        bob = admission.of(pair.bob)
        opening = message_frame(OPEN, encode(OpenHead("upload", 60_000)), BODY)

        async def open_again_and_again() -> None:
            while True:
                stream = await mallory.open(pair.bob_id, PROTOCOL)
                try:
                    await send_and_read_everything(stream, opening)
                except* trio.BrokenResourceError:
                    pass
                stream.reset()

        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(16):
                    nursery.start_soon(open_again_and_again)
        refused = bob.refused_requests[Reason.TOKEN_MISSING]
        assert REFUSED_AT_ONCE < refused < REFUSED_AT_ONCE + 61 * REFUSED_PER_SECOND

    between_two(scenario, guards=admission.pair)


def test_a_node_whose_token_ran_out_in_many_calls_is_told_so_at_once() -> None:
    """A peer that was a member is not slowed down by it."""
    admission = Admission("alice")

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        alice = admission.of(pair.alice)
        good, alice.token = alice.token, None

        async def call() -> None:
            with pytest.raises(NotAllowed):
                await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)

        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(128):
                nursery.start_soon(call)
        alice.token = good
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        assert trio.current_time() - before < 1.0

    between_two(scenario, guards=admission.pair)


# How much they have open


@pytest.mark.parametrize("is_member", [False, True])
def test_a_stranger_has_fewer_streams_than_a_member(is_member: bool) -> None:
    admission = Admission()
    limits = RpcLimits(streams_per_peer=12, streams_per_stranger=4)

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        asking = pair.alice if is_member else add_mallory(pair)
        if is_member:
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        open_streams = 0
        for _ in range(20):
            stream = await asking.open(pair.bob_id, PROTOCOL)
            with trio.move_on_after(1) as still_open:
                try:
                    await stream.send_all(a_request(1)[:8])
                    await stream.receive_some(1)
                except trio.BrokenResourceError:
                    continue
            open_streams += still_open.cancelled_caught
        # of a member's, one carries its calls
        assert open_streams == (limits.streams_per_peer - 1 if is_member else 4)

    between_two(scenario, bobs_limits=limits, guards=admission.pair)


async def begin_messages(
    asking: SimulatedNetwork, pair: Pair, kind: int, count: int
) -> list[Stream]:
    """Streams on which most of a large message has come, and the rest will not."""
    begun = [await asking.open(pair.bob_id, PROTOCOL) for _ in range(count)]
    for stream in begun:
        frame = message_frame(kind, encode(RequestHead(1, "blob", 60_000)), bytes(60_000))
        await stream.send_all(frame[:50_000])
    await pair.settle()
    return begun


async def are_open(streams: list[Stream]) -> list[bool]:
    found = []
    for stream in streams:
        with trio.move_on_after(0.01) as silent, suppress(trio.BrokenResourceError):
            await stream.receive_some(1)
        found.append(silent.cancelled_caught)
    return found


@pytest.mark.parametrize("kind", [REQUEST, OPEN])
def test_unfinished_messages_of_strangers_make_way_for_those_of_members(kind: int) -> None:
    admission = Admission()
    limits = RpcLimits(unfinished_bytes_in_total=220_000)

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve(BLOB, echo_blob)
        pair.answering.serve_bulk(UPLOAD, nobody_gets_here)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        strangers = await begin_messages(add_mallory(pair), pair, kind, 1)
        assert await are_open(strangers) == [True]
        members = await begin_messages(pair.alice, pair, kind, 3)
        assert await are_open(members) == [True] * 3
        strangers += await begin_messages(add_mallory(pair, "other"), pair, kind, 1)
        assert (await are_open(strangers)).count(True) == 1
        strangers += await begin_messages(add_mallory(pair, "third"), pair, kind, 2)
        assert await are_open(members) == [True] * 3
        assert (await are_open(strangers)).count(True) <= 1

    between_two(scenario, bobs_limits=limits, guards=admission.pair)


def test_of_peers_alike_that_with_most_in_unfinished_messages_loses_them() -> None:
    limits = RpcLimits(unfinished_bytes_in_total=220_000)

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(BLOB, echo_blob)
        few = await begin_messages(pair.alice, pair, REQUEST, 1)
        many = await begin_messages(add_mallory(pair), pair, REQUEST, 4)
        assert await are_open(few) == [True]
        assert await are_open(many) == [False] * 4
        again = await begin_messages(add_mallory(pair, "other"), pair, REQUEST, 3)
        assert await are_open([*few, *again]) == [True] * 4, "what was lost no longer counts"

    between_two(scenario, bobs_limits=limits)


def test_a_stranger_that_only_keeps_a_link_is_hung_up_on_and_a_member_is_not() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        mallory = add_mallory(pair)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                hang_up_on_strangers, pair.bob, pair.answering, admission.of(pair.bob)
            )
            await mallory.connect(pair.bob_id)
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
            await trio.sleep(STRANGER_SECONDS - 2 * LOOK_SECONDS)
            assert pair.bob.link(mallory.peer_id) is not None
            await trio.sleep(4 * LOOK_SECONDS)
            assert pair.bob.link(mallory.peer_id) is None
            await trio.sleep(10 * STRANGER_SECONDS)
            assert pair.bob.link(pair.alice.peer_id) is not None
            # her token runs out, and an outage is forgiven; then she is a stranger like any other
            await trio.sleep(3600)
            assert pair.bob.link(pair.alice.peer_id) is not None
            await trio.sleep(3600 + 2 * STRANGER_SECONDS)
            assert pair.bob.link(pair.alice.peer_id) is None
            nursery.cancel_scope.cancel()

    between_two(scenario, guards=admission.pair)


def test_a_peer_that_takes_long_to_answer_is_not_hung_up_on() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(SLEEP, sleep)
        alice = admission.of(pair.alice)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang_up_on_strangers, pair.alice, pair.asking, alice)
            long = 3 * int(STRANGER_SECONDS)
            assert await pair.asking.call(pair.bob_id, SLEEP, Number(long), timeout=2 * long)
            assert alice.is_member(pair.bob_id)
            nursery.cancel_scope.cancel()

    between_two(scenario, guards=admission.pair)


def test_of_very_many_strangers_the_oldest_make_way_at_once() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                hang_up_on_strangers, pair.bob, pair.answering, admission.of(pair.bob)
            )
            oldest = [add_mallory(pair, f"old {number}") for number in range(10)]
            for one in oldest:
                await one.connect(pair.bob_id)
            await trio.sleep(LOOK_SECONDS)
            for number in range(MOST_STRANGERS):
                nursery.start_soon(add_mallory(pair, f"new {number}").connect, pair.bob_id)
            await trio.sleep(2 * LOOK_SECONDS)
            assert len(pair.bob.links()) == MOST_STRANGERS
            assert all(pair.bob.link(one.peer_id) is None for one in oldest)
            nursery.cancel_scope.cancel()

    between_two(scenario, guards=admission.pair)


# Peers that were shut out


def test_knocking_finds_a_readmitted_peer_that_only_answers() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.asking.serve(DOUBLE, double)
        alice = pair.alice.peer_id
        await pair.answering.call(alice, DOUBLE, Number(4), timeout=5)
        bob = admission.of(pair.bob)
        bob.revocations.accept(
            admission.authority.revoke("alice", at_ms=bob.clock_ms() + 1), bob.keyring
        )
        assert await end_refused(pair.answering, bob) == (alice,)
        await pair.bob.disconnect(alice)
        asked = []

        async def call() -> None:
            asked.append(trio.current_time())
            with trio.fail_after(0):  # at once
                await pair.answering.call(alice, DOUBLE, Number(4), timeout=5)

        for _ in range(int(KNOCK_EVERY_SECONDS) - 1):
            with pytest.raises(NotAllowed):
                await call()
            assert pair.bob.link(alice) is None, "no link to somebody who has just been revoked"
            await trio.sleep(1)
        for _ in range(2):  # still revoked: knocked at, once a minute, and not let in
            await trio.sleep(KNOCK_EVERY_SECONDS)
            with pytest.raises(NotAllowed):
                await call()
            await pair.settle()
            await pair.settle()
            assert pair.answering.shut_out(alice) is not None
        admission.renew(pair.alice, "alice")
        await trio.sleep(KNOCK_EVERY_SECONDS)
        with pytest.raises(NotAllowed):
            await call()
        await pair.settle()
        await pair.settle()
        assert pair.answering.shut_out(alice) is None
        assert await pair.answering.call(alice, DOUBLE, Number(4), timeout=5) == Number(8)

    between_two(scenario, guards=admission.pair)


def test_a_monitor_that_was_only_ever_refused_for_its_role_is_ended_when_it_is_revoked() -> None:
    admission = Admission(alice=(Role.MONITOR,))

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(TRAIN, double)
        with pytest.raises(NotAllowed) as refused:
            await pair.asking.call(pair.bob_id, TRAIN, Number(4), timeout=5)
        assert refused.value.reason is Reason.ROLE
        bob = admission.of(pair.bob)
        listed = admission.authority.revoke("alice", at_ms=bob.clock_ms() + 1)
        bob.revocations.accept(listed, bob.keyring)
        assert await end_refused(pair.answering, bob) == (pair.alice.peer_id,)

    between_two(scenario, guards=admission.pair)


def test_a_caller_is_told_of_its_refusal_without_delay() -> None:
    """A refusal is told at once, also when many were told before."""
    admission = Admission("alice")

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        admission.of(pair.alice).token = None
        for _ in range(REFUSED_AT_ONCE + 5):
            with pytest.raises((NotAllowed, Unreachable)):
                await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)

    between_two(scenario, guards=admission.pair)
