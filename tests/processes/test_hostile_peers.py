"""Hostile or broken peers lose their stream, and cost us next to nothing.

The victim is a process of its own, so that its memory can be read from outside. Around each
attack an honest customer is served as if nothing happened, and afterwards the victim holds
nothing more than before: no task, no file, no stream.
"""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest
import trio

from node.net.libp2p.settings import Libp2pSettings
from protocols.errors import HandlerFailed, ProtocolNotServed, Unreachable
from protocols.network import Stream
from protocols.rpc import Empty, encode
from protocols.rpc.frames import CHUNK, OPEN, REQUEST, RESPONSE, message_frame
from protocols.rpc.messages import OpenHead, RequestHead
from protocols.rpc.state import RpcLimits
from tests.processes.children import PeerProcess, running_peer
from tests.processes.methods import BREAK, ECHO, PROTOCOL, SINK, Content
from tests.processes.peer import TestPeer, open_test_peer
from tests.waiting import PATIENCE_SECONDS, until

# A call that waits for more bytes, or is held up by one that does, ends after the stall's time. A
# call that ended within half of that was refused, or was never held up.
REFUSED_SECONDS: Final = RpcLimits().stall_seconds / 2
CALL_SECONDS: Final = REFUSED_SECONDS
HANDSHAKE_SECONDS: Final = 1.5
SHOWN_OUT_SECONDS: Final = Libp2pSettings().handshake_seconds  # when it would be, without the flag

FOUR_GIGABYTES: Final = 0xFFFF_FFFF
FLOOD_BYTES: Final = 64 << 20
# Reading a frame costs kilobytes; the rest is what Python's allocator rounds up meanwhile. The
# 64 MiB that an attacker is ready to send would stand out, and a declared 4 GB all the more.
MEMORY_BYTES: Final = 16 << 20


@dataclass
class Scene:
    """A victim in a process of its own, and an attacker who can reach it."""

    victim: PeerProcess
    customer: TestPeer
    attacker: TestPeer

    async def open(self, protocol: str = PROTOCOL) -> Stream:
        return await self.attacker.network.open(self.victim.peer, protocol)

    async def customer_is_served(self) -> None:
        request = Content(b"still there?")
        answer = await self.customer.rpc.call(self.victim.peer, ECHO, request, timeout=CALL_SECONDS)
        assert answer == request


@asynccontextmanager
async def attacked(*flags: str) -> AsyncIterator[Scene]:
    """The scene of an attack; leaving it checks that the attack changed nothing."""
    async with running_peer(*flags) as victim, open_test_peer() as customer:
        customer.network.learn_addresses(victim.peer, victim.addresses)

        async def let_in() -> bool:  # a machine that stops for long makes an honest one late, too
            try:
                await customer.network.connect(victim.peer)
            except Unreachable:
                return False
            return True

        await until(let_in, PATIENCE_SECONDS)
        before = await customer.census_of(victim.peer)
        memory_before = victim.memory_bytes()
        async with open_test_peer() as attacker:
            attacker.network.learn_addresses(victim.peer, victim.addresses)
            scene = Scene(victim, customer, attacker)
            yield scene
            await scene.customer_is_served()
            assert victim.memory_bytes() - memory_before < MEMORY_BYTES

        async def nothing_left() -> bool:
            return not (await customer.census_of(victim.peer)).exceeds(before)

        try:
            await until(nothing_left, REFUSED_SECONDS)
        except trio.TooSlowError:
            now = await customer.census_of(victim.peer)
            raise AssertionError(f"before: {before}; now: {now}") from None


async def dropped(stream: Stream) -> None:
    """Return when the other side has ended or reset the stream; it may say why before."""
    with trio.fail_after(REFUSED_SECONDS):
        try:
            while await stream.receive_some(65_536):
                pass
        except trio.BrokenResourceError:
            pass


async def flood(stream: Stream) -> None:
    """Send as much as the other side takes."""
    with trio.move_on_after(REFUSED_SECONDS):
        try:
            for _ in range(FLOOD_BYTES >> 20):
                await stream.send_all(bytes(1 << 20))
        except trio.BrokenResourceError:
            pass


async def test_a_declared_message_of_4_gigabytes_is_refused_before_memory_is_taken() -> None:
    """F11: wrong sizes."""
    async with attacked() as scene:
        stream = await scene.open()
        await stream.send_all(struct.pack(">IB", FOUR_GIGABYTES, REQUEST))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, stream)
            await dropped(stream)


async def test_a_declared_chunk_of_4_gigabytes_is_refused_before_memory_is_taken() -> None:
    """F11: wrong sizes, inside a transfer that began well."""
    async with attacked() as scene:
        stream = await scene.open()
        head = encode(OpenHead(SINK.name, 5000))
        await stream.send_all(message_frame(OPEN, head, encode(Empty())))
        await stream.send_all(struct.pack(">IB", FOUR_GIGABYTES, CHUNK))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, stream)
            await dropped(stream)


