"""The whole auth server, from its settings and its state.

    async with trio.open_nursery() as nursery:
        server = AuthServer(settings, store, version="0.1.0")
        await nursery.start(server.serve)      # listens when this returns

Plain HTTP shows codes, passes and logins to everybody on the way. So it is served to this machine
alone, for trying things out and for a proxy here that does the TLS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio
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
from auth.server.certificates import Certificate
from auth.server.issuing import Issuer, IssuerSettings
from auth.server.metrics import Metrics
from auth.server.providers.logins import Logins, open_logins
from auth.server.rate_limits import AllowedRate, Network, is_within
from auth.server.refusing import Refusing
from auth.server.serving import BACKLOG, HttpServer
from auth.server.settings import ListenAddress, Settings, SettingsError
from auth.server.store import wall_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp
    from trio_typing import TaskStatus

    from auth.server.store import Store

Endpoint = Callable[[Request], Awaitable[Answer]]


class CannotListen(AuthError):
    """The port is in use, or the address is not this machine's."""


class AuthServer:
    """One server. `public_url`, `listening` and `status` are valid once it serves."""

    def __init__(
        self, settings: Settings, store: Store, *, version: str, insecure_http: bool = False
    ) -> None:
        """SettingsError or UnusableCertificate if it cannot be served like this."""
        if settings.run != store.run:
            raise SettingsError(
                f"auth.toml is for the run {settings.run!r}, the database for {store.run!r}.",
                why="Every token carries the name of its run; it does not change.",
                advice="Correct `run` in auth.toml, or use another home for another run.",
            )
        self.settings = settings
        self.store = store
        self.version = version
        self.metrics = Metrics()
        self.certificate = None if insecure_http else _certificate(settings)
        if insecure_http:
            _check_loopback(settings.listen)
        self.public_url = settings.public_url
        self.listening: tuple[str, ...] = ()
        self._started_ms = wall_ms()
        self.http: HttpServer | None = None
        self._logins: Logins | None = None

    async def serve(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; requests in flight are answered first."""
        listeners = await _listeners(self.settings.listen)
        self._take_addresses(listeners)
        async with open_logins(self.settings.providers, self.public_url) as logins:
            self._logins = logins
            self.http = self._build(logins)
            async with trio.open_nursery() as nursery:
                if self.certificate is not None:
                    nursery.start_soon(self.certificate.watch)
                await nursery.start(self.http.serve, listeners)
                task_status.started()

    def status(self) -> dict[str, Any]:
        """The server's state, for its operator."""
        newest = self.store.revocation_list()
        return {
            "run": self.settings.run,
            "url": self.public_url,
            "listening": list(self.listening),
            "fingerprint": self.store.fingerprint,
            "version": self.version,
            "started_ms": self._started_ms,
            "connections": self.http.connections if self.http is not None else 0,
            "live_tokens": self.store.live_tokens(),
            "revocation_number": newest.number,
            "certificate_until_ms": (
                self.certificate.current.not_after_ms if self.certificate is not None else None
            ),
            "provider_troubles": self._logins.troubles() if self._logins is not None else {},
        }

    def _build(self, logins: Logins) -> HttpServer:
        settings, store, metrics = self.settings, self.store, self.metrics
        issuer = Issuer(
            store,
            IssuerSettings(
                auth_url=self.public_url,
                endpoints=settings.endpoints,
                token_life_ms=settings.token_life_seconds * 1000,
                grace_ms=settings.grace_seconds * 1000,
            ),
        )
        app = self._addresses(issuer, logins, lambda: http.connections)
        http = HttpServer(
            app,
            self.certificate,
            most_connections=settings.connections,
            most_connections_per_address=settings.connections_per_address,
            handshakes=AllowedRate.per_minute(settings.connections_per_minute_per_address),
            proxies=settings.trusted_proxies,
            on_refused_connection=lambda limit: metrics.connections_refused.labels(limit).inc(),
        )
        return http

    def _addresses(self, issuer: Issuer, logins: Logins, connections: Callable[[], int]) -> ASGIApp:
        """The handler of each address, and the checks before all of them."""
        settings, store, metrics = self.settings, self.store, self.metrics
        refusing = Refusing(issuer, metrics)
        api = Api(settings, store, issuer, logins, metrics, self.version)
        browser = Browser(settings.run, self.public_url, logins, refusing)
        operations = Operations(
            store, logins, metrics, self.certificate, settings.metrics_from, connections
        )
        # Starlette tries one after another with a regular expression each: the most frequent first.
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

    def _take_addresses(self, listeners: Sequence[trio.SocketListener]) -> None:
        scheme = "http" if self.certificate is None else "https"
        addresses = [listener.socket.getsockname()[:2] for listener in listeners]
        self.listening = tuple(f"{scheme}://{ListenAddress(*address)}" for address in addresses)
        # Plain HTTP without a proxy is for trying things out: its address is where it listens.
        if self.certificate is None and not self.settings.trusted_proxies:
            self.public_url = self.listening[0]


class Operations:
    """The addresses for operators: is the server alive, is it ready, and what has it counted?

    `/healthz` shows that the process answers; it is for a supervisor that restarts on a failure.
    `/readyz` shows that a volunteer who came now could get a pass: the database can be written, the
    signing key is there, the certificate is valid. An identity provider that is down does not
    matter: codes and renewals work without it. `/metrics` is for the addresses in auth.toml, by
    default this machine.

    Behind a proxy that is not in auth.toml, every request seems to come from the proxy's machine,
    which may be this one. Such a request gets no metrics.
    """

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
        metrics.logins_waiting.set(self._logins.open_count())
        metrics.writer_waiting.set(health.waiting)
        metrics.database_bytes.set(health.database_bytes)
        metrics.free_bytes.set(health.free_bytes)
        if self._certificate is not None:
            left_ms = self._certificate.current.not_after_ms - wall_ms()
            metrics.certificate_seconds.set(left_ms / 1000)


def _certificate(settings: Settings) -> Certificate:
    if settings.certificate is None or settings.certificate_key is None:
        raise SettingsError(
            "auth.toml names no certificate, or no key of it.",
            why="Logins and codes go over TLS only.",
            advice="Set server.certificate and server.certificate_key. To try things out on this "
            "machine: `potluck auth serve --insecure-http --listen 127.0.0.1:8080`.",
        )
    return Certificate(settings.certificate, settings.certificate_key)


def _check_loopback(addresses: Sequence[ListenAddress]) -> None:
    for address in addresses:
        if not address.is_loopback:
            raise SettingsError(
                f"Plain HTTP is not served at {address}.",
                why="Everybody on the way could read codes and logins, and take part with them.",
                advice="--insecure-http goes with an address of this machine only, like "
                "--listen 127.0.0.1:8080. For others, set server.certificate.",
            )


async def _listeners(addresses: Sequence[ListenAddress]) -> list[trio.SocketListener]:
    listeners: list[trio.SocketListener] = []
    try:
        for address in addresses:
            listeners += await trio.open_tcp_listeners(
                address.port, host=address.host, backlog=BACKLOG
            )
    except OSError as error:
        for listener in listeners:
            await listener.aclose()
        raise CannotListen(
            f"The auth server cannot listen at {address}: {error.strerror or error}.",
            why="Another program may use that port, or it is below 1024 and this user may not.",
            advice="Choose another one: server.listen in auth.toml, or --listen.",
        ) from None
    return listeners
