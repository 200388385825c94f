"""A login by the device flow, from the code in the terminal to the identity, and its bad ends."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from auth.server.providers.errors import (
    LoginExpired,
    LoginMisuse,
    LoginReason,
    LoginRefused,
    ProviderMisconfigured,
    ProviderUnavailable,
)
from auth.server.providers.identity import ProviderIdentity
from auth.server.providers.logins import LoggedIn, Logins, Pending
from tests.auth.providers.conftest import (
    ADDRESS,
    PEER,
    ask_again,
    logins_with,
    settings_for,
    start_device,
)
from tests.auth.providers.openid_imitation import OpenIdImitation, as_json
from tests.auth.providers.web_imitation import Asked, Reply, Write

PENDING = {"error": "authorization_pending"}


async def test_the_code_and_the_address_are_the_providers(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_device(logins)
    assert started.user_code == "WDJB-MJHT"
    assert started.verification_uri == f"{imitation.issuer}/connect"
    assert started.verification_uri_complete == f"{imitation.issuer}/connect?code=WDJB-MJHT"
    assert (started.interval, started.expires_in) == (5, 900)
    assert imitation.asked[-1].form["scope"] == "openid profile email"


async def test_after_the_person_said_yes_the_identity_is_for_the_peer_that_began(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.person = PENDING
    started = await start_device(logins)
    assert await ask_again(logins, clock, started) == Pending(5)
    imitation.person = None
    assert await ask_again(logins, clock, started) == LoggedIn(
        started.session, PEER, ProviderIdentity("corp", "subject-1", "alice")
    )


async def test_an_identity_is_handed_out_once(
    logins: Logins, clock: trio.testing.MockClock
) -> None:
    started = await start_device(logins)
    assert isinstance(await ask_again(logins, clock, started), LoggedIn)
    with pytest.raises(LoginExpired):
        await ask_again(logins, clock, started)


async def test_an_identity_given_back_is_handed_out_again(
    logins: Logins, clock: trio.testing.MockClock
) -> None:
    started = await start_device(logins)
    first = await ask_again(logins, clock, started)
    assert logins.give_back(started.session)
    assert await logins.poll(started.session) == first
    assert logins.give_back(started.session)
    clock.jump(900)
    assert not logins.give_back(started.session)


async def test_polls_before_the_interval_do_not_reach_the_provider(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_device(logins)
    for _ in range(5):
        assert isinstance(await logins.poll(started.session), Pending)
    assert imitation.times_asked("/token") == 0


async def test_polls_at_the_same_time_ask_the_provider_once(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.person = PENDING
    started = await start_device(logins)
    clock.jump(5)
    answers = []

    async def poll() -> None:
        answers.append(await logins.poll(started.session))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(poll)
    assert len(answers) == 5
    assert imitation.times_asked("/token") == 1


async def test_slow_down_adds_five_seconds(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.person = {"error": "slow_down"}
    started = await start_device(logins)
    assert await ask_again(logins, clock, started) == Pending(10)
    assert isinstance(await ask_again(logins, clock, started), Pending)
    assert imitation.times_asked("/token") == 1  # 5 s later it is still too early
    clock.jump(5)
    assert await logins.poll(started.session) == Pending(15)
    assert imitation.times_asked("/token") == 2


async def test_a_person_who_says_no_is_refused_and_told_so_again(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.person = {"error": "access_denied"}
    started = await start_device(logins)
    with pytest.raises(LoginRefused) as first:
        await ask_again(logins, clock, started)
    assert first.value.reason is LoginReason.DENIED
    assert (first.value.provider, first.value.peer) == ("corp", PEER)
    with pytest.raises(LoginRefused) as again:
        await ask_again(logins, clock, started)
    assert again.value.reason is LoginReason.DENIED
    assert again.value.record is first.value.record
    assert imitation.times_asked("/token") == 1


@pytest.mark.parametrize("error", ["expired_token", "invalid_grant"])
async def test_a_code_that_the_provider_gave_up_is_expired(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock, error: str
) -> None:
    imitation.person = {"error": error}
    started = await start_device(logins)
    with pytest.raises(LoginExpired):
        await ask_again(logins, clock, started)
    with pytest.raises(LoginExpired):
        await ask_again(logins, clock, started)
    assert logins.open_count() == 0


async def test_a_login_that_nobody_confirms_expires_by_itself(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.device = {"expires_in": 60}
    started = await start_device(logins)
    clock.jump(61)
    with pytest.raises(LoginExpired):
        await logins.poll(started.session)
    assert imitation.times_asked("/token") == 0


async def test_an_outage_while_waiting_costs_nothing_but_time(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    started = await start_device(logins)
    imitation.instead["/token"] = lambda _: Reply(status=502)
    with pytest.raises(ProviderUnavailable) as outage:
        await ask_again(logins, clock, started)
    assert outage.value.status == 503
    assert "502" in outage.value.why
    assert logins.troubles()["corp"]
    assert isinstance(await ask_again(logins, clock, started), Pending)  # the pauses grow
    del imitation.instead["/token"]
    assert isinstance(await ask_again(logins, clock, started), LoggedIn)
    assert logins.troubles()["corp"] == ""


async def test_an_outage_after_the_token_was_given_does_not_lose_it(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.claims = {"preferred_username": None}
    imitation.userinfo["preferred_username"] = "alice"
    imitation.instead["/userinfo"] = lambda _: Reply(status=503)
    started = await start_device(logins)
    with pytest.raises(ProviderUnavailable):
        await ask_again(logins, clock, started)
    imitation.person = {"error": "invalid_grant"}  # what a provider says to a used code
    del imitation.instead["/userinfo"]
    clock.jump(10)
    answer = await logins.poll(started.session)
    assert isinstance(answer, LoggedIn)
    assert answer.identity.login == "alice"


async def test_hanging_up_while_the_provider_answers_does_not_lose_the_login(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    started = await start_device(logins)
    clock.jump(5)
    with trio.CancelScope() as hangs_up:

        def answer(asked: Asked) -> Reply:
            hangs_up.cancel()
            del imitation.instead["/token"]
            return imitation.handle(asked)

        imitation.instead["/token"] = answer
        await logins.poll(started.session)
    assert hangs_up.cancelled_caught
    imitation.person = {"error": "invalid_grant"}
    assert isinstance(await logins.poll(started.session), LoggedIn)


async def test_a_silent_provider_does_not_hold_up_somebody_who_leaves(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    started = await start_device(logins)
    clock.jump(5)
    silent = trio.Event()

    async def say_nothing(write: Write) -> None:
        del write
        silent.set()
        await trio.sleep_forever()

    imitation.instead["/token"] = lambda _: Reply(pieces=say_nothing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(logins.poll, started.session)
        await silent.wait()
        left = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - left < 5.0  # and not the ten seconds of a deadline
    del imitation.instead["/token"]
    clock.jump(5)
    assert isinstance(await logins.poll(started.session), LoggedIn)


@pytest.mark.parametrize(
    "wrong",
    [
        {"verification_uri": "javascript:alert(1)"},
        {"verification_uri": "http://203.0.113.9/"},
        {"verification_uri": "https://example.org/\x1b[2J"},
        {"verification_uri_complete": "https://example.org/ two words"},
        {"user_code": "\x1b]0;owned\x07"},
        {"user_code": ""},
        {"user_code": "A" * 41},
        {"device_code": ""},
        {"device_code": "A" * 20_000},
        {"user_code": 17},
        {"expires_in": "soon"},
    ],
)
async def test_an_answer_that_no_terminal_should_show_is_an_outage(
    logins: Logins, imitation: OpenIdImitation, wrong: dict[str, object]
) -> None:
    imitation.device = wrong
    with pytest.raises(ProviderUnavailable):
        await start_device(logins)
    assert logins.open_count() == 0


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ({"verification_uri": None, "verification_url": "https://google.example/device"}, None),
        ({"interval": "7", "expires_in": "900"}, None),
        ({}, "authorization_declined"),
    ],
    ids=["Google's name for the address", "Microsoft's numbers", "Microsoft's no"],
)
async def test_deviations_of_large_providers_from_the_standard_are_understood(
    logins: Logins,
    imitation: OpenIdImitation,
    clock: trio.testing.MockClock,
    device: dict[str, object],
    error: str | None,
) -> None:
    imitation.device = device
    imitation.person = None if error is None else {"error": error}
    started = await start_device(logins)
    assert started.verification_uri
    assert started.expires_in == 900
    if error is None:
        assert isinstance(await ask_again(logins, clock, started), LoggedIn)
    else:
        with pytest.raises(LoginRefused):
            await ask_again(logins, clock, started)


async def test_intervals_and_lifetimes_beyond_reason_are_bounded(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    imitation.device = {"interval": 1e300, "expires_in": 1e300}
    started = await start_device(logins)
    assert (started.interval, started.expires_in) == (60, 1800)
    imitation.device = {"interval": -1, "expires_in": 0}
    started = await start_device(logins)
    assert (started.interval, started.expires_in) == (5, 1800)


@pytest.mark.parametrize("error", ["invalid_client", "unauthorized_client", "invalid_scope"])
async def test_settings_that_the_provider_rejects_are_told_from_an_outage(
    logins: Logins, imitation: OpenIdImitation, error: str
) -> None:
    answer = {"error": error, "error_description": "no \x1b[31msuch\x1b[0m client"}
    imitation.instead["/device"] = lambda _: as_json(answer, 401)
    with pytest.raises(ProviderMisconfigured) as trouble:
        await start_device(logins)
    assert error in logins.troubles()["corp"]
    assert error in trouble.value.why
    assert trouble.value.why.isprintable()


async def test_a_provider_without_a_device_flow_is_said_to_have_none(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    imitation.document = {"device_authorization_endpoint": ""}
    with pytest.raises(ProviderMisconfigured, match="no device flow"):
        await start_device(logins)


async def test_an_answer_without_an_id_token_names_the_scope_that_lacks(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    imitation.instead["/token"] = lambda _: as_json({"access_token": "a"})
    started = await start_device(logins)
    with pytest.raises(ProviderMisconfigured, match="openid"):
        await ask_again(logins, clock, started)


@pytest.mark.parametrize(
    ("provider", "kind"), [("corp", "code"), ("corp", "smoke"), ("nobody", "device"), ("", "")]
)
async def test_a_login_that_is_not_offered_is_misuse(
    logins: Logins, provider: str, kind: str
) -> None:
    with pytest.raises(LoginMisuse):
        await logins.start(PEER, provider, kind, ADDRESS)


@pytest.mark.parametrize(
    ("methods", "in_the_header"),
    [(None, True), (["client_secret_post"], False), (["private_key_jwt"], True)],
)
async def test_a_secret_goes_where_the_provider_takes_it(
    imitation: OpenIdImitation,
    tmp_path_factory: pytest.TempPathFactory,
    methods: list[str] | None,
    in_the_header: bool,
) -> None:
    if methods is not None:
        imitation.document = {"token_endpoint_auth_methods_supported": methods}
    file = tmp_path_factory.mktemp("secret") / "corp.secret"
    file.write_text("s:e cret\n")
    file.chmod(0o600)
    settings = settings_for(imitation, client_secret_file=str(file))
    async with logins_with(settings) as logins:
        await start_device(logins)
    asked = imitation.asked[-1]
    if in_the_header:
        assert asked.headers["authorization"] == "Basic cG90bHVjazpzJTNBZSUyMGNyZXQ="
    else:
        assert asked.form["client_secret"] == "s:e cret"
    assert ("client_secret" in asked.form) is not in_the_header


def test_the_error_says_what_why_and_what_next() -> None:
    error = LoginRefused("What.", reason=LoginReason.CODE, why="Why.", advice="Advice.")
    assert str(error) == "What. Why. Advice."
    assert json.dumps([error.code, error.status]) == '["login_refused", 403]'
