"""The place of the signed envelope: a toy guard that signs with the node's key, and refuses.

It has the parts of DeDLOC I.5 that the real one will have (recipient, time, nonce, signature over
these, the method and the contents; the nonce comes back in the answer), and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from protocols.errors import MalformedMessage, Refused
from protocols.guard import Caller, Exchange, OpenGuard, Part
from protocols.identity import PeerId, verify
from protocols.network import Network, Stream
from protocols.rpc import BulkMethod, Message, Transfer, decode, encode
from protocols.rpc.frames import (
    CHUNK,
    CLOSE,
    ERROR,
    OPEN,
    REQUEST,
    RESPONSE,
    message_frame,
    split_payload,
)
from protocols.rpc.messages import (
    CloseHead,
    ErrorBody,
    ErrorHead,
    OpenHead,
    RequestHead,
    ResponseHead,
)
from protocols.testing.world import SimulatedNetwork
from tests.chunks import next_chunk
from tests.protocols.pair import DOUBLE, PROTOCOL, Number, Pair, Text, between_two

DOMAIN = b"potluck toy envelope"
CLOCK_TOLERANCE_SECONDS = 30.0

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, hashed=True
)


class Envelope(Message, frozen=True):
    recipient: str
    time: float
    nonce: bytes
    signature: bytes


class ToyGuard:
    """Signs everything that goes out and believes nothing that is not signed for this node."""

    judged_at_once = 1
    hashes_chunks = False

    def knows(self, peer: PeerId) -> bool:  # noqa: ARG002
        return True

    def __init__(self, network: Network, friends: set[PeerId] | None = None) -> None:
        self.seen: list[Part] = []
        self.sealed: list[bytes] = []
        self._network = network
        self._friends = friends
        self._nonces: set[bytes] = set()

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:
        if part in (Part.REQUEST, Part.OPENING):
            exchange.memory = self._network.random.randbytes(16)
        nonce = exchange.memory or b""
        recipient, time = exchange.peer, self._network.wall_time()
        signature = self._network.identity.sign(
            DOMAIN, _signed(exchange, part, recipient, time, nonce, content)
        )
        envelope = encode(Envelope(recipient, time, nonce, signature))
        self.sealed.append(envelope)
        return envelope

    def open(self, exchange: Exchange, part: Part, content: bytes, envelope: bytes) -> None:
        self.seen.append(part)
        said = decode(Envelope, envelope)
        if said.recipient != self._network.peer_id:
            raise Refused("This message is for somebody else.")
        if abs(said.time - self._network.wall_time()) > CLOCK_TOLERANCE_SECONDS:
            raise Refused("This message is from another time.")
        if part in (Part.REQUEST, Part.OPENING):
            exchange.memory = said.nonce
            if said.nonce in self._nonces:
                raise Refused("This message has been seen before.")
            self._nonces.add(said.nonce)
        elif said.nonce != exchange.memory:
            raise Refused("This answer belongs to another request.")
        signed = _signed(exchange, part, said.recipient, said.time, said.nonce, content)
        if not verify(DOMAIN, exchange.peer, said.signature, signed):
            raise Refused("The signature does not match.")
        if self._friends is not None and exchange.peer not in self._friends:
            raise Refused("You are not on the list.")
        exchange.credentials = f"friend {exchange.peer}"


def _signed(
    exchange: Exchange, part: Part, recipient: str, time: float, nonce: bytes, content: bytes
) -> bytes:
    fields = (exchange.protocol, exchange.method, part.value, recipient, time, nonce, content)
    return encode(fields)


class Guards:
    """Makes a toy guard for each of the two nodes, and keeps them for the test to look at."""

    def __init__(self, *, friends: set[PeerId] | None = None) -> None:
        self._friends = friends
        self.made: list[ToyGuard] = []

    @property
    def pair(self) -> tuple[Callable[[SimulatedNetwork], ToyGuard], ...]:
        return (self.make, self.make)

    def make(self, network: SimulatedNetwork) -> ToyGuard:
        guard = ToyGuard(network, self._friends if self.made else None)
        self.made.append(guard)
        return guard


async def double(caller: Caller, request: Number) -> Number:
    assert caller.credentials == f"friend {caller.peer}"
    if request.value == 0:
        raise MalformedMessage("Zero is not to be doubled.")
    return Number(2 * request.value)


async def count(caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Text) -> None:
    assert caller.credentials == f"friend {caller.peer}"
    await transfer.accept(Number(0))
    while await next_chunk(transfer) is not None:
        pass
    await transfer.finish(Number(transfer.bytes_received))


def test_every_part_of_calls_and_transfers_goes_through_the_guard_in_order() -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)
        with pytest.raises(MalformedMessage, match="Zero"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(0), timeout=5)
        async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5) as transfer:
            await transfer.send_chunk(b"abc")
            assert await transfer.finish(Number(0)) == Number(3)
        alice, bob = guards.made
        assert bob.seen == [Part.REQUEST, Part.REQUEST, Part.OPENING, Part.CLOSING]
        assert alice.seen == [Part.RESPONSE, Part.ERROR, Part.ACCEPTED, Part.CLOSED]
        assert pair.asking.statistics().misbehaviours == 0

    between_two(scenario, guards=guards.pair)


def test_a_peer_that_the_guard_refuses_gets_a_sealed_refusal_and_is_not_avoided() -> None:
    guards = Guards(friends=set())

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        with pytest.raises(Refused, match="not on the list"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        with pytest.raises(Refused, match="not on the list"):
            async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text(), timeout=5):
                pass
        assert guards.made[0].seen == [Part.ERROR, Part.ERROR]
        assert pair.answering.statistics().misbehaviours == 0
        assert pair.answering.statistics().requests_served == 0

    between_two(scenario, guards=guards.pair)


def test_a_clock_that_is_off_is_refused_in_words() -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        pair.world.set_clock_skew(pair.bob, 31.0)
        with pytest.raises(Refused, match="another time"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)

    between_two(scenario, guards=guards.pair)


async def _one_answer(stream: Stream) -> tuple[int, bytes, bytes]:
    header = await _exactly(stream, 5)
    payload = await _exactly(stream, int.from_bytes(header[:4], "big"))
    head, body = split_payload(header[4], payload)
    return header[4], head, body


async def _exactly(stream: Stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        assert more
        data += more
    return data


def test_a_request_that_is_sent_again_is_refused() -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)
        overheard = guards.made[0].sealed[0]
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        head = encode(RequestHead(1, "double", 5000, overheard))
        await stream.send_all(message_frame(REQUEST, head, encode(Number(4))))
        kind, _, body = await _one_answer(stream)
        assert kind == ERROR
        assert "seen before" in decode(ErrorBody, body).what

    between_two(scenario, guards=guards.pair)


@pytest.mark.parametrize("envelope", [b"", b"garbage", b"\x91" * 2000])
def test_an_invalid_envelope_breaks_the_protocol(envelope: bytes) -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        head = encode(RequestHead(1, "double", 5000, envelope))
        await stream.send_all(message_frame(REQUEST, head, encode(Number(4))))
        kind, head, body = await _one_answer(stream)
        assert (kind, decode(ErrorHead, head).id) == (ERROR, 1)
        assert decode(ErrorBody, body).code == "malformed-message"
        assert pair.answering.avoided_for(pair.alice.peer_id) > 0

    between_two(scenario, guards=guards.pair)


def test_an_answer_to_another_request_is_not_accepted() -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        async def swap(stream: Stream) -> None:
            """Answers the first call properly, and every later one with the same envelope."""
            guard = guards.made[1]
            envelope = b""
            while True:
                _, encoded, _ = await _one_answer(stream)
                head = decode(RequestHead, encoded)
                if not envelope:
                    nonce = decode(Envelope, head.envelope).nonce
                    exchange = Exchange(stream.remote_peer, PROTOCOL, head.method, nonce)
                    envelope = guard.seal(exchange, Part.RESPONSE, encode(Number(8)))
                answer = encode(ResponseHead(head.id, envelope))
                await stream.send_all(message_frame(RESPONSE, answer, encode(Number(8))))

        pair.bob.serve(PROTOCOL, swap)
        assert await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5) == Number(8)
        with pytest.raises(Refused, match="another request"):
            await pair.asking.call(pair.bob_id, DOUBLE, Number(5), timeout=5)

    between_two(scenario, guards=guards.pair)


def test_the_closing_seal_covers_the_chunks() -> None:
    guards = Guards()

    async def scenario(pair: Pair) -> None:
        """Alice's own stream, with the closing of an honest transfer after another chunk."""
        pair.answering.serve_bulk(UPLOAD, count)
        guard = guards.made[0]
        exchange = Exchange(pair.bob_id, PROTOCOL, "upload")
        opening = guard.seal(exchange, Part.OPENING, encode(Text()))
        honest = closing_of(b"honest")
        sealed = guard.seal(exchange, Part.CLOSING, honest.transcript)
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        head = encode(OpenHead("upload", 5000, opening))
        await stream.send_all(message_frame(OPEN, head, encode(Text())))
        await _one_answer(stream)
        changed = closing_of(b"forged")
        await stream.send_all(changed.frames)
        head = encode(CloseHead(1, 6, changed.digest, sealed))
        await stream.send_all(message_frame(CLOSE, head, encode(Number(0))))
        kind, _, body = await _one_answer(stream)
        assert kind == ERROR
        assert "signature" in decode(ErrorBody, body).what
        await trio.sleep(1)
        assert pair.answering.statistics().transfers_served == 0

    between_two(scenario, guards=guards.pair)


class closing_of:
    """The frames of one chunk, and what seals them."""

    def __init__(self, chunk: bytes) -> None:
        from blake3 import blake3

        self.frames = len(chunk).to_bytes(4, "big") + bytes([CHUNK]) + chunk
        self.digest = blake3(self.frames).digest()
        self.transcript = (
            (1).to_bytes(8, "big")
            + len(chunk).to_bytes(8, "big")
            + bytes([32])
            + self.digest
            + encode(Number(0))
        )


def test_without_a_guard_an_envelope_that_nobody_asked_for_is_ignored() -> None:
    exchange = Exchange(PeerId("alice"), PROTOCOL, "double")
    guard = OpenGuard()
    assert guard.seal(exchange, Part.REQUEST, b"content") == b""
    guard.open(exchange, Part.REQUEST, b"content", b"an envelope")
    assert exchange.credentials is None