async def test_a_head_that_claims_to_be_longer_than_its_frame_is_refused() -> None:
    """F11: wrong sizes."""
    async with attacked() as scene:
        stream = await scene.open()
        await stream.send_all(struct.pack(">IBH", 10, REQUEST, 0xFFFF) + bytes(8))
        await dropped(stream)


async def test_garbage_on_a_stream_ends_that_stream() -> None:
    """F11"""
    async with attacked() as scene:
        stream = await scene.open()
        await stream.send_all(random.Random(1).randbytes(100_000))
        await dropped(stream)


async def test_a_truncated_frame_ends_its_stream() -> None:
    """F11"""
    async with attacked() as scene:
        stream = await scene.open()
        whole = message_frame(REQUEST, encode(RequestHead(1, ECHO.name, 5000)), b"")
        await stream.send_all(whole[:-3])
        await stream.send_eof()
        await dropped(stream)


async def test_a_message_of_an_unknown_kind_ends_its_stream() -> None:
    """F20: version skew."""
    async with attacked() as scene:
        stream = await scene.open()
        await stream.send_all(message_frame(99, b"", b""))
        await dropped(stream)


async def test_a_message_in_the_wrong_place_ends_its_stream() -> None:
    """F11: an answer where only questions belong."""
    async with attacked() as scene:
        stream = await scene.open()
        await stream.send_all(message_frame(RESPONSE, encode((7,)), b""))
        await dropped(stream)


async def test_a_body_that_is_no_message_is_refused_and_named() -> None:
    """F11"""
    async with attacked() as scene:
        stream = await scene.open()
        head = encode(RequestHead(1, ECHO.name, 5000))
        await stream.send_all(message_frame(REQUEST, head, b"\xc1" * 100))
        await dropped(stream)


async def test_an_unknown_version_of_a_protocol_is_an_error_of_its_own() -> None:
    """F20: version skew."""
    async with attacked() as scene:
        with pytest.raises(ProtocolNotServed):
            await scene.open(PROTOCOL.replace("1.0.0", "9.0.0"))


async def test_a_handler_that_raises_fails_its_call_alone_and_tells_no_secrets() -> None:
    async with attacked() as scene, trio.open_nursery() as nursery:

        async def be_served() -> None:
            for _ in range(20):
                await scene.customer_is_served()

        nursery.start_soon(be_served)
        for _ in range(20):
            with pytest.raises(HandlerFailed) as caught:
                await scene.attacker.rpc.call(
                    scene.victim.peer, BREAK, Empty(), timeout=CALL_SECONDS
                )
            assert "secret" not in str(caught.value)


async def test_one_byte_a_second_on_a_stream_holds_up_nobody() -> None:
    """F10"""
    async with attacked() as scene:
        stream = await scene.open()
        frame = message_frame(REQUEST, encode(RequestHead(1, ECHO.name, 5000)), bytes(1000))
        for at in range(4):
            await stream.send_all(frame[at : at + 1])
            with trio.move_on_after(1.0):
                while True:
                    await scene.customer_is_served()
                    await trio.sleep(0.05)


async def test_one_byte_a_second_in_the_handshake_is_shown_the_door() -> None:
    """F10: such a connection never becomes a link, and does not keep its place for long."""
    async with attacked("--handshake-seconds", str(HANDSHAKE_SECONDS)) as scene:
        drips = await trio.open_tcp_stream("127.0.0.1", scene.victim.port)

        async def drip() -> None:
            # the beginning of what a dialler says first in multistream-select
            for byte in b"\x13/multistream/1.0.0\n":
                try:
                    await drips.send_all(bytes([byte]))
                except trio.BrokenResourceError:
                    return
                await trio.sleep(1.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            await scene.customer_is_served()
            with trio.fail_after(SHOWN_OUT_SECONDS):
                await end_of_socket(drips)
            nursery.cancel_scope.cancel()
        await drips.aclose()


async def test_a_connection_that_says_nothing_is_shown_the_door() -> None:
    """F10: headers, or not even those, then nothing."""
    async with attacked("--handshake-seconds", str(HANDSHAKE_SECONDS)) as scene:
        silent = await trio.open_tcp_stream("127.0.0.1", scene.victim.port)
        with trio.fail_after(SHOWN_OUT_SECONDS):
            await end_of_socket(silent)
        await silent.aclose()


@pytest.mark.parametrize("seed", range(5))
async def test_garbage_in_the_place_of_a_handshake_ends_the_connection(seed: int) -> None:
    """F11"""
    async with attacked("--handshake-seconds", str(HANDSHAKE_SECONDS)) as scene:
        noisy = await trio.open_tcp_stream("127.0.0.1", scene.victim.port)
        await noisy.send_all(random.Random(seed).randbytes(10_000))
        with trio.fail_after(SHOWN_OUT_SECONDS):
            await end_of_socket(noisy)
        await noisy.aclose()


async def end_of_socket(socket: trio.SocketStream) -> None:
    """Return when the other side has closed or reset the connection."""
    try:
        while await socket.receive_some(65_536):
            pass
    except trio.BrokenResourceError:
        pass
