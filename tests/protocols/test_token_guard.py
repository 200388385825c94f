"""The token guard over whole calls and transfers: who may ask and answer, and what is told."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio

from auth.keys import SigningKey
from auth.refusals import Reason
from auth.roles import Role
from auth.tokens import Token
from protocols.errors import Busy, HandlerFailed, MalformedMessage, ProtocolNotServed, Refused
from protocols.guard import Caller, Exchange, Part
from protocols.network import Stream
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import BulkMethod, Method, Rpc, Transfer, decode, encode
from protocols.rpc.frames import ERROR, message_frame, split_payload
from protocols.rpc.messages import ErrorBody, ErrorHead
from tests.chunks import next_chunk
from tests.protocols.admitted import (
    HOUR_MS,
    Admission,
    Authority,
    Careless,
    seed,
)
from tests.protocols.pair import DOUBLE, PROTOCOL, Number, Pair, Text, between_two

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, hashed=True
)
TRAIN = Method(PROTOCOL, "train", Number, Number, training=True)
TRAIN_MUCH: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "train-much", Text, Number, Number, Number, training=True
)
UNKNOWN = Method(PROTOCOL, "unknown", Number, Number)


async def double(_caller: Caller, request: Number) -> Number:
    if request.value == 0:
        raise MalformedMessage("Zero is not to be doubled.")
    return Number(2 * request.value)


async def count(
    _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
) -> None:
    await transfer.accept(Number(0))
    while await next_chunk(transfer) is not None:
        pass
    await transfer.finish(Number(transfer.bytes_received))


def serve_all(rpc: Rpc) -> None:
    rpc.serve(DOUBLE, double)
    rpc.serve(TRAIN, double)
    rpc.serve_bulk(UPLOAD, count)
    rpc.serve_bulk(TRAIN_MUCH, count)


async def call(pair: Pair) -> None:
    assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)


async def upload(pair: Pair) -> None:
    async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
        await transfer.send_chunk(b"abc")
        assert await transfer.finish(Number(0)) == Number(3)


async def train(pair: Pair) -> None:
    await pair.asking.call(pair.bob_id, TRAIN, Number(4), timeout=5)


async def train_much(pair: Pair) -> None:
    async with pair.asking.open_bulk(pair.bob_id, TRAIN_MUCH, Text(), timeout=5) as transfer:
        await transfer.finish(Number(0))


WAYS_TO_ASK = pytest.mark.parametrize("ask", [call, upload])

Ask = Callable[[Pair], Awaitable[None]]


@dataclass
class Spoiled:
    """One side's access, to be made worse, and what the other side judges it by."""

    authority: Authority
    mine: Careless
    theirs: object


def no_token(it: Spoiled) -> None:
    it.mine.token = None


def garbage(it: Spoiled) -> None:
    it.mine.token = b"garbage"


def changed(it: Spoiled) -> None:
    it.mine.shown = it.mine.shown[:-1] + bytes([it.mine.shown[-1] ^ 1])


def expired(it: Spoiled) -> None:
    now_ms = it.mine.clock_ms()
    it.mine.token = it.authority.token(it.mine.key.public_key, now_ms - HOUR_MS)


def of_the_future(it: Spoiled) -> None:
    now_ms = it.mine.clock_ms()
    it.mine.token = it.authority.token(it.mine.key.public_key, now_ms + 60_000)


def of_another_server(it: Spoiled) -> None:
    other = Authority(key=SigningKey(seed("another server")))
    it.mine.token = other.token(it.mine.key.public_key, it.mine.clock_ms())


def of_another_run(it: Spoiled) -> None:
    it.mine.token = it.authority.token(it.mine.key.public_key, it.mine.clock_ms(), run="another")


def revoked(it: Spoiled) -> None:
    now_ms = it.mine.clock_ms()
    listed = it.authority.revoke("alice", "bob", at_ms=now_ms + 1)
    assert isinstance(it.theirs, Careless)
    it.theirs.revocations.accept(listed, it.theirs.keyring)


def of_another_peer(it: Spoiled) -> None:
    it.mine.token = it.authority.token(
        SigningKey(seed("somebody else")).public_key, it.mine.clock_ms()
    )


def signed_by_another(it: Spoiled) -> None:
    mine, other = it.mine.key, SigningKey(seed("somebody else"))

    class Mixed(SigningKey):
        def sign(self, domain: bytes, message: bytes) -> bytes:
            return other.sign(domain, message)

    it.mine.key = Mixed(mine.seed)


