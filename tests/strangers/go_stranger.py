"""go-libp2p as a stranger: its daemon p2pd, and as much of p2pd's control protocol as we need.

The control protocol is protobuf, each message behind its length as a varint. We write and read
the few fields we use by hand: a message is a list of (field number, value), a value an integer or
bytes. After a stream was opened the same socket carries its bytes.

Easy to get wrong: p2pd closes a stream wholly, both ways, when either side closed its half. So
nothing can be answered after a half-close through p2pd; go-libp2p itself could.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import base58
import trio
from multiaddr import Multiaddr

from tests.ports import held_port
from tests.processes.children import die_with_parent
from tests.strangers.stranger import (
    COMMAND_SECONDS,
    Stranger,
    StrangerMissing,
    StrangerRefused,
)

REQUIREMENT: Final = Path(__file__).parent / "go" / "requirements.txt"
BINARY_IN_WHEEL: Final = "hivemind/hivemind_cli/p2pd"
DOWNLOAD_SECONDS: Final = 300.0  # 9.5 MB
LONGEST_MESSAGE_BYTES: Final = 1 << 20
PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"
PING_BYTES: Final = 32
DOES_NOT_LISTEN: Final = "-noListenAddrs"
NO_RELAY: Final = ("-relay=false", "-relayService=false")

# p2pd.proto: Request.Type, and the field of the request that each type fills
IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER, LIST_PEERS = 0, 1, 2, 3, 5
DISCONNECT, REMOVE_STREAM_HANDLER = 7, 10

Fields = list[tuple[int, int | bytes]]


def install(cache: Path) -> Path:
    """The p2pd binary; StrangerMissing on a platform that the wheel does not cover."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise StrangerMissing("A ready-made p2pd exists for Linux on x86-64 alone.")
    wanted = hashlib.sha256(REQUIREMENT.read_bytes()).hexdigest()[:16]
    place = cache / f"p2pd-{wanted}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            download += ["--only-binary", ":all:", "--disable-pip-version-check"]
            subprocess.run(
                [*download, "--require-hashes", "-r", str(REQUIREMENT), "-d", scratch],
                check=True,
                stdin=subprocess.DEVNULL,
                timeout=DOWNLOAD_SECONDS,
            )
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                binary = Path(archive.extract(BINARY_IN_WHEEL, scratch))
            binary.chmod(0o755)
            binary.replace(place)
    return place


class GoStranger(Stranger):
    """A running p2pd, which has nothing to do with relays unless flags say so."""

    answers_after_half_close = False

    def __init__(self, binary: Path, *flags: str) -> None:
        is_deaf = DOES_NOT_LISTEN in flags
        self._held = ExitStack()
        self._port = self._held.enter_context(held_port())
        self._process = subprocess.Popen(
            [
                str(binary),
                f"-listen=/ip4/127.0.0.1/tcp/{self._port}",
                DOES_NOT_LISTEN if is_deaf else "-hostAddrs=/ip4/127.0.0.1/tcp/0",
                # TCP, Noise and Yamux are what we are here to meet, and nothing else unasked
                *("-quic=false", "-tls=false"),
                *(flags or NO_RELAY),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        self.process_id = self._process.pid
        printed = [
            self._process.stdout.readline().decode().strip() for _ in range(3 if is_deaf else 4)
        ]
        # Control socket: ...  /  Peer ID: ...  /  Peer Addrs:  /  the first of them
        if not printed[1].startswith("Peer ID: "):
            self.stop()
            raise RuntimeError(f"p2pd did not start, but said: {printed}")
        self.peer = printed[1].removeprefix("Peer ID: ")
        self.address = "" if is_deaf else f"{printed[3]}/p2p/{self.peer}"

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._held.close()

    async def connect(self, address: str) -> None:
        where, _, peer = address.rpartition("/p2p/")
        request: Fields = [(1, _peer_bytes(peer)), (2, Multiaddr(where).to_bytes())]
        await self._ask(CONNECT, [(2, _encode(request))])

    async def disconnect(self, peer: str) -> None:
        await self._ask(DISCONNECT, [(7, _encode([(1, _peer_bytes(peer))]))])

    async def connected(self) -> tuple[str, ...]:
        infos = [
            _decode(value)
            for number, value in await self._ask(LIST_PEERS, [])
            if number == 6 and isinstance(value, bytes)
        ]
        return tuple(
            base58.b58encode(value).decode()
            for info in infos
            for number, value in info
            if number == 1 and isinstance(value, bytes)
        )

    async def ping(self, peer: str) -> float:
        # p2pd has no command for it, but libp2p's ping is a protocol like any other
        stream = await self.open(peer, PING_PROTOCOL)
        async with stream:
            sent_at = trio.current_time()
            await stream.send_all(b"p" * PING_BYTES)
            if await _read_exactly(stream, PING_BYTES) != b"p" * PING_BYTES:
                raise RuntimeError("the ping came back changed")
            return trio.current_time() - sent_at

    async def open(self, peer: str, protocol: str) -> trio.SocketStream:
        request: Fields = [(1, _peer_bytes(peer)), (2, protocol.encode())]
        stream, _ = await self._command(STREAM_OPEN, [(3, _encode(request))])
        return stream

    async def begin_serving(self, protocol: str, port: int) -> None:
        await self._ask(STREAM_HANDLER, [(4, _handler(protocol, port))])

    async def end_serving(self, protocol: str, port: int) -> None:
        await self._ask(REMOVE_STREAM_HANDLER, [(9, _handler(protocol, port))])

    async def take_header(self, stream: trio.SocketStream) -> None:
        await _read_message(stream)

    async def _ask(self, kind: int, fields: Fields) -> Fields:
        stream, answer = await self._command(kind, fields)
        await trio.aclose_forcefully(stream)
        return answer

    async def _command(self, kind: int, fields: Fields) -> tuple[trio.SocketStream, Fields]:
        with trio.fail_after(COMMAND_SECONDS):
            stream = await trio.open_tcp_stream("127.0.0.1", self._port)
            try:
                message = _encode([(1, kind), *fields])
                await stream.send_all(_varint(len(message)) + message)
                answer = await _read_message(stream)
                if (1, 0) not in answer:  # Response.Type OK
                    raise StrangerRefused(repr(answer))
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
        return stream, answer


def _handler(protocol: str, port: int) -> bytes:
    address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes()
    return _encode([(1, address), (2, protocol.encode()), (3, 0)])


def _peer_bytes(peer: str) -> bytes:
    return bytes(base58.b58decode(peer))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _encode(fields: Iterable[tuple[int, int | bytes]]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
    return out


def _decode(message: bytes) -> Fields:
    fields: Fields = []
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            fields.append((tag >> 3, varint()))
        elif tag & 7 == 2:
            length = varint()
            fields.append((tag >> 3, message[at : at + length]))
            at += length
        else:
            raise RuntimeError(f"p2pd sent a field of kind {tag & 7}")
    return fields


async def _read_exactly(stream: trio.SocketStream, count: int) -> bytes:
    held = bytearray()
    while len(held) < count:
        more = await stream.receive_some(count - len(held))
        if not more:
            raise RuntimeError(f"p2pd ended a message after {len(held)} of {count} bytes")
        held += more
    return bytes(held)


async def _read_message(stream: trio.SocketStream) -> Fields:
    length = shift = 0
    while True:
        byte = (await _read_exactly(stream, 1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if length > LONGEST_MESSAGE_BYTES:
        raise RuntimeError(f"p2pd announced a message of {length} bytes")
    return _decode(await _read_exactly(stream, length))
