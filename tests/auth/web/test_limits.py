"""How often, how much, how slowly: what strangers may not do, and what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from auth.challenges import RENEW
from auth.keys import peer_id_of
from auth.server.boundary import BODY_SECONDS, LARGEST_BODY_BYTES
from tests.auth.web.http_client import request
from tests.auth.web.running import ACTOR, RunningServer, Volunteer, auth_server, encoded, metric
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with auth_server(tmp_path) as server:
        yield server


async def test_requests_of_one_address_are_limited_and_it_is_told_when_to_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with auth_server(tmp_path, requests_per_minute_per_address=8) as running:
        async with running.client() as client:
            assert [(await client.ask("GET", "/v1/about")).status for _ in range(2)] == [200, 200]
        answer = await running.ask("GET", "/v1/about")
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 8
        said = answer.json()
        assert said["error"] == "too_many_requests"
        assert said["what"]
        assert said["advice"]
        assert "signed" not in said, "it is an outage, and no refusal"
        assert "127.0.0.1 asks too often: limit requests" in caplog.text


async def test_the_limit_is_looked_at_before_the_body_is_read(tmp_path: Path) -> None:
    async with auth_server(tmp_path, requests_per_minute_per_address=4) as running:
        await running.ask("GET", "/v1/about")
        async with running.client() as client:
            await client.send(b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")
            assert (await client.answer()).status == 429


async def test_logins_of_one_address_are_limited_apart(tmp_path: Path) -> None:
    async with auth_server(tmp_path, logins_per_hour_per_address=8) as running:
        volunteer = Volunteer(running)
        answers = [(await volunteer.join("AAAAA-AAAAA-AAAAA-AAAAA")).status for _ in range(3)]
        assert answers == [403, 403, 429]
        assert (await running.ask("GET", "/v1/about")).status == 200


async def test_renewals_of_one_account_are_limited_wherever_they_come_from(
    tmp_path: Path,
) -> None:
    async with auth_server(tmp_path, renewals_per_hour_per_account=8) as running:
        code = running.new_code(uses=5, name="bob")
        bobs, other = [Volunteer(running) for _ in range(3)], Volunteer(running)
        for each in bobs:
            assert (await each.join(code)).status == 200
        await other.join(running.new_code(name="alice"))
        assert [(await each.renew()).status for each in bobs] == [200, 200, 429]
        assert (await other.renew()).status == 200
        assert metric(running.server.metrics.text().decode(),
                      "potluck_auth_rate_limited_total", limit="renewals") == 1  # fmt: skip


async def test_nobody_uses_up_the_renewals_of_another_account(tmp_path: Path) -> None:
    async with auth_server(tmp_path, renewals_per_hour_per_account=8) as running:
        bob, mallory = Volunteer(running), Volunteer(running)
        await bob.join(running.new_code(name="bob"))
        await mallory.join(running.new_code(name="mallory"))
        assert bob.opened is not None
        for _ in range(4):
            body = await mallory.prove(RENEW)
            token = encoded(bob.opened.access_pass.token)
            await running.post("/v1/renew", {**body, "token": token})
        assert (await bob.renew()).status == 200


@pytest.mark.parametrize("act", ["revoke", "rebind"])
async def test_who_was_put_out_does_not_use_up_the_renewals_of_the_account(
    tmp_path: Path, act: str
) -> None:
    async with auth_server(tmp_path, renewals_per_hour_per_account=8) as running:
        thief, owner = Volunteer(running), Volunteer(running)
        await thief.join(running.new_code(name="bob"))
        if act == "rebind":
            running.moderation.allow("code:bob", rebind=True, actor=ACTOR, reason="a test")
        else:
            running.moderation.revoke(
                peer_id_of(thief.key.public_key), actor=ACTOR, reason="a test"
            )
        await owner.join(running.new_code(name="bob"))
        assert thief.opened is not None
        answers = []
        for _ in range(4):
            body = await thief.prove(RENEW)
            token = encoded(thief.opened.access_pass.token)
            answers.append((await running.post("/v1/renew", {**body, "token": token})).status)
        assert answers == [403, 403, 429, 429]
        assert (await owner.renew()).status == 200


async def test_clients_that_a_trusted_proxy_names_have_their_own_limits(tmp_path: Path) -> None:
    limits = {"requests_per_minute_per_address": 4}
    async with auth_server(tmp_path, server_lines='trusted_proxies = ["127.0.0.1/32"]',
                           **limits) as running:  # fmt: skip
        for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1"):
            answer = await running.ask("GET", "/v1/about", x_forwarded_for=address)
            assert answer.status == 200
        for address in ("192.0.2.1", "9.9.9.9, 192.0.2.2", "2001:db8::2"):
            answer = await running.ask("GET", "/v1/about", x_forwarded_for=address)
            assert answer.status == 429


async def test_nobody_gets_a_limit_of_their_own_by_claiming_to_be_others(tmp_path: Path) -> None:
    async with auth_server(tmp_path, requests_per_minute_per_address=4) as running:
        assert (await running.ask("GET", "/v1/about", x_forwarded_for="192.0.2.1")).status == 200
        assert (await running.ask("GET", "/v1/about", x_forwarded_for="192.0.2.2")).status == 429


@pytest.mark.parametrize("size", [LARGEST_BODY_BYTES + 1, 1_000_000, 10**15, 10**400])
async def test_a_body_that_says_it_is_too_large_is_refused_unread(
    running: RunningServer, size: int
) -> None:
    async with running.client() as client:
        await client.send(request("POST", "/v1/renew", b"", content_length=str(size)))
        answer = await client.answer()
        assert answer.status in (400, 413)
        await client.is_closed()


async def test_a_body_in_pieces_is_refused_as_soon_as_it_is_too_large(
    running: RunningServer,
) -> None:
    async with running.client() as client, trio.open_nursery() as nursery:
        head = b"POST /v1/renew HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await client.send(head + b"transfer-encoding: chunked\r\n\r\n")

        async def pour() -> None:
            while True:
                try:
                    await client.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
                except trio.BrokenResourceError:
                    return

        nursery.start_soon(pour)
        assert (await client.answer()).status == 413
        nursery.cancel_scope.cancel()


async def test_the_largest_body_is_still_read(running: RunningServer) -> None:
    body = b'{"session":"' + b"x" * 100 + b'"}'
    answer = await running.post("/v1/login/poll", body.ljust(LARGEST_BODY_BYTES))
    assert answer.status == 410


@pytest.fixture
def hurried() -> MockClock:
    return MockClock(rate=20.0)


async def test_a_body_that_trickles_is_dropped_in_time(hurried: MockClock, tmp_path: Path) -> None:
    async with auth_server(tmp_path) as running, running.client() as client:
        began = trio.current_time()
        await client.send(request("POST", "/v1/renew", b"", content_length="9000"))

        async def trickle() -> None:
            with contextlib.suppress(trio.BrokenResourceError):  # the answer may come with the end
                while True:
                    await client.send(b" ")
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            answer = await client.answer()
            nursery.cancel_scope.cancel()
        assert answer.status == 408
        patience = PATIENCE_SECONDS * hurried.rate
        assert BODY_SECONDS <= trio.current_time() - began < BODY_SECONDS + patience


@pytest.mark.slow
async def test_a_thousand_requests_at_once_are_all_answered_somehow(tmp_path: Path) -> None:
    async with auth_server(
        tmp_path, requests_per_minute_per_address=400, server_lines="connections_per_address = 50"
    ) as running:
        statuses: list[int] = []

        async def flood() -> None:
            try:
                async with running.client() as client:
                    for _ in range(10):
                        statuses.append((await client.ask("GET", "/v1/about")).status)
            except (EOFError, trio.BrokenResourceError):
                statuses.append(0)

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(flood)
        assert set(statuses) <= {200, 429, 0}
        assert statuses.count(200) >= 100
        text = running.server.metrics.text().decode()
        limited = metric(text, "potluck_auth_rate_limited_total", limit="requests")
        assert limited == statuses.count(429) > 0