SPOILERS = {
    no_token: Reason.TOKEN_MISSING,
    garbage: Reason.MALFORMED,
    changed: Reason.TOKEN_SIGNATURE,
    expired: Reason.TOKEN_EXPIRED,
    of_the_future: Reason.TOKEN_NOT_YET_VALID,
    of_another_server: Reason.UNKNOWN_AUTH_KEY,
    of_another_run: Reason.WRONG_RUN,
    revoked: Reason.REVOKED,
    of_another_peer: Reason.NOT_THE_PEER,
    signed_by_another: Reason.SIGNATURE,
}
REFUSALS = pytest.mark.parametrize(
    ("spoil", "reason"), SPOILERS.items(), ids=[spoil.__name__ for spoil in SPOILERS]
)


def test_admitted_nodes_call_and_transfer_and_are_known_by_name() -> None:
    admission = Admission(alice=(Role.MODERATOR, Role.VOLUNTEER))
    callers: list[Token] = []

    async def remember(caller: Caller, request: Number) -> Number:
        callers.append(caller.credentials)
        return await double(caller, request)

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, remember)
        pair.answering.serve_bulk(UPLOAD, count)
        await call(pair)
        await upload(pair)
        with pytest.raises(MalformedMessage, match="Zero"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(0), timeout=5)
        assert callers[0].username == "alice"
        assert callers[0].roles == (Role.MODERATOR, Role.VOLUNTEER)
        assert pair.asking.statistics().misbehaviours == 0
        assert pair.answering.statistics().misbehaviours == 0
        shown = admission.of(pair.alice).shown_by(pair.bob_id)
        assert shown is not None
        assert shown.username == "bob"

    between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
@REFUSALS
def test_a_caller_without_a_valid_token_is_told_the_reason(
    spoil: Callable[[Spoiled], None], reason: Reason, ask: Ask
) -> None:
    admission = Admission("alice", "bob")

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        alice, bob = admission.of(pair.alice), admission.of(pair.bob)
        assert isinstance(alice, Careless)
        spoil(Spoiled(admission.authority, alice, bob))
        with pytest.raises(NotAllowed, match="Your request was refused") as refused:
            await ask(pair)
        assert type(refused.value) is NotAllowed
        assert (refused.value.reason, refused.value.by_peer) == (reason, True)
        assert refused.value.why
        assert refused.value.advice
        assert bob.refused_requests == {reason: 1}
        statistics = pair.answering.statistics()
        assert statistics.requests_served == statistics.transfers_served == 0
        assert statistics.misbehaviours == (reason is Reason.MALFORMED)

    between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
@REFUSALS
def test_an_answer_without_a_valid_token_is_not_believed_and_its_sender_is_logged(
    spoil: Callable[[Spoiled], None],
    reason: Reason,
    ask: Ask,
    caplog: pytest.LogCaptureFixture,
) -> None:
    admission = Admission("alice", "bob")

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        alice, bob = admission.of(pair.alice), admission.of(pair.bob)
        assert isinstance(bob, Careless)
        spoil(Spoiled(admission.authority, bob, alice))
        with caplog.at_level(logging.WARNING, "potluck.access"):
            for _ in range(1 if reason is Reason.MALFORMED else 3):
                with pytest.raises(AnswerNotAllowed, match="does not prove") as refused:
                    await ask(pair)
        assert (refused.value.reason, refused.value.by_peer) == (reason, False)
        assert pair.bob_id in refused.value.what
        assert alice.refused_answers[reason] >= 1
        said = [record.getMessage() for record in caplog.records if "proving" in record.msg]
        assert len(said) == 1, "once, however often it happens"
        assert pair.bob_id in said[0]
        assert pair.asking.statistics().misbehaviours == (reason is Reason.MALFORMED)

    between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
