"""The auth server's metrics, for Prometheus.

Each server has a registry of its own, so that two in one process (a test) do not add up.

A label whose values a stranger chooses is a memory leak. So routes are our own names or `other`,
and reasons are members of our enumerations.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# A pass takes some milliseconds; the goal is 100 ms at the 99th percentile.
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """The counters of one server; docs/auth-server.md lists them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "potluck_auth_requests",
            "Requests answered, by route and status.",
            ("route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "potluck_auth_request_seconds",
            "From the head of a request to its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.passes = Counter(
            "potluck_auth_passes",
            "Access passes issued, by way: code, device, browser, renew.",
            ("how",),
            registry=self.registry,
        )
        self.refusals = Counter(
            "potluck_auth_refusals",
            "Refusals, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.limited = Counter(
            "potluck_auth_rate_limited",
            "Requests answered with 429, by limit.",
            ("limit",),
            registry=self.registry,
        )
        self.connections_refused = Counter(
            "potluck_auth_connections_refused",
            "Connections closed before a request, by limit.",
            ("limit",),
            registry=self.registry,
        )
        self.failures = Counter(
            "potluck_auth_failures",
            "Requests that failed for a reason of ours, by kind.",
            ("kind",),
            registry=self.registry,
        )
        self.connections = self._gauge("connections", "Connections open now.")
        self.ready = self._gauge("ready", "1 while /readyz says that the server is ready.")
        self.live_tokens = self._gauge("live_tokens", "Issued tokens that have not expired.")
        self.revocation_number = self._gauge("revocation_number", "Number of the newest list.")
        self.certificate_seconds = self._gauge(
            "certificate_seconds_left", "Seconds until the TLS certificate expires."
        )
        self.logins_waiting = self._gauge("logins_waiting", "Login sessions that are open.")
        self.writer_waiting = self._gauge("writer_waiting", "Operations that wait for a commit.")
        self.database_bytes = self._gauge("database_bytes", "Size of the database.")
        self.free_bytes = self._gauge("free_bytes", "Free space on the database's disk.")

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"potluck_auth_{name}", what, registry=self.registry)

    def text(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        return generate_latest(self.registry)
