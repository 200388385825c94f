"""Logging in at oidc-provider in both flows, well and badly: its pages, tokens and refusals."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from urllib.parse import parse_qsl, urlsplit

import pytest
import trio
import trio.testing

from auth.server.providers.errors import (
    LoginExpired,
    LoginReason,
    LoginRefused,
    ProviderMisconfigured,
    ProviderUnavailable,
)
from auth.server.providers.fetching import Fetcher, open_client
from auth.server.providers.flows import NotYet
from auth.server.providers.identity import ProviderIdentity
from auth.server.providers.logins import (
    BrowserStarted,
    DeviceStarted,
    LoggedIn,
    Logins,
    Pending,
    open_logins,
)
from auth.server.providers.oidc import OpenIdProvider
from auth.server.providers.settings import OpenIdSettings
from tests.strangers.oidc.browser import Browser, Page
from tests.strangers.oidc.process import OpenIdStranger
from tests.waiting import until

PUBLIC_URL = "https://auth.example.org"
CALLBACK = f"{PUBLIC_URL}/login/callback"
PEER = bytes(range(32))
ADDRESS = "192.0.2.7"
ALICE = ProviderIdentity("corp", "alice", "alice-online")


def logins_at(
    provider: OpenIdStranger, client: str = "potluck", **changes: object
) -> AbstractAsyncContextManager[Logins]:
    given = {"id": "corp", "issuer": provider.issuer, "client_id": client, **changes}
    return open_logins([OpenIdSettings(**given)], PUBLIC_URL)  # type: ignore[arg-type]


async def start_device(logins: Logins, peer: bytes = PEER) -> DeviceStarted:
    started = await logins.start(peer, "corp", "device", ADDRESS)
    assert isinstance(started, DeviceStarted)
    return started


async def poll(
    logins: Logins, clock: trio.testing.MockClock, started: DeviceStarted
) -> Pending | LoggedIn:
    clock.jump(started.interval)
    return await logins.poll(started.session)


async def open_device_page(browser: Browser, started: DeviceStarted) -> Page:
    """Type the code into the page that the terminal names, up to the question whether to go on."""
    page = await browser.open(started.verification_uri)
    return await browser.send(page, page.forms[0], {"user_code": started.user_code})


@pytest.mark.parametrize("client", ["potluck", "potluck-rsa"])
async def test_a_device_login_from_the_code_to_the_identity(
    provider: OpenIdStranger, clock: trio.testing.MockClock, client: str
) -> None:
    async with logins_at(provider, client) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        assert isinstance(await poll(logins, clock, started), Pending)
        page = await open_device_page(browser, started)
        assert started.user_code in page.text  # the provider shows it, to be compared
        page = await browser.log_in(page, "alice")
        assert "successful" in page.text
        assert await poll(logins, clock, started) == LoggedIn(started.session, PEER, ALICE)


async def test_the_complete_address_spares_the_typing(
    provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with logins_at(provider) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        assert started.verification_uri_complete is not None
        await browser.log_in(await browser.open(started.verification_uri_complete), "alice")
        assert isinstance(await poll(logins, clock, started), LoggedIn)


async def test_a_client_with_a_secret_proves_it(
    provider: OpenIdStranger,
    clock: trio.testing.MockClock,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("secret") / "corp.secret"
    file.touch(0o600)
    for secret, right in (("another", False), ("a secret: with & signs", True)):
        file.write_text(secret)
        settings = {"client": "potluck-basic", "client_secret_file": str(file)}
        async with logins_at(provider, **settings) as logins, Browser(CALLBACK) as browser:
            if not right:
                with pytest.raises(ProviderMisconfigured, match="invalid_client"):
                    await start_device(logins)
                continue
            started = await start_device(logins)
            await browser.log_in(await open_device_page(browser, started), "alice")
            assert isinstance(await poll(logins, clock, started), LoggedIn)


async def test_a_person_who_aborts_the_device_is_refused(
    provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with logins_at(provider) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        page = await open_device_page(browser, started)
        assert {"type": "submit", "form": page.forms[0].id, "value": "yes", "name": "abort"} in (
            page.buttons
        )
        await browser.send(page, page.forms[0], {"abort": "yes"})
        with pytest.raises(LoginRefused) as refused:
            await poll(logins, clock, started)
        assert refused.value.reason is LoginReason.DENIED


async def test_a_device_code_that_nobody_types_in_expires(
    provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with logins_at(provider, "hurried") as logins:
        started = await start_device(logins)
        assert started.expires_in == 4
        with pytest.raises(LoginExpired):
            await poll(logins, clock, started)


async def test_the_provider_itself_says_that_a_code_expired(provider: OpenIdStranger) -> None:
    settings = OpenIdSettings(id="corp", issuer=provider.issuer, client_id="hurried")
    async with open_client(None) as client:
        asked = OpenIdProvider(settings, None, Fetcher("Corp", client, trio.CapacityLimiter(1)))
        grant = await asked.start_device()
        answers = []

        async def has_expired() -> bool:
            try:
                answers.append(await asked.ask_device(grant, 5))
            except LoginExpired as expired:
                return "expired before it was used" in expired.what
            return False

        await until(has_expired, within_seconds=20)
    assert set(map(type, answers)) == {NotYet}


async def test_a_code_that_gave_a_token_gives_no_second_one(
    provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with logins_at(provider) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        await browser.log_in(await open_device_page(browser, started), "alice")
        assert isinstance(await poll(logins, clock, started), LoggedIn)
        with pytest.raises(LoginExpired):
            await poll(logins, clock, started)


@pytest.mark.parametrize("kind", ["device", "browser"])
async def test_a_token_for_another_program_is_refused(
    provider: OpenIdStranger, clock: trio.testing.MockClock, kind: str
) -> None:
    """It is signed by the provider, for this person, now: only the audience is somebody else's."""
    async with logins_at(provider, "confused") as logins, Browser(CALLBACK) as browser:
        if kind == "device":
            started = await start_device(logins)
            await browser.log_in(await open_device_page(browser, started), "alice")
            with pytest.raises(LoginRefused) as refused:
                await poll(logins, clock, started)
        else:
            trip = await BrowserTrip.begin(logins)
            back = await trip.log_in(browser, "alice")
            with pytest.raises(LoginRefused) as refused:
                await logins.callback(back, trip.cookie)
    assert refused.value.reason is LoginReason.ID_TOKEN
    assert "another program" in refused.value.why


