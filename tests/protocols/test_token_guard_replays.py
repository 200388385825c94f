"""Overheard messages are useless: again, elsewhere, for another peer, or later."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import trio
from blake3 import blake3

from auth.refusals import Reason
from auth.tokens import CLOCK_TOLERANCE_MS
from protocols.access import TokenGuard
from protocols.guard import Caller, Exchange, Part
from protocols.network import Network, Stream
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import BulkMethod, Transfer, decode, encode, open_rpc
from protocols.rpc.frames import ERROR, OPEN, REQUEST, RESPONSE, message_frame, split_payload
from protocols.rpc.messages import ErrorBody, ErrorHead, OpenHead, RequestHead, ResponseHead
from protocols.testing.world import SimulatedNetwork
from tests.chunks import next_chunk
from tests.protocols.admitted import Admission, clock_of
from tests.protocols.pair import DOUBLE, PROTOCOL, Number, Pair, Text, between_two

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number
)
BODY = encode(Number(4))
N_SECONDS = CLOCK_TOLERANCE_MS / 1000


@dataclass
class Sealed:
    """One message that a node has sent, with its envelope."""

    exchange: Exchange
    part: Part
    content: bytes
    envelope: bytes


class Overheard(TokenGuard):
    """Another peer knows everything that this guard has sealed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.sealed: list[Sealed] = []

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:
        envelope = super().seal(exchange, part, content)
        self.sealed.append(Sealed(exchange, part, content, envelope))
        return envelope


class Eavesdropping(Admission):
    """Everything that anybody seals is overheard."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: dict[str, Overheard] = {}

    def admit(self, network: Network, name: str) -> Overheard:
        access = self.access(network.identity, name, clock_of(network))
        self.accesses[network.peer_id] = access
        guard = self.guards[name] = Overheard(access, network.random)
        return guard

    def last(self, name: str, part: Part) -> bytes:
        return [one.envelope for one in self.guards[name].sealed if one.part is part][-1]


async def double(_caller: Caller, request: Number) -> Number:
    return Number(2 * request.value)


async def count(
    _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text
) -> None:
    await transfer.accept(Number(0))
    while await next_chunk(transfer) is not None:
        pass
    await transfer.finish(Number(0))


async def ask_both_ways(pair: Pair) -> None:
    await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
    async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
        await transfer.finish(Number(0))


async def answer_to(stream: Stream, frame: bytes) -> str:
    """The other side's answer to one frame: "answered", or the code of its error."""
    await stream.send_all(frame)
    header = await exactly(stream, 5)
    payload = await exactly(stream, int.from_bytes(header[:4], "big"))
    head, body = split_payload(header[4], payload)
    stream.reset()
    if header[4] != ERROR:
        return "answered"
    assert decode(ErrorHead, head).envelope, "an error is sealed as well"
    return decode(ErrorBody, body).code


