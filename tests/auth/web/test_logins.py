"""Logins through a provider, over the server's addresses: the terminal's part and the browser's.

A terminal polls as often as it is told to; the clock runs faster here (`hurried`).
"""

from __future__ import annotations

import gc
import html
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
import trio
from trio.testing import MockClock

from auth.server.browser import confirmation_page, done_page, failed_page
from auth.server.join_refused import JoinRefused
from auth.server.providers.errors import LoginRefused
from auth.server.store_errors import DiskFull
from tests.auth.providers.openid_imitation import CLIENT, OpenIdImitation, openid_imitation
from tests.auth.providers.web_imitation import Reply
from tests.auth.web.authority import Authority
from tests.auth.web.http_client import HttpAnswer
from tests.auth.web.running import ACTOR, RunningServer, Volunteer, auth_server

COOKIE = "potluck-login"  # over plain HTTP; over TLS with the prefix __Host-
FORM = "application/x-www-form-urlencoded"


@asynccontextmanager
async def with_provider(
    folder: Path, authority: Authority | None = None
) -> AsyncIterator[tuple[RunningServer, OpenIdImitation]]:
    async with openid_imitation() as imitation:
        now = int(time.time())
        imitation.claims = {"iat": now, "exp": now + 300}
        imitation.device = {"interval": 1}
        provider = (
            f'[[provider]]\nid = "corp"\nkind = "oidc"\nissuer = "{imitation.issuer}"\n'
            f'client_id = "{CLIENT}"\ntitle = "The <b>Corp</b>"\n'
        )
        async with auth_server(folder, authority, settings=provider) as running:
            yield running, imitation


class Browser:
    """A browser with the cookies of one server."""

    def __init__(self, running: RunningServer) -> None:
        self._running = running
        self.origin = running.server.public_url
        self.cookie = ""

    async def get(self, url: str, **headers: str) -> HttpAnswer:
        if self.cookie:
            headers.setdefault("cookie", f"other=1; {COOKIE}={self.cookie}")
        answer = await self._running.ask("GET", _path_of(url), **headers)
        set_cookie = re.match(rf"{COOKIE}=([^;]*);", answer.headers.get("set-cookie", ""))
        if set_cookie:
            self.cookie = set_cookie[1]
        return answer

    async def press(self, url: str, page: HttpAnswer, **changes: str) -> HttpAnswer:
        """Send the page's form."""
        token = re.search(rb'name="form_token" value="([^"]*)"', page.body)
        assert token
        headers = {
            "content_type": FORM,
            "origin": self.origin,
            "cookie": f"{COOKIE}={self.cookie}",
            **changes,
        }
        body = urlencode({"form_token": token[1].decode()}).encode()
        return await self._running.ask(
            "POST", _path_of(url), body, **{name: text for name, text in headers.items() if text}
        )


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.path + (f"?{parts.query}" if parts.query else "")


async def begun(
    running: RunningServer, browser: Browser
) -> tuple[Volunteer, dict[str, str], HttpAnswer]:
    volunteer = Volunteer(running)
    started = (await volunteer.begin("corp", "browser")).json()
    return volunteer, started, await browser.get(started["url"])


async def ended(volunteer: Volunteer, session: str) -> HttpAnswer:
    """The result of a login, polled as often as a terminal does."""
    while True:
        answer = await volunteer.poll(session)
        if answer.status != 202:
            return answer
        await trio.sleep(answer.json()["interval"])


@pytest.fixture(autouse=True)
def hurried() -> MockClock:
    return MockClock(rate=10.0)