class BrowserTrip:
    """One login in a browser: our page, then the provider's, and what comes back from there."""

    def __init__(self, started: BrowserStarted, url: str, cookie: str) -> None:
        self.started = started
        self.url = url
        self.cookie = cookie

    @classmethod
    async def begin(cls, logins: Logins) -> BrowserTrip:
        started = await logins.start(PEER, "corp", "browser", ADDRESS)
        assert isinstance(started, BrowserStarted)
        page = logins.page(started.page_id, None)
        url = await logins.continue_to_provider(started.page_id, page.cookie, page.form_token)
        return cls(started, url, page.cookie)

    async def log_in(self, browser: Browser, name: str) -> dict[str, str]:
        return query_of(await browser.log_in(await browser.open(self.url), name))


def query_of(page: Page) -> dict[str, str]:
    assert page.url.startswith(CALLBACK), page.text
    return dict(parse_qsl(urlsplit(page.url).query))


@pytest.mark.parametrize("client", ["potluck", "potluck-rsa", "browser-only"])
async def test_a_browser_login_from_the_page_to_the_identity(
    provider: OpenIdStranger, client: str
) -> None:
    async with logins_at(provider, client) as logins, Browser(CALLBACK) as browser:
        trip = await BrowserTrip.begin(logins)
        back = await trip.log_in(browser, "alice")
        assert back["iss"] == provider.issuer
        done = await logins.callback(back, trip.cookie)
        assert done.login == "alice-online"
        assert await logins.poll(trip.started.session) == LoggedIn(
            trip.started.session, PEER, ALICE
        )


