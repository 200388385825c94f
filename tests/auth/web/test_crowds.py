"""A crowd of clients that behave in every way at once, and one that behaves well among them.

A seed sets the sequence of behaviours; how they interleave is up to the machine. In every order,
clients that behave must be answered, and in the end nothing may be left open.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.auth.web.authority import Authority
from tests.auth.web.http_client import HttpClient, connect, request
from tests.auth.web.running import RunningServer, Volunteer, auth_server
from tests.waiting import PATIENCE_SECONDS, until

CROWD = 150
SOAK_CROWD = 5_000
AT_ONCE = 40

Behaviour = Callable[[HttpClient, random.Random], Awaitable[None]]


@pytest.fixture
def hurried() -> MockClock:
    return MockClock(rate=10.0)


async def ask_and_leave(client: HttpClient, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 5)):
        await client.ask("GET", chance.choice(["/v1/about", "/v1/revocations", "/nothing"]))


async def leave_in_the_middle(client: HttpClient, chance: random.Random) -> None:
    whole = request("POST", "/v1/renew", b"x" * chance.randrange(3000))
    await client.send(whole[: chance.randrange(len(whole))])


async def leave_before_the_answer(client: HttpClient, chance: random.Random) -> None:
    await client.send(request("GET", "/v1/about") * chance.randrange(1, 30))


async def say_nothing_more(client: HttpClient, _chance: random.Random) -> None:
    await client.send(b"GET /v1/about HTTP/1.1\r\n")
    await client.is_closed()


async def talk_rubbish(client: HttpClient, chance: random.Random) -> None:
    await client.send(chance.randbytes(chance.randrange(1, 2000)))
    await client.is_closed()


async def send_a_body_nobody_wants(client: HttpClient, chance: random.Random) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    await client.send(head)
    for _ in range(chance.randrange(1, 40)):
        await client.send(b"3\r\nabc\r\n")
    await client.is_closed()


async def reset(client: HttpClient, _chance: random.Random) -> None:
    await client.send(request("GET", "/v1/about"))
    stream = client.stream
    if isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    assert isinstance(stream, trio.SocketStream)
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


BEHAVIOURS: tuple[Behaviour, ...] = (
    ask_and_leave,
    leave_in_the_middle,
    leave_before_the_answer,
    say_nothing_more,
    talk_rubbish,
    send_a_body_nobody_wants,
    reset,
)


async def a_crowd(running: RunningServer, count: int, seed: int) -> None:
    chance = random.Random(seed)
    room = trio.CapacityLimiter(AT_ONCE)

    async def one(behave: Behaviour, over_tls: bool, own: random.Random) -> None:
        async with room:
            with contextlib.suppress(EOFError, OSError, trio.BrokenResourceError):
                async with connect(running.port, running.tls if over_tls else None) as client:
                    await behave(client, own)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            own = random.Random(chance.random())
            nursery.start_soon(one, chance.choice(BEHAVIOURS), chance.random() < 0.8, own)


async def among_a_crowd(folder: Path, count: int, clock: MockClock) -> None:
    async with auth_server(
        folder,
        Authority(folder),
        requests_per_minute_per_address=1_000_000,
        connections_per_minute_per_address=1_000_000,
        renewals_per_hour_per_account=1_000_000,
    ) as running:
        volunteer = Volunteer(running)
        assert (await volunteer.join(running.new_code())).status == 200
        renewed = 0
        async with trio.open_nursery() as nursery:

            async def renew() -> None:
                nonlocal renewed
                while True:
                    assert (await volunteer.renew()).status == 200
                    renewed += 1

            nursery.start_soon(renew)
            await a_crowd(running, count, seed=11)
            nursery.cancel_scope.cancel()
        assert renewed >= 5
        http = running.server.http
        assert http is not None
        await until(lambda: http.connections == 0, PATIENCE_SECONDS * clock.rate)


@pytest.mark.slow
async def test_a_well_behaved_client_is_served_among_misbehaving_ones(
    hurried: MockClock, tmp_path: Path
) -> None:
    await among_a_crowd(tmp_path, CROWD, hurried)


@pytest.mark.soak
async def test_a_well_behaved_client_is_served_among_very_many_misbehaving_ones(
    hurried: MockClock, tmp_path: Path
) -> None:
    await among_a_crowd(tmp_path, SOAK_CROWD, hurried)
