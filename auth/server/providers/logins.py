"""Logging in, from the first request to the identity, as the auth server's routes call it.

    start           a peer that has proven its key begins a login with a provider
    poll            its terminal asks for the state; at the end it gets the identity, once
    page, continue_to_provider, callback      the steps of the person's browser in between

A login only gives an identity. The allowlist then decides about it and about the peer key with
which the session was begun.

Two attacks shape the browser's part. An attacker may send a victim the page of the attacker's own
login. So the page shows a word that must be in the victim's terminal, and nothing goes to the
provider before the form of that page is sent. Or an attacker may skip the page and send the victim
straight to the provider, or back from it. So the answer counts only in the browser that sent the
form, by its cookie.

Easy to get wrong: while a provider is asked, the session may end, because its time is over or its
peer has begun another. A late answer must not revive it.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

import trio

from auth.server.providers.device_answers import LONGEST_INTERVAL_SECONDS
from auth.server.providers.errors import (
    LoginError,
    LoginExpired,
    LoginMisuse,
    LoginReason,
    LoginRefused,
    ProviderUnavailable,
    words_of_a_stranger,
)
from auth.server.providers.fetching import QUESTIONS_AT_ONCE, Fetcher, open_client
from auth.server.providers.flows import (
    BrowserProvider,
    DeviceProvider,
    LoginAttempt,
    NotYet,
    Provider,
)
from auth.server.providers.github import GithubProvider
from auth.server.providers.identity import ProviderIdentity
from auth.server.providers.oidc import OpenIdProvider
from auth.server.providers.sessions import (
    Session,
    Sessions,
    expired,
    form_token,
    is_same,
    looks_like_an_id,
    new_id,
)
from auth.server.providers.settings import (
    CodeSettings,
    GithubSettings,
    ProviderSettings,
    ProviderSettingsError,
    read_secret,
)

CALLBACK_PATH: Final = "/login/callback"
PAGE_PATH: Final = "/login/"
PEER_KEY_BYTES: Final = 32

# How often a terminal asks while its person is in the browser: the asking costs a table look-up.
BROWSER_INTERVAL_SECONDS: Final = 2


# The answers, one for each request. Times are whole seconds. `session` is the terminal's secret and
# `page_id` the browser's: neither may be shown to the other, and neither may be logged.


@dataclass(frozen=True, slots=True)
class ProviderEntry:
    id: str
    kind: str  # "code", "device" or "browser"
    title: str


@dataclass(frozen=True, slots=True)
class DeviceStarted:
    session: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str | None
    interval: int
    expires_in: int


@dataclass(frozen=True, slots=True)
class BrowserStarted:
    session: str
    page_id: str
    url: str
    confirmation: str
    interval: int
    expires_in: int


@dataclass(frozen=True, slots=True)
class Pending:
    interval: int


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """`peer` is the key that began the login: a pass for this identity is for that key only."""

    session: str
    peer: bytes
    identity: ProviderIdentity


@dataclass(frozen=True, slots=True)
class LoginPage:
    title: str
    confirmation: str
    peer: bytes
    started_from: str
    cookie: str
    form_token: str
    expires_in: int


@dataclass(frozen=True, slots=True)
class CallbackDone:
    title: str
    confirmation: str
    login: str


@asynccontextmanager
async def open_logins(
    settings: Sequence[ProviderSettings],
    public_url: str,
    *,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Logins]:
    """The providers of these settings, ready for use; AuthError if a file cannot be read.

    No provider is contacted yet: one that is down does not keep the server from starting.
    """
    ids = [each.id for each in settings]
    if len(set(ids)) != len(ids):
        raise ProviderSettingsError(
            "Two providers have the same id.",
            why="An id is part of every account's name, so it belongs to one provider.",
            advice="Give each [[provider]] an id of its own.",
        )
    limiter = trio.CapacityLimiter(QUESTIONS_AT_ONCE)
    async with AsyncExitStack() as stack:
        providers = [await _open(each, limiter, stack, wall_clock) for each in settings]
        yield Logins(providers, public_url.rstrip("/"))


async def _open(
    settings: ProviderSettings,
    limiter: trio.CapacityLimiter,
    stack: AsyncExitStack,
    wall_clock: Callable[[], float],
) -> Provider:
    if isinstance(settings, CodeSettings):
        return CodeProvider(settings)
    authorities = Path(settings.ca_file) if settings.ca_file else None
    try:
        client = await stack.enter_async_context(open_client(authorities))
    except OSError as error:  # ssl.SSLError is one
        raise ProviderSettingsError(
            f"The certificate authorities in {settings.ca_file} cannot be used: {error}.",
            advice="Name a file of PEM certificates, or leave ca_file out.",
        ) from error
    if isinstance(settings, GithubSettings):
        return GithubProvider(settings, Fetcher(settings.title or "GitHub", client, limiter))
    fetcher = Fetcher(settings.title or settings.id, client, limiter)
    file = settings.client_secret_file
    secret = read_secret(Path(file)) if file else None
    return OpenIdProvider(settings, secret, fetcher, wall_clock)


class Logins:
    """All providers and all open logins of one server. Made by `open_logins`."""

    def __init__(self, providers: Sequence[Provider], public_url: str) -> None:
        self._providers = {provider.id: provider for provider in providers}
        self._public_url = public_url
        self._redirect_uri = public_url + CALLBACK_PATH
        self._sessions = Sessions()
        self._form_secret = secrets.token_bytes(32)

    def provider_list(self) -> list[ProviderEntry]:
        return [
            ProviderEntry(provider.id, flow, provider.title)
            for provider in self._providers.values()
            for flow in provider.flows
        ]

    def is_code_provider(self, provider_id: str) -> bool:
        return isinstance(self._providers.get(provider_id), CodeProvider)

    async def start(
        self, peer: bytes, provider_id: str, kind: str, address: str
    ) -> DeviceStarted | BrowserStarted:
        """Begin a login of this peer, which has just proven that it holds the key.

        Logins are counted by `address`. An older login of the same peer ends.
        """
        provider = self._providers.get(provider_id)
        if provider is None or kind not in provider.flows or kind == "code":
            raise LoginMisuse(
                "This server has no login of kind "
                f"{words_of_a_stranger(kind)} with a provider {words_of_a_stranger(provider_id)}.",
                why="The list of providers may have changed, or the request is made up.",
                advice="Ask the server for its list (/v1/about) and choose one that is in it.",
            )
        if len(peer) != PEER_KEY_BYTES:
            raise LoginMisuse(f"A peer's key has {PEER_KEY_BYTES} bytes, not {len(peer)}.")
        session = self._sessions.begin(peer, provider, kind, address, trio.current_time())
        if kind == "browser":
            return self._browser_started(session)
        try:
            return await self._device_started(session, cast(DeviceProvider, provider))
        except BaseException:
            self._sessions.end(session)
            raise

    async def poll(self, session_id: str) -> Pending | LoggedIn:
        """The state of a login. Raises LoginRefused, LoginExpired, or ProviderUnavailable."""
        session = self._sessions.found(session_id, trio.current_time())
        if session.flow == "device" and not session.is_answered:
            wait = session.next_question - trio.current_time()
            if session.asking or session.grant is None or wait > 0:
                return Pending(max(1, math.ceil(wait)))
            await finishing(partial(self._ask_device, session))
        if session.refusal is not None:
            raise session.refusal.again()
        if session.identity is None:
            waits = session.interval if session.flow == "device" else BROWSER_INTERVAL_SECONDS
            return Pending(waits)
        if session.over:  # while the provider was asked: it expired, or another poll was faster
            raise expired()
        return LoggedIn(session.id, session.peer, self._sessions.hand_out(session))

    def give_back(self, session_id: str) -> bool:
        """No pass could be written, through no fault of the volunteer: the next poll tries again.

        False if the login cannot go on: its time is over, or its peer has begun another.
        """
        return self._sessions.give_back(session_id, trio.current_time())

    def page(self, page_id: str, cookie: str | None) -> LoginPage:
        """The page to show before the browser goes anywhere; LoginExpired if there is no such page.

        The cookie must be set with the page: the form counts only together with it.
        """
        now = trio.current_time()
        session = self._sessions.at_page(page_id, now)
        if session.is_answered:
            raise _answered()
        kept = cookie if cookie is not None and looks_like_an_id(cookie) else new_id()
        return LoginPage(
            title=session.provider.title,
            confirmation=session.confirmation,
            peer=session.peer,
            started_from=session.address,
            cookie=kept,
            form_token=form_token(self._form_secret, kept, page_id),
            expires_in=math.ceil(session.expires - now),
        )

    async def continue_to_provider(self, page_id: str, cookie: str | None, form: str | None) -> str:
        """The page's form was sent: the address at the provider to send this browser to."""
        session = self._sessions.at_page(page_id, trio.current_time())
        if session.is_answered:
            raise _answered()
        if (
            cookie is None
            or not looks_like_an_id(cookie)
            or not is_same(form, form_token(self._form_secret, cookie, page_id))
        ):
            raise _other_browser()
        provider = cast(BrowserProvider, session.provider)
        attempt = LoginAttempt(state=new_id(), nonce=new_id(), verifier=new_id())
        url = await provider.browser_url(attempt, self._redirect_uri)
        if session.over:
            raise expired()
        self._sessions.send_out(session, attempt, cookie)
        return url

    async def callback(self, query: Mapping[str, str], cookie: str | None) -> CallbackDone:
        """The browser is back from the provider. Its query counts once, and only from this
        browser."""
        state = query.get("state")
        if state is None:
            raise LoginMisuse(
                "The provider's answer names no login (it lacks a state).",
                advice="Begin the login again from the terminal.",
            )
        now = trio.current_time()
        session = self._sessions.on_the_way(state, now)
        if not session.cookie or not is_same(cookie, session.cookie):
            raise _other_browser()
        attempt = self._sessions.take_attempt(session)
        assert attempt is not None
        await finishing(partial(self._finish_browser, session, attempt, query))
        if session.over or session.identity is None:
            raise expired()
        return CallbackDone(session.provider.title, session.confirmation, session.identity.login)

    def troubles(self) -> dict[str, str]:
        """The last outage of each provider in words; empty if its last request was answered."""
        return {
            provider.id: provider.trouble
            for provider in self._providers.values()
            if not isinstance(provider, CodeProvider)
        }

    def open_count(self) -> int:
        """How many logins are open."""
        self._sessions.forget_old(trio.current_time())
        return len(self._sessions)

    def _browser_started(self, session: Session) -> BrowserStarted:
        return BrowserStarted(
            session=session.id,
            page_id=session.page_id,
            url=f"{self._public_url}{PAGE_PATH}{session.page_id}",
            confirmation=session.confirmation,
            interval=BROWSER_INTERVAL_SECONDS,
            expires_in=math.floor(session.expires - trio.current_time()),
        )

    async def _device_started(self, session: Session, provider: DeviceProvider) -> DeviceStarted:
        grant = await provider.start_device()
        if session.over:  # the same peer began another in the meantime
            raise expired()
        now = trio.current_time()
        session.grant, session.interval = grant, grant.interval
        session.next_question = now + grant.interval
        self._sessions.lasts_until(session, now + grant.expires_in)
        return DeviceStarted(
            session=session.id,
            user_code=grant.user_code,
            verification_uri=grant.verification_uri,
            verification_uri_complete=grant.verification_uri_complete,
            interval=grant.interval,
            expires_in=grant.expires_in,
        )

    async def _ask_device(self, session: Session) -> None:
        """Ask the provider once, and store the result in the session."""
        assert session.grant is not None
        provider = cast(DeviceProvider, session.provider)
        session.asking = True
        asked = trio.current_time()
        try:
            answer = await provider.ask_device(session.grant, session.interval)
        except LoginRefused as refused:
            if not session.over:
                self._sessions.refuse(session, refused, trio.current_time())
            raise
        except LoginExpired:
            self._sessions.end(session)
            raise
        except ProviderUnavailable:
            # RFC 8628, 3.5: longer and longer pauses while the provider is away
            session.interval = min(session.interval * 2, LONGEST_INTERVAL_SECONDS)
            session.next_question = trio.current_time() + session.interval
            raise
        finally:
            session.asking = False
        if isinstance(answer, NotYet):
            session.interval = answer.interval
            session.next_question = asked + answer.interval
        elif session.refusal is None:
            session.identity = answer

    async def _finish_browser(
        self, session: Session, attempt: LoginAttempt, query: Mapping[str, str]
    ) -> None:
        """Turn the browser's query into the session's identity, or its refusal."""
        provider = cast(BrowserProvider, session.provider)
        try:
            identity = await provider.finish_browser(attempt, query, self._redirect_uri)
        except LoginRefused as refused:
            if not session.over and not session.is_answered:
                self._sessions.refuse(session, refused, trio.current_time())
            raise
        if session.is_answered:  # by another trip of the same login, which was faster
            raise _answered()
        session.identity = identity


