"""Every way in which no auth server answers is an outage, with what to do about it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import trio

from node.core.access.auth_http import (
    LARGEST_ANSWER_BYTES,
    Outage,
    explain_answer,
    open_auth_http,
)
from tests.access.https_servers import (
    Certificate,
    make_certificate,
    response,
    scripted_server,
)

JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return make_certificate()


async def test_an_answer_comes_back_as_it_is(tmp_path: Path, certificate: Certificate) -> None:
    says = response("200 OK", b'{"run": "albert"}', JSON, "Potluck-Poll-Seconds: 20")
    async with (
        scripted_server(tmp_path, says, certificate=certificate) as server,
        open_auth_http(server.url, certificate.sha256) as http,
    ):
        answer = await http.ask("GET", "/v1/about")
    assert (answer.status, answer.document()) == (200, {"run": "albert"})
    assert answer.headers["potluck-poll-seconds"] == "20"
    assert server.asked[0].startswith(b"GET /v1/about HTTP/1.1\r\n")


async def test_a_question_has_its_content_and_query(
    tmp_path: Path, certificate: Certificate
) -> None:
    async with (
        scripted_server(tmp_path, response("204 No Content"), certificate=certificate) as server,
        open_auth_http(server.url, certificate.sha256) as http,
    ):
        await http.ask("POST", "/v1/challenge", content={"peer": "x"}, query={"after": "7"})
    assert server.asked[0].startswith(b"POST /v1/challenge?after=7 ")
    assert b"content-type: application/json" in server.asked[0].lower()


@pytest.mark.parametrize("kind", ["unknown authority", "other name", "expired"])
async def test_a_wrong_certificate_gets_not_a_byte(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = make_certificate(
        "other.example" if kind == "other name" else "127.0.0.1", expired=kind == "expired"
    )
    trusted = make_certificate() if kind == "unknown authority" else shown
    (tmp_path / "authorities.pem").write_bytes(trusted.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authorities.pem"))
    async with (
        scripted_server(tmp_path, response("200 OK"), certificate=shown) as server,
        open_auth_http(server.url) as http,
    ):
        with pytest.raises(Outage, match="the certificate is not accepted") as outage:
            await http.ask("POST", "/v1/login", content={"code": "secret"})
    assert server.asked == []
    assert outage.value.exit_code == 4
    assert "captive portal" in outage.value.advice


@pytest.mark.parametrize(
    "host", ["auth.example", "192.0.2.1", "[2001:db8::1]", "127.0.0.1.example"]
)
async def test_nothing_is_sent_without_tls_to_another_machine(
    host: str, certificate: Certificate
) -> None:
    for pin in (b"", certificate.sha256):
        async with open_auth_http(f"http://{host}:8080", pin) as http:
            with pytest.raises(Outage, match="no https address"):
                await http.ask("POST", "/v1/login", content={"code": "secret"})


async def test_the_system_does_not_know_our_authority(
    tmp_path: Path, certificate: Certificate
) -> None:
    async with (
        scripted_server(tmp_path, response("200 OK"), certificate=certificate) as server,
        open_auth_http(server.url) as http,
    ):
        with pytest.raises(Outage, match="the certificate is not accepted"):
            await http.ask("GET", "/v1/about")


async def test_an_authority_that_the_system_knows_is_enough(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "authorities.pem").write_bytes(certificate.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authorities.pem"))
    async with (
        scripted_server(tmp_path, response("200 OK"), certificate=certificate) as server,
        open_auth_http(server.url) as http,
    ):
        assert (await http.ask("GET", "/v1/about")).status == 200


async def test_a_pinned_certificate_is_enough(tmp_path: Path) -> None:
    shown = make_certificate("other.example")
    async with (
        scripted_server(tmp_path, response("200 OK"), certificate=shown) as server,
        open_auth_http(server.url, shown.sha256) as http,
    ):
        assert (await http.ask("GET", "/v1/about")).status == 200


async def test_any_other_than_the_pinned_one_gets_not_a_byte(
    tmp_path: Path, certificate: Certificate
) -> None:
    async with (
        scripted_server(tmp_path, response("200 OK"), certificate=certificate) as server,
        open_auth_http(server.url, bytes(32)) as http,
    ):
        with pytest.raises(Outage, match="not the certificate in the invite"):
            await http.ask("GET", "/v1/about")
    assert server.asked == []


async def test_nobody_there_is_an_outage(certificate: Certificate) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    async with open_auth_http(f"https://127.0.0.1:{port}", certificate.sha256) as http:
        with pytest.raises(Outage, match="no connection") as outage:
            await http.ask("GET", "/v1/about")
    assert "Check this machine's connection" in outage.value.advice


async def test_a_server_that_hangs_up_is_an_outage(
    tmp_path: Path, certificate: Certificate
) -> None:
    for said in (
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf",
        b"\x00\xff garbage\r\n",
    ):
        async with (
            scripted_server(tmp_path, said, certificate=certificate) as server,
            open_auth_http(server.url, certificate.sha256) as http,
        ):
            with pytest.raises(Outage, match="the connection broke"):
                await http.ask("GET", "/v1/about")


async def test_an_endless_answer_ends(tmp_path: Path, certificate: Certificate) -> None:
    async def pour(stream: trio.abc.Stream) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            await stream.send_all(bytes(65_536))

    async with (
        scripted_server(tmp_path, certificate=certificate, conversation=pour) as server,
        open_auth_http(server.url, certificate.sha256) as http,
    ):
        with pytest.raises(Outage, match=f"more than {LARGEST_ANSWER_BYTES // 1024} KiB"):
            await http.ask("GET", "/v1/revocations")


async def test_cancelling_in_the_handshake_leaves_no_socket_open(certificate: Certificate) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with open_auth_http(f"https://127.0.0.1:{port}", certificate.sha256) as http:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http.ask, "GET", "/v1/about")
            accepted = await listener.accept()
            assert await accepted.receive_some(1), "the handshake has begun"
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            while await accepted.receive_some(4096):
                pass
    gc.collect()  # an open socket would be complained of here
    await accepted.aclose()
    await listener.aclose()


async def test_a_silent_server_is_given_up(
    tmp_path: Path,
    certificate: Certificate,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def say_nothing(_stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    async with (
        scripted_server(tmp_path, certificate=certificate, conversation=say_nothing) as server,
        open_auth_http(server.url, certificate.sha256) as http,
    ):
        autojump_clock.autojump_threshold = 0.2
        with pytest.raises(Outage, match="did not answer"):
            await http.ask("GET", "/v1/about")


@pytest.mark.parametrize(
    ("says", "why", "advice"),
    [
        (
            response("302 Found", b"", "Location: http://portal.example/login"),
            r"redirects us \(302, http://portal.example/login\)",
            "log in to the network",
        ),
        (
            response("403 Forbidden", b"<html>Welcome to our Wi-Fi", "Content-Type: text/html"),
            r"a page came instead of an answer \(403, text/html\)",
            "captive portal",
        ),
        (
            response("200 OK", b"<html>Accept our terms", "Content-Type: text/html"),
            "a page came instead",
            "captive portal",
        ),
        (
            response("407 Proxy Authentication Required"),
            "a proxy requires a login",
            "HTTPS_PROXY",
        ),
        (
            response("429 Too Many Requests", b"{}", JSON, "Retry-After: 20"),
            "it is busy",
            "Try again in 20 s",
        ),
        (
            response("500 Internal Server Error", b'{"what": "The disk is full."}', JSON),
            r"fault of its own \(500: The disk is full\)",
            "the moderator sees it",
        ),
        (
            response("418 Teapot", b'{"what": "I am not an auth server."}', JSON),
            "does not fit the question",
            "update",
        ),
    ],
)
async def test_a_wrong_answer_is_an_outage_that_is_explained(
    tmp_path: Path, certificate: Certificate, says: bytes, why: str, advice: str
) -> None:
    async with (
        scripted_server(tmp_path, says, certificate=certificate) as server,
        open_auth_http(server.url, certificate.sha256) as http,
    ):
        outage = explain_answer(server.url, await http.ask("GET", "/v1/about"))
    assert outage.what == "The auth server cannot be asked."
    assert outage.exit_code == 4
    with pytest.raises(Outage, match=why):
        raise outage
    assert advice in outage.advice


async def test_a_proxy_that_does_not_let_us_through_is_named(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_server(tmp_path, response("403 Forbidden")) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        async with open_auth_http("https://auth.example", certificate.sha256) as http:
            with pytest.raises(Outage, match="proxy did not let us through") as outage:
                await http.ask("GET", "/v1/about")
    assert "HTTPS_PROXY" in outage.value.advice


def test_text_from_an_unproven_server_is_cut() -> None:
    from node.core.access.auth_http import HttpAnswer

    answer = HttpAnswer(400, "application/json", json.dumps({"what": "x" * 5_000}).encode())
    assert len(str(explain_answer("https://auth.example", answer))) < 700
