"""What every request passes before it is looked at, and every answer on its way out.

Who asks (and whether through a proxy of ours), how often, whether its method means anything here;
and at the end what was answered, how long it took, and that nothing but an answer leaves: an error
that nobody foresaw is logged with its traceback and becomes a 500 that says nothing about it.

Easy to get wrong: a limit that is checked after the body was read limits nothing. Here it comes
first, and costs a few microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from auth.errors import AuthError
from auth.server.answers import Answer, error_answer
from auth.server.bodies import ClientLeft
from auth.server.metrics import Metrics
from auth.server.rate_limits import Network, Rate, RateLimit, asker, is_within, site_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The longest thing that is done for a request is asking an identity provider: 30 s at the worst.
REQUEST_SECONDS = 40.0
OTHER_ROUTE = "other"
FORWARDED_HEADERS = frozenset({b"x-forwarded-for", b"forwarded", b"via"})

_log = logging.getLogger("potluck.auth.requests")


class TooManyRequests(AuthError):
    """Somebody asks too often. Not a refusal: it passes by itself."""

    exit_code = 4

    def __init__(self, limit: str, retry_seconds: int) -> None:
        super().__init__(
            "Too many requests.",
            why=f"The limit is `{limit}`, for everybody at this address or in this account.",
            advice=f"Try again in {retry_seconds} s.",
        )
        self.limit = limit
        self.retry_seconds = retry_seconds


class Boundary:
    """The outermost application. `route_names` maps paths to what metrics call them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        requests: Rate,
        trusted_proxies: tuple[Network, ...],
        route_names: Mapping[str, str],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._requests = RateLimit(requests)
        self._trusted = trusted_proxies
        self._route_names = route_names
        self._warned_of_proxy = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = trio.current_time()
        answered: list[int] = []

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.append(message["status"])
            await send(message)

        with trio.move_on_after(REQUEST_SECONDS) as patience:
            refusal = self._refusal(scope, began)
            try:
                await (refusal or self._app)(scope, receive, send_and_note)
            except ClientLeft:
                pass
            except Exception as error:  # noqa: BLE001 - the last place: the server goes on
                _log.exception("%s %r failed: %r", scope["method"], scope["path"][:200], error)
                self._metrics.failures.labels("unforeseen").inc()
                if not answered:
                    await _unforeseen()(scope, receive, send_and_note)
        if patience.cancelled_caught and not answered:
            self._metrics.failures.labels("too_slow").inc()
            await _too_slow()(scope, receive, send_and_note)
        self._note(scope, answered, trio.current_time() - began)

    def _refusal(self, scope: Scope, now: float) -> Answer | None:
        """Say who asks, in `scope["potluck.site"]`; an answer if that one asks too often."""
        peer = (scope.get("client") or ("unknown",))[0]
        forwarded, through_proxy = _forwarded(scope)
        address = asker(peer, forwarded, self._trusted)
        site = site_of(address)
        scope["potluck.address"] = address
        scope["potluck.site"] = site
        scope["potluck.unknown_proxy"] = through_proxy and not is_within(peer, self._trusted)
        if scope["potluck.unknown_proxy"]:
            self._warn_of_proxy(peer)
        wait = self._requests.wait_seconds(site, now)
        if wait:
            return too_many(self._metrics, site, TooManyRequests("requests", wait))
        if scope["method"] == "OPTIONS":
            return Answer(b"", "", 204, {"allow": "GET, HEAD, POST, OPTIONS"})
        return None

    def _warn_of_proxy(self, peer: str) -> None:
        if not self._warned_of_proxy:
            self._warned_of_proxy = True
            _log.warning(
                "a request came from %s with a proxy's headers, which are not believed. If that is"
                " a proxy of yours, name it in server.trusted_proxies: until then everybody behind"
                " it shares one rate limit. This is said once",
                peer,
            )

    def _note(self, scope: Scope, answered: list[int], seconds: float) -> None:
        path = scope["path"]
        name = self._route_names.get(path) or (
            "login_page" if path.startswith("/login/") else OTHER_ROUTE
        )
        self._metrics.requests.labels(name, str(answered[0]) if answered else "left").inc()
        self._metrics.seconds.labels(name).observe(seconds)


def too_many(metrics: Metrics, site: str, error: TooManyRequests) -> Answer:
    _log.warning("%s asks too often: limit %s", site, error.limit)
    metrics.limited.labels(error.limit).inc()
    return error_answer(error, 429, "too_many_requests", retry_seconds=error.retry_seconds)


def _forwarded(scope: Scope) -> tuple[str, bool]:
    """What proxies say of whom they ask for, and whether there seem to be any."""
    addresses, through_proxy = [], False
    for name, value in scope["headers"]:
        if name in FORWARDED_HEADERS:
            through_proxy = True
            if name == b"x-forwarded-for":
                addresses.append(value.decode("latin-1"))
    return ",".join(addresses), through_proxy


def _unforeseen() -> Answer:
    error = AuthError(
        "The auth server failed at this request.",
        why="It has met something that nobody foresaw; its log says what.",
        advice="Try again in a while; if it stays, tell the run's moderators.",
    )
    return error_answer(error, 500, "failed")


def _too_slow() -> Answer:
    error = AuthError(
        f"This took longer than {REQUEST_SECONDS:g} seconds.",
        advice="Try again in a while.",
    )
    return error_answer(error, 503, "too_slow", retry_seconds=10)
