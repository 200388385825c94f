"""Volunteers of `scripts/bench auth-server` in a process of their own: many keys, many connections.

They speak HTTP/1.1 over TLS with code of their own, because a usual client costs more CPU time than
the server that is measured. They leave out only conveniences: the server's certificate is verified,
each challenge is signed, each pass is decoded, and one of every VERIFY_EACH passes is verified as a
real node verifies it, down to the token's signature.

At a fixed pace, a request that waits because the one before it was slow is late. Its time counts
from when it should have been sent; otherwise a server that stalls looks fast.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import ssl
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from auth.challenges import LOGIN, RENEW, prove
from auth.keys import SIGNATURE_BYTES, SigningKey
from auth.passes import AccessPass, open_pass
from lab.bench.orders import obey
from protocols.errors import PotluckError

VERIFY_EACH = 20
ANSWER_SECONDS = 30.0
REQUESTS_PER_CONNECTION = 900  # the server ends one after 1,000
LOOPBACK = "127.0.0.1"

_PASS = msgspec.msgpack.Decoder(AccessPass)


class NoPass(PotluckError):
    """The server gave no pass."""


@dataclass(frozen=True)
class Target:
    """The server, with the data of an invite to it."""

    port: int
    authority: str
    run: str
    fingerprint: str
    code: str


class EnrollingVolunteer:
    """One key with one connection, that joins once and then renews."""

    def __init__(self, target: Target, tls: ssl.SSLContext) -> None:
        self._target = target
        self._tls = tls
        self._key = SigningKey(os.urandom(32))
        self._peer = _encoded(self._key.public_key)
        self._stream: trio.SSLStream | None = None
        self._asked = 0
        self._challenge = b""
        self._token = b""
        self.passes = 0
        self.verified = 0

    async def join(self) -> None:
        answer = await self._ask("/v1/challenge", {"peer": self._peer})
        challenge = _decoded(answer["challenge"])
        body = {"provider": "code", "kind": "code", "code": self._target.code}
        await self._get_pass("/v1/login", body, challenge, LOGIN)

    async def renew(self) -> None:
        await self._get_pass("/v1/renew", {"token": _encoded(self._token)}, self._challenge, RENEW)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None

    async def _get_pass(
        self, path: str, body: dict[str, str], challenge: bytes, purpose: str
    ) -> None:
        target = self._target
        proof = prove(self._key, challenge, target.run, target.fingerprint, purpose)
        body |= {
            "peer": self._peer,
            "challenge": _encoded(challenge),
            "proof": _encoded(proof),
        }
        data = _decoded((await self._ask(path, body))["pass"])
        if self.passes % VERIFY_EACH == 0:
            opened = open_pass(
                data,
                run=target.run,
                fingerprint=target.fingerprint,
                peer=self._key.public_key,
                challenge=challenge,
            )
            received = opened.access_pass
            self.verified += 1
        else:
            received = _PASS.decode(data[:-SIGNATURE_BYTES])
        self.passes += 1
        self._challenge, self._token = received.next_challenge, received.token

    async def _ask(self, path: str, body: dict[str, str]) -> dict[str, Any]:
        """One request on the connection that is kept; its answer. NoPass for any but 200."""
        if self._asked % REQUESTS_PER_CONNECTION == 0:
            await self.close()
            self._stream = trio.SSLStream(
                await trio.open_tcp_stream(LOOPBACK, self._target.port),
                self._tls,
                server_hostname=LOOPBACK,
                https_compatible=True,
            )
        self._asked += 1
        assert self._stream is not None
        content = json.dumps(body).encode()
        with trio.fail_after(ANSWER_SECONDS):
            await self._stream.send_all(_head(path, len(content)) + content)
            status, answer = await _receive(self._stream)
        if status != 200:
            raise NoPass(f"The server answered {path} with {status}.", why=answer[:300].decode())
        decoded: dict[str, Any] = json.loads(answer)
        return decoded


class Volunteers:
    """The orders of this process: each public coroutine is one."""

    def __init__(self) -> None:
        self._all: list[EnrollingVolunteer] = []

    async def join(self, *, count: int, **target: Any) -> dict[str, Any]:
        """Make volunteers and let each join by the code."""
        tls = ssl.create_default_context(cafile=target["authority"])
        self._all = [EnrollingVolunteer(Target(**target), tls) for _ in range(count)]
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for volunteer in self._all:
                nursery.start_soon(volunteer.join)
        gc.collect()
        gc.freeze()
        return {"seconds": time.perf_counter() - began}

    async def renew_without_pause(self, *, seconds: float) -> dict[str, Any]:
        """Each renews again as soon as it has its pass."""
        milliseconds: list[float] = []

        async def loop(volunteer: EnrollingVolunteer) -> None:
            while time.perf_counter() < end:
                began = time.perf_counter()
                await volunteer.renew()
                milliseconds.append((time.perf_counter() - began) * 1000)

        began = time.perf_counter()
        end = began + seconds
        before = time.process_time()
        async with trio.open_nursery() as nursery:
            for volunteer in self._all:
                nursery.start_soon(loop, volunteer)
        took = time.perf_counter() - began
        return self._result(milliseconds, took, time.process_time() - before)

    async def renew_at_pace(self, *, seconds: float, per_second: float) -> dict[str, Any]:
        """All together so many a second, evenly spread, whether or not earlier ones have ended."""
        milliseconds: list[float] = []
        pause = len(self._all) / per_second

        async def loop(volunteer: EnrollingVolunteer, due: float) -> None:
            while due < end:
                await trio.sleep(max(0.0, due - time.perf_counter()))
                await volunteer.renew()
                milliseconds.append((time.perf_counter() - due) * 1000)
                due += pause

        began = time.perf_counter()
        end = began + seconds
        before = time.process_time()
        async with trio.open_nursery() as nursery:
            for number, volunteer in enumerate(self._all):
                nursery.start_soon(loop, volunteer, began + number / per_second)
        took = time.perf_counter() - began
        return self._result(milliseconds, took, time.process_time() - before)

    def _result(
        self, milliseconds: list[float], seconds: float, cpu_seconds: float
    ) -> dict[str, Any]:
        return {
            "passes": len(milliseconds),
            "per_second": len(milliseconds) / seconds,
            "ms": _places(sorted(milliseconds)),
            "verified": sum(volunteer.verified for volunteer in self._all),
            "client_cpu_share": round(cpu_seconds / seconds, 2),
        }


def _places(ordered: list[float]) -> dict[str, float]:
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[round(place * last)], 2) for name, place in places.items()}


def _head(path: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: {LOOPBACK}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


async def _receive(stream: trio.SSLStream) -> tuple[int, bytes]:
    """One answer: its status and its body."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += await _some(stream)
    head = received[:end].lower()
    at = head.index(b"content-length:") + len(b"content-length:")
    length = int(head[at:].split(b"\r\n", 1)[0])
    while len(received) < end + 4 + length:
        received += await _some(stream)
    return int(head[9:12]), received[end + 4 :]


async def _some(stream: trio.SSLStream) -> bytes:
    some = await stream.receive_some(65_536)
    if not some:
        raise NoPass("The server closed a connection in the middle.")
    return bytes(some)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


if __name__ == "__main__":
    trio.run(obey, Volunteers())
