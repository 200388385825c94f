"""Strangers at a port: all tests use a real listener over real TLS.

Deadlines of ten seconds pass in half a second here: the clock runs faster (`hurried`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import h11
import pytest
import trio
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from trio.testing import MockClock

from auth.server import serving
from auth.server.answers import json_answer
from auth.server.boundary import read_body
from auth.server.certificates import LOOK_SECONDS, Certificate
from auth.server.rate_limits import AllowedRate, Network
from auth.server.serving import Connection, HttpServer
from tests.auth.web.authority import LOOPBACK, Authority
from tests.auth.web.http_client import HttpClient, connect, request
from tests.waiting import PATIENCE_SECONDS, until

HURRY = 20.0
GET = request("GET", "/")


@pytest.fixture
def hurried() -> MockClock:
    return MockClock(rate=HURRY)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what it was asked, as an application of ours would."""
    body = await read_body(Request(scope, receive))
    answer = json_answer(
        {"path": scope["path"], "bytes": len(body), "version": scope["http_version"]}
    )
    await answer(scope, receive, send)


class Listening:
    """A server on a port of its own, until the block is left."""

    def __init__(self, server: HttpServer, port: int, refused: list[str]) -> None:
        self.server = server
        self.port = port
        self.refused = refused
        self.stop: Callable[[], None] = lambda: None


@contextlib.asynccontextmanager
async def listening(
    app: Any = echo,
    certificate: Certificate | None = None,
    *,
    most: int = 50,
    most_per_address: int = 50,
    handshakes: AllowedRate = AllowedRate.per_minute(6000),  # noqa: B008 - it is frozen
    proxies: tuple[Network, ...] = (),
) -> AsyncIterator[Listening]:
    refused: list[str] = []
    server = HttpServer(
        app,
        certificate,
        most_connections=most,
        most_connections_per_address=most_per_address,
        handshakes=handshakes,
        proxies=proxies,
        on_refused_connection=refused.append,
    )
    listeners = await trio.open_tcp_listeners(0, host=LOOPBACK)
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def serve(task_status: Any) -> None:
            with scope:
                await server.serve(listeners, task_status)

        await nursery.start(serve)
        here = Listening(server, port, refused)
        here.stop = scope.cancel
        yield here
        scope.cancel()
    assert server.connections == 0, "nothing is left open"


async def test_a_request_is_answered_over_tls(authority: Authority) -> None:
    async with (
        listening(certificate=Certificate(*authority.issue())) as here,
        connect(here.port, authority.trust()) as client,
    ):
        for number in range(3):
            answer = await client.post(f"/{number}", b"x" * number)
            assert answer.json() == {"path": f"/{number}", "bytes": number, "version": "1.1"}
            assert "server" not in answer.headers


@pytest.mark.parametrize(
    ("hosts", "error"),
    [(("127.0.0.1",), "signature failure"), (("auth.example",), "IP address mismatch")],
    ids=["another authority", "another name"],
)
async def test_a_client_that_is_careful_turns_away(
    authority: Authority, tmp_path: Path, hosts: tuple[str, ...], error: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    trusting = Authority(folder) if hosts == ("127.0.0.1",) else authority
    async with (
        listening(certificate=Certificate(*authority.issue(*hosts))) as here,
        connect(here.port, trusting.trust()) as client,
    ):
        with pytest.raises(trio.BrokenResourceError) as caught:
            await client.ask("GET", "/")
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert error in caught.value.__cause__.verify_message + str(caught.value.__cause__)


async def test_an_expired_certificate_is_turned_away_by_the_client(authority: Authority) -> None:
    from tests.auth.web.authority import DAY

    certificate = Certificate(*authority.issue(begins=DAY * -9, ends=DAY * -1))
    async with (
        listening(certificate=certificate) as here,
        connect(here.port, authority.trust()) as client,
    ):
        with pytest.raises(trio.BrokenResourceError) as caught:
            await client.ask("GET", "/")
        assert "expired" in str(caught.value.__cause__)


async def test_new_handshakes_get_a_new_certificate_and_old_connections_go_on(
    authority: Authority,
) -> None:
    certificate = Certificate(*authority.issue())
    async with (
        listening(certificate=certificate) as here,
        connect(here.port, authority.trust()) as before,
    ):
        await before.ask("GET", "/")
        first = _serial(before.stream)
        authority.issue()
        assert certificate.reload_if_changed()
        async with connect(here.port, authority.trust()) as after:
            await after.ask("GET", "/")
            assert _serial(after.stream) != first
        assert (await before.ask("GET", "/again")).status == 200


async def test_a_new_certificate_is_looked_for(authority: Authority, hurried: MockClock) -> None:
    certificate = Certificate(*authority.issue())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.watch)
        authority.issue()
        await until(
            lambda: certificate.reloads == 1, LOOK_SECONDS + PATIENCE_SECONDS * hurried.rate
        )
        nursery.cancel_scope.cancel()