@REFUSALS
def test_an_error_without_a_valid_token_is_reported_and_not_believed(
    spoil: Callable[[Spoiled], None], reason: Reason, ask: Ask
) -> None:
    admission = Admission("alice", "bob")

    async def refuse_call(_caller: Caller, _request: Number) -> Number:
        raise Busy("Come back later.")

    async def refuse_upload(
        _caller: Caller, _transfer: Transfer[Number, Number, Number], _opening: Text
    ) -> None:
        raise Busy("Come back later.")

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, refuse_call)
        pair.answering.serve_bulk(UPLOAD, refuse_upload)
        with pytest.raises(Busy):
            await ask(pair)
        alice, bob = admission.of(pair.alice), admission.of(pair.bob)
        assert isinstance(bob, Careless)
        spoil(Spoiled(admission.authority, bob, alice))
        with pytest.raises(AnswerNotAllowed) as refused:
            await ask(pair)
        assert refused.value.reason is reason
        assert not refused.value.surely_not_executed, "that, too, it might only claim"
        if reason is not Reason.MALFORMED:
            assert "Unproven, it said: Come back later." in refused.value.what
            assert isinstance(refused.value.claimed, Busy)

    between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (no_token, Reason.TOKEN_MISSING),
        (expired, Reason.TOKEN_EXPIRED),
        (revoked, Reason.REVOKED),
    ],
)
def test_a_node_that_knows_it_may_not_take_part_asks_nobody(
    spoil: Callable[[Spoiled], None], reason: Reason, ask: Ask
) -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        alice = admission.of(pair.alice)
        if spoil is no_token:
            alice.token = None
        elif spoil is expired:
            key, then_ms = alice.key.public_key, alice.clock_ms() - HOUR_MS
            alice.token = admission.authority.token(key, then_ms)
        else:
            listed = admission.authority.revoke("alice", at_ms=alice.clock_ms() + 1)
            alice.revocations.accept(listed, alice.keyring)
        with pytest.raises(NotAllowed, match="this node itself") as refused:
            await ask(pair)
        assert (refused.value.reason, refused.value.by_peer) == (reason, False)
        assert refused.value.surely_not_executed
        assert not admission.of(pair.bob).refused_requests
        # and what others ask of it, it refuses before it does anything
        serve_all(pair.asking)
        with pytest.raises(Refused, match="may not take part itself") as refused_there:
            await pair.answering.call(pair.alice.peer_id, DOUBLE, Number(4), timeout=5)
        assert pair.asking.statistics().requests_served == 0
        assert not getattr(refused_there.value, "by_peer", False), "Bob himself is not refused"

    between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
def test_a_clock_ten_minutes_off_is_refused_in_words_that_say_by_how_much(ask: Ask) -> None:
    for skew in (600.0, -600.0):
        admission = Admission()

        async def scenario(
            pair: Pair, skew: float = skew, admission: Admission = admission
        ) -> None:
            serve_all(pair.answering)
            await ask(pair)
            pair.world.set_clock_skew(pair.alice, skew)
            with pytest.raises(NotAllowed, match="10 minutes") as refused:
                await ask(pair)
            # to a clock that is behind, everybody's fresh token is from the future as well
            expected = Reason.CLOCK if skew > 0 else Reason.TOKEN_NOT_YET_VALID
            assert refused.value.reason is expected
            assert f"10 minutes {'ahead of' if skew > 0 else 'behind'}" in refused.value.what
            pair.world.set_clock_skew(pair.alice, 0.0)
            await ask(pair)
            pair.world.set_clock_skew(pair.bob, skew)
            with pytest.raises(NotAllowed, match="10 minutes") as refused:
                await ask(pair)
            assert (refused.value.reason, refused.value.by_peer) == (Reason.CLOCK, True)
            assert f"10 minutes {'behind' if skew > 0 else 'ahead of'}" in refused.value.what
            pair.world.set_clock_skew(pair.bob, 0.0)
            await ask(pair)
            assert admission.of(pair.bob).refused_requests == {Reason.CLOCK: 2}

        between_two(scenario, guards=admission.pair)


@WAYS_TO_ASK
def test_a_token_node_and_an_open_node_tell_each_other_what_is_wrong(ask: Ask) -> None:
    admission = Admission()

    async def open_asks(pair: Pair) -> None:
        serve_all(pair.answering)
        with pytest.raises(NotAllowed, match="without an access token") as refused:
            await ask(pair)
        assert refused.value.reason is Reason.TOKEN_MISSING
        assert "potluck login" in refused.value.advice

    between_two(open_asks, guards=(lambda _: None, admission.pair[1]))  # type: ignore[arg-type, return-value]

    async def open_answers(pair: Pair) -> None:
        serve_all(pair.answering)
        with pytest.raises(AnswerNotAllowed, match="does not prove") as refused:
            await ask(pair)
        assert refused.value.reason is Reason.TOKEN_MISSING
        assert "open run" in refused.value.why
        with pytest.raises(AnswerNotAllowed, match="Unproven, it said: This node does not serve"):
            await pair.asking.call(pair.bob_id, UNKNOWN, Number(4), timeout=5)

    between_two(open_answers, guards=(admission.pair[0], lambda _: None))  # type: ignore[arg-type, return-value]


def test_only_those_who_may_ask_learn_what_is_served() -> None:
    admission = Admission("alice")

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        with pytest.raises(ProtocolNotServed):
            await pair.asking.call(pair.bob_id, UNKNOWN, Number(4), timeout=5)
        admission.of(pair.alice).token = None
        with pytest.raises(NotAllowed) as refused:
            await pair.asking.call(pair.bob_id, UNKNOWN, Number(4), timeout=5)
        assert refused.value.reason is Reason.TOKEN_MISSING

    between_two(scenario, guards=admission.pair)


