"""The addresses below /login: what a person's browser goes through during a browser login.

    GET  /login/PAGE       whose login is this? The word in the terminal, and a button
    POST /login/PAGE       the button: on to the provider
    GET  /login/callback   back from there: done, or not

The pages are in pages.py; what they mean is in providers/logins.py.

Easy to get wrong: the form is ours only if the browser says so. A page elsewhere can make a
browser send any form here; its `Origin` then is another one, and it lacks the token besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import Request

from auth.keys import peer_id_of
from auth.server.answers import Answer
from auth.server.bodies import BadRequest, read_body
from auth.server.pages import confirmation_page, done_page, failed_page, page_headers
from auth.server.providers.errors import LoginError, LoginMisuse, LoginRefused
from auth.server.providers.logins import Logins
from auth.server.refusing import Refusing

HTML = "text/html; charset=utf-8"
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 32
LONGEST_COOKIES = 4096  # characters; other sites on this host may have set some


class Browser:
    """The browser's part of a login. Made by app.py."""

    def __init__(self, run: str, public_url: str, logins: Logins, refusing: Refusing) -> None:
        self._run = run
        self._origin = public_url
        self._logins = logins
        self._refusing = refusing
        self._headers = page_headers(public_url)
        self._over_tls = public_url.startswith("https:")
        # a name with this prefix cannot be set by another host, nor over plain HTTP
        self._cookie_name = "__Host-potluck-login" if self._over_tls else "potluck-login"

    async def show(self, request: Request) -> Answer:
        """Ask whose login it is."""
        try:
            page = self._logins.page(request.path_params["page"], self._cookie(request))
        except LoginError as error:
            return await self._failed(request, error)
        content = confirmation_page(
            run=self._run,
            provider=page.title,
            confirmation=page.confirmation,
            peer_id=peer_id_of(page.peer),
            started_from=page.started_from,
            form_token=page.form_token,
        )
        cookie = f"{self._cookie_name}={page.cookie}; Path=/; HttpOnly; SameSite=Lax"
        cookie += f"; Max-Age={page.expires_in}" + ("; Secure" if self._over_tls else "")
        headers = {**self._headers, "set-cookie": cookie}
        return Answer(content, HTML, 200, headers)

    async def send_on(self, request: Request) -> Answer:
        """The button was pressed."""
        try:
            self._check_origin(request)
            form = await _form_in(request)
            url = await self._logins.continue_to_provider(
                request.path_params["page"], self._cookie(request), form.get("form_token")
            )
        except (LoginError, BadRequest) as error:
            return await self._failed(request, error)
        return Answer(b"", HTML, 303, {**self._headers, "location": url})

    async def callback(self, request: Request) -> Answer:
        """Back from the provider."""
        try:
            query = _fields(request.scope["query_string"].decode("latin-1"))
            done = await self._logins.callback(query, self._cookie(request))
        except (LoginError, BadRequest) as error:
            return await self._failed(request, error)
        content = done_page(
            run=self._run, provider=done.title, confirmation=done.confirmation, login=done.login
        )
        return Answer(content, HTML, 200, self._headers)

    async def _failed(self, request: Request, error: LoginError | BadRequest) -> Answer:
        if isinstance(error, LoginRefused):
            await self._refusing.tell_the_log(request, error)
        content = failed_page(what=error.what, why=error.why, advice=error.advice)
        return Answer(content, HTML, error.status, self._headers)

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin")
        if origin is not None and origin != self._origin:
            raise LoginMisuse(
                "This form was sent by another site.",
                why="Only the login page of this server has a form for this address.",
                advice="Open the address that your terminal shows.",
            )

    def _cookie(self, request: Request) -> str | None:
        header = request.headers.get("cookie", "")[:LONGEST_COOKIES]
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie_name:
                return value
        return None


async def _form_in(request: Request) -> Mapping[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise LoginMisuse("That is not what the form of this page sends.")
    return _fields((await read_body(request)).decode("latin-1"))


def _fields(text: str) -> Mapping[str, str]:
    """The fields of a query or a form, each at most once."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise LoginMisuse("There are too many fields in this request.") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise LoginMisuse(
            "A field stands twice in this request.",
            advice="Begin the login again from the terminal.",
        )
    return fields