def _serial(stream: Any) -> str:
    serial: str = stream.getpeercert()["serialNumber"]
    return serial


async def test_plain_http_on_a_tls_port_gets_nothing(authority: Authority) -> None:
    async with (
        listening(certificate=Certificate(*authority.issue())) as here,
        connect(here.port, None) as client,
    ):
        await client.send(GET)
        await client.is_closed()


SLOW = {
    "no handshake": b"",
    "no request": b"",
    "half a head": b"GET / HTTP/1.1\r\nhost: x\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW.keys())
@pytest.mark.parametrize("tls", [True, False])
async def test_a_client_that_connects_and_says_nothing_is_dropped(
    authority: Authority, words: bytes, tls: bool, hurried: MockClock
) -> None:
    certificate = Certificate(*authority.issue()) if tls else None
    shakes_hands = tls and words != b""
    async with (
        listening(certificate=certificate) as here,
        connect(here.port, authority.trust() if shakes_hands else None) as client,
    ):
        if words:
            await client.send(words)
        with trio.fail_after(serving.IDLE_SECONDS + PATIENCE_SECONDS * hurried.rate):
            await client.is_closed()


async def test_a_head_that_trickles_is_dropped_all_the_same(hurried: MockClock) -> None:
    async with listening() as here, connect(here.port, None) as client:
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012 - it is the loop that ends
            while True:
                assert trio.current_time() < began + PATIENCE_SECONDS * hurried.rate
                await client.send(
                    b"x: y\r\n" if trio.current_time() > began else b"GET / HTTP/1.1\r\n"
                )
                await trio.sleep(1)


async def test_a_head_that_never_ends_is_refused_at_its_limit() -> None:
    async with listening() as here, connect(here.port, None) as client:
        await client.send(b"GET / HTTP/1.1\r\nx: " + b"y" * serving.LARGEST_HEAD_BYTES)
        assert (await client.answer()).status == 431


@pytest.mark.parametrize(
    "words",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
        b"rubbish\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
)
async def test_other_bytes_than_http_end_only_their_connection(words: bytes) -> None:
    async with listening() as here:
        async with connect(here.port, None) as client:
            await client.send(words)
            with trio.fail_after(PATIENCE_SECONDS):
                await client.is_closed()
        async with connect(here.port, None) as client:
            assert (await client.ask("GET", "/")).status == 200


async def test_a_request_to_upgrade_the_protocol_is_not_followed() -> None:
    upgrades = (
        {"upgrade": "h2c", "connection": "upgrade, http2-settings", "http2_settings": "AAMAAABk"},
        {
            "upgrade": "websocket",
            "connection": "upgrade",
            "sec_websocket_version": "13",
            "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==",
        },
    )
    async with listening() as here:
        for headers in upgrades:
            async with connect(here.port, None) as client:
                answer = await client.ask("GET", "/", **headers)
                assert (answer.status, answer.json()["version"]) == (200, "1.1")


async def test_without_room_the_longest_idle_connection_makes_way() -> None:
    async with listening(most=3) as here, contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(3):
            clients.append(await stack.enter_async_context(connect(here.port, None)))
            await clients[-1].ask("GET", "/")
        await clients[0].ask("GET", "/")
        async with connect(here.port, None) as newest:
            assert (await newest.ask("GET", "/")).status == 200
            await clients[1].is_closed()
            assert (await clients[0].ask("GET", "/")).status == 200
            assert (await clients[2].ask("GET", "/")).status == 200
        assert here.refused == ["idle"]


async def test_a_connection_that_is_being_answered_does_not_make_way() -> None:
    go = trio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await json_answer({})(scope, receive, send)

    async with listening(slow, most=2) as here, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(here.port, None)) for _ in range(2)]
        for client in clients:
            await client.send(GET)
        await until(
            lambda: all(each.idle_since is None for each in here.server.open), PATIENCE_SECONDS
        )
        async with connect(here.port, None) as one_too_many:
            await one_too_many.is_closed()
        assert here.refused == ["connections"]
        go.set()
        for client in clients:
            assert (await client.answer()).status == 200