async def exactly(stream: Stream, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await stream.receive_some(length - len(data))
        assert more
        data += more
    return data


async def send_again(network: SimulatedNetwork, pair: Pair, envelope: bytes, part: Part) -> str:
    """Send a request or an opening with an overheard envelope, on a stream of one's own."""
    stream = await network.open(pair.bob_id, PROTOCOL)
    if part is Part.REQUEST:
        return await answer_to(
            stream, message_frame(REQUEST, encode(RequestHead(1, "double", 5000, envelope)), BODY)
        )
    head = encode(OpenHead("upload", 5000, envelope))
    return await answer_to(stream, message_frame(OPEN, head, encode(Text())))


def add_carol(pair: Pair) -> SimulatedNetwork:
    carol = pair.world.add_node("carol")
    pair.world.introduce(carol, pair.alice, pair.bob)
    return carol


BEGINNINGS = pytest.mark.parametrize("part", [Part.REQUEST, Part.OPENING])


@BEGINNINGS
def test_the_same_to_the_same_peer_is_a_replay(part: Part) -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        await ask_both_ways(pair)
        envelope = admission.last("alice", part)
        assert await send_again(pair.alice, pair, envelope, part) == "not-allowed/replay"
        await ask_both_ways(pair)
        assert await send_again(pair.alice, pair, envelope, part) == "not-allowed/replay"

    between_two(scenario, guards=admission.pair)


@BEGINNINGS
def test_a_message_for_another_peer_is_refused(part: Part) -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        carol = add_carol(pair)
        async with open_rpc(carol, admission.admit(carol, "carol")) as carols:
            carols.serve(DOUBLE, double)
            carols.serve_bulk(UPLOAD, count)
            pair.answering.serve(DOUBLE, double)
            pair.answering.serve_bulk(UPLOAD, count)
            await pair.asking.call(carol.peer_id, DOUBLE, Number(4), timeout=5)
            async with pair.asking.open_bulk(carol.peer_id, UPLOAD, Text(), timeout=5) as transfer:
                await transfer.finish(Number(0))
            for_carol = admission.last("alice", part)
            assert (
                await send_again(pair.alice, pair, for_carol, part) == "not-allowed/wrong-recipient"
            )
            # Carol, who has a token of her own and was asked, passes it on
            assert await send_again(carol, pair, for_carol, part) == "not-allowed/wrong-recipient"

    between_two(scenario, guards=admission.pair)


@BEGINNINGS
def test_someone_in_the_middle_with_a_token_of_their_own_cannot_speak_for_another(
    part: Part,
) -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        await ask_both_ways(pair)
        overheard = admission.last("alice", part)
        carol = add_carol(pair)
        admission.admit(carol, "carol")
        assert await send_again(carol, pair, overheard, part) == "not-allowed/not-the-peer"
        # with her own token in place of Alice's, the signature is not hers
        token, *rest = decode(tuple[bytes, bytes, int, bytes, bytes], overheard)
        assert token == admission.of(pair.alice).token
        swapped = encode((admission.of(carol).token, *rest))
        assert await send_again(carol, pair, swapped, part) == "not-allowed/signature"

    between_two(scenario, guards=admission.pair)


@BEGINNINGS
@pytest.mark.parametrize("ahead_seconds", [0.0, 29.0])
def test_a_replay_is_refused_for_as_long_as_its_time_could_pass_and_then_for_its_time(
    part: Part, ahead_seconds: float
) -> None:
    """Sent by a clock that is ahead, a request could pass for nearly 2N."""
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        pair.world.set_clock_skew(pair.alice, ahead_seconds)
        await ask_both_ways(pair)
        began = trio.current_time()
        envelope = admission.last("alice", part)
        answers = []
        lives = ahead_seconds + N_SECONDS
        for seconds in (1.0, lives - 2.0, lives + 1.0, 2 * N_SECONDS + 1.0, 600.0):
            await trio.sleep_until(began + seconds)
            answers.append(await send_again(pair.alice, pair, envelope, part))
        assert answers == ["not-allowed/replay"] * 2 + ["not-allowed/clock"] * 3

    between_two(scenario, guards=admission.pair)


@BEGINNINGS
def test_nothing_from_before_a_restart_is_accepted_after_it(part: Part) -> None:
    admission = Eavesdropping()

    async def main(pair: Pair) -> None:
        carol = add_carol(pair)

        async def carol_lives() -> str:
            async with open_rpc(carol, admission.admit(carol, "carol")) as carols:
                carols.serve(DOUBLE, double)
                carols.serve_bulk(UPLOAD, count)
                await pair.asking.call(carol.peer_id, DOUBLE, Number(4), timeout=5)
                async with pair.asking.open_bulk(carol.peer_id, UPLOAD, Text(), timeout=5) as it:
                    await it.finish(Number(0))
            return pair.alice.peer_id

        await carol_lives()
        envelope = admission.last("alice", part)
        await trio.sleep(1)
        async with open_rpc(carol, admission.admit(carol, "carol")) as again:
            again.serve(DOUBLE, double)
            again.serve_bulk(UPLOAD, count)
            stream = await pair.alice.open(carol.peer_id, PROTOCOL)
            head = (
                message_frame(REQUEST, encode(RequestHead(1, "double", 5000, envelope)), BODY)
                if part is Part.REQUEST
                else message_frame(OPEN, encode(OpenHead("upload", 5000, envelope)), encode(Text()))
            )
            assert await answer_to(stream, head) == "not-allowed/replay"
            assert await pair.asking.call(carol.peer_id, DOUBLE, Number(4), timeout=5) == Number(8)

    between_two(main, guards=admission.pair)


def test_an_answer_is_for_one_request_of_one_asker() -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        for _ in range(2):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        first, second = (one for one in admission.guards["bob"].sealed)
        alices = [one.exchange for one in admission.guards["alice"].sealed]
        guard = admission.guards["alice"]
        guard.open(alices[0], Part.RESPONSE, first.content, first.envelope)
        with pytest.raises(AnswerNotAllowed) as refused:
            guard.open(alices[0], Part.RESPONSE, second.content, second.envelope)
        assert refused.value.reason is Reason.WRONG_NONCE
        # for another method, protocol, part or asker it does not do either
        nonce = alices[0].memory
        for exchange, part in (
            (Exchange(pair.bob_id, PROTOCOL, "halve", nonce), Part.RESPONSE),
            (Exchange(pair.bob_id, "/potluck/other/1.0.0", "double", nonce), Part.RESPONSE),
            (Exchange(pair.bob_id, PROTOCOL, "double", nonce), Part.ERROR),
        ):
            with pytest.raises(AnswerNotAllowed) as refused:
                guard.open(exchange, part, first.content, first.envelope)
            assert refused.value.reason is Reason.SIGNATURE
        carol = add_carol(pair)
        for_alice = Exchange(pair.bob_id, PROTOCOL, "double", nonce)
        with pytest.raises(AnswerNotAllowed) as refused:
            admission.admit(carol, "carol").open(
                for_alice, Part.RESPONSE, first.content, first.envelope
            )
        assert refused.value.reason is Reason.SIGNATURE

    between_two(scenario, guards=admission.pair)


def test_an_older_answer_is_not_believed() -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        sent: list[bytes] = []

        async def swap(stream: Stream) -> None:
            """Answers the first call properly, and every later one with the same envelope."""
            guard = admission.guards["bob"]
            while True:
                header = await exactly(stream, 5)
                payload = await exactly(stream, int.from_bytes(header[:4], "big"))
                encoded, body = split_payload(header[4], payload)
                head = decode(RequestHead, encoded)
                exchange = Exchange(stream.remote_peer, PROTOCOL, head.method)
                guard.open(exchange, Part.REQUEST, body, head.envelope)
                if not sent:
                    sent.append(guard.seal(exchange, Part.RESPONSE, encode(Number(8))))
                answer = encode(ResponseHead(head.id, sent[0]))
                await stream.send_all(message_frame(RESPONSE, answer, encode(Number(8))))

        pair.bob.serve(PROTOCOL, swap)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)
        with pytest.raises(AnswerNotAllowed) as refused:
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        assert refused.value.reason is Reason.WRONG_NONCE

    between_two(scenario, guards=admission.pair)


