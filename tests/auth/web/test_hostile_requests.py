"""Requests that nobody sensible sends: each gets an answer below 500, and nobody gets a pass.

The test sends valid requests with one thing wrong in each, and rubbish. A seed sets the sequence.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.auth.web.http_client import HttpClient, request
from tests.auth.web.running import RunningServer, Volunteer, auth_server, encoded, metric

ROUNDS = 3000
SOAK_ROUNDS = 40_000
OPEN = {"requests_per_minute_per_address": 1_000_000, "logins_per_hour_per_address": 1_000_000}

POSTS = ("/v1/renew", "/v1/login", "/v1/login/poll", "/v1/challenge", "/login/x")
GETS = ("/v1/time?nonce=", "/v1/revocations?after=", "/login/", "/login/callback?", "/v1/keys?")

ODD: list[Any] = [
    None, True, -1, 2**63, 2**64, 1.5, 1e308, "", "=", "A", "!!!", "\x00", "\ud800", "ü", "🦔",
    "A" * 43, "A" * 75, "A" * 86, "A" * 5000, [], {}, [[]], {"a": {}}, "-" * 43, "../../x", "%00",
]  # fmt: skip


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with auth_server(tmp_path, **OPEN) as server:
        yield server


async def sweep(running: RunningServer, chance: random.Random, rounds: int) -> None:
    volunteer = Volunteer(running)
    assert (await volunteer.join(running.new_code())).status == 200
    assert volunteer.opened is not None
    right = {
        **await volunteer.prove("login"),
        "token": encoded(volunteer.opened.access_pass.token),
        "session": "x" * 22,
        "provider": "code",
        "kind": "code",
        "code": "AAAAA-AAAAA-AAAAA-AAAAA",
    }
    done = 0
    while done < rounds:
        async with running.client() as client:
            for _ in range(50):
                done += 1
                try:
                    await ask_something_odd(client, chance, right)
                except EOFError:  # the server has ended this connection: that is an answer, too
                    break


async def ask_something_odd(client: HttpClient, chance: random.Random, right: Any) -> None:
    if chance.random() < 0.25:
        odd = "".join(chance.choice("aZ09-_%&=./~;+") for _ in range(chance.randrange(60)))
        await client.send(request("GET", chance.choice(GETS) + odd))
    else:
        body, headers = odd_body(chance, right)
        await client.send(request("POST", chance.choice(POSTS), body, **headers))
    answer = await client.answer()
    assert answer.status < 500, (answer, answer.body)
    assert answer.status != 200 or b'"pass"' not in answer.body


def odd_body(chance: random.Random, right: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    kind = chance.randrange(6)
    if kind == 0:  # rubbish
        return chance.randbytes(chance.randrange(300)), {}
    if kind == 1:  # brackets without end
        return chance.choice([b"[", b'{"a":', b'"']) * chance.randrange(1, 5000), {}
    value = dict(right)
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice(list(right))
        if chance.random() < 0.3:
            value.pop(name, None)
        else:
            value[name] = chance.choice([*ODD, flipped(chance, right[name])])
    body = bytearray(json.dumps(value).encode())
    if kind == 2:  # one byte of it is another
        body[chance.randrange(len(body))] = chance.randrange(256)
    if kind == 3:  # cut short
        del body[chance.randrange(len(body)) :]
    if kind == 4:
        types = ["text/plain", "application/x-www-form-urlencoded", "", "application/json; x=\xff"]
        return bytes(body), {"content_type": chance.choice(types)}
    return bytes(body), {}


def flipped(chance: random.Random, text: str) -> str:
    if not text:
        return "A"
    at = chance.randrange(len(text))
    return text[:at] + chance.choice("ABCXYZabcxyz0189-_") + text[at + 1 :]


@pytest.mark.slow
async def test_odd_requests_are_answered_and_nothing_breaks(
    running: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        await sweep(running, random.Random(4), ROUNDS)
    assert not caplog.records
    text = running.server.metrics.text().decode()
    assert metric(text, "potluck_auth_failures_total", kind="unforeseen") == 0
    assert running.moderation.verify().sound


@pytest.mark.soak
async def test_very_many_odd_requests(running: RunningServer) -> None:
    await sweep(running, random.Random(5), SOAK_ROUNDS)
    text = running.server.metrics.text().decode()
    assert metric(text, "potluck_auth_failures_total", kind="unforeseen") == 0


METHODS = ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "X")
PATHS = (
    "/", "/v1", "/v1/", "/v1/renew/", "/v1/Login", "//v1/about", "/v1/about/../keys", "/%2e", "*",
    "/login", "/login/", "/login/a/b", "/" + "a" * 8000, "/v1/about?" + "a=b&" * 2000,
)  # fmt: skip


@pytest.mark.slow
async def test_odd_methods_and_addresses_are_answered_plainly(running: RunningServer) -> None:
    for path in PATHS:
        for method in METHODS:
            async with running.client() as client:
                await client.send(request(method, path))
                try:
                    answer = await client.answer("HEAD" if method == "HEAD" else "GET")
                except EOFError:
                    continue
                assert answer.status < 500, (method, path, answer)
                for name in answer.headers:
                    assert not name.startswith("access-control"), "CORS is closed"


async def test_a_page_elsewhere_may_not_ask_in_its_readers_name(running: RunningServer) -> None:
    preflight = await running.ask(
        "OPTIONS", "/v1/login", origin="https://evil.example",
        access_control_request_method="POST", access_control_request_headers="content-type",
    )  # fmt: skip
    assert preflight.status == 204
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    plain = await running.post("/v1/login", {}, content_type="text/plain")
    assert (plain.status, plain.json()["error"]) == (415, "unsupported_type")


async def test_every_answer_tells_browsers_to_stay_out_of_it(running: RunningServer) -> None:
    for path in ("/v1/about", "/nothing", "/healthz", "/login/x"):
        headers = (await running.ask("GET", path)).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
