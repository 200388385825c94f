"""The whole auth server, from its settings and its state.

    async with trio.open_nursery() as nursery:
        server = AuthServer(settings, store, version="0.1.0")
        await nursery.start(server.serve)      # listens when this returns

Plain HTTP shows codes, passes and logins to everybody on the way. So it is served to this machine
alone, for trying things out and for a proxy here that does the TLS.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import trio

from auth.errors import AuthError
from auth.server.api import Api
from auth.server.app import Operations, build_app
from auth.server.browser import Browser
from auth.server.certificates import Certificate
from auth.server.issuing import Issuer, IssuerSettings
from auth.server.metrics import Metrics
from auth.server.providers.logins import Logins, open_logins
from auth.server.rate_limits import AllowedRate
from auth.server.refusing import Refusing
from auth.server.serving import BACKLOG, HttpServer
from auth.server.settings import ListenAddress, Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_typing import TaskStatus

    from auth.server.store import Store


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
        self._started_ms = time.time_ns() // 1_000_000
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
        refusing = Refusing(issuer, metrics)
        operations = Operations(
            store,
            logins,
            metrics,
            self.certificate,
            settings.metrics_from,
            lambda: http.connections,
        )
        app = build_app(
            settings,
            Api(settings, store, issuer, logins, metrics, self.version),
            Browser(settings.run, self.public_url, logins, refusing),
            operations,
            refusing,
            metrics,
        )
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

    def _take_addresses(self, listeners: Sequence[trio.SocketListener]) -> None:
        scheme = "http" if self.certificate is None else "https"
        addresses = [listener.socket.getsockname()[:2] for listener in listeners]
        self.listening = tuple(f"{scheme}://{ListenAddress(*address)}" for address in addresses)
        # Plain HTTP without a proxy is for trying things out: its address is where it listens.
        if self.certificate is None and not self.settings.trusted_proxies:
            self.public_url = self.listening[0]


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
