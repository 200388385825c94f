"""An auth server of a few lines, that does right or wrong as a test tells it.

It signs with the real documents of auth/, keeps nothing, and lets everybody in. Here it does only
things that a true server never does; the tests of the true server use a true one.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from auth.documents import encode
from auth.keyring import KeyRecord, endorse
from auth.keys import SigningKey, fingerprint
from auth.passes import AccessPass, sign_pass
from auth.revocations import Entry, RevocationList, sign_list
from auth.roles import Role
from auth.statements import SignedRefusal, SignedTime, sign_refusal, sign_time
from auth.tokens import Token, sign_token
from tests.access.https_servers import (
    Certificate,
    ScriptedServer,
    make_certificate,
    response,
    scripted_server,
)

RUN = "albert"
JSON = "Content-Type: application/json"
ROOT = SigningKey(bytes(range(32)))
STRANGER = SigningKey(bytes(reversed(range(32))))

Handler = Callable[["Impostor", dict[str, Any]], bytes]


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def said(value: dict[str, Any], status: str = "200 OK", *headers: str) -> bytes:
    return response(status, json.dumps(value).encode(), JSON, *headers)


@dataclass
class Impostor:
    """Its parts. Each of `answers` may be replaced by one that misbehaves."""

    key: SigningKey = ROOT
    run: str = RUN
    life_ms: int = 3_600_000
    grace_ms: int = 600_000
    endpoints: tuple[str, ...] = ()
    clock: Callable[[], float] = time.time
    auth_url: str = ""
    serial: int = 0
    records: tuple[KeyRecord, ...] = ()
    revocations: bytes = b""
    username: str = "code:alice"
    role: Role = Role.VOLUNTEER
    answers: dict[str, Handler] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = self.records or (root_record(self.key, self.run),)
        self.answers = {
            "/v1/about": Impostor.about,
            "/v1/keys": lambda impostor, _: said({"keys": encoded(encode(impostor.records))}),
            "/v1/time": Impostor.time,
            "/v1/challenge": lambda _impostor, _: said(
                {"challenge": encoded(bytes(40) + self._random()), "expires_in": 600}
            ),
            "/v1/login": Impostor.grant,
            "/v1/login/poll": Impostor.grant,
            "/v1/renew": Impostor.grant,
            "/v1/revocations": Impostor.list_revocations,
            **self.answers,
        }

    def _random(self) -> bytes:
        self.serial += 1
        return self.serial.to_bytes(16, "big")

    @property
    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key.public_key)

    def about(self, _: dict[str, Any]) -> bytes:
        code = {"id": "code", "kind": "code", "title": "a code"}
        return said({"run": self.run, "fingerprint": self.fingerprint, "providers": [code]})

    def time(self, question: dict[str, Any]) -> bytes:
        nonce = decoded(question["nonce"])
        signed = SignedTime(self.run, nonce, self.now_ms, self.key.key_id)
        return said({"time": encoded(sign_time(signed, self.key))})

    def grant(self, question: dict[str, Any]) -> bytes:
        return said({"pass": encoded(self.make_pass(question))})

    def make_pass(self, question: dict[str, Any], **changes: Any) -> bytes:
        self.serial += 1
        token = Token(
            self.run, self.username, decoded(question["peer"]), (self.role,), self.serial,
            self.key.key_id, self.now_ms, self.now_ms + self.life_ms,
        )  # fmt: skip
        access_pass = AccessPass(
            self.run, sign_token(token, self.key), self.endpoints, self.records, self.now_ms,
            decoded(question["challenge"]), b"", self.auth_url, self.grace_ms, self.key.key_id,
        )  # fmt: skip
        return sign_pass(msgspec.structs.replace(access_pass, **changes), self.key)

    def refuse(
        self, question: dict[str, Any], by: SigningKey | None = None, code: str = "denied"
    ) -> bytes:
        """A refusal, signed by our key or by another."""
        by = by or self.key
        refusal = SignedRefusal(
            self.run, decoded(question["challenge"]), self.now_ms, code,
            "You may not take part in this run.", "A moderator said so.", "Ask them.", by.key_id,
        )  # fmt: skip
        return said({"error": code, "signed": encoded(sign_refusal(refusal, by))}, "403 No")

    def list_revocations(self, _: dict[str, Any]) -> bytes:
        if not self.revocations:
            return response("204 No Content", b"", "Potluck-Poll-Seconds: 10")
        return response(
            "200 OK", self.revocations, "Content-Type: application/octet-stream",
            "Potluck-Poll-Seconds: 10",
        )  # fmt: skip

    def revoke(
        self,
        number: int,
        *entries: Entry,
        by: SigningKey | None = None,
        withdrawn: tuple[bytes, ...] = (),
    ) -> bytes:
        """Have a new revocation list, and say it from now on."""
        by = by or self.key
        signed = sign_list(
            RevocationList(self.run, number, self.now_ms, entries, withdrawn, by.key_id), by
        )
        self.revocations = signed
        return signed

    async def converse(self, stream: trio.abc.Stream, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        path, _, query = lines[0].split(" ")[1].partition("?")
        length = next(
            (
                int(line.split(":")[1])
                for line in lines
                if line.lower().startswith("content-length")
            ),
            0,
        )
        while len(body) < length:
            body += await stream.receive_some(4096)
        question = (
            json.loads(body)
            if body
            else dict(pair.split("=", 1) for pair in query.split("&") if pair)
        )
        self.asked.append(path)
        await stream.send_all(self.answers[path](self, question))


def root_record(key: SigningKey, run: str = RUN) -> KeyRecord:
    """A key that has been there from the beginning."""
    return endorse(run, key.public_key, 1, 1 << 50, key)


@asynccontextmanager
async def running_impostor(
    folder: Path, impostor: Impostor, certificate: Certificate | None = None
) -> AsyncIterator[ScriptedServer]:
    certificate = certificate or make_certificate()
    async with scripted_server(
        folder, certificate=certificate, converse=impostor.converse
    ) as server:
        impostor.auth_url = server.url
        yield server
