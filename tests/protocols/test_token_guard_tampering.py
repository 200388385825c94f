"""One flipped bit anywhere in a whole exchange: nothing is accepted, nothing breaks, nothing hangs.

The short form takes bits at even distances; `scripts/test --soak` takes every one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from protocols.access import TokenGuard
from protocols.errors import MalformedMessage, PotluckError
from protocols.guard import Caller, Exchange, Guard, Part
from protocols.network import Network
from protocols.not_allowed import AnswerNotAllowed, NotAllowed
from protocols.rpc import BulkMethod, Transfer, encode
from protocols.rpc.frames import OPEN, REQUEST, message_frame
from protocols.rpc.messages import OpenHead, RequestHead
from tests.chunks import next_chunk
from tests.protocols.admitted import Admission, clock_of
from tests.protocols.pair import DOUBLE, PROTOCOL, Number, Pair, Text, between_two

UPLOAD: BulkMethod[Text, Number, Number, Number] = BulkMethod(
    PROTOCOL, "upload", Text, Number, Number, Number, hashed=True
)
LONGEST_SECONDS = 60.0  # of virtual time; a call here may take 5
CONTENT = encode(Number(4_000_000))


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


async def call(pair: Pair) -> None:
    await pair.asking.call(pair.bob_id, DOUBLE, Number(4), timeout=5)


async def fail(pair: Pair) -> None:
    try:
        await pair.asking.call(pair.bob_id, DOUBLE, Number(0), timeout=5)
    except MalformedMessage as error:
        if not isinstance(error, NotAllowed):
            return  # the error that it should be
        raise


async def upload(pair: Pair) -> None:
    async with pair.asking.open_bulk(pair.bob_id, UPLOAD, Text("it"), timeout=5) as transfer:
        await transfer.send_chunk(b"abc")
        await transfer.finish(Number(0))


PARTS: dict[Part, tuple[str, Callable[[Pair], Awaitable[None]]]] = {
    Part.REQUEST: ("alice", call),
    Part.RESPONSE: ("bob", call),
    Part.ERROR: ("bob", fail),
    Part.OPENING: ("alice", upload),
    Part.ACCEPTED: ("bob", upload),
    Part.CLOSING: ("alice", upload),
    Part.CLOSED: ("bob", upload),
}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


class Flipping(TokenGuard):
    """Seals one part wrongly: a bit of the envelope is changed, or a bit of what it covers."""

    part: Part
    bit: int | None = None
    in_content = False
    bits_of_envelope = 0
    bits_of_content = 0

    def seal(self, exchange: Exchange, part: Part, content: bytes) -> bytes:
        if part is not self.part:
            return super().seal(exchange, part, content)
        if self.in_content and self.bit is not None:
            return super().seal(exchange, part, flipped(content, self.bit))
        envelope = super().seal(exchange, part, content)
        if self.bit is not None:
            return flipped(envelope, self.bit)
        self.bits_of_envelope, self.bits_of_content = 8 * len(envelope), 8 * len(content)
        return envelope


def outcome(part: Part, bit: int | None, *, in_content: bool) -> tuple[str, Flipping]:
    """How an exchange ends in which one message is changed."""
    who, ask = PARTS[part]
    admission = Admission()
    made: list[Flipping] = []

    def guard_of(name: str) -> Callable[[Network], Guard]:
        def make(network: Network) -> Guard:
            if name != who:
                return admission.admit(network, name)
            guard = Flipping(
                admission.access(network.identity, name, clock_of(network)), network.random
            )
            guard.part, guard.bit, guard.in_content = part, bit, in_content
            made.append(guard)
            return guard

        return make

    async def scenario(pair: Pair) -> str:
        pair.answering.serve(DOUBLE, double)
        pair.answering.serve_bulk(UPLOAD, count)
        try:
            with trio.fail_after(LONGEST_SECONDS):
                await ask(pair)
        except PotluckError as error:
            return type(error).__name__
        return "accepted"

    return between_two(scenario, guards=(guard_of("alice"), guard_of("bob"))), made[0]


REFUSALS = {
    NotAllowed.__name__,
    AnswerNotAllowed.__name__,
    "MalformedAnswerEnvelope",  # an answer's envelope, and its sender is avoided
}


def sweep(part: Part, *, at_most: int) -> Iterator[tuple[int, bool]]:
    """The bits to flip: so many, at even distances, of the envelope and of the content."""
    how, guard = outcome(part, None, in_content=False)
    assert how == "accepted", "unchanged, it goes through"
    for bits, in_content in ((guard.bits_of_envelope, False), (guard.bits_of_content, True)):
        assert bits
        step = max(1, bits // at_most)
        # an odd step visits all places within a byte
        for bit in range(0, bits, step | 1):
            yield bit, in_content


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.value)
def test_no_changed_message_is_accepted(part: Part) -> None:
    for bit, in_content in sweep(part, at_most=64):
        how, _ = outcome(part, bit, in_content=in_content)
        assert how in REFUSALS, (part, bit, in_content, how)


@pytest.mark.soak
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.value)
def test_no_changed_bit_of_any_message_is_accepted(part: Part) -> None:
    for bit, in_content in sweep(part, at_most=1 << 20):
        how, _ = outcome(part, bit, in_content=in_content)
        assert how in REFUSALS, (part, bit, in_content, how)


def sealed_frame(part: Part) -> bytes:
    """Alice's first message."""
    admission = Admission()

    async def scenario(pair: Pair) -> bytes:
        guard = guards[0]
        name = "double" if part is Part.REQUEST else "upload"
        envelope = guard.seal(Exchange(pair.bob_id, PROTOCOL, name), part, CONTENT)
        if part is Part.REQUEST:
            return message_frame(REQUEST, encode(RequestHead(1, name, 5000, envelope)), CONTENT)
        return message_frame(OPEN, encode(OpenHead(name, 5000, envelope)), CONTENT)

    guards: list[Guard] = []

    def first(network: Network) -> Guard:
        guards.append(admission.admit(network, "alice"))
        return guards[0]

    return between_two(scenario, guards=(first, admission.pair[1]))


