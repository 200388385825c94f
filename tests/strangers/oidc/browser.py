"""A person at a browser, as far as a provider's pages can tell: links, forms, cookies, redirects.

Nothing in it knows a provider: it reads the forms on a page and sends them as a browser does, with
what the person types into the fields that they can see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from types import TracebackType
from typing import Final
from urllib.parse import urljoin

import httpx2

MOST_STEPS: Final = 20  # pages and redirects of one login; a loop must not go on for ever


@dataclass
class Form:
    action: str
    id: str
    fields: dict[str, str] = field(default_factory=dict)  # hidden ones and their values
    blanks: list[str] = field(default_factory=list)  # what a person fills in


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self.links: dict[str, str] = {}  # by their text
        self.buttons: list[dict[str, str]] = []
        self._link = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "form":
            self.forms.append(Form(given.get("action", ""), given.get("id", "")))
        elif tag == "input" and self.forms and "name" in given:
            if given.get("type") in ("text", "password"):
                self.forms[-1].blanks.append(given["name"])
            else:
                self.forms[-1].fields[given["name"]] = given.get("value", "")
        elif tag == "button":
            self.buttons.append(given)
        elif tag == "a":
            self._link = given.get("href", "")

    def handle_data(self, data: str) -> None:
        if self._link and data.strip():
            self.links[data.strip()] = self._link
            self._link = ""


@dataclass
class Page:
    url: str
    text: str
    status: int = 200

    def __post_init__(self) -> None:
        reader = _Reader()
        reader.feed(self.text)
        self.forms, self.links, self.buttons = reader.forms, reader.links, reader.buttons


class Browser:
    """Follows redirects up to an address that begins with `stops_at`, which it does not open."""

    def __init__(self, stops_at: str) -> None:
        self._client = httpx2.AsyncClient(timeout=10)
        self._stops_at = stops_at

    async def __aenter__(self) -> Browser:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def open(self, url: str) -> Page:
        return await self._follow(await self._client.get(url))

    async def send(self, page: Page, form: Form, typed: dict[str, str]) -> Page:
        content = {**form.fields, **typed}
        url = urljoin(page.url, form.action)
        return await self._follow(await self._client.post(url, data=content))

    async def log_in(self, page: Page, name: str) -> Page:
        """Press on through whatever the provider asks, typing this name where one is asked for."""
        for _ in range(MOST_STEPS):
            if not page.forms:
                return page
            form = page.forms[0]
            typed = {blank: name if blank == "login" else "secret" for blank in form.blanks}
            page = await self.send(page, form, typed)
        raise AssertionError(f"no end of pages: {page.text}")

    async def _follow(self, answer: httpx2.Response) -> Page:
        for _ in range(MOST_STEPS):
            if not answer.is_redirect:
                return Page(str(answer.url), answer.text, answer.status_code)
            there = urljoin(str(answer.url), answer.headers["location"])
            if there.startswith(self._stops_at):
                return Page(there, "")
            answer = await self._client.get(there)
        raise AssertionError(f"no end of redirects: {answer.headers['location']}")