async def test_without_room_the_slowest_sender_of_a_body_makes_way() -> None:
    part = request("POST", "/", b"x", content_length="2")
    async with listening(most=3) as here, contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(1, 4):
            clients.append(await stack.enter_async_context(connect(here.port, None)))
            await clients[-1].send(part)
            await until(lambda n=number: len(bodies_awaited(here)) == n, PATIENCE_SECONDS)
        async with connect(here.port, None) as newest:
            assert (await newest.ask("GET", "/")).status == 200
            with pytest.raises(EOFError):
                await clients[0].answer()
        for client in clients[1:]:
            await client.send(b"y")
            assert (await client.answer()).json()["bytes"] == 2
        assert here.refused == ["idle"]


def bodies_awaited(here: Listening) -> list[Connection]:
    return [
        each
        for each in here.server.open
        if each.idle_since is not None and each._http.their_state is h11.SEND_BODY
    ]


async def test_a_body_that_is_not_all_here_does_not_hold_up_the_end() -> None:
    async with listening() as here, connect(here.port, None) as client:
        await client.send(request("POST", "/", b"x", content_length="2"))
        await until(lambda: bool(bodies_awaited(here)), PATIENCE_SECONDS)
        with trio.fail_after(serving.GRACE_SECONDS / 2):
            here.stop()
            await client.is_closed()


async def test_a_body_that_the_application_gives_up_is_no_longer_waited_for(
    hurried: MockClock,
) -> None:
    go = trio.Event()

    async def impatient(scope: Scope, receive: Receive, send: Send) -> None:
        with trio.move_on_after(1):
            await read_body(Request(scope, receive))
        await go.wait()
        await json_answer({}, 408)(scope, receive, send)

    async with listening(impatient, most=1) as here, connect(here.port, None) as client:
        await client.send(request("POST", "/", b"x", content_length="2"))
        await until(lambda: bool(bodies_awaited(here)), PATIENCE_SECONDS * hurried.rate)
        await until(lambda: not bodies_awaited(here), PATIENCE_SECONDS * hurried.rate)
        async with connect(here.port, None) as one_too_many:
            await one_too_many.is_closed()
        go.set()
        assert (await client.answer()).status == 408


async def test_handshakes_of_one_address_are_limited() -> None:
    async with listening(handshakes=AllowedRate(burst=3, per_second=0.001)) as here:
        for _ in range(3):
            async with connect(here.port, None) as client:
                await client.ask("GET", "/")
        async with connect(here.port, None) as client:
            await client.is_closed()
        assert here.refused == ["handshakes"]


