"""The answers of logins.py, one struct for each request. Times are whole seconds.

`session` is the terminal's secret and `page_id` the browser's. Neither may be shown to the other,
and neither may be logged.
"""

from __future__ import annotations

from dataclasses import dataclass

from auth.server.providers.identity import ProviderIdentity


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


@dataclass(frozen=True, slots=True)
class LoginStatistics:
    open: int
    waiting_device: int
    waiting_browser: int
    done: int
    started_total: int
    finished_total: int
    refused_total: int
    outages_total: int
