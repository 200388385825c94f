"""The addresses below /login: what a person's browser goes through during a browser login.

    GET  /login/PAGE       whose login is this? The word in the terminal, and a button
    POST /login/PAGE       the button: on to the provider
    GET  /login/callback   back from there: done, or not

The pages are below; providers/logins.py handles the login itself.

A form is accepted only if the browser says that it is ours. A page elsewhere can make a browser
send any form here, but then its `Origin` differs, and it lacks the token.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from urllib.parse import parse_qsl

from starlette.requests import Request

from auth.keys import peer_id_of
from auth.server.answers import Answer
from auth.server.boundary import BadRequest, read_body
from auth.server.providers.errors import LoginError, LoginMisuse, LoginRefused
from auth.server.providers.logins import Logins
from auth.server.refusing import Refusing

HTML = "text/html; charset=utf-8"
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 32
LONGEST_COOKIES = 4096  # characters; other sites on this host may have set some


class Browser:
    """The browser's part of a login. Made by auth_server.py."""

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


# The pages that a browser sees during a login: plain HTML, no script, nothing from elsewhere.
#
# The threat is a link. An attacker who sends a stranger the address of a login that they began
# themselves would get the stranger's access, if the stranger only clicked on. So the first page
# says whose login it is and which word must be in the reader's own terminal, and goes nowhere by
# itself.
#
# Everything that is shown passes through `escape`: a login name, a provider's title and a run's
# name are chosen by others.
#
# `form-action` in a content security policy also governs, in some browsers, where a form's answer
# redirects to. It has to allow the way to the provider.


STYLE = (
    "body{font:1.1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:12vh auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "strong.word{display:block;font-size:1.8rem;letter-spacing:.05em;margin:1rem 0}"
    "code{font-size:.85rem;overflow-wrap:anywhere}"
    "button{font:inherit;padding:.6rem 1.4rem}"
    "p.small{font-size:.9rem;color:#555}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}p.small{color:#aaa}}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()


def page_headers(public_url: str) -> Mapping[str, str]:
    """The headers of every page of the server at this address."""
    # A provider's page for people may be on another host than its issuer, so the policy can only
    # require that the form's way is encrypted.
    onwards = "https:" if public_url.startswith("https:") else "https: http:"
    return {
        "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
        f"form-action 'self' {onwards}; frame-ancestors 'none'; base-uri 'none'",
        "x-frame-options": "DENY",
        # not no-referrer: with that, browsers hide the origin of our own form from us
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
    }


def confirmation_page(
    *, run: str, provider: str, confirmation: str, peer_id: str, started_from: str, form_token: str
) -> bytes:
    """Asks whose login this is, and whether to continue."""
    return _page(
        f"Join {run}",
        f"""<p>A computer asks to take part in the run <b>{escape(run)}</b> in your name, after you
log in with {escape(provider)}.</p>
<p>The terminal in which you started it shows this word:</p>
<strong class="word">{escape(confirmation)}</strong>
<form method="post"><input type="hidden" name="form_token" value="{escape(form_token)}">
<button>The same word is in my terminal: continue</button></form>
<p>If you see no such word in a terminal of your own, somebody else sent you here: close this page.
Going on would give <b>them</b> access in your name.</p>
<p class="small">The computer's key: <code>{escape(peer_id)}</code><br>
It asked from: <code>{escape(started_from)}</code></p>""",
    )


def done_page(*, run: str, provider: str, confirmation: str, login: str) -> bytes:
    """Logged in; the rest happens in the terminal."""
    return _page(
        "Logged in",
        f"""<p>{escape(provider)} says that you are <b>{escape(login)}</b>. The terminal that shows
<b>{escape(confirmation)}</b> now learns whether that name may take part in
<b>{escape(run)}</b>.</p>
<p>You can close this page.</p>""",
    )


def failed_page(*, what: str, why: str, advice: str) -> bytes:
    """The error, in three sentences."""
    sentences = "".join(f"<p>{escape(text)}</p>" for text in (why, advice) if text)
    return _page("That did not work", f"<p><b>{escape(what)}</b></p>{sentences}")


def _page(title: str, content: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{content}</body></html>"
    ).encode()