def test_an_error_for_another_request_is_not_believed_though_it_is_signed() -> None:
    """A peer that was asked cannot end other calls with the error of one."""
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        alice, bob = admission.guards["alice"], admission.guards["bob"]
        first = Exchange(pair.bob_id, PROTOCOL, "double")
        second = Exchange(pair.bob_id, PROTOCOL, "double")
        asked = alice.seal(first, Part.REQUEST, BODY)
        alice.seal(second, Part.REQUEST, BODY)
        answering = Exchange(pair.alice.peer_id, PROTOCOL, "double")
        bob.open(answering, Part.REQUEST, BODY, asked)
        body = encode(ErrorBody("busy"))
        envelope = bob.seal(answering, Part.ERROR, body)
        alice.open(first, Part.ERROR, body, envelope)
        with pytest.raises(AnswerNotAllowed) as refused:
            alice.open(second, Part.ERROR, body, envelope)
        assert refused.value.reason is Reason.WRONG_NONCE
        about_the_stream = bob.seal(Exchange(pair.alice.peer_id, PROTOCOL, ""), Part.ERROR, body)
        alice.open(Exchange(pair.bob_id, PROTOCOL, ""), Part.ERROR, body, about_the_stream)
        with pytest.raises(AnswerNotAllowed):
            alice.open(first, Part.ERROR, body, about_the_stream)

    between_two(scenario, guards=admission.pair)