async def test_a_person_who_cancels_in_the_browser_is_refused(provider: OpenIdStranger) -> None:
    async with logins_at(provider) as logins, Browser(CALLBACK) as browser:
        trip = await BrowserTrip.begin(logins)
        page = await browser.open(trip.url)
        back = query_of(await browser.open(page.links["[ Cancel ]"]))
        with pytest.raises(LoginRefused) as refused:
            await logins.callback(back, trip.cookie)
        assert refused.value.reason is LoginReason.DENIED
        with pytest.raises(LoginRefused):
            await logins.poll(trip.started.session)


async def test_a_code_is_good_for_the_trip_that_it_was_made_for_only(
    provider: OpenIdStranger,
) -> None:
    async with logins_at(provider) as logins, Browser(CALLBACK) as browser:
        first = await BrowserTrip.begin(logins)
        stolen = await first.log_in(browser, "alice")
        second = await BrowserTrip.begin(logins)
        back = await second.log_in(browser, "alice")
        with pytest.raises(LoginRefused) as refused:  # its verifier is another
            await logins.callback({**back, "code": stolen["code"]}, second.cookie)
        assert refused.value.reason is LoginReason.CODE


async def test_a_client_without_the_device_flow_is_said_to_have_none(
    provider: OpenIdStranger,
) -> None:
    async with logins_at(provider, "browser-only") as logins:
        with pytest.raises(ProviderMisconfigured) as trouble:
            await start_device(logins)
    assert "unauthorized_client" in trouble.value.why or "invalid" in trouble.value.why


async def test_an_unknown_client_is_for_the_moderator_to_mend(provider: OpenIdStranger) -> None:
    async with logins_at(provider, "nobody") as logins:
        with pytest.raises(ProviderMisconfigured, match="invalid_client"):
            await start_device(logins)


async def test_an_issuer_spelt_otherwise_is_another_issuer(provider: OpenIdStranger) -> None:
    issuer = provider.issuer.replace("127.0.0.1", "localhost")
    async with logins_at(provider, issuer=issuer) as logins:
        with pytest.raises(ProviderMisconfigured, match="another issuer"):
            await start_device(logins)


async def test_a_provider_that_goes_down_is_an_outage_and_its_new_keys_are_found(
    mortal_provider: OpenIdStranger, clock: trio.testing.MockClock
) -> None:
    async with logins_at(mortal_provider) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        await browser.log_in(await open_device_page(browser, started), "alice")
        assert isinstance(await poll(logins, clock, started), LoggedIn)

        waiting = await start_device(logins)
        mortal_provider.stop()
        with pytest.raises(ProviderUnavailable) as outage:
            await poll(logins, clock, waiting)
        assert "not refused" in outage.value.advice
        with pytest.raises(ProviderUnavailable):
            await start_device(logins, bytes(32))

        mortal_provider.start("second")
        clock.jump(60)
        with pytest.raises(LoginExpired, match="no longer knows"):  # it lost its memory
            await logins.poll(waiting.session)
        started = await start_device(logins)
        async with Browser(CALLBACK) as fresh:
            await fresh.log_in(await open_device_page(fresh, started), "alice")
        assert isinstance(await poll(logins, clock, started), LoggedIn)


@pytest.mark.parametrize(("claim", "login"), [("sub", "alice"), ("email", "alice@example.org")])
async def test_the_claim_that_is_configured_becomes_the_login(
    provider: OpenIdStranger, clock: trio.testing.MockClock, claim: str, login: str
) -> None:
    async with logins_at(provider, username_claim=claim) as logins, Browser(CALLBACK) as browser:
        started = await start_device(logins)
        await browser.log_in(await open_device_page(browser, started), "alice")
        answer = await poll(logins, clock, started)
        assert isinstance(answer, LoggedIn)
        assert answer.identity == ProviderIdentity("corp", "alice", login)
