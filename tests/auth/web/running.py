"""A whole auth server in this process (SQLite on disk, TLS on loopback), and its volunteers."""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from auth.challenges import LOGIN, RENEW, prove
from auth.keyring import Keyring
from auth.keys import SigningKey
from auth.passes import OpenedPass, open_pass
from auth.server.auth_server import AuthServer
from auth.server.moderation import Moderation
from auth.server.settings import settings_in
from auth.server.store import Store, create_store, open_store
from auth.statements import SignedRefusal, open_refusal
from tests.auth.web.authority import Authority
from tests.auth.web.http_client import HttpAnswer, HttpClient, connect

RUN = "tiny-stories"
ACTOR = "local:moderator"


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class RunningServer:
    """The facts about the server that a test needs."""

    def __init__(self, server: AuthServer, store: Store, tls: ssl.SSLContext | None) -> None:
        self.server = server
        self.store = store
        self.tls = tls
        self.moderation = Moderation(
            store, providers=[provider.id for provider in server.settings.providers]
        )
        self.port = int(server.listening[0].rsplit(":", 1)[1])
        self.invited_fingerprint = store.fingerprint

    def new_code(self, uses: int = 1, name: str = "") -> str:
        return self.moderation.code_new(uses=uses, name=name, actor=ACTOR).code

    @asynccontextmanager
    async def client(self) -> AsyncIterator[HttpClient]:
        async with connect(self.port, self.tls) as client:
            yield client

    async def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> HttpAnswer:
        """One request on a connection of its own."""
        async with self.client() as client:
            return await client.ask(method, path, body, **headers)

    async def post(self, path: str, value: object, **headers: str) -> HttpAnswer:
        async with self.client() as client:
            return await client.post(path, value, **headers)


class Volunteer:
    """A node's key, and what it does with the server. `answer` is the last that it was told."""

    def __init__(self, running: RunningServer, key: SigningKey | None = None) -> None:
        self._running = running
        self.key = key or SigningKey(os.urandom(32))
        self.challenge = b""
        self.opened: OpenedPass | None = None
        self.answer: HttpAnswer

    @property
    def peer(self) -> str:
        return encoded(self.key.public_key)

    async def fetch_challenge(self) -> bytes:
        answer = await self._running.post("/v1/challenge", {"peer": self.peer})
        return decoded(answer.json()["challenge"])

    async def prove(self, purpose: str) -> dict[str, str]:
        """The three fields that prove the key, for a challenge that is fetched now."""
        self.challenge = await self.fetch_challenge()
        fingerprint = self._running.invited_fingerprint
        proof = prove(self.key, self.challenge, RUN, fingerprint, purpose)
        return {"peer": self.peer, "challenge": encoded(self.challenge), "proof": encoded(proof)}

    async def join(self, code: str) -> HttpAnswer:
        fields = await self.prove(LOGIN)
        return await self._ask(
            "/v1/login", {**fields, "provider": "code", "kind": "code", "code": code}
        )

    async def begin(self, provider: str, kind: str) -> HttpAnswer:
        """Begin a login through a provider."""
        fields = await self.prove(LOGIN)
        return await self._ask("/v1/login", {**fields, "provider": provider, "kind": kind})

    async def poll(self, session: str) -> HttpAnswer:
        return await self._ask("/v1/login/poll", {"session": session})

    async def renew(self) -> HttpAnswer:
        """With the challenge that came with the last pass, as nodes do it: one request."""
        assert self.opened is not None
        self.challenge = self.opened.access_pass.next_challenge
        fingerprint = self._running.invited_fingerprint
        proof = prove(self.key, self.challenge, RUN, fingerprint, RENEW)
        return await self._ask(
            "/v1/renew",
            {
                "peer": self.peer,
                "challenge": encoded(self.challenge),
                "proof": encoded(proof),
                "token": encoded(self.opened.access_pass.token),
            },
        )

    def refusal(self) -> SignedRefusal:
        """The refusal in the last answer, verified as a node verifies it."""
        answer = self.answer.json()
        assert self.answer.status == 403
        refusal = open_refusal(decoded(answer["signed"]), self._keyring(), self.challenge)
        assert (refusal.code, refusal.what) == (answer["error"], answer["what"])
        return refusal

    async def _ask(self, path: str, body: dict[str, str]) -> HttpAnswer:
        self.answer = await self._running.post(path, body)
        if self.answer.status == 200:
            self.opened = open_pass(
                decoded(self.answer.json()["pass"]),
                run=RUN,
                fingerprint=self._running.invited_fingerprint,
                peer=self.key.public_key,
                challenge=self.challenge,
            )
        return self.answer

    def _keyring(self) -> Keyring:
        records = self._running.store.keys.records
        return Keyring.from_pinned(RUN, self._running.invited_fingerprint, records)


@asynccontextmanager
async def auth_server(
    folder: Path,
    authority: Authority | None = None,
    *,
    settings: str = "",
    server_lines: str = "",
    **limits: int,
) -> AsyncIterator[RunningServer]:
    """A server in this folder, which may have been one before. `settings` are lines of auth.toml.

    `server_lines` are such below [server], `limits` such below [limits].
    Over TLS if there is an authority to sign its certificate; otherwise over plain HTTP.
    """
    if not (folder / "auth").exists():
        create_store(folder / "auth", RUN, actor=ACTOR)
    certificate = ""
    if authority is not None:
        files = authority.issue()
        certificate = f'certificate = "{files[0]}"\ncertificate_key = "{files[1]}"'
    given = "\n".join(f"{name} = {count}" for name, count in limits.items())
    text = f"""
        run = "{RUN}"
        public_url = "https://auth.example.org"
        endpoints = ["/dns4/node.example.org/tcp/4001"]
        {settings}
        [server]
        listen = ["127.0.0.1:0"]
        {certificate}
        {server_lines}
        [limits]
        {given}
    """
    read = settings_in(text.encode(), folder / "auth.toml")
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(open_store(folder / "auth", actor="server:test"))
        server = AuthServer(read, store, version="0", insecure_http=authority is None)
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(server.serve)
        yield RunningServer(server, store, None if authority is None else authority.trust())
        nursery.cancel_scope.cancel()


def metric(text: str, name: str, **labels: str) -> float:
    """One number out of what /metrics says; 0.0 if it does not."""
    wanted = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    start = f"{name}{{{wanted}}} " if wanted else f"{name} "
    for line in text.splitlines():
        if line.startswith(start):
            return float(line.removeprefix(start))
    return 0.0