def _answered() -> LoginExpired:
    return LoginExpired(
        "This login was answered already.",
        why="The page was opened again after the provider had said who you are.",
        advice="Look at the terminal: it says how it went.",
    )


def _other_browser() -> LoginRefused:
    return LoginRefused(
        "This browser is not the one that began this login.",
        reason=LoginReason.STATE,
        why="Cookies are off, the page was opened long ago, or somebody sent you the address of"
        " their own login.",
        advice="If your own terminal shows a login, open the address that it shows, and allow"
        " cookies there. Otherwise close this page: nothing has happened.",
    )


# Enrolment codes as a provider: without an identity provider, a moderator's word is the identity.
#
# The store looks up a code, counts it and makes a pass in one transaction. So nothing is asked here
# and no session is kept; this class only lists such a provider among the others.


DEFAULT_TITLE: Final = "Enrolment code"


class CodeProvider:
    flows: tuple[str, ...] = ("code",)
    trouble = ""

    def __init__(self, settings: CodeSettings) -> None:
        self.id = settings.id
        self.title = settings.title or DEFAULT_TITLE


# Finishing an exchange with a provider although its caller has left.
#
# A provider gives a token once. When a client hangs up while it is on its way, the exchange goes on
# for a moment, so that the next caller can finish the login. It is the same when the server is
# stopped, so the moment must be short.
#
# The exchange itself has to store its result, because nothing can be returned to a caller that has
# left.


# Providers answer in a tenth of a second or two; a stopped server has 1.5 s for everything.
LAST_MOMENTS_SECONDS: Final = 0.3


async def finishing(exchange: Callable[[], Awaitable[None]]) -> None:
    """Run it to its end, or for LAST_MOMENTS_SECONDS once cancelled. Raises its LoginError."""
    failure: LoginError | None = None
    async with trio.open_nursery() as nursery:
        with trio.CancelScope(shield=True) as scope:
            nursery.start_soon(_hurry_when_cancelled, scope)
            try:
                await exchange()
            except LoginError as error:
                failure = error  # not through the nursery, which would wrap it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _hurry_when_cancelled(scope: trio.CancelScope) -> None:
    try:
        await trio.sleep_forever()
    finally:
        scope.deadline = trio.current_time() + LAST_MOMENTS_SECONDS
