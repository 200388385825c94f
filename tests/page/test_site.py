"""The page over HTTP: what it allows, and how little viewers can make it cost."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
import trio.testing

from auth.server import serving
from auth.server.rate_limits import AllowedRate
from lab.page.scenes import PageScene, served
from node.app.page import RunPage
from node.app.page.site import VIEWERS_PER_ADDRESS, page_file

LARGEST_PAGE = 150_000  # bytes, for the first paint


async def got(url: str, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=30.0) as client:
        return await client.get(url, headers=headers)


def data_in(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def test_the_policy_allows_the_one_script_and_the_one_style_and_nothing_from_elsewhere() -> None:
    html = page_file().with_data(b"{}").decode()
    policy = dict(part.strip().split(" ", 1) for part in page_file().policy.split(";"))
    for element, directive in (("script", "script-src"), ("style", "style-src")):
        [text] = re.findall(rf"<{element}>(.*?)</{element}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == "'none'"


def test_the_page_names_no_other_place_and_has_no_handler_in_its_html() -> None:
    here = Path(__file__).parents[2] / "node" / "app" / "page"
    text = "".join((here / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    places = set(re.findall(r"https?://[\w./]+", text))
    assert places == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody asks for
    assert not re.findall(
        r"\son\w+=|style=|innerHTML|outerHTML|insertAdjacent|document\.write|eval", text
    )


async def test_a_first_look_is_one_small_answer_with_the_data_in_it() -> None:
    scene = PageScene(peers=200, steps=1_500)  # a point for every other step, and the last ones
    async with served(RunPage(scene.source())) as url:
        answer = await got(f"{url}/", **{"accept-encoding": "identity"})
        small = await got(f"{url}/", **{"accept-encoding": "gzip"})
    assert answer.status_code == 200
    assert len(gzip.compress(answer.content, 4)) < LARGEST_PAGE
    assert int(small.headers["content-length"]) < LARGEST_PAGE
    assert small.text.split("/*")[0] == answer.text.split("/*")[0]
    found = data_in(answer.text)
    assert found["run"]["name"] == "poem"
    assert found["points"][-1][0] == 1_500
    assert len(found["people"]["rows"]) == 200


async def test_no_name_can_end_the_element_of_the_data() -> None:
    scene = PageScene(peers=8, steps=30, hostile=True)
    async with served(RunPage(scene.source())) as url:
        answer = await got(f"{url}/")
    assert answer.text.count("</script>") == 2
    assert "<img" not in answer.text
    names = [one["who"] for one in data_in(answer.text)["people"]["rows"]]
    assert any("<img" in name for name in names)


@pytest.mark.parametrize("path", ["/", "/page.json", "/events"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(method: str, path: str) -> None:
    async with served(RunPage(PageScene(steps=3).source())) as url, httpx2.AsyncClient() as client:
        answer = await client.request(method, f"{url}{path}")
    assert answer.status_code == 405


@pytest.mark.parametrize(
    ("host", "is_refused"),
    [
        ("localhost", False),
        ("LocalHost:8481", False),
        ("127.0.0.1:8481", False),
        ("192.0.2.7", False),
        ("[::1]:8481", False),
        ("evil.example:8481", True),
        ("localhost.evil.example", True),
        ("127.0.0.1.evil.example", True),
        ("[::1].evil.example", True),
        ("", True),
    ],
)
async def test_a_name_that_somebody_has_led_to_this_machine_reads_nothing(
    host: str, is_refused: bool
) -> None:
    async with served(RunPage(PageScene(steps=3).source())) as url, httpx2.AsyncClient() as client:
        for path in ("/", "/page.json", "/events", "/metrics", "/healthz"):
            for told in ({}, {"x-forwarded-for": "192.0.2.8"}):
                answer = await client.head(f"{url}{path}", headers={"host": host, **told})
                assert (answer.status_code == 421) is is_refused, (path, told)


async def test_a_page_that_cannot_be_made_ends_nothing_and_is_told_once(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - an argument, or it is not used
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = PageScene(steps=3)
    source, fails = scene.source(), False

    def invite() -> str:
        if fails:
            raise ZeroDivisionError
        return "potluck-run:abc"

    object.__setattr__(source, "invite", invite)
    page = RunPage(source)
    before = page.public.news_since("")
    fails = True
    for _ in range(10):
        await trio.sleep(1.0)
        assert page.public.news_since("") == before
    fails = False
    await trio.sleep(1.0)
    assert page.public.news_since("") != before
    assert [one.message for one in caplog.records] == [
        "the page cannot show the newest state; it shows the last one"
    ]


@asynccontextmanager
async def viewer_at(
    url: str, *, behind: str = "", headers: str = ""
) -> AsyncIterator[trio.SocketStream]:
    """A connection that asks for the news. `behind`: as a proxy on this machine reports it."""
    host, port = url.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        told = headers + (f"X-Forwarded-For: {behind}\r\n" if behind else "")
        await stream.send_all(f"GET /events HTTP/1.1\r\nHost: {host}\r\n{told}\r\n".encode())
        yield stream


async def number_of(page: RunPage, wanted: int, seconds: float = 60.0) -> None:
    """Until the page has so many viewers."""
    with trio.fail_after(seconds):
        while page.viewers != wanted:  # noqa: ASYNC110 - nobody tells how many there are
            await trio.sleep(0.05)


async def until(stream: trio.SocketStream, wanted: bytes) -> bytes:
    heard = b""
    with trio.fail_after(60):
        while wanted not in heard:
            some = await stream.receive_some(1 << 20)
            assert some, "the answer has ended"
            heard += some
    return heard


@pytest.mark.slow
async def test_a_viewer_hears_of_a_step_without_asking_again() -> None:
    scene = PageScene(peers=4, steps=10)
    page = RunPage(scene.source())
    async with served(page) as url:
        async with viewer_at(url) as stream:
            assert b"text/event-stream" in await until(stream, b'"points":')
            scene.now += 2.0
            scene.step(10, 1.25)
            assert b'"more":[[11,1.25,' in await until(stream, b'"more":')
        await number_of(page, 0)


async def test_a_question_for_the_head_alone_is_no_viewer() -> None:
    page = RunPage(PageScene(steps=3).source())
    async with served(page) as url, httpx2.AsyncClient(timeout=10.0) as client:
        answer = await client.head(f"{url}/events")
        assert (answer.status_code, page.viewers) == (200, 0)


async def test_viewers_are_let_go_at_once_when_the_node_ends() -> None:
    page = RunPage(PageScene(steps=3).source())
    async with AsyncExitStack() as staying:
        async with served(page) as url:
            stream = await staying.enter_async_context(viewer_at(url))
            await until(stream, b'"points":')
            began = trio.current_time()
        assert trio.current_time() - began < 5.0
        assert page.viewers == 0


async def test_there_are_only_so_many_viewers() -> None:
    page = RunPage(PageScene(steps=3).source(), most_viewers=2)
    async with served(page) as url, AsyncExitStack() as staying:
        for _ in range(2):
            stream = await staying.enter_async_context(viewer_at(url))
            await until(stream, b'"points":')
        refused = await staying.enter_async_context(viewer_at(url))
        heard = await until(refused, b"Try again in a minute")
        assert heard.startswith(b"HTTP/1.1 503")


async def test_one_address_behind_a_proxy_has_only_some_of_the_viewers() -> None:
    page = RunPage(PageScene(steps=3).source())
    async with served(page) as url, AsyncExitStack() as staying:
        heard = b""
        for _ in range(VIEWERS_PER_ADDRESS + 1):
            stream = await staying.enter_async_context(viewer_at(url, behind="192.0.2.7"))
            heard = await until(stream, b"\r\n\r\n")
        assert heard.startswith(b"HTTP/1.1 503")
        assert page.viewers == VIEWERS_PER_ADDRESS
        other = await staying.enter_async_context(viewer_at(url, behind="192.0.2.8"))
        assert (await until(other, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_proxy_may_say_in_a_line_of_its_own_for_whom_it_asks() -> None:
    """The first line is the visitor's own, and may name anybody."""
    page = RunPage(PageScene(steps=3).source(), requests=AllowedRate(burst=3, per_second=0.001))
    async with served(page) as url, httpx2.AsyncClient() as client:
        statuses = []
        for number in range(5):
            lines = [
                ("x-forwarded-for", f"198.51.100.{number}"),
                ("x-forwarded-for", "192.0.2.7"),
            ]
            statuses.append((await client.get(f"{url}/page.json", headers=lines)).status_code)
    assert statuses == [200] * 3 + [429] * 2


