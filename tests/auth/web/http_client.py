"""A client that sends exactly the bytes that a test wants, and reads whole answers."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from tests.auth.web.authority import LOOPBACK


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


class HttpClient:
    """One connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._unread = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> HttpAnswer:
        await self.send(request(method, path, body, **headers))
        return await self.answer(method)

    async def post(self, path: str, value: object, **headers: str) -> HttpAnswer:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return await self.ask("POST", path, body, **headers)

    async def answer(self, method: str = "GET") -> HttpAnswer:
        """The next answer; EOFError if the server closes first."""
        head = await self._until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        pairs = [line.split(":", 1) for line in lines]
        headers = {name.lower(): value.strip() for name, value in pairs}
        status = int(first.split()[1])
        if status == 100:
            return await self.answer(method)
        length = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
        while len(self._unread) < length:
            await self._read()
        body, self._unread = self._unread[:length], self._unread[length:]
        return HttpAnswer(status, headers, body)

    async def is_closed(self) -> None:
        """Return when the server has closed the connection; its last words are dropped."""
        try:
            while await self.stream.receive_some(65_536):
                pass
        except trio.BrokenResourceError:
            pass

    async def _until(self, end: bytes) -> bytes:
        while end not in self._unread:
            await self._read()
        at = self._unread.index(end) + len(end)
        found, self._unread = self._unread[:at], self._unread[at:]
        return found

    async def _read(self) -> None:
        some = await self.stream.receive_some(65_536)
        if not some:
            raise EOFError("the server closed the connection")
        self._unread += some


@asynccontextmanager
async def connect(
    port: int, tls: ssl.SSLContext | None, *, name: str = LOOPBACK
) -> AsyncIterator[HttpClient]:
    """A connection to a port of this machine, over TLS if a context is given."""
    stream: trio.abc.Stream = await trio.open_tcp_stream(LOOPBACK, port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname=name, https_compatible=True)
    try:
        yield HttpClient(stream)
    finally:
        await trio.aclose_forcefully(stream)


def request(method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
    """The bytes of a request; a name in `headers` has `_` for `-`."""
    lines = {"host": LOOPBACK, **{name.replace("_", "-"): text for name, text in headers.items()}}
    if body is not None:
        lines.setdefault("content-type", "application/json")
        lines.setdefault("content-length", str(len(body)))
    head = "".join(f"{name}: {text}\r\n" for name, text in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")