@pytest.mark.parametrize("ask", [train, train_much])
@pytest.mark.parametrize(
    "roles", [(Role.MONITOR,), (Role.MODERATOR,), (Role.MODERATOR, Role.MONITOR)]
)
def test_a_monitor_reads_and_does_not_train_on_either_side(
    ask: Ask, roles: tuple[Role, ...]
) -> None:
    asks = Admission(alice=roles)

    async def monitor_asks(pair: Pair) -> None:
        serve_all(pair.answering)
        await call(pair)
        await upload(pair)
        with pytest.raises(NotAllowed, match="role") as refused:
            await ask(pair)
        assert (refused.value.reason, refused.value.by_peer) == (Reason.ROLE, True)

    between_two(monitor_asks, guards=asks.pair)
    answers = Admission(bob=roles)

    async def monitor_answers(pair: Pair) -> None:
        serve_all(pair.answering)
        await call(pair)
        with pytest.raises(AnswerNotAllowed, match="role") as refused:
            await ask(pair)
        assert refused.value.reason is Reason.ROLE

    between_two(monitor_answers, guards=answers.pair)


@pytest.mark.parametrize("ask", [train, train_much])
@pytest.mark.parametrize("roles", [(Role.BACKBONE,), (Role.MONITOR, Role.VOLUNTEER)])
def test_a_volunteer_may_use_the_methods_of_a_monitor(ask: Ask, roles: tuple[Role, ...]) -> None:
    admission = Admission(alice=roles, bob=roles)

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        await ask(pair)

    between_two(scenario, guards=admission.pair)


def test_a_refusal_that_a_handler_met_elsewhere_does_not_seem_to_be_its_own() -> None:
    """Bob asks Alice while he answers her; what she says to him is not what he says to her."""
    admission = Admission("alice")

    async def scenario(pair: Pair) -> None:
        async def ask_back(caller: Caller, request: Number) -> Number:
            return await pair.answering.call(caller.peer, TRAIN, request, timeout=2)

        async def no(_caller: Caller, _request: Number) -> Number:
            raise NotAllowed("Not you.", reason=Reason.ROLE)

        pair.answering.serve(DOUBLE, ask_back)
        pair.asking.serve(TRAIN, no)
        with pytest.raises(Exception, match="Not you") as met:
            await call(pair)
        assert not isinstance(met.value, Refused | HandlerFailed)

    between_two(scenario, guards=admission.pair)


def test_an_unproven_error_about_the_whole_stream_ends_it_and_is_not_believed() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        async def forge(stream: Stream) -> None:
            await stream.receive_some(65_536)
            body = encode(ErrorBody("not-allowed/revoked", "You are revoked.", "", "Give up."))
            await stream.send_all(message_frame(ERROR, encode(ErrorHead(0)), body))
            await trio.sleep_forever()

        pair.bob.serve(PROTOCOL, forge)
        with pytest.raises(AnswerNotAllowed, match="Unproven, it said: You are") as refused:
            await call(pair)
        assert refused.value.reason is Reason.TOKEN_MISSING, "and not that Alice is revoked"
        assert "Give up" not in str(refused.value)

    between_two(scenario, guards=admission.pair)


def test_a_violation_is_told_in_an_error_that_is_proven() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        await call(pair)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        await stream.send_all(b"\x00\x00\x00\x04\x63oops")
        frame = b""
        while more := await stream.receive_some(65_536):
            frame += more
        head, body = split_payload(ERROR, frame[5:])
        envelope = decode(ErrorHead, head).envelope
        told = decode(ErrorBody, body)
        assert told.code == "malformed-message"
        guard = admission.admit(pair.alice, "alice")
        guard.open(Exchange(pair.bob_id, PROTOCOL, ""), Part.ERROR, body, envelope)

    between_two(scenario, guards=admission.pair)


def test_a_rotated_auth_key_is_accepted_by_nodes_that_know_it() -> None:
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        serve_all(pair.answering)
        alice, bob = admission.of(pair.alice), admission.of(pair.bob)
        await call(pair)
        admission.authority.rotate()
        admission.renew(pair.alice, "alice")
        with pytest.raises(NotAllowed) as refused:
            await call(pair)
        assert refused.value.reason is Reason.UNKNOWN_AUTH_KEY
        bob.keyring.add(admission.authority.records)
        await call(pair)  # Bob still shows a token of the old key: both count
        admission.renew(pair.bob, "bob")
        with pytest.raises(AnswerNotAllowed) as unproven:
            await call(pair)
        assert unproven.value.reason is Reason.UNKNOWN_AUTH_KEY
        alice.keyring = admission.authority.keyring()
        await call(pair)
        await upload(pair)

    between_two(scenario, guards=admission.pair)
