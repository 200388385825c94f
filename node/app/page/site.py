"""Serves the run's page: the page itself, its data as JSON, and the news of it as they happen.

| path | answer |
|---|---|
| `/` | the page: one HTML file with its style, its script and the present data in it |
| `/page.json` | the same data |
| `/events` | server-sent events: all of the data, then what changes |
| `/login` | a cookie for the key of a login link (login.py), with which the others show more |

The page may load nothing from anywhere and send nothing but to where it came from: the
Content-Security-Policy allows its one script and its one style by their hashes, and connections to
its own origin. Data inside of the page is escaped, so that no text in it can end its element.

Promises, whatever viewers do: there are at most `MOST_VIEWERS`, and `VIEWERS_PER_ADDRESS` from one
address. A viewer that reads nothing is dropped after some seconds (auth/server/serving.py).
Requests of one address beyond `REQUESTS` are refused before any work. The data is made once a
second at most for all of them, and not at all while nobody looks.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

import trio
from starlette.requests import Request
from starlette.routing import Route

from auth.server.answers import ALWAYS, JSON, Answer
from auth.server.rate_limits import AllowedRate, RateLimit, asker, is_within, site_of
from node.app.page.feed import Feed
from node.app.page.login import SESSION_SECONDS, PageLogins
from node.app.page.public import PageSource, sections_of
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from node.training.credit import Board

MOST_VIEWERS: Final = 256
VIEWERS_PER_ADDRESS: Final = 32  # a school behind one address
REQUESTS: Final = AllowedRate(burst=600, per_second=20.0)
"""Of one address: a hundred viewers that come back at once need two each."""
LOGIN_TRIES: Final = AllowedRate.per_minute(20)  # of one address; a key has 256 bits
TICK_SECONDS: Final = 1.0  # between two states
PEOPLE_SECONDS: Final = 5.0  # between two lists of peers: 40 kB of two hundred, for each viewer
SILENCE_SECONDS: Final = 15.0  # then a viewer gets a line without meaning, so that proxies wait
BOARD_SECONDS: Final = 15.0  # between two leaderboards
BOARD_REST: Final = 50.0  # or so many times as long as adding up took: seconds in a large run
WATCHED_SECONDS: Final = 60.0  # after a look, more of them are likely
RETRY_MS: Final = 2000  # after which a browser connects again
THIS_MACHINE: Final = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""A reverse proxy on this machine says for whom it asks."""

PAGE_POLICY: Final = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DATA_PLACE: Final = "/*DATA*/"
HTML: Final = "text/html; charset=utf-8"

_log = logging.getLogger("potluck.page")