async def test_a_login_link_of_a_closed_run_shows_names_to_those_who_have_it() -> None:
    scene = PageScene(peers=4, steps=30, closed=True, page_table="[page]\nevents = false\n")
    page = RunPage(scene.source())
    async with (
        served(page) as url,
        httpx2.AsyncClient() as member,
        httpx2.AsyncClient() as stranger,
    ):
        address, _, key = page.link(url).partition("#key=")
        assert address == f"{url}/"
        bearer = {"authorization": f"Bearer {key}"}
        assert "Grace" not in (await member.get(f"{url}/page.json")).text
        answer = await member.post(f"{url}/login", headers=bearer)
        assert answer.status_code == 204
        assert answer.headers["set-cookie"].endswith("; HttpOnly; SameSite=Strict")
        again = await stranger.post(f"{url}/login", headers=bearer)
        assert (again.status_code, "set-cookie" in again.headers) == (403, False)
        for path in ("/", "/page.json"):
            assert "Grace" in (await member.get(f"{url}{path}")).text
            assert "Grace" not in (await stranger.get(f"{url}{path}")).text
        cookie = answer.headers["set-cookie"].partition(";")[0]
        for headers, sees_names in ((f"Cookie: {cookie}\r\n", True), ("", False)):
            async with viewer_at(url, headers=headers) as stream:
                heard = await until(stream, b'"points":')
                assert (b"Grace" in heard) is sees_names
        assert (await member.get(f"{url}/page.json")).json()["events"]
        assert (await stranger.get(f"{url}/page.json")).json()["events"] is None