def served_after(frame: bytes) -> int:
    """How many requests and transfers Bob took after this came to him as a first frame."""
    admission = Admission()

    async def scenario(pair: Pair) -> int:
        taken = 0

        async def take(_caller: Caller, request: Number) -> Number:
            nonlocal taken
            taken += 1
            return request

        async def take_up(
            _caller: Caller, transfer: Transfer[Number, Number, Number], _opening: Number
        ) -> None:
            nonlocal taken
            taken += 1
            await transfer.accept(Number(0))

        pair.answering.serve(DOUBLE, take)
        pair.answering.serve_bulk(
            BulkMethod(PROTOCOL, "upload", Number, Number, Number, Number), take_up
        )
        stream = await pair.alice.open(pair.bob_id, PROTOCOL)
        try:
            await stream.send_all(frame)
            await stream.send_eof()
            with trio.fail_after(LONGEST_SECONDS):
                while await stream.receive_some(65_536):
                    pass
        except trio.BrokenResourceError:
            pass
        return taken

    return between_two(scenario, guards=admission.pair)


def uncovered_bits(frame: bytes, part: Part) -> set[int]:
    """The id and the patience of a call are no part of what is signed: the channel carries them."""
    head = frame[7:]
    name = b"double" if part is Part.REQUEST else b"upload"
    at = head.index(name)
    uncovered = set(range(at + len(name), at + len(name) + 3))  # cd 13 88: 5000 milliseconds
    if part is Part.REQUEST:
        uncovered.add(1)  # the id
    return {8 * (7 + place) + bit for place in uncovered for bit in range(8)}


@pytest.mark.parametrize("part", [Part.REQUEST, Part.OPENING], ids=lambda part: part.value)
def test_no_changed_frame_starts_anything(part: Part) -> None:
    frame_sweep(part, step=43)


@pytest.mark.soak
@pytest.mark.parametrize("part", [Part.REQUEST, Part.OPENING], ids=lambda part: part.value)
def test_no_changed_bit_of_a_frame_starts_anything(part: Part) -> None:
    frame_sweep(part, step=1)


def frame_sweep(part: Part, *, step: int) -> None:
    frame = sealed_frame(part)
    assert served_after(frame) == 1, "unchanged, it is served: the same seed gives the same run"
    uncovered = uncovered_bits(frame, part)
    for bit in range(0, 8 * len(frame), step):
        if bit not in uncovered:
            assert served_after(flipped(frame, bit)) == 0, bit


def test_a_changed_envelope_is_no_crash_of_the_node() -> None:
    """After every kind of change the node answers others, and those who behave, as before."""
    admission = Admission()

    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DOUBLE, double)
        guard = admission.admit(pair.alice, "alice")
        envelope = guard.seal(Exchange(pair.bob_id, PROTOCOL, "double"), Part.REQUEST, CONTENT)
        bobs = admission.admit(pair.bob, "bob")
        for end in range(len(envelope)):
            for changed in (envelope[:end], envelope + envelope[:end], envelope[end:]):
                if changed == envelope:
                    continue
                exchange = Exchange(pair.alice.peer_id, PROTOCOL, "double")
                with pytest.raises(NotAllowed):
                    bobs.open(exchange, Part.REQUEST, CONTENT, changed)
        bobs.open(Exchange(pair.alice.peer_id, PROTOCOL, "double"), Part.REQUEST, CONTENT, envelope)

    between_two(scenario, guards=admission.pair)
