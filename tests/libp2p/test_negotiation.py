# ruff: noqa: ARG001 - asking for `autojump_clock` is how a test gets pytest-trio's virtual clock
"""multistream-select: one round trip, understood by the library, bounded against strangers."""

from __future__ import annotations

import contextlib

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from node.net.libp2p.negotiation import (
    HEADER,
    LONGEST_MESSAGE,
    MOST_PROPOSALS,
    answer,
    encode,
    propose,
    read_message,
)
from protocols.errors import LimitExceeded, MalformedMessage

ECHO = b"/potluck/echo/1.0.0"
# A varint of two bytes: the specification's names may be longer than 127.
LONG_NAME = b"/potluck/" + b"x" * 300

Pipe = trio.StapledStream[trio.abc.SendStream, trio.abc.ReceiveStream]


class LibraryStream:
    """A memory stream with the library's method names."""

    def __init__(self, pipe: Pipe) -> None:
        self.read = pipe.receive_some
        self.write = pipe.send_all


class Recorded:
    """Canned input, recorded output."""

    def __init__(self, incoming: bytes) -> None:
        self._incoming = incoming
        self.unread = incoming
        self.sent = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        assert max_bytes is not None, "reading without a limit would take what comes after"
        taken, self.unread = self.unread[:max_bytes], self.unread[max_bytes:]
        return taken

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data


@pytest.mark.parametrize("name", [ECHO, LONG_NAME])
async def test_both_our_sides_agree(name: bytes) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def answering() -> None:
            assert await answer(far, {name}) == name

        nursery.start_soon(answering)
        assert await propose(near, name)


async def test_header_and_proposal_leave_together(autojump_clock: trio.testing.MockClock) -> None:
    """One round trip: nothing is waited for between the two."""
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(propose, near, ECHO)
        assert await read_message(far) == HEADER
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(1):
            assert await read_message(far) == ECHO
        nursery.cancel_scope.cancel()


async def test_the_library_waits_for_an_answer_between_header_and_proposal(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """When this fails, the library asks in one round trip too, and `propose` may go."""
    near, far = trio.testing.memory_stream_pair()
    communicator = MultiselectCommunicator(LibraryStream(near))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(MultiselectClient().select_one_of, [ECHO.decode()], communicator)
        assert await read_message(far) == HEADER
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.1) as waiting:
            await read_message(far)
        assert waiting.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_the_library_answers_our_proposal() -> None:
    near, far = trio.testing.memory_stream_pair()
    library = Multiselect({ECHO.decode(): None})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(library.negotiate, MultiselectCommunicator(LibraryStream(far)))
        assert not await propose_again_after_refusal(near)


async def propose_again_after_refusal(near: Pipe) -> bool:
    """Refused once, then agreed on the same stream, which the library allows."""
    refused = await propose(near, b"/potluck/other/1.0.0")
    await near.send_all(encode(ECHO))
    assert await read_message(near) == ECHO
    return refused


async def test_we_answer_the_library() -> None:
    near, far = trio.testing.memory_stream_pair()
    chosen: list[str] = []

    async def ask() -> None:
        communicator = MultiselectCommunicator(LibraryStream(near))
        wanted = ["/not/this", ECHO.decode()]
        chosen.append(await MultiselectClient().select_one_of(wanted, communicator))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        assert await answer(far, {ECHO}) == ECHO
    assert chosen == [ECHO.decode()]


async def test_bytes_after_the_negotiation_are_left_for_the_protocol() -> None:
    asked = Recorded(encode(HEADER) + encode(ECHO) + b"first bytes of the protocol")
    assert await answer(asked, {ECHO}) == ECHO
    assert asked.unread == b"first bytes of the protocol"
    assert asked.sent == encode(HEADER) + encode(ECHO)
    asking = Recorded(encode(HEADER) + encode(ECHO) + b"first bytes of the answer")
    assert await propose(asking, ECHO)
    assert asking.unread == b"first bytes of the answer"


async def test_a_name_that_is_not_utf8_is_not_available() -> None:
    asked = Recorded(encode(HEADER) + encode(b"\xff\xfe") + encode(ECHO))
    assert await answer(asked, {ECHO}) == ECHO
    assert asked.sent == encode(HEADER) + encode(b"na") + encode(ECHO)


async def test_the_library_raises_for_a_name_that_is_not_utf8() -> None:
    """When this fails, the library has closed its remote off-switch."""
    near, far = trio.testing.memory_stream_pair()
    await near.send_all(encode(HEADER) + encode(b"\xff\xfe"))
    with pytest.raises(UnicodeDecodeError):
        await Multiselect({}).negotiate(MultiselectCommunicator(LibraryStream(far)))


async def test_a_refusal_is_no_error_and_no_agreement() -> None:
    assert not await propose(Recorded(encode(HEADER) + encode(b"na")), ECHO)


@pytest.mark.parametrize(
    "incoming",
    [
        b"",
        encode(HEADER),
        encode(HEADER)[:-1],
        b"\x00",
        b"\x05ab",
        b"\x03abc",
        encode(b"/multistream/2.0.0") + encode(ECHO),
        encode(HEADER) + encode(b"/something/else"),
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    ],
)
async def test_nonsense_is_malformed_for_both_sides(incoming: bytes) -> None:
    with pytest.raises(MalformedMessage):
        await propose(Recorded(incoming), ECHO)
    with pytest.raises(MalformedMessage):
        await answer(Recorded(incoming), {ECHO})


async def test_a_long_message_is_refused_before_it_is_read() -> None:
    declared = Recorded(encode(HEADER) + b"\xff\x7f" + b"x" * 16_383)
    with pytest.raises(LimitExceeded):
        await answer(declared, {ECHO})
    assert len(declared.unread) == 16_383


async def test_endless_proposals_are_cut_off() -> None:
    endless = Recorded(encode(HEADER) + encode(b"/a") * (MOST_PROPOSALS + 1))
    with pytest.raises(LimitExceeded):
        await answer(endless, {ECHO})
    assert endless.unread == encode(b"/a")


def test_a_name_too_long_to_propose_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="1,023"):
        encode(b"x" * LONGEST_MESSAGE)


mutated = st.builds(
    lambda start, junk, end: encode(HEADER)[:start] + junk + encode(ECHO)[end:],
    st.integers(0, 20),
    st.binary(max_size=40),
    st.integers(0, 21),
)


@given(st.binary(max_size=200) | mutated)
def test_any_bytes_give_an_answer_or_one_of_the_two_errors(incoming: bytes) -> None:
    async def main() -> None:
        for talk in (answer(Recorded(incoming), {ECHO}), propose(Recorded(incoming), ECHO)):
            with contextlib.suppress(MalformedMessage, LimitExceeded):
                assert await talk in (None, ECHO, True, False)

    trio.run(main)
