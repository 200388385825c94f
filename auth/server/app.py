"""The application: the handler of each address, and the checks before all of them.

Starlette tries routes one after another with a regular expression each, so the most frequent come
first.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from auth.errors import AuthError
from auth.server.answers import Answer, json_answer
from auth.server.api import Api
from auth.server.boundary import BadRequest, Boundary
from auth.server.browser import Browser
from auth.server.metrics import Metrics
from auth.server.providers.logins import Logins
from auth.server.rate_limits import AllowedRate, Network, is_within
from auth.server.refusing import Refusing
from auth.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from auth.server.certificates import Certificate
    from auth.server.store import Store

Endpoint = Callable[[Request], Awaitable[Answer]]


def build_app(
    settings: Settings,
    api: Api,
    browser: Browser,
    operations: Operations,
    refusing: Refusing,
    metrics: Metrics,
) -> ASGIApp:
    """The application with all addresses."""
    addresses: list[tuple[str, str, str, Endpoint]] = [
        ("POST", "/v1/renew", "renew", api.renew),
        ("GET", "/v1/revocations", "revocations", api.revocations),
        ("POST", "/v1/challenge", "challenge", api.challenge),
        ("POST", "/v1/login/poll", "poll", api.poll),
        ("POST", "/v1/login", "login", api.login),
        ("GET", "/v1/about", "about", api.about),
        ("GET", "/v1/keys", "keys", api.keys),
        ("GET", "/v1/time", "time", api.time),
        ("GET", "/healthz", "healthz", operations.alive),
        ("GET", "/readyz", "readyz", operations.ready),
        ("GET", "/metrics", "metrics", operations.show_metrics),
        ("GET", "/login/callback", "login_callback", browser.callback),
        ("GET", "/login/{page}", "login_page", browser.show),
        ("POST", "/login/{page}", "login_form", browser.send_on),
    ]
    routes = [Route(path, answer, methods=[method]) for method, path, _, answer in addresses]
    app = Starlette(
        routes=routes,
        exception_handlers={
            AuthError: refusing.answer_error,  # type: ignore[dict-item]  # our Answer is ASGI, too
            HTTPException: refusing.answer_http_exception,  # type: ignore[dict-item]
        },
    )
    app.router.redirect_slashes = False
    return Boundary(
        app,
        metrics=metrics,
        requests=AllowedRate.per_minute(settings.requests_per_minute_per_address),
        trusted_proxies=settings.trusted_proxies,
        route_names={path: name for _, path, name, _ in addresses},
    )


# For operators: is the server alive, is it ready, and what has it counted?
#
# `/healthz` shows that the process answers; it is for a supervisor that restarts on a failure.
# `/readyz` shows that a volunteer who came now could get a pass: the database can be written, the
# signing key is there, the certificate is valid. An identity provider that is down does not matter:
# codes and renewals work without it. `/metrics` is for the addresses in auth.toml, by default this
# machine.
#
# Behind a proxy that is not in auth.toml, every request seems to come from the proxy's machine,
# which may be this one. Such a request gets no metrics.


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Operations:
    """The addresses for operators. Made by app.py."""

    def __init__(
        self,
        store: Store,
        logins: Logins,
        metrics: Metrics,
        certificate: Certificate | None,
        metrics_from: tuple[Network, ...],
        connections: Callable[[], int],
    ) -> None:
        self._store = store
        self._logins = logins
        self._metrics = metrics
        self._certificate = certificate
        self._metrics_from = metrics_from
        self._connections = connections

    async def alive(self, _request: Request) -> Answer:
        return json_answer({"alive": True})

    async def ready(self, _request: Request) -> Answer:
        troubles = self.troubles()
        return json_answer({"ready": not troubles, "troubles": troubles}, 503 if troubles else 200)

    async def show_metrics(self, request: Request) -> Answer:
        allowed = is_within(request.scope["potluck.address"], self._metrics_from)
        if not allowed or request.scope["potluck.unknown_proxy"]:
            raise BadRequest(
                403,
                "not_for_you",
                "Metrics are not shown to this address.",
                advice="server.metrics_from in auth.toml names the addresses that may read them.",
            )
        self._measure()
        return Answer(self._metrics.text(), CONTENT_TYPE_LATEST)

    def troubles(self) -> dict[str, str]:
        """The reasons why the server cannot give passes, by name; empty if there are none."""
        troubles = {}
        health = self._store.health()
        if not health.writable:
            troubles["database"] = health.trouble or "it cannot be written"
        if not self._store.can_sign():
            troubles["keys"] = "there is no signing key that counts now"
        if self._certificate is not None and not self._certificate.is_valid_at(wall_ms()):
            troubles["certificate"] = "it has expired, or does not count yet"
        return troubles

    def _measure(self) -> None:
        metrics, health = self._metrics, self._store.health()
        metrics.connections.set(self._connections())
        metrics.ready.set(0 if self.troubles() else 1)
        metrics.live_tokens.set(self._store.live_tokens())
        metrics.revocation_number.set(self._store.revocation_list().number)
        metrics.logins_waiting.set(self._logins.statistics().open)
        metrics.writer_waiting.set(health.waiting)
        metrics.database_bytes.set(health.database_bytes)
        metrics.free_bytes.set(health.free_bytes)
        if self._certificate is not None:
            left_ms = self._certificate.current.not_after_ms - wall_ms()
            metrics.certificate_seconds.set(left_ms / 1000)