async def test_a_login_in_the_browser_from_the_terminal_to_the_pass(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        running.moderation.allow("corp:alice", actor=ACTOR)
        browser = Browser(running)
        volunteer, started, page = await begun(running, browser)
        assert started["confirmation"] in page.body.decode()
        assert (await volunteer.poll(started["session"])).status == 202
        sent_on = await browser.press(started["url"], page)
        assert sent_on.status == 303
        answer = imitation.send_back(sent_on.headers["location"])
        done = await browser.get("/login/callback?" + urlencode(answer))
        assert done.status == 200
        assert "alice" in done.body.decode()
        answer = await volunteer.poll(started["session"])
        assert answer.status == 200
        assert volunteer.opened is not None
        assert volunteer.opened.token.username == "corp:alice"
        again = await volunteer.poll(started["session"])
        assert again.body == answer.body, "an answer that was lost is given again"


@pytest.mark.slow
async def test_a_device_login_to_the_pass(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        running.moderation.allow("corp:alice", actor=ACTOR)
        imitation.person = {"error": "authorization_pending"}
        volunteer = Volunteer(running)
        answer = await volunteer.begin("corp", "device")
        started = answer.json()
        assert answer.status == 202
        assert started["user_code"] == "WDJB-MJHT"
        assert started["verification_uri_complete"].endswith("code=WDJB-MJHT")
        imitation.person = None
        answer = await ended(volunteer, started["session"])
        assert answer.status == 200


@pytest.mark.slow
async def test_somebody_who_is_not_on_the_list_is_refused_and_told_their_name(
    tmp_path: Path,
) -> None:
    async with with_provider(tmp_path) as (running, _):
        volunteer = Volunteer(running)
        started = (await volunteer.begin("corp", "device")).json()
        await ended(volunteer, started["session"])
        refusal = volunteer.refusal()
        assert refusal.code == "not-on-the-list"
        assert "corp:alice" in refusal.what
        await volunteer.poll(started["session"])
        assert volunteer.refusal().what == refusal.what, "an answer that was lost is given again"


@pytest.mark.slow
async def test_a_person_who_says_no_is_refused_signed_and_the_log_knows(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        imitation.person = {"error": "access_denied"}
        volunteer = Volunteer(running)
        started = (await volunteer.begin("corp", "device")).json()
        await ended(volunteer, started["session"])
        assert volunteer.refusal().code == "login-denied"
        assert (await volunteer.poll(started["session"])).status == 403
        refused = [r for r in running.moderation.audit(limit=50).rows if r.act == "refused"]
        assert len(refused) == 1


@pytest.mark.slow
async def test_a_no_that_could_not_be_written_is_in_the_log_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where whoever was told first hung up in the middle of it."""
    async with with_provider(tmp_path) as (running, imitation):
        imitation.person = {"error": "access_denied"}
        volunteer = Volunteer(running)
        started = (await volunteer.begin("corp", "device")).json()

        async def full(*_: object, **__: object) -> None:
            raise DiskFull("There is no room.")

        with monkeypatch.context() as patched:
            patched.setattr(running.store.writer, "perform", full)
            answer = await ended(volunteer, started["session"])
            assert (answer.status, answer.json()["error"]) == (503, "store_failed")
        assert (await volunteer.poll(started["session"])).status == 403
        refused = [r for r in running.moderation.audit(limit=50).rows if r.act == "refused"]
        assert [row.reason for row in refused] == ["login: denied: You said no at The <b>Corp</b>."]


async def test_a_provider_that_is_down_is_an_outage(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        imitation.instead["/.well-known/openid-configuration"] = lambda _: Reply(status=500)
        answer = await Volunteer(running).begin("corp", "device")
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "signed" not in answer.json()
        assert (await running.ask("GET", "/readyz")).status == 200


@pytest.mark.slow
async def test_two_polls_at_once_are_one_login(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        running.moderation.allow("corp:alice", actor=ACTOR)
        volunteer = Volunteer(running)
        started = (await volunteer.begin("corp", "device")).json()
        await trio.sleep(started["interval"])
        answers: list[HttpAnswer] = []

        async def poll() -> None:
            answer = await running.post("/v1/login/poll", {"session": started["session"]})
            while answer.status == 202:
                await trio.sleep(answer.json()["interval"])
                answer = await running.post("/v1/login/poll", {"session": started["session"]})
            answers.append(answer)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(poll)
        assert [answer.status for answer in answers] == [200] * 4
        assert len({answer.body for answer in answers}) == 1
        assert imitation.times_asked("/token") == 1


def refusals_with_a_traceback() -> list[BaseException]:
    return [
        each
        for each in gc.get_objects()
        # by type(): some object of torch's warns whoever asks it for its __class__
        if issubclass(type(each), JoinRefused | LoginRefused) and each.__traceback__ is not None
    ]


@pytest.mark.slow
async def test_a_refusal_that_is_kept_holds_on_to_nothing_of_who_was_told(tmp_path: Path) -> None:
    """Ten thousand of them may be kept, and each would keep a connection."""
    before = refusals_with_a_traceback()  # of tests that came before, in this process
    async with with_provider(tmp_path) as (running, imitation):
        for person in (None, {"error": "access_denied"}):
            imitation.person = person
            volunteer = Volunteer(running)
            started = (await volunteer.begin("corp", "device")).json()
            assert (await ended(volunteer, started["session"])).status == 403
            assert (await volunteer.poll(started["session"])).status == 403
        kept = [one for one in refusals_with_a_traceback() if all(one is not old for old in before)]
        assert kept == []


@pytest.mark.slow
async def test_a_trouble_of_ours_after_the_login_costs_no_second_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_provider(tmp_path) as (running, _):
        running.moderation.allow("corp:alice", actor=ACTOR)
        volunteer = Volunteer(running)
        started = (await volunteer.begin("corp", "device")).json()

        async def full(*_: object, **__: object) -> None:
            raise DiskFull("There is no room.")

        with monkeypatch.context() as patched:
            patched.setattr(running.store.writer, "perform", full)
            answer = await ended(volunteer, started["session"])
            assert answer.status == 503
        answer = await ended(volunteer, started["session"])
        assert answer.status == 200


# -- the browser's defences


async def test_the_page_escapes_what_others_chose_and_runs_nothing(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, _):
        browser = Browser(running)
        _, _, page = await begun(running, browser)
        text = page.body.decode()
        assert html.escape("The <b>Corp</b>") in text
        assert "<b>Corp</b>" not in text
        assert "<script" not in text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script" not in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["referrer-policy"] == "same-origin"
        assert page.headers["cache-control"] == "no-store"
        cookie = page.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert "Path=/" in cookie


async def test_the_host_that_a_request_names_is_not_believed(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        browser = Browser(running)
        _, started, _ = await begun(running, browser)
        page = await browser.get(
            started["url"], host="evil.example", x_forwarded_host="evil.example"
        )
        assert page.status == 200
        sent_on = await browser.press(started["url"], page, host="evil.example")
        assert sent_on.headers["location"].startswith(f"{imitation.issuer}/authorize?")
        for answer in (page, sent_on):
            assert "evil" not in f"{answer.headers}{answer.body!r}"
        assert "evil" not in sent_on.headers["location"]


async def test_over_tls_the_cookie_is_for_this_host_and_for_tls_alone(tmp_path: Path) -> None:
    async with with_provider(tmp_path, Authority(tmp_path)) as (running, _):
        started = (await Volunteer(running).begin("corp", "browser")).json()
        assert started["url"].startswith("https://auth.example.org/login/")
        page = await running.ask("GET", _path_of(started["url"]))
        cookie = page.headers["set-cookie"]
        assert cookie.startswith("__Host-potluck-login=")
        assert {"Secure", "Path=/", "HttpOnly"} <= {part.strip() for part in cookie.split(";")}
        assert "Domain" not in cookie
        assert "http:" not in page.headers["content-security-policy"]


async def test_the_form_counts_only_from_the_page_in_the_same_browser(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, _):
        browser, other = Browser(running), Browser(running)
        _, started, page = await begun(running, browser)
        await other.get(started["url"])
        for changes in (
            {"cookie": ""},
            {"cookie": f"{COOKIE}={other.cookie}"},
            {"cookie": f"{COOKIE}="},
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"content_type": "text/plain"},
        ):
            answer = await browser.press(started["url"], page, **changes)
            assert answer.status in (400, 403), changes
            assert "location" not in answer.headers
        assert (await browser.press(started["url"], page)).status == 303, "nothing was spoilt"


async def test_the_way_back_counts_only_in_the_same_browser(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, imitation):
        browser, victim = Browser(running), Browser(running)
        volunteer, started, page = await begun(running, browser)
        sent_on = await browser.press(started["url"], page)
        back = "/login/callback?" + urlencode(imitation.send_back(sent_on.headers["location"]))
        assert (await victim.get(back)).status == 403
        victim.cookie = "x" * 22
        assert (await victim.get(back)).status == 403
        assert (await volunteer.poll(started["session"])).status == 202
        assert (await browser.get(back)).status == 200


@pytest.mark.parametrize(
    "query",
    [
        "",
        "state=x",
        "state=x&state=y",
        "code=x",
        "&".join(f"a{n}=1" for n in range(100)),
        "state=%ff",
    ],
)
async def test_a_way_back_that_leads_nowhere_is_a_page_that_says_so(
    tmp_path: Path, query: str
) -> None:
    async with with_provider(tmp_path) as (running, _):
        answer = await running.ask("GET", f"/login/callback?{query}")
        assert answer.status in (400, 410)
        assert answer.headers["content-type"].startswith("text/html")
        assert "<h1>" in answer.body.decode()


async def test_a_page_that_there_is_not_says_so(tmp_path: Path) -> None:
    async with with_provider(tmp_path) as (running, _):
        answer = await running.ask("GET", "/login/" + "x" * 22)
        assert answer.status == 410
        assert "set-cookie" not in answer.headers


def test_every_field_of_the_page_is_escaped() -> None:
    evil = "\"'><script>alert(1)</script>"
    pages = [
        confirmation_page(
            run=evil, provider=evil, confirmation=evil, peer_id=evil, started_from=evil,
            form_token=evil,
        ),
        done_page(run=evil, provider=evil, confirmation=evil, login=evil),
        failed_page(what=evil, why=evil, advice=evil),
    ]  # fmt: skip
    for page in pages:
        assert b"<script" not in page
        assert b"\"'>" not in page
