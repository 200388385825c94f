"""A login in a browser: the page, the trip to the provider and back, and who could come between."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

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
from auth.server.providers.logins import BrowserStarted, LoggedIn, Logins, Pending
from auth.server.providers.oidc import challenge_of
from tests.auth.providers.conftest import ADDRESS, PEER, PUBLIC_URL
from tests.auth.providers.openid_imitation import CLIENT, OpenIdImitation
from tests.auth.providers.web_imitation import Asked, Reply, Write


@dataclass
class Browser:
    """A person's browser, as far as this server notices: a cookie, and forms that it sends."""

    logins: Logins
    cookie: str | None = None

    async def go(self, page_id: str) -> str:
        """Open the page, send its form; gives the address at the provider."""
        page = self.logins.page(page_id, self.cookie)
        self.cookie = page.cookie
        return await self.logins.continue_to_provider(page_id, self.cookie, page.form_token)


async def start_browser(logins: Logins, peer: bytes = PEER) -> BrowserStarted:
    started = await logins.start(peer, "corp", "browser", ADDRESS)
    assert isinstance(started, BrowserStarted)
    return started


async def test_a_person_who_confirms_comes_back_as_an_identity(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    assert await logins.poll(started.session) == Pending(2)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    done = await logins.callback(back, browser.cookie)
    assert (done.login, done.confirmation) == ("alice", started.confirmation)
    assert await logins.poll(started.session) == LoggedIn(
        started.session, PEER, ProviderIdentity("corp", "subject-1", "alice")
    )
    with pytest.raises(LoginExpired):
        await logins.poll(started.session)


async def test_the_page_shows_what_the_terminal_shows_and_who_asks(logins: Logins) -> None:
    started = await start_browser(logins)
    assert started.url == f"{PUBLIC_URL}/login/{started.page_id}"
    assert started.session not in started.url
    page = logins.page(started.page_id, None)
    assert page.confirmation == started.confirmation
    assert (page.title, page.peer, page.started_from) == ("Corp", PEER, ADDRESS)
    assert 0 < page.expires_in <= 600


async def test_the_provider_is_asked_with_pkce_state_and_nonce_and_nothing_secret(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    url = await browser.go(started.page_id)
    assert url.startswith(f"{imitation.issuer}/authorize?")
    query = dict(parse_qsl(urlsplit(url).query))
    assert query["response_type"] == "code"
    assert query["client_id"] == CLIENT
    assert query["redirect_uri"] == f"{PUBLIC_URL}/login/callback"
    assert query["code_challenge_method"] == "S256"
    assert started.session not in url
    assert started.page_id not in url
    await logins.callback(imitation.send_back(url), browser.cookie)
    verifier = imitation.asked[-2 if imitation.asked[-1].path == "/keys" else -1].form[
        "code_verifier"
    ]
    assert challenge_of(verifier) == query["code_challenge"]
    assert verifier not in url


async def test_nothing_goes_to_the_provider_before_the_form_of_the_page_is_sent(
    logins: Logins,
) -> None:
    started = await start_browser(logins)
    page = logins.page(started.page_id, None)
    other = logins.page((await start_browser(logins, bytes(32))).page_id, None)
    for cookie, form in (
        (None, page.form_token),
        (page.cookie, None),
        (page.cookie, ""),
        (page.cookie, other.form_token),
        (other.cookie, page.form_token),
        ("x" * 43, page.form_token),
        ("ö" * 43, page.form_token),
        (page.cookie, "\ud800"),
    ):
        with pytest.raises(LoginRefused) as refused:
            await logins.continue_to_provider(started.page_id, cookie, form)
        assert refused.value.reason is LoginReason.STATE
    assert await logins.poll(started.session) == Pending(2)  # the login itself is unharmed


async def test_a_callback_in_another_browser_is_refused_and_harms_nothing(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    victim = logins.page(started.page_id, None).cookie
    for cookie in (None, "", victim, "ö"):
        with pytest.raises(LoginRefused) as refused:
            await logins.callback(back, cookie)
        assert refused.value.reason is LoginReason.STATE
        assert refused.value.peer is None
    assert imitation.times_asked("/token") == 0
    assert (await logins.callback(back, browser.cookie)).login == "alice"


async def test_an_answer_counts_once(logins: Logins, imitation: OpenIdImitation) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    await logins.callback(back, browser.cookie)
    with pytest.raises(LoginExpired):
        await logins.callback(back, browser.cookie)
    assert imitation.times_asked("/token") == 1


async def test_going_again_makes_the_earlier_trip_worthless(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    first = imitation.send_back(await browser.go(started.page_id))
    second = imitation.send_back(await browser.go(started.page_id))
    assert first["state"] != second["state"]
    with pytest.raises(LoginExpired):
        await logins.callback(first, browser.cookie)
    assert (await logins.callback(second, browser.cookie)).login == "alice"


async def test_of_two_trips_of_one_login_the_faster_answers_it(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    slow = imitation.send_back(await browser.go(started.page_id))
    waiting, go_on = trio.Event(), trio.Event()

    async def answer_late(write: Write) -> None:
        waiting.set()
        await go_on.wait()
        await write(late.body)

    late = imitation.handle(_token_request(imitation, slow))
    imitation.instead["/token"] = lambda _: Reply(pieces=answer_late)

    async def come_back_late() -> None:
        with pytest.raises((LoginExpired, LoginRefused)):
            await logins.callback(slow, browser.cookie)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come_back_late)
        await waiting.wait()
        del imitation.instead["/token"]
        fast = imitation.send_back(await browser.go(started.page_id))
        await logins.callback(fast, browser.cookie)
        go_on.set()
    assert isinstance(await logins.poll(started.session), LoggedIn)


def _token_request(imitation: OpenIdImitation, back: dict[str, str]) -> Asked:
    """A request that this provider answers well, for the trip that came back like this."""
    request = imitation.codes[back["code"]]
    imitation.codes[back["code"]] = {**request, "code_challenge": challenge_of("v")}
    form = {
        "grant_type": "authorization_code",
        "code": back["code"],
        "code_verifier": "v",
    }
    return Asked("POST", "/token", {}, {}, form)


async def test_a_code_of_another_trip_is_refused(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    """Code injection: the provider compares the verifier, which belongs to one trip."""
    mine, theirs = await start_browser(logins), await start_browser(logins, bytes(32))
    me, them = Browser(logins), Browser(logins)
    back = imitation.send_back(await me.go(mine.page_id))
    stolen = imitation.send_back(await them.go(theirs.page_id))
    with pytest.raises(LoginRefused) as refused:
        await logins.callback({**back, "code": stolen["code"]}, me.cookie)
    assert refused.value.reason is LoginReason.CODE
    assert refused.value.peer == PEER


async def test_a_code_used_before_is_refused(logins: Logins, imitation: OpenIdImitation) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    imitation.codes.clear()
    with pytest.raises(LoginRefused) as refused:
        await logins.callback(back, browser.cookie)
    assert refused.value.reason is LoginReason.CODE
    with pytest.raises(LoginRefused):
        await logins.poll(started.session)


async def test_a_token_with_another_nonce_is_refused(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    for nonce in ("another", None, ["a"], 7):
        imitation.claims = {"nonce": nonce}
        started = await start_browser(logins)
        browser = Browser(logins)
        back = imitation.send_back(await browser.go(started.page_id))
        with pytest.raises(LoginRefused, match="nonce") as refused:
            await logins.callback(back, browser.cookie)
        assert refused.value.reason is LoginReason.ID_TOKEN


@pytest.mark.parametrize("issuer", ["https://evil.example.org", ""])
async def test_an_answer_that_names_another_issuer_is_refused_before_the_code_is_shown(
    logins: Logins, imitation: OpenIdImitation, issuer: str
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    with pytest.raises(LoginRefused) as refused:
        await logins.callback({**back, "iss": issuer}, browser.cookie)
    assert refused.value.reason is LoginReason.ID_TOKEN
    assert imitation.times_asked("/token") == 0


@pytest.mark.parametrize("promised", [False, True])
async def test_an_answer_that_names_no_issuer_is_refused_where_one_was_promised(
    logins: Logins, imitation: OpenIdImitation, promised: bool
) -> None:
    imitation.document = {"authorization_response_iss_parameter_supported": promised}
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    del back["iss"]
    if promised:
        with pytest.raises(LoginRefused):
            await logins.callback(back, browser.cookie)
    else:
        assert (await logins.callback(back, browser.cookie)).login == "alice"


async def test_a_person_who_says_no_is_refused_in_browser_and_terminal(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    answer = {"state": back["state"], "error": "access_denied", "error_description": "no"}
    with pytest.raises(LoginRefused) as refused:
        await logins.callback(answer, browser.cookie)
    assert refused.value.reason is LoginReason.DENIED
    with pytest.raises(LoginRefused) as told:
        await logins.poll(started.session)
    assert told.value.reason is LoginReason.DENIED
    assert told.value.record is refused.value.record
    with pytest.raises(LoginExpired):
        logins.page(started.page_id, browser.cookie)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("temporarily_unavailable", ProviderUnavailable),
        ("server_error", ProviderUnavailable),
        ("invalid_scope", ProviderMisconfigured),
        ("\x1b[2Jboo", ProviderMisconfigured),
    ],
)
async def test_a_providers_own_trouble_leaves_the_login_open(
    logins: Logins, imitation: OpenIdImitation, error: str, kind: type[ProviderUnavailable]
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    with pytest.raises(ProviderUnavailable) as outage:
        await logins.callback({"state": back["state"], "error": error}, browser.cookie)
    assert type(outage.value) is kind
    assert outage.value.why.isprintable()
    assert await logins.poll(started.session) == Pending(2)
    again = imitation.send_back(await browser.go(started.page_id))
    assert (await logins.callback(again, browser.cookie)).login == "alice"


async def test_an_outage_at_the_token_endpoint_leaves_the_login_open(
    logins: Logins, imitation: OpenIdImitation
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    imitation.instead["/token"] = lambda _: Reply(status=500)
    with pytest.raises(ProviderUnavailable):
        await logins.callback(back, browser.cookie)
    assert await logins.poll(started.session) == Pending(2)


async def test_an_answer_without_a_state_is_misuse(logins: Logins) -> None:
    with pytest.raises(LoginMisuse):
        await logins.callback({"code": "1"}, None)


async def test_pages_and_states_that_nobody_knows_are_expired(logins: Logins) -> None:
    with pytest.raises(LoginExpired):
        logins.page("nothing", None)
    with pytest.raises(LoginExpired):
        await logins.continue_to_provider("nothing", None, None)
    with pytest.raises(LoginExpired):
        await logins.callback({"state": "nothing", "code": "1"}, None)
    with pytest.raises(LoginExpired):
        await logins.poll("nothing")


async def test_a_page_left_open_for_ten_minutes_is_expired(
    logins: Logins, imitation: OpenIdImitation, clock: trio.testing.MockClock
) -> None:
    started = await start_browser(logins)
    browser = Browser(logins)
    back = imitation.send_back(await browser.go(started.page_id))
    clock.jump(600)
    with pytest.raises(LoginExpired):
        await logins.callback(back, browser.cookie)
    with pytest.raises(LoginExpired):
        logins.page(started.page_id, browser.cookie)
    assert logins.open_count() == 0


async def test_the_page_of_a_device_login_does_not_exist(logins: Logins) -> None:
    started = await logins.start(PEER, "corp", "device", ADDRESS)
    with pytest.raises(LoginExpired):
        logins.page(started.session, None)
