"""For whoever runs the server: is it alive, is it ready, and what has it counted?

`/healthz` says that the process answers; a supervisor that restarts on a failure asks this one.
`/readyz` says that a volunteer who came now could get a pass: the database can be written, the
signing key is there, the certificate counts. An identity provider that is away is no reason: codes
and renewals work without it. `/metrics` is for those whom auth.toml names, by default this machine.

Easy to get wrong: behind a proxy that nobody named, every request seems to come from the proxy's
machine, which may be this one. Such a request gets no metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request

from auth.server.answers import Answer, json_answer
from auth.server.bodies import BadRequest
from auth.server.metrics import Metrics
from auth.server.providers.logins import Logins
from auth.server.rate_limits import Network, is_within

if TYPE_CHECKING:
    from auth.server.certificates import Certificate
    from auth.server.store import Store


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
        """What keeps the server from giving passes, by its name; empty when nothing does."""
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