async def test_a_proxy_of_ours_has_as_many_connections_as_there_are() -> None:
    loopback = (ipaddress.ip_network("127.0.0.0/8"),)
    few = AllowedRate(burst=1, per_second=0.001)
    async with (
        listening(most_per_address=1, handshakes=few, proxies=loopback) as here,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(5):
            client = await stack.enter_async_context(connect(here.port, None))
            assert (await client.ask("GET", "/")).status == 200


async def test_connections_from_one_address_are_limited() -> None:
    async with listening(most_per_address=2) as here, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            client = await stack.enter_async_context(connect(here.port, None))
            await client.ask("GET", "/")
        async with connect(here.port, None) as one_too_many:
            await one_too_many.is_closed()
        assert here.refused == ["connections_per_address"]


async def test_a_client_that_asks_and_never_reads_is_dropped(hurried: MockClock) -> None:
    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await json_answer({"x": "y" * 1_000_000})(scope, receive, send)

    async with listening(much) as here:
        client = await trio.open_tcp_stream(LOOPBACK, here.port)
        with contextlib.suppress(trio.BrokenResourceError):
            await client.send_all(GET * 100)
        patience = serving.WRITE_SECONDS + PATIENCE_SECONDS * hurried.rate
        await until(lambda: here.server.connections == 0, patience)
        await trio.aclose_forcefully(client)


async def test_clients_that_do_not_read_make_way_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They kept all places, and nobody else was let in."""
    monkeypatch.setattr(serving, "STUCK_SECONDS", 0.2)

    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        size = 1 if b"small" in scope["query_string"] else 20_000_000
        await json_answer({"x": "y" * size})(scope, receive, send)

    async with listening(much, most=3) as here:
        deaf = [await trio.open_tcp_stream(LOOPBACK, here.port) for _ in range(3)]
        for client in deaf:
            await client.send_all(GET)
        await until(
            lambda: sum(each.waits_since() is not None for each in here.server.open) == 3,
            PATIENCE_SECONDS,
        )
        async with connect(here.port, None) as newest:
            assert (await newest.ask("GET", "/?small")).status == 200
        assert here.refused == ["idle"]
        for client in deaf:
            await trio.aclose_forcefully(client)


async def test_a_client_that_goes_on_sending_after_its_answer_is_dropped() -> None:
    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        await json_answer({"no": True}, 413)(scope, receive, send)

    async with listening(deaf) as here, connect(here.port, None) as client:
        await client.send(request("POST", "/", b"", content_length="100000")[:-4] + b"\r\n\r\n")
        assert (await client.answer()).status == 413
        with contextlib.suppress(trio.BrokenResourceError):
            for _ in range(50):
                await client.send(b"x" * 100)
                await trio.lowlevel.checkpoint()
        await until(lambda: here.server.connections == 0, PATIENCE_SECONDS)


@pytest.mark.slow
async def test_many_pieces_that_nobody_reads_hold_up_nothing() -> None:
    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(0.05)  # while what it does not read piles up
        await json_answer({"no": True}, 404)(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening(deaf) as here, connect(here.port, None) as client:
        await client.send(head + b"1\r\nx\r\n" * 100 + b"0\r\n\r\n")
        assert (await client.answer()).status == 404
        with trio.fail_after(PATIENCE_SECONDS):
            await client.is_closed()
        await until(lambda: here.server.connections == 0, PATIENCE_SECONDS)


async def test_a_large_body_does_not_cost_its_sender_the_answer() -> None:
    async with listening() as here:
        for _ in range(5):
            async with connect(here.port, None) as client, trio.open_nursery() as nursery:
                nursery.start_soon(
                    _send_what_is_taken, client, request("POST", "/", b"x" * 500_000)
                )
                assert (await client.answer()).status == 500  # the echo knows no refusal
                nursery.cancel_scope.cancel()


async def _send_what_is_taken(client: HttpClient, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await client.send(data)


async def test_a_client_that_leaves_before_the_answer_leaves_nothing_behind() -> None:
    finished = trio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await trio.sleep(0.05)
        await json_answer({})(scope, receive, send)
        finished.set()

    async with listening(slow) as here:
        async with connect(here.port, None) as client:
            await client.send(GET)
            await until(lambda: here.server.connections == 1, PATIENCE_SECONDS)
        await until(lambda: here.server.connections == 0, PATIENCE_SECONDS)
        assert finished.is_set(), "what was begun is finished: it may have issued a pass"


async def test_many_requests_in_one_write_are_answered_in_order() -> None:
    async with listening() as here, connect(here.port, None) as client:
        await client.send(b"".join(request("GET", f"/{number}") for number in range(20)))
        paths = [(await client.answer()).json()["path"] for _ in range(20)]
    assert paths == [f"/{number}" for number in range(20)]


async def test_a_request_in_flight_is_answered_before_the_end() -> None:
    entered, go = trio.Event(), trio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await go.wait()
        await json_answer({"done": True})(scope, receive, send)

    async with listening(slow) as here, connect(here.port, None) as client:
        async with connect(here.port, None) as idle:
            await client.send(GET)
            await entered.wait()
            here.stop()
            await idle.is_closed()
            go.set()
            assert (await client.answer()).json() == {"done": True}
            await client.is_closed()
        with pytest.raises(OSError, match="all attempts"):
            await trio.open_tcp_stream(LOOPBACK, here.port)


@pytest.mark.slow
async def test_a_request_that_hangs_does_not_hold_up_the_end() -> None:
    async def hang(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await trio.sleep_forever()

    with trio.fail_after(serving.GRACE_SECONDS + PATIENCE_SECONDS):
        async with listening(hang) as here, connect(here.port, None) as client:
            await client.send(GET)
            await until(lambda: here.server.connections == 1, PATIENCE_SECONDS)
            here.stop()
            await client.is_closed()


async def test_a_client_that_never_reads_does_not_hold_up_the_end() -> None:
    async def much(scope: Scope, receive: Receive, send: Send) -> None:
        await json_answer({"x": "y" * 20_000_000})(scope, receive, send)

    with trio.fail_after(serving.GRACE_SECONDS + PATIENCE_SECONDS):
        async with listening(much) as here:
            client = await trio.open_tcp_stream(LOOPBACK, here.port)
            await client.send_all(GET)
            await client.receive_some(1)
            here.stop()
            await trio.aclose_forcefully(client)


async def test_a_crash_of_the_application_ends_one_connection_only() -> None:
    async def crash(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ValueError("a bug")

    async with listening(crash) as here:
        for _ in range(2):
            async with connect(here.port, None) as client:
                assert (await client.ask("GET", "/")).status == 500


async def test_a_reset_in_the_handshake_is_no_news(authority: Authority) -> None:
    async with listening(certificate=Certificate(*authority.issue())) as here:
        for _ in range(5):
            rude = socket.create_connection((LOOPBACK, here.port))
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            rude.close()
        async with connect(here.port, authority.trust()) as client:
            assert (await client.ask("GET", "/")).status == 200