class RunPage:
    """The page of one run."""

    def __init__(
        self,
        source: PageSource,
        *,
        most_viewers: int = MOST_VIEWERS,
        requests: AllowedRate = REQUESTS,
    ) -> None:
        self._source, self._most_viewers = source, most_viewers
        self._requests, self._tries = RateLimit(requests), RateLimit(LOGIN_TRIES)
        self.public = Audience(source, for_members=False)
        self._for_members = Audience(source, for_members=True)
        self._logins = PageLogins(trio.current_time)
        self._viewers: Counter[str] = Counter()
        self._news = trio.Event()
        self._is_closed = False

    @property
    def viewers(self) -> int:
        return self._viewers.total()

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks, or has done so just now."""
        made_at = max(self.public.made_at, self._for_members.made_at)
        return self.viewers > 0 or trio.current_time() - made_at < WATCHED_SECONDS

    def link(self, url: str) -> str:
        """The address of the page for its owner; in a closed run with a key, good for once."""
        return f"{url}/#key={self._logins.new_key()}" if self._source.is_closed else f"{url}/"

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page, methods=["GET"]),
            Route("/page.json", self._data, methods=["GET"]),
            Route("/events", self._events, methods=["GET"]),
            Route("/login", self._login, methods=["POST"]),
        ]

    async def run(self) -> None:
        """Keep the viewers informed, until cancelled; then every one of them is let go."""
        try:
            while True:
                await trio.sleep(TICK_SECONDS)
                if self.viewers:
                    self._news.set()
                    self._news = trio.Event()
        finally:
            self._is_closed = True
            self._news.set()

    # -- the answers

    async def _page(self, request: Request) -> Answer:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        plain, small = self._shown_to(request).document()
        headers = {"content-security-policy": page_file().policy, "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Answer(small, HTML, 200, headers | {"content-encoding": "gzip"})
        return Answer(plain, HTML, 200, headers)

    async def _data(self, request: Request) -> Answer:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        shown = self._shown_to(request)
        shown.look()
        return Answer(shown.feed.whole(), JSON)

    async def _events(self, request: Request) -> Answer | Viewer:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if request.method == "HEAD":  # nothing is sent, so nobody would notice that it has left
            return Answer(b"", "text/event-stream")
        address = asked_by(request)
        site = site_of(address)
        is_full = self.viewers >= self._most_viewers
        if is_full or (
            self._viewers[site] >= VIEWERS_PER_ADDRESS and not is_within(address, THIS_MACHINE)
        ):
            return Answer(
                b"There are as many viewers as this peer serves. Try again in a minute.\n",
                "text/plain",
                503,
                {"retry-after": "60"},
            )
        mark = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return Viewer(self, self._shown_to(request), site, mark)

    async def _login(self, request: Request) -> Answer:
        """The key is in a header that no page of another origin can send."""
        site = site_of(asked_by(request))
        seconds = self._tries.wait_seconds(site, trio.current_time())
        if seconds:
            return _too_many(site, seconds)
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = self._logins.exchange(key)
        if cookie is None:
            words = b"This link was used before, or is too old. `potluck page` makes another one.\n"
            return Answer(words, "text/plain", 403)
        flags = f"Path=/; Max-Age={SESSION_SECONDS:.0f}; HttpOnly; SameSite=Strict"
        set_cookie = f"{self._logins.cookie_name}={cookie}; {flags}"
        return Answer(b"", "text/plain", 204, {"set-cookie": set_cookie})

    def _shown_to(self, request: Request) -> Audience:
        cookie = request.cookies.get(self._logins.cookie_name, "")
        return self._for_members if self._logins.knows(cookie) else self.public

    def _refusal(self, request: Request) -> Answer | None:
        site = site_of(asked_by(request))
        seconds = self._requests.wait_seconds(site, trio.current_time())
        return _too_many(site, seconds) if seconds else None

    # -- for viewers

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def enter(self, site: str) -> None:
        self._viewers[site] += 1

    def leave(self, site: str) -> None:
        self._viewers[site] -= 1
        if not self._viewers[site]:
            del self._viewers[site]

    async def news(self) -> None:
        """Until there is a newer state, or for a while."""
        with trio.move_on_after(SILENCE_SECONDS):
            await self._news.wait()


class Audience:
    """What some of the viewers see, and the page with it. Nothing is made while nobody looks."""

    def __init__(self, source: PageSource, *, for_members: bool) -> None:
        self._source, self._is_for_members = source, for_members
        self.feed = Feed()
        self.made_at = self._people_at = float("-inf")
        self._made_version, self._made = -1, (b"", b"")
        self._has_failed = False

    def news_since(self, mark: str) -> bytes:
        self.look()
        return self.feed.since(mark)

    def look(self) -> None:
        """Make the newest state, unless the last one is as good as new."""
        if trio.current_time() - self.made_at < TICK_SECONDS / 2:
            return
        now = self.made_at = trio.current_time()
        try:
            sections = sections_of(self._source, for_members=self._is_for_members)
        except Exception:  # noqa: BLE001 - the run goes on, whatever the page is wrong about
            if not self._has_failed:
                self._has_failed = True
                _log.exception("the page cannot show the newest state; it shows the last one")
            return
        if now - self._people_at < PEOPLE_SECONDS:
            del sections["people"]
        else:
            self._people_at = now
        self.feed.update(sections, self._source.history.curve.points)

    def document(self) -> tuple[bytes, bytes]:
        """The page with the newest data, plain and compressed."""
        self.look()
        if self._made_version != self.feed.version:
            plain = page_file().with_data(self.feed.whole())
            self._made_version, self._made = self.feed.version, (plain, gzip.compress(plain, 4))
        return self._made


class Viewer:
    """One browser that follows the page: an answer that does not end."""

    def __init__(self, page: RunPage, shown: Audience, site: str, mark: str) -> None:
        self._page, self._shown, self._site, self._mark = page, shown, site, mark

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        page = self._page
        page.enter(self._site)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await self._send(send, b"retry: %d\n\n" % RETRY_MS)
            while not page.is_closed:
                data = self._shown.news_since(self._mark)
                self._mark = self._shown.feed.mark
                id_ = self._mark.encode()
                await self._send(send, b"id: %s\ndata: %s\n\n" % (id_, data) if data else b":\n\n")
                await page.news()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            page.leave(self._site)

    async def _send(self, send: Send, piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})


_EVENT_HEADERS: Final = [
    *((name.encode(), value.encode()) for name, value in ALWAYS.items()),
    (b"content-type", b"text/event-stream"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def _too_many(site: str, seconds: int) -> Answer:
    words = f"Too many requests from {site}. Try again in {seconds} s.\n"
    return Answer(words.encode(), "text/plain", 429, {"retry-after": str(seconds)})


def asked_by(request: Request) -> str:
    """The address that asks, also through a proxy on this machine."""
    peer = request.client.host if request.client is not None else ""
    forwarded = ",".join(request.headers.getlist("x-forwarded-for"))  # a proxy may add a line
    return asker(peer, forwarded, THIS_MACHINE)


class LatestBoard:
    """The leaderboard of a peer that keeps records, made anew now and then while somebody looks.
    `add_up` gives the function that adds the records up; None as long as there are none."""

    def __init__(self, add_up: Callable[[], Callable[[], Awaitable[Board]] | None]) -> None:
        self._add_up = add_up
        self.board: Board | None = None

    async def run(self, page: RunPage) -> None:
        """Forever."""
        while True:
            add_up = self._add_up()
            if add_up is not None and (self.board is None or page.is_watched):
                began = trio.current_time()
                try:
                    self.board = await add_up()
                except PotluckError as error:
                    _log.warning("the leaderboard of the page cannot be added up: %s", error)
                took = trio.current_time() - began
                await trio.sleep(max(BOARD_SECONDS, BOARD_REST * took))
            await trio.sleep(TICK_SECONDS)


class PageFile:
    """The page without its data, and the policy that allows exactly it."""

    def __init__(self) -> None:
        here = files("node.app.page")
        style = (here / "page.css").read_text(encoding="utf-8")
        script = (here / "page.js").read_text(encoding="utf-8")
        html = (here / "page.html").read_text(encoding="utf-8")
        self.policy = PAGE_POLICY.format(script=_hash(script), style=_hash(style))
        html = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
        before, after = html.split(DATA_PLACE)
        self._before, self._after = before.encode(), after.encode()

    def with_data(self, data: bytes) -> bytes:
        """The page with these data. `<` would let a name end the element that they are in."""
        return self._before + data.replace(b"<", b"\\u003c") + self._after


@cache
def page_file() -> PageFile:
    return PageFile()


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
