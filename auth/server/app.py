"""The application: which address is answered by what, and what all of them pass first.

Easy to get wrong: Starlette tries routes one after another with a regular expression each. What is
asked most stands first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from auth.errors import AuthError
from auth.server.answers import Answer
from auth.server.api import Api
from auth.server.boundary import Boundary
from auth.server.browser import Browser
from auth.server.metrics import Metrics
from auth.server.operations import Operations
from auth.server.rate_limits import Rate
from auth.server.refusing import Refusing
from auth.server.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

Endpoint = Callable[[Request], Awaitable[Answer]]


def build_app(
    settings: Settings,
    api: Api,
    browser: Browser,
    operations: Operations,
    refusing: Refusing,
    metrics: Metrics,
) -> ASGIApp:
    """Everything that the server answers."""
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
        requests=Rate.per_minute(settings.requests_per_minute_per_address),
        trusted_proxies=settings.trusted_proxies,
        route_names={path: name for _, path, name, _ in addresses},
    )