def test_the_closing_covers_the_chunks_whatever_the_method_says() -> None:
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve_bulk(UPLOAD, count)
        assert not UPLOAD.hashed
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            await transfer.send_chunk(b"abc")
            await transfer.finish(Number(0))
        frame = bytes([0, 0, 0, 3, 7]) + b"abc"
        digests = {Part.CLOSING: blake3(frame).digest(), Part.CLOSED: blake3(b"").digest()}
        for name, part in (("alice", Part.CLOSING), ("bob", Part.CLOSED)):
            [sealed] = [one for one in admission.guards[name].sealed if one.part is part]
            assert sealed.content[16:49] == bytes([32]) + digests[part]

    between_two(scenario, guards=admission.pair)


def test_two_nodes_with_one_identity_are_one_party_and_judge_alone() -> None:
    """A person runs two nodes with one key file. Both may take part; once revoked, neither may.

    Each has seen only its own requests, so a request to one can be shown to the other, by its
    sender alone: nobody else gets a channel that proves the sender's key.
    """
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        twin = Overheard(
            admission.access(pair.bob.identity, "bob", clock_of(pair.bob)), pair.bob.random
        )
        alice, bob = admission.guards["alice"], admission.guards["bob"]
        exchange = Exchange(pair.bob_id, PROTOCOL, "double")
        envelope = alice.seal(exchange, Part.REQUEST, BODY)
        from_alice = Exchange(pair.alice.peer_id, PROTOCOL, "double")
        bob.open(from_alice, Part.REQUEST, BODY, envelope)
        twin.open(Exchange(pair.alice.peer_id, PROTOCOL, "double"), Part.REQUEST, BODY, envelope)
        for guard in (bob, twin):
            again = Exchange(pair.alice.peer_id, PROTOCOL, "double")
            with pytest.raises(NotAllowed) as refused:
                guard.open(again, Part.REQUEST, BODY, envelope)
            assert refused.value.reason is Reason.REPLAY
        answer = twin.seal(from_alice, Part.RESPONSE, BODY)
        alice.open(exchange, Part.RESPONSE, BODY, answer)
        access = admission.of(pair.alice)
        listed = admission.authority.revoke("bob", at_ms=access.clock_ms() + 1)
        access.revocations.accept(listed, access.keyring)
        for guard in (bob, twin):
            with pytest.raises(AnswerNotAllowed) as unproven:
                alice.open(
                    exchange, Part.RESPONSE, BODY, guard.seal(from_alice, Part.RESPONSE, BODY)
                )
            assert unproven.value.reason is Reason.REVOKED

    between_two(scenario, guards=admission.pair)


def test_a_clock_that_is_set_right_locks_nobody_out() -> None:
    """A node that starts with a clock an hour ahead, and then learns the time."""
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        carol = add_carol(pair)
        pair.world.set_clock_skew(carol, 3600.0)
        async with open_rpc(carol, admission.admit(carol, "carol")) as carols:
            carols.serve(DOUBLE, double)
            with pytest.raises(NotAllowed, match="60 minutes behind"):
                await pair.asking.call(carol.peer_id, DOUBLE, Number(4), timeout=5)
            pair.world.set_clock_skew(carol, 0.0)
            admission.renew(carol, "carol")
            for _ in range(2):
                await pair.asking.call(carol.peer_id, DOUBLE, Number(4), timeout=5)
            stream = await pair.alice.open(carol.peer_id, PROTOCOL)
            head = encode(RequestHead(1, "double", 5000, admission.last("alice", Part.REQUEST)))
            frame = message_frame(REQUEST, head, BODY)
            assert await answer_to(stream, frame) == "not-allowed/replay"

    between_two(scenario, guards=admission.pair)


def test_a_flood_of_requests_hurts_only_its_sender() -> None:
    """The nonce window of one sender fills, and others are still heard."""
    admission = Eavesdropping()

    async def scenario(pair: Pair) -> None:
        from auth.nonces import NonceWindow

        guard = admission.guards["bob"]
        guard._nonces = NonceWindow(0, share=20, pool=40, most_senders=8, reserved=5)
        pair.answering.serve(DOUBLE, double)
        for _ in range(20):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        for _ in range(3):
            with pytest.raises(NotAllowed) as refused:
                await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
            assert refused.value.reason is Reason.TOO_MANY_REQUESTS
        carol = add_carol(pair)
        async with open_rpc(carol, admission.admit(carol, "carol")) as carols:
            await carols.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        await trio.sleep(2 * N_SECONDS + 1)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)

    between_two(scenario, guards=admission.pair)
