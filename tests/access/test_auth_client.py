"""Which answers count as the auth server's own, and which could be from any server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from auth.keyring import endorse
from auth.keys import SigningKey, fingerprint
from auth.statements import SignedRefusal, sign_refusal
from node.core.access.auth_client import (
    AccessDenied,
    AuthClient,
    GrantedPass,
    OfferedProvider,
    PendingLogin,
    WrongServer,
    open_auth_client,
)
from node.core.access.auth_http import Outage
from node.core.access.server_time import ServerTime
from node.net.clocks import machine_clocks
from protocols.identity import Identity
from tests.access.https_servers import response
from tests.access.impostor import (
    ROOT,
    RUN,
    STRANGER,
    Impostor,
    decoded,
    encoded,
    root_record,
    running_impostor,
    said,
)

CODE = OfferedProvider("code", "code")
ME = Identity.from_seed(b"\7" * 32)


@asynccontextmanager
async def client_of(
    impostor: Impostor, folder: Path, time: ServerTime | None = None
) -> AsyncIterator[AuthClient]:
    """A client with an invite that pins ROOT, at a server that does as it likes."""
    async with running_impostor(folder, impostor) as server:
        assert server.certificate is not None
        async with open_auth_client(
            ME,
            url=server.url,
            run=RUN,
            fingerprint=fingerprint(ROOT.public_key),
            pin=server.certificate.sha256,
            time=time or ServerTime(machine_clocks()),
        ) as client:
            yield client


async def logged_in(client: AuthClient) -> GrantedPass:
    await client.meet()
    granted = await client.log_in(CODE, "ABCD")
    assert isinstance(granted, GrantedPass)
    return granted


async def test_a_login_ends_in_a_pass_for_our_own_key(tmp_path: Path) -> None:
    async with client_of(Impostor(), tmp_path) as client:
        granted = await logged_in(client)
    assert granted.opened.token.peer == ME.public_key
    assert granted.opened.token.username == "code:alice"


async def test_a_server_with_other_keys_hears_nothing_of_ours(tmp_path: Path) -> None:
    impostor = Impostor(key=STRANGER)
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(WrongServer, match="is not the auth server of albert"):
            await client.meet()
    assert impostor.asked == ["/v1/keys"]


async def test_a_server_that_only_shows_the_right_keys_hears_nothing_either(tmp_path: Path) -> None:
    impostor = Impostor(key=STRANGER, records=(root_record(ROOT),))
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(WrongServer):
            await client.meet()
    assert impostor.asked == ["/v1/keys", "/v1/time"]


async def test_the_server_of_another_run_is_another_server(tmp_path: Path) -> None:
    impostor = Impostor(run="bert")
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(WrongServer):
            await client.meet()
    assert "/v1/login" not in impostor.asked


async def test_a_key_that_the_pinned_one_vouches_for_is_as_good(tmp_path: Path) -> None:
    newer = SigningKey(b"\3" * 32)
    records = (root_record(ROOT), endorse(RUN, newer.public_key, 1, 1 << 50, ROOT))
    async with client_of(Impostor(key=newer, records=records), tmp_path) as client:
        assert (await logged_in(client)).opened.token.key_id == newer.key_id


async def test_a_refusal_that_the_auth_key_signed_is_one(tmp_path: Path) -> None:
    impostor = Impostor(answers={"/v1/login": Impostor.refuse})
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(AccessDenied) as denied:
            await logged_in(client)
    assert denied.value.exit_code == 3
    assert denied.value.code == "denied"
    assert (denied.value.what, denied.value.why, denied.value.advice) == (
        "You may not take part in this run.",
        "A moderator said so.",
        "Ask them.",
    )


def signed_by_a_stranger(impostor: Impostor, question: dict[str, Any]) -> bytes:
    return impostor.refuse(question, by=STRANGER)


def about_another_question(impostor: Impostor, question: dict[str, Any]) -> bytes:
    return impostor.refuse({**question, "challenge": encoded(bytes(56))})


def unsigned(_impostor: Impostor, _question: dict[str, Any]) -> bytes:
    return said({"error": "denied", "what": "Go away.", "signed": ""}, "403 Forbidden")


def a_page(_impostor: Impostor, _question: dict[str, Any]) -> bytes:
    return response("403 Forbidden", b"<html>pay first", "Content-Type: text/html")


def about_the_challenge(_impostor: Impostor, question: dict[str, Any]) -> bytes:
    refusal = SignedRefusal(
        RUN, decoded(question["challenge"]), 1, "challenge", "It is used.", "", "", ROOT.key_id
    )
    return said({"signed": encoded(sign_refusal(refusal, ROOT))}, "403 Forbidden")


@pytest.mark.parametrize(
    "answer",
    [signed_by_a_stranger, about_another_question, unsigned, a_page, about_the_challenge],
    ids=lambda answer: answer.__name__.replace("_", " "),
)
async def test_every_other_no_is_an_outage(tmp_path: Path, answer: Any) -> None:
    async with client_of(Impostor(answers={"/v1/renew": answer}), tmp_path) as client:
        granted = await logged_in(client)
        with pytest.raises(Outage) as outage:
            await client.renew(granted.opened.access_pass.token)
    assert outage.value.exit_code == 4


async def test_a_server_that_lost_an_auth_key_is_not_called_busy(tmp_path: Path) -> None:
    def without_the_key(_impostor: Impostor, _question: dict[str, Any]) -> bytes:
        no = {"error": "unknown_key", "what": "It does not know it.", "advice": "Pay."}
        return said(no, "503 Service Unavailable", "Retry-After: 60")

    impostor = Impostor(answers={"/v1/renew": without_the_key})
    async with client_of(impostor, tmp_path) as client:
        granted = await logged_in(client)
        with pytest.raises(Outage, match="does not know the auth key") as outage:
            await client.renew(granted.opened.access_pass.token)
    assert "busy" not in str(outage.value)
    assert "backup" in outage.value.why
    assert "moderators" in outage.value.advice
    assert "Pay" not in str(outage.value), "anybody can send this answer"
    assert outage.value.retry_seconds == 60.0


async def test_a_pass_that_answers_something_older_does_not_count(tmp_path: Path) -> None:
    kept: list[bytes] = []

    def replay(impostor: Impostor, question: dict[str, Any]) -> bytes:
        kept.append(impostor.grant(question))
        return kept[0]

    async with client_of(Impostor(answers={"/v1/renew": replay}), tmp_path) as client:
        granted = await logged_in(client)
        await client.renew(granted.opened.access_pass.token)
        with pytest.raises(WrongServer, match="does not answer this request"):
            await client.renew(granted.opened.access_pass.token)


async def test_a_pass_for_another_key_does_not_count(tmp_path: Path) -> None:
    def for_another(impostor: Impostor, question: dict[str, Any]) -> bytes:
        another = encoded(Identity.from_seed(b"\10" * 32).public_key)
        return impostor.grant({**question, "peer": another})

    async with client_of(Impostor(answers={"/v1/login": for_another}), tmp_path) as client:
        with pytest.raises(WrongServer, match="not for this node"):
            await logged_in(client)


@pytest.mark.parametrize(
    "shown",
    [
        {"url": "https://real.example/login/p1", "confirmation": "amber otter"},
        {"url": "http://[", "confirmation": "amber otter"},
        {"user_code": "\x1b]0;title\x07"},
        {"verification_uri": "https://id.example/\u202egnp"},
        {"verification_uri": "https://id.example/" + "x" * 3_000},
    ],
    ids=["another's page", "no page", "commands to the terminal", "a turned text", "endless"],
)
async def test_text_that_must_not_be_shown_to_a_person_ends_the_login(
    tmp_path: Path, shown: dict[str, str]
) -> None:
    def begin(_impostor: Impostor, _question: dict[str, Any]) -> bytes:
        return said({"session": "s", "interval": 1, "expires_in": 600, **shown}, "202 Accepted")

    async with client_of(Impostor(answers={"/v1/login": begin}), tmp_path) as client:
        await client.meet()
        with pytest.raises(WrongServer):
            await client.log_in(OfferedProvider("hub", "browser"))


@pytest.mark.parametrize("page", ["https://auth.example", "https://auth.example:443"])
@pytest.mark.parametrize("url", ["https://Auth.example:443", "https://auth.example"])
async def test_a_page_of_the_server_is_at_its_address_with_the_usual_port_or_without(
    url: str, page: str
) -> None:
    time = ServerTime(machine_clocks())
    async with open_auth_client(ME, url=url, run=RUN, fingerprint="", time=time) as client:
        client._check_shown(PendingLogin("s", 1, 600, url=f"{page}/login/p1"))
        with pytest.raises(WrongServer, match="at another address"):
            client._check_shown(PendingLogin("s", 1, 600, url="https://auth.example:8443/login/p1"))


async def test_server_time_comes_with_each_pass_and_when_asked(tmp_path: Path) -> None:
    ahead = Impostor(clock=lambda: machine_clocks().wall() + 600.0)
    time = ServerTime(machine_clocks())
    async with client_of(ahead, tmp_path, time) as client:
        await client.meet()
        await client.measure_time()
        assert abs(time.offset_ms - 600_000) < 1_000
        ahead.clock = lambda: machine_clocks().wall() - 600.0
        await logged_in(client)
        assert abs(time.offset_ms + 600_000) < 1_000


async def test_a_time_that_answers_another_nonce_is_not_taken(tmp_path: Path) -> None:
    def another(impostor: Impostor, _question: dict[str, Any]) -> bytes:
        return impostor.time({"nonce": encoded(bytes(16))})

    time = ServerTime(machine_clocks())
    async with client_of(Impostor(answers={"/v1/time": another}), tmp_path, time) as client:
        with pytest.raises(WrongServer):
            await client.meet()
    assert not time.is_measured


@pytest.mark.parametrize(
    "answer",
    [
        said({}),
        said({"challenge": 7}),
        said({"challenge": "!!"}),
        said({"challenge": encoded(bytes(1_000))}),
        said({"challenge": "é"}),
        response("200 OK", b"[" * 100_000, "Content-Type: application/json"),
        response("200 OK", b'"text"', "Content-Type: application/json"),
    ],
)
async def test_nonsense_is_an_outage(tmp_path: Path, answer: bytes) -> None:
    impostor = Impostor(answers={"/v1/challenge": lambda _impostor, _question: answer})
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(Outage):
            await logged_in(client)


@pytest.mark.parametrize("keys", [b"", b"\xc1", b"\x91" * 5_000, b"\x90", bytes(2_000)])
async def test_nonsense_for_keys_is_an_outage(tmp_path: Path, keys: bytes) -> None:
    impostor = Impostor(answers={"/v1/keys": lambda _impostor, _: said({"keys": encoded(keys)})})
    async with client_of(impostor, tmp_path) as client:
        with pytest.raises(Outage):
            await client.meet()


async def test_revocations_come_as_they_are_with_the_servers_wish(tmp_path: Path) -> None:
    impostor = Impostor()
    async with client_of(impostor, tmp_path) as client:
        nothing = await client.revocations(b"")
        assert (nothing.signed_list, nothing.poll_seconds) == (None, 10.0)
        signed = impostor.revoke(1)
        assert (await client.revocations(b"")).signed_list == signed