async def test_keys_cannot_be_tried_out() -> None:
    page = RunPage(PageScene(steps=3, closed=True).source())
    async with served(page) as url, httpx2.AsyncClient() as client:
        statuses = [(await client.post(f"{url}/login")).status_code for _ in range(30)]
        assert (await client.get(f"{url}/login")).status_code == 405
    assert statuses[:5] == [403] * 5
    assert set(statuses[10:]) == {429}


def test_a_link_to_an_open_run_has_no_key() -> None:
    page = RunPage(PageScene(steps=3).source())
    assert page.link("http://127.0.0.1:8481") == "http://127.0.0.1:8481/"


async def test_requests_beyond_the_limit_of_an_address_cost_no_work() -> None:
    looks = 0
    scene = PageScene(peers=50, steps=500)
    source = scene.source()

    def view() -> Any:
        nonlocal looks
        looks += 1
        return scene.view

    object.__setattr__(source, "view", view)
    page = RunPage(source, requests=AllowedRate(burst=20, per_second=0.001))
    statuses = []
    async with served(page) as url, httpx2.AsyncClient(timeout=60.0) as client:
        for _ in range(400):
            statuses.append((await client.get(f"{url}/page.json")).status_code)
        health = await client.get(f"{url}/healthz")
    assert statuses == [200] * 20 + [429] * 380
    assert looks <= 20
    assert health.status_code == 200


@pytest.mark.slow
async def test_a_viewer_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WRITE_SECONDS", 1.0)  # which are really waited for
    page = RunPage(PageScene(peers=300, steps=1_500).source())
    async with served(page) as url, viewer_at(url):
        await number_of(page, 1)
        with trio.fail_after(120):
            while page.viewers:
                # so that all of it is sent again each time
                page.public.feed.boot = page.public.feed.boot[::-1]
                await trio.sleep(0.2)


async def test_the_list_of_peers_is_sent_less_often_than_the_figures(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - an argument, or it is not used
) -> None:
    scene = PageScene(peers=4, steps=10)
    page = RunPage(scene.source())
    page.public.news_since("")
    sent = []
    for _ in range(10):
        mark = page.public.feed.mark
        await trio.sleep(1.0)
        scene.now += 1.0
        sent.append({"people", "run"} & json.loads(page.public.news_since(mark)).keys())
    assert sent.count({"people", "run"}) == 2
    assert sent.count({"run"}) == 8
