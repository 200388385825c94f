"""A provider that does not answer as it should: always an outage, never a refusal, never dear."""

from __future__ import annotations

import datetime
import gzip
import ipaddress
import json
import logging
import ssl
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from auth.server.providers.errors import (
    LoginReason,
    LoginRefused,
    ProviderMisconfigured,
    ProviderUnavailable,
)
from auth.server.providers.fetching import LONGEST_ANSWER_BYTES
from auth.server.providers.logins import LoggedIn, Logins
from tests.auth.providers.conftest import (
    ADDRESS,
    PEER,
    ask_again,
    logins_with,
    settings_for,
    start_device,
)
from tests.auth.providers.openid_imitation import OpenIdImitation, SigningKey
from tests.auth.providers.web_imitation import Asked, Reply, Write, serving

DOCUMENT = "/.well-known/openid-configuration"
PATHS = [DOCUMENT, "/device", "/token", "/keys", "/userinfo"]


async def outage_when(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> ProviderUnavailable:
    """Log in until the provider's misbehaviour shows; it must be an outage."""
    imitation.claims["preferred_username"] = None  # so that userinfo is needed too
    with pytest.raises(ProviderUnavailable) as outage:
        await ask_again(logins, clock, await start_device(logins))
    assert outage.value.status == 503
    assert "not refused" in outage.value.advice
    assert str(outage.value).isprintable()
    return outage.value


GARBAGE = {
    "nothing": b"",
    "text": b"<html>Sign in to the hotel's network</html>",
    "cut short": b'{"issuer": "http',
    "another type": b"[1, 2, 3]",
    "a number": b"7",
    "null": b"null",
    "no text": b'{"issuer": "\xff\xfe"}',
    "deep": b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "wrong types": b'{"issuer": 1, "keys": 2, "device_code": 3, "access_token": 4, "sub": 5}',
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_an_outage(
    logins: Logins,
    imitation: OpenIdImitation,
    clock: trio.testing.MockClock,
    path: str,
    body: bytes,
) -> None:
    imitation.instead[path] = lambda _: Reply(body)
    if path == "/userinfo" and body == GARBAGE["wrong types"]:
        with pytest.raises(LoginRefused):  # claims they are, about somebody else
            await outage_when(logins, imitation, clock)
    else:
        await outage_when(logins, imitation, clock)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(
    logins: Logins,
    imitation: OpenIdImitation,
    clock: trio.testing.MockClock,
    path: str,
    status: int,
) -> None:
    elsewhere = {"Location": f"{imitation.issuer}/elsewhere"}
    imitation.instead[path] = lambda _: Reply(status=status, headers=elsewhere)
    outage = await outage_when(logins, imitation, clock)
    assert "redirect" in outage.why
    assert imitation.times_asked("/elsewhere") == 0


async def _endless(write: Write) -> None:
    while True:
        await write(b" " * 65_536)


@pytest.mark.parametrize("path", PATHS)
async def test_an_endless_answer_is_read_up_to_its_bound(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock, path: str
) -> None:
    imitation.instead[path] = lambda _: Reply(pieces=_endless)
    outage = await outage_when(logins, imitation, clock)
    assert str(LONGEST_ANSWER_BYTES) in outage.why


@pytest.mark.parametrize("path", PATHS)
async def test_a_slow_answer_has_a_deadline_for_all_of_it(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock, path: str
) -> None:
    async def drip(write: Write) -> None:
        for _ in range(4):  # each piece comes soon enough for a timeout between two reads
            await write(b" ")
            await trio.testing.wait_all_tasks_blocked(0.01)
            clock.jump(3)
        await trio.sleep_forever()

    imitation.instead[path] = lambda _: Reply(pieces=drip)
    outage = await outage_when(logins, imitation, clock)
    assert "10 s" in outage.why


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_server_in_trouble_is_an_outage_with_its_own_pause(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock, status: int
) -> None:
    imitation.instead["/token"] = lambda _: Reply(status=status, headers={"Retry-After": "77"})
    outage = await outage_when(logins, imitation, clock)
    assert outage.retry_after == 77


@pytest.mark.parametrize("asked", ["-1", "soon", "99999999999", "0", "\xb2"])
async def test_a_pause_beyond_reason_is_not_believed(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock, asked: str
) -> None:
    imitation.instead["/token"] = lambda _: Reply(status=503, headers={"Retry-After": asked})
    assert 1 <= (await outage_when(logins, imitation, clock)).retry_after <= 300


async def test_a_compressed_answer_is_not_unpacked(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    headers = {"Content-Encoding": "gzip"}
    imitation.instead["/keys"] = lambda _: Reply(bomb, headers=headers)
    assert "compressed" in (await outage_when(logins, imitation, clock)).why
    assert imitation.asked[0].headers["accept-encoding"] == "identity"


async def test_a_provider_that_is_not_there_is_an_outage(
    clock: trio.testing.MockClock, imitation: OpenIdImitation
) -> None:
    del clock
    async with serving(lambda _: Reply()) as address:
        pass
    async with logins_with(settings_for(imitation, issuer=address)) as logins:
        with pytest.raises(ProviderUnavailable) as outage:
            await start_device(logins)
    assert "connection failed" in outage.value.why


async def test_a_provider_that_comes_back_is_used_again(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.instead[DOCUMENT] = lambda _: Reply(status=503)
    with pytest.raises(ProviderUnavailable):
        await start_device(logins)
    del imitation.instead[DOCUMENT]
    with pytest.raises(ProviderUnavailable):  # for moments, nobody asks again
        await start_device(logins)
    assert imitation.times_asked(DOCUMENT) == 1
    clock.jump(5)
    await start_device(logins)


async def test_a_hundred_logins_ask_for_the_document_once(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(100):
            peer = number.to_bytes(32)
            nursery.start_soon(start_device, logins, peer, f"192.0.2.{number}")
    assert imitation.times_asked(DOCUMENT) == 1


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example.org"},
        {"issuer": "HTTP://127.0.0.1"},
        {"jwks_uri": ""},
        {"jwks_uri": "http://203.0.113.9/keys"},
        {"token_endpoint": "http://169.254.169.254/latest"},
        {"token_endpoint": "ftp://example.org/token"},
        {"device_authorization_endpoint": "//nowhere"},
        {"authorization_endpoint": "https://user:secret@example.org/"},
        {"authorization_endpoint": "https://example.org/#here"},
        {"userinfo_endpoint": "https://example.org:port/"},
        {"userinfo_endpoint": "https://example.org/" + "a" * 3000},
    ],
)
async def test_a_document_that_points_elsewhere_is_not_used(
    logins: Logins, imitation: OpenIdImitation, document: dict[str, str]
) -> None:
    imitation.document = document
    with pytest.raises(ProviderMisconfigured):
        await start_device(logins)
    assert {each.path for each in imitation.asked} == {DOCUMENT}


async def test_a_document_with_the_issuer_and_a_slash_is_another_issuers(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    imitation.document = {"issuer": imitation.issuer + "/"}
    with pytest.raises(ProviderMisconfigured, match="another issuer"):
        await start_device(logins)


async def test_an_issuer_that_ends_in_a_slash_is_found_and_believed(
    clock: trio.testing.MockClock, imitation: OpenIdImitation
) -> None:
    imitation.document = {"issuer": imitation.issuer + "/"}
    imitation.claims = {"iss": imitation.issuer + "/"}
    settings = settings_for(imitation, issuer=imitation.issuer + "/")
    async with logins_with(settings) as logins:
        assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)


async def test_the_log_says_when_an_outage_begins_and_ends_and_holds_no_secret(
    logins: Logins,
    imitation: OpenIdImitation,
    clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "potluck")
    started = await start_device(logins)
    imitation.instead["/token"] = lambda _: Reply(status=500)
    for _ in range(3):
        clock.jump(60)
        with pytest.raises(ProviderUnavailable):
            await logins.poll(started.session)
    del imitation.instead["/token"]
    clock.jump(60)
    assert isinstance(await logins.poll(started.session), LoggedIn)
    lines = [f"{each.levelname} {each.getMessage()}" for each in caplog.records]
    ours = [line for line in lines if "Corp" in line]
    assert [line.split()[0] for line in ours] == ["WARNING", "INFO"]
    for secret in ("access-1", "device-code-1", started.session):
        assert not any(secret in line for line in lines)


async def test_new_keys_are_noticed_when_a_token_is_signed_with_one(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)
    assert imitation.times_asked("/keys") == 1
    imitation.key = SigningKey("two", number=1)
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)
    assert imitation.times_asked("/keys") == 2


async def test_a_key_that_was_withdrawn_counts_for_an_hour_at_most(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)
    imitation.published = [SigningKey("two", number=1).published()]
    clock.jump(3600)
    with pytest.raises(LoginRefused, match="does not publish"):
        await ask_again(logins, clock, await start_device(logins))


async def test_unknown_keys_do_not_make_us_ask_as_often_as_somebody_likes(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.published = [SigningKey("two", number=1).published()]
    started = [await start_device(logins, bytes([number]) * 32) for number in range(10)]
    clock.jump(5)
    for each in started:
        with pytest.raises(LoginRefused) as refused:
            await logins.poll(each.session)
        assert refused.value.reason is LoginReason.ID_TOKEN
    assert imitation.times_asked("/keys") <= 2


async def test_keys_of_unknown_kinds_do_not_cost_us_the_good_one(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    strange = [{"kty": 7}, {}, {"kty": "LATTICE", "kid": "one"}, {"kty": "EC", "kid": ["one"]}]
    imitation.published = [*strange, imitation.key.published()]  # type: ignore[list-item]
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)


async def test_a_name_from_userinfo_is_taken_only_for_the_same_subject(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.claims = {"preferred_username": None}
    imitation.userinfo = {"sub": "subject-1", "preferred_username": "alice"}
    answer = await ask_again(logins, clock, await start_device(logins))
    assert isinstance(answer, LoggedIn)
    assert answer.identity.login == "alice"
    assert imitation.asked[-1].headers["authorization"] == "Bearer access-1"
    imitation.userinfo["sub"] = "subject-2"
    with pytest.raises(LoginRefused, match="two people"):
        await ask_again(logins, clock, await start_device(logins))


async def test_the_address_of_userinfo_does_not_count_as_verified_by_the_tokens_word(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.claims = {
        "preferred_username": None,
        "email": "me@example.org",
        "email_verified": True,
    }
    imitation.userinfo = {"sub": "subject-1", "email": "boss@example.org"}
    answer = await ask_again(logins, clock, await start_device(logins))
    assert isinstance(answer, LoggedIn)
    assert answer.identity.login == "subject-1"


async def test_a_provider_that_refuses_userinfo_is_misconfigured(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.instead["/userinfo"] = lambda _: Reply(status=403)
    assert isinstance(await outage_when(logins, imitation, clock), ProviderMisconfigured)


async def test_cookies_of_one_login_are_not_sent_with_the_next(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    def with_cookie(asked: Asked) -> Reply:
        del imitation.instead["/device"]
        reply = imitation.handle(asked)
        reply.headers["Set-Cookie"] = "session=1; Path=/"
        return reply

    imitation.instead["/device"] = with_cookie
    await start_device(logins)
    await start_device(logins)
    assert all("cookie" not in each.headers for each in imitation.asked)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "imitation")])
    today = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return file


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_certificate_of_nobodys_is_an_outage_and_a_named_one_is_trusted(
    clock: trio.testing.MockClock, certificate: Path, trusted: bool
) -> None:
    del clock
    imitation = OpenIdImitation()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with serving(imitation.handle, tls=tls) as address:
        imitation.issuer = address
        changes = {"ca_file": str(certificate)} if trusted else {}
        async with logins_with(settings_for(imitation, **changes)) as logins:
            if trusted:
                await start_device(logins)
            else:
                with pytest.raises(ProviderUnavailable, match="certificate is not valid"):
                    await start_device(logins)
                assert not imitation.asked


async def test_a_set_without_keys_refuses_and_recovers(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.instead["/keys"] = lambda _: Reply(json.dumps({"keys": []}).encode())
    with pytest.raises(LoginRefused):
        await ask_again(logins, clock, await start_device(logins))
    del imitation.instead["/keys"]
    assert isinstance(await ask_again(logins, clock, await start_device(logins)), LoggedIn)


async def test_a_start_that_fails_takes_no_place(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    imitation.instead["/device"] = lambda _: Reply(status=500)
    for _ in range(60):
        with pytest.raises(ProviderUnavailable):
            await logins.start(PEER, "corp", "device", ADDRESS)
    assert logins.open_count() == 0
